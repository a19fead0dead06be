"""Medusa: heads side by side that say what comes 2, 3, ... tokens later, from the target's last hidden state.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
arXiv 2401.10774.
Drafts are chains: each head's own choice.

The state is that of the last accepted position, which the target's own head has turned into the bonus token, so
head 0 drafts the token after that. No head knows of the bonus token, or of another head's choice.

Shape suffixes: R rows, T tokens, M rows of the engine plus one, Q = 1 + K verified positions, N = R * K drafts,
C hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.config.speculative import SpeculativeConfig
from draftloop.drafters.base import Drafter, Rounds, Target, count_name, sampled_name
from draftloop.drafters.files import open_weights, read_shapes
from draftloop.drafters.fill import fill, fill_dummy, target_ids
from draftloop.drafters.locate import locate
from draftloop.drafters.medusa_config import MEDUSA_PRESETS, TOKEN_MAP, MedusaConfig, check_target, parse
from draftloop.drafters.write import write_block
from draftloop.errors import ConfigError
from draftloop.graphs.phase import Cost, Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kernels.linear import linear
from draftloop.kvcache.rows import RowState
from draftloop.models.config_file import read_config
from draftloop.models.decoder import FINAL_HIDDEN, Decoder
from draftloop.models.layers import parameter


class MedusaHeads(torch.nn.Module):
    """The first `num_heads` heads; `lm_head` is the target's, for checkpoints without one."""

    def __init__(
        self, config: MedusaConfig, num_heads: int, lm_head: Tensor, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.num_heads = config, num_heads
        width = config.hidden_size

        def make(wanted: int, *shape: int) -> torch.nn.ParameterList:
            return torch.nn.ParameterList(parameter(*shape, device=device, dtype=dtype) for _ in range(wanted))

        num_blocks = num_heads * config.num_layers
        self.blocks = make(num_blocks, width, width)
        self.biases = make(num_blocks if config.bias else 0, width)
        self.lm_heads = make({"each": num_heads, "one": 1, "target": 0}[config.output_heads], config.output_size, width)
        # plain: what is not ours is neither counted nor filled
        self.output_heads: list[Tensor] = [*self.lm_heads] or [lm_head.detach()]
        self.target_ids_W: Tensor | None = None

    def settle(self, target_ids_W: Tensor | None) -> None:
        """Once the weights are there: which ids of the target the draft vocabulary has, and only their rows."""
        if target_ids_W is None:
            return
        self.target_ids_W = target_ids_W.to(self.output_heads[0].device)
        if self.output_heads[0].shape[0] > self.target_ids_W.shape[0]:
            self.output_heads = [head.index_select(0, self.target_ids_W) for head in self.output_heads]

    def forward(self, hidden_RC: Tensor) -> Tensor:
        """Logits [N, W] of all drafts, row after row."""
        by_head = []
        for head in range(self.num_heads):
            x_RC = hidden_RC
            for index in range(head * self.config.num_layers, (head + 1) * self.config.num_layers):
                bias = self.biases[index] if self.config.bias else None
                x_RC = x_RC + F.silu(linear(x_RC, self.blocks[index], bias))
            by_head.append(x_RC)
        if len(self.output_heads) == 1:
            return linear(torch.stack(by_head, 1).flatten(0, 1), self.output_heads[0])
        logits = [linear(x_RC, weight) for x_RC, weight in zip(by_head, self.output_heads, strict=True)]
        return torch.stack(logits, 1).flatten(0, 1)

    def cost(self) -> Cost:
        """What one pass must read and compute."""
        blocks, heads = sum(weight.numel() for weight in self.blocks), sum(w.numel() for w in self.output_heads)
        each = self.num_heads // len(self.output_heads)
        return Cost(
            weight_bytes=(blocks + heads) * self.output_heads[0].dtype.itemsize, flops=2 * (blocks + heads * each)
        )

    def destinations(self) -> dict[str, Tensor]:
        """Plain tensor name -> the weight that it fills."""
        found: dict[str, Tensor] = {}
        for kind, weights in (("weight", self.blocks), ("bias", self.biases)):
            for index, weight in enumerate(weights):
                head, layer = divmod(index, self.config.num_layers)
                found[f"blocks.{head}.layers.{layer}.{kind}"] = weight
        return found | {f"lm_heads.{head}.weight": weight for head, weight in enumerate(self.lm_heads)}


class MedusaDrafter(Drafter):
    """All heads in one phase; each draft is its head's likeliest token, or drawn from what the head says."""

    name = "medusa"
    options = frozenset({"model", "revision", "draft_sample_method", "load_format"})
    samples = True
    reuses_prefixes = True
    follows_load = True
    aux_layers = (FINAL_HIDDEN,)

    heads: MedusaHeads
    hidden_MC: Tensor
    """Per engine row, the state of its prompt's last token."""

    def __init__(self, spec: SpeculativeConfig, target: Target) -> None:
        super().__init__(spec, target)
        preset, self.folder = locate(spec, target, MEDUSA_PRESETS, method=self.name)
        self.names = dict[str, str]()
        if self.folder is None:
            assert preset is not None
            self.config = preset
        else:
            config = read_config(self.folder)
            self.config, self.names = parse(config, read_shapes(self.folder), name=str(spec.model))
        check_target(self.config, str(spec.model), target.config, target.name)
        if self.num_drafts > self.config.num_heads:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_drafts}, but {str(spec.model)!r} has {self.config.num_heads} "
                f"heads, and each drafts one token; ask for {self.config.num_heads} or fewer"
            )

    def describe(self) -> str:
        return f"{super().describe()}, {self.spec.model} ({self.config.layout} layout, {self.config.num_heads} heads)"

    def borrow(self, target: Decoder) -> None:
        self._lm_head = target.whole_lm_head()

    def load(self, *, progress: bool) -> None:
        target, name = self.target, str(self.spec.model)
        self.heads = MedusaHeads(self.config, self.num_drafts, self._lm_head, device=target.device, dtype=target.dtype)
        del self._lm_head
        if self.folder is None:
            fill_dummy(self.heads, vocab_size=target.vocab_size, seed=target.seed)
            return
        fill(self.heads, self.folder, self.names, vocab_size=target.vocab_size, name=name)
        ids_W = None
        if self.config.map_size:
            with open_weights(self.folder) as tensors:
                offsets_W = tensors.read(self.names[TOKEN_MAP]).cpu().long() - torch.arange(self.config.map_size)
            ids_W = target_ids(offsets_W, vocab_size=target.vocab_size, name=name, tensor=TOKEN_MAP)
        self.heads.settle(ids_W)

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"hidden_MC": self.hidden_MC}

    def phases(self, state: RowState, caches: Sequence[Tensor]) -> list[Phase]:
        heads, width = self.heads, self.config.hidden_size
        target = self.target
        hidden_MC = self.hidden_MC = torch.zeros(state.padding_row + 1, width, dtype=target.dtype, device=target.device)
        num_known = target.vocab_size
        if not self.config.map_size:
            num_known = min(heads.output_heads[0].shape[0], num_known)

        def draft(rows: Tensor, hidden_RC: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            write_block(
                state,
                rows,
                heads(hidden_RC),
                vocab_size=num_known,
                sampled=sampled,
                target_ids_W=heads.target_ids_W,
            )
            return {}

        def prompt(launch: Launch, rows: Tensor, query_starts: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
            last_R = (query_starts[1:] - 1).clamp(min=0).long()
            hidden_MC.index_copy_(0, rows.long(), aux_hidden.index_select(0, last_R))
            return {}

        def first(launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
            return draft(rows, hidden_MC[rows], sampled=sampled)

        def following(
            launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, verified: int, sampled: bool
        ) -> Mapping[str, Tensor]:
            # of the last position whose draft was accepted, or of the bonus token before
            index_R = torch.arange(rows.shape[0], device=rows.device) * verified
            last_R = index_R + (num_emitted.long() - 1).clamp(0, verified - 1)
            return draft(rows, aux_hidden.index_select(0, last_R), sampled=sampled)

        rows = rows_slot(state.padding_row)
        aux = Slot(unit=Unit.TOKEN, dtype=target.dtype, shape=(width,))
        num_emitted = Slot(unit=Unit.ROW, dtype=torch.int32, pad=Pad.KEEP)  # nothing of the padding row follows from it
        query_starts = Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST)
        phases = [
            Phase(
                name="draft.prompt",
                fn=prompt,
                slots={"rows": rows, "query_starts": query_starts, "aux_hidden": aux},
                tokens_per_row=None,
            )
        ]
        for sampled in (False, True) if self.sampled else (False,):
            phases += [
                Phase(
                    name=sampled_name("draft.first", sampled),
                    fn=lambda launch, s=sampled, **slots: first(launch, sampled=s, **slots),
                    slots={"rows": rows},
                    cost=heads.cost(),
                ),
                *(
                    Phase(
                        name=count_name(sampled_name("draft.heads", sampled), k, self.num_drafts),
                        fn=partial(following, verified=k + 1, sampled=sampled),
                        slots={"rows": rows, "num_emitted": num_emitted, "aux_hidden": aux},
                        tokens_per_row=k + 1,
                        cost=heads.cost(),
                    )
                    for k in self.counts
                    if k
                ),
            ]
        return phases

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        return Rounds(
            prompt=("draft.prompt",),
            first=(sampled_name("draft.first", sampled),),
            next=(sampled_name("draft.heads", sampled),),
            plain=(),  # rows without drafts declined them: they never draft again
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return tuple(
            count_name(heads, num_drafts, self.num_drafts) for heads in self.rounds(sampled=sampled).next[:num_drafts]
        )

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first if num_drafts else ()
