"""DFlash drafters: masks behind an anchor are filled at once, beside the target's states of the text before it.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Anchors are drawn at
random in each step. Slot j's loss is the cross-entropy to the target's probabilities of the token there: given
the true text up to it, of which the drafter sees only what is before the block, so that its mean is the
distribution that the slot can know at best, at less noise than the token alone. Later slots, which are of
use only where all before them are right, weigh less: exp(-(j - 1) / gamma).

Shape suffixes: B rows, L tokens of a row, A anchors, Q slots of a block, K drafts of it, S = A * Q, C width,
X numbers that the target hands over per token, W draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftloop.drafters.dflash_config import DFlashConfig, parse
from draftloop.drafters.dflash_config import Method as DraftMethod
from draftloop.drafters.dflash_files import MASK_EMBEDDING, read_mask_embedding
from draftloop.drafters.dspark_config import DSparkConfig
from draftloop.drafters.files import open_weights, read_shapes
from draftloop.drafters.fill import target_ids
from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.config_file import read_config
from draftloop.train.anchors import Anchors
from draftloop.train.attention import attend_dense, attend_flex
from draftloop.train.fitting import check_alike, check_draft_vocab_size, choose_aux_layers, copy_stored
from draftloop.train.formats import layer_config, speculators_config
from draftloop.train.layers import GatedMLP, Projections, RMSNorm, Rotary, linear
from draftloop.train.losses import soft_cross_entropy
from draftloop.train.method import Batch, Losses, Method, Subject
from draftloop.train.options import DFlashOptions
from draftloop.train.vocabulary import frequent_ids, is_known, map_tensors


class BlockLayer(nn.Module):
    """A decoder layer over slots, whose keys and values are those of the context too."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn, self.mlp = Projections(model), GatedMLP(model)

    def before(
        self, x_BSC: Tensor, context_BLC: Tensor, rotary: Rotary, place_BS: Tensor, position_BL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the slots; keys and values of context and slots."""
        normed_BSC = self.input_layernorm(x_BSC)
        query = self.self_attn.queries(normed_BSC, rotary, place_BS)
        pairs = zip(
            self.self_attn.keys_values(context_BLC, rotary, position_BL),
            self.self_attn.keys_values(normed_BSC, rotary, place_BS),
            strict=True,
        )
        key, value = (torch.cat(pair, 1) for pair in pairs)
        return query, key, value

    def after(self, x_BSC: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from what attention gave."""
        x_BSC = x_BSC + self.self_attn.output(attended)
        return x_BSC + self.mlp(self.post_attention_layernorm(x_BSC))


class DFlashModule(nn.Module):
    """The drafter with its loss. Tensors are named as in the `speculators` layout."""

    def __init__(
        self, drafter: DFlashConfig, options: DFlashOptions, subject: Subject, draft_ids_W: Tensor | None
    ) -> None:
        super().__init__()
        model = drafter.model
        self.drafter, self.options, self.subject = drafter, options, subject
        self.num_drafts, self.first_slot = drafter.max_drafts, drafter.first_slot
        self.fc = linear(drafter.aux_width, model.hidden_size)
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.norm.weight.data.copy_(subject.final_norm)
        assert drafter.mask_token_id is not None
        self.mask_embedding: nn.Parameter | None = None
        if options.train_mask_embedding:
            self.mask_embedding = nn.Parameter(subject.embed_tokens[drafter.mask_token_id].float().cpu())
        self.rotary = Rotary(model, subject.row_tokens + drafter.block_size)
        # part of the state: a recording that has grown has other frequent ids
        self.register_buffer("draft_ids", draft_ids_W)
        # layers of the target differ much in size: each is divided by its own, seen in the first step
        self.register_buffer("aux_scale", torch.zeros(drafter.num_aux))
        self._scaled = False
        wrap = torch.compile if subject.compile else lambda function: function
        # plain attributes: what is compiled is not a module of its own
        self._steps = [(wrap(layer.before), wrap(layer.after)) for layer in self._layers()]
        attention = options.attention
        if attention == "auto":
            attention = "flex" if subject.compile and subject.device.type == "cuda" else "dense"
        self.attention = attention

    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def forward(self, batch: Batch, progress: float) -> Losses:
        """One block at each of some places; see `Losses` for what is returned."""
        anchors = Anchors.draw(batch, self.options.anchors)
        hidden_BAKC = self.hidden(batch, anchors)
        offset_K = torch.arange(1, self.num_drafts + 1, device=hidden_BAKC.device)
        ids_W, lm_head = self.draft_ids, self.subject.lm_head
        head_WC = lm_head if ids_W is None else lm_head[ids_W]
        teacher = anchors.at(batch.hidden_BLC, offset_K - 1)
        said_BAK, learn_BAK = anchors.at(batch.token_ids_BL, offset_K), anchors.learn(offset_K)
        weight_BAK = learn_BAK.float() * torch.exp(-(offset_K - 1) / self.gamma)
        if ids_W is not None:
            # where the target says an id that is not drafted, nothing can be learnt
            weight_BAK = weight_BAK * anchors.at(is_known(batch.hidden_BLC, lm_head, ids_W), offset_K - 1)
        features, table = self.features(hidden_BAKC, head_WC, anchors, said_BAK)
        loss, found_BAK = soft_cross_entropy(
            features,
            table,
            teacher / self.options.teacher_temperature,
            weight_BAK,
            teacher_head=head_WC,
            compiled=self.subject.compile,
        )
        right_BAK = (found_BAK if ids_W is None else ids_W[found_BAK]) == said_BAK
        loss = loss + self.other_loss(hidden_BAKC, anchors, said_BAK, right_BAK, weight_BAK)
        accepted_BAK = right_BAK.cumprod(-1).bool() & learn_BAK
        return Losses(loss, weight_BAK.sum(), accepted_BAK.sum((0, 1)), learn_BAK.sum((0, 1)))

    @property
    def gamma(self) -> float:
        return self.options.gamma or 7 / 16 * self.drafter.block_size

    def features(
        self, hidden_BAKC: Tensor, head_WC: Tensor, anchors: Anchors, said_BAK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What is multiplied to logits: per draft, and per id. `said_BAK`: the tokens that are to be drafted."""
        return hidden_BAKC, head_WC

    def other_loss(
        self, hidden_BAKC: Tensor, anchors: Anchors, said_BAK: Tensor, right_BAK: Tensor, weight_BAK: Tensor
    ) -> Tensor:
        """What is learnt beside the tokens; `right_BAK`: drafts that are the text's."""
        return hidden_BAKC.new_zeros((), dtype=torch.float32)

    def hidden(self, batch: Batch, anchors: Anchors) -> Tensor:
        """[B, A, K, C]: what the output head reads for each draft of the blocks."""
        rows, count = anchors.index_BA.shape
        num_slots = self.num_drafts + self.first_slot
        slot_Q = torch.arange(num_slots, device=anchors.index_BA.device)
        context_BLC = self.context(batch.aux_BLX)
        anchor_ids_BA = batch.token_ids_BL.gather(1, anchors.index_BA)
        embedded_BAC = F.embedding(anchor_ids_BA, self.subject.embed_tokens)
        mask_C = self.mask_embedding
        if mask_C is None:
            mask_C = self.subject.embed_tokens[self.drafter.mask_token_id]
        masks = mask_C.to(embedded_BAC.dtype).expand(rows, count, num_slots - 1, -1)
        x_BSC = torch.cat((embedded_BAC[:, :, None], masks), 2).flatten(1, 2)
        place_BS = (batch.position_BL.gather(1, anchors.index_BA)[..., None] + slot_Q).flatten(1)
        attend = self._attention(anchors, num_slots)
        for before, after in self._steps:
            x_BSC = after(x_BSC, attend(*before(x_BSC, context_BLC, self.rotary, place_BS, batch.position_BL)))
        return self.norm(x_BSC).unflatten(1, (count, num_slots))[:, :, self.first_slot :]

    def context(self, aux_BLX: Tensor) -> Tensor:
        """The target's states as the layers read them: [B, L, X] -> [B, L, C]."""
        scale = self.get_buffer("aux_scale")
        if not self._scaled:  # asked once: the host waits for the answer
            if not scale.any():
                scale.copy_(self._sizes(aux_BLX).rsqrt())
            self._scaled = True
        return self.hidden_norm(self.fc(aux_BLX * scale.repeat_interleave(self.subject.config.hidden_size)))

    @torch.no_grad()
    def _sizes(self, aux_BLX: Tensor) -> Tensor:
        """Mean square of each of the target's states, the same in all processes."""
        sizes = aux_BLX.float().unflatten(-1, (self.drafter.num_aux, -1)).square().mean((0, 1, 3))
        return self.subject.world.mean(sizes).clamp(min=1e-12)

    def _attention(self, anchors: Anchors, num_slots: int) -> Any:
        scale = self.drafter.model.head_dim**-0.5
        if self.attention == "flex":
            compiled = anchors.index_BA.is_cuda
            return functools.partial(attend_flex, blocks=anchors.blocks(num_slots), scale=scale, compiled=compiled)
        return functools.partial(attend_dense, mask_BLL=anchors.mask(num_slots), scale=scale)

    def exported(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a state dict, what is in the checkpoint; the sizes of the target's states become part of `fc`."""
        found = {
            name: weight for name, weight in state.items() if name not in ("draft_ids", "aux_scale", "mask_embedding")
        }
        scale = state["aux_scale"]
        if scale.any():
            found["fc.weight"] = found["fc.weight"] * scale.repeat_interleave(self.subject.config.hidden_size)
        return found


BlockOptionsT = TypeVar("BlockOptionsT", bound=DFlashOptions)


class BlockMethod(Method[BlockOptionsT]):
    """What DFlash and DSpark share: a few layers of the target's own shape over some of its hidden states."""

    method: ClassVar[DraftMethod]
    architecture: ClassVar[str]
    samples_from_anchor: ClassVar[bool]
    """The anchor's own slot predicts the first draft."""
    module_class: ClassVar[type[DFlashModule]] = DFlashModule

    def __init__(self, options: BlockOptionsT, subject: Subject) -> None:
        super().__init__(options, subject)
        target, size = subject.config, options.draft_vocab_size
        check_draft_vocab_size(size, subject)
        if options.mask_token_id is not None and options.mask_token_id >= target.vocab_size:
            raise ConfigError(
                f"mask_token_id is {options.mask_token_id}, but {subject.name!r} has {target.vocab_size} ids; name "
                "one that it does not say"
            )
        layers = choose_aux_layers(options.aux_layer_ids, subject)
        # Qwen3: what other engines take these layers for
        model = target.plain(architecture="Qwen3ForCausalLM", num_layers=options.num_layers, qk_norm=True)
        model = replace(
            model,
            intermediate_size=options.intermediate_size or model.intermediate_size,
            num_kv_heads=options.num_kv_heads or model.num_kv_heads,
        )
        self._aux_layers = layers
        self._mask_C: Tensor | None = None
        self.drafter = DFlashConfig(
            method=self.method,
            layout="speculators",
            model=model,
            causal_layers=(False,) * options.num_layers,
            block_size=options.block_size,
            samples_from_anchor=self.samples_from_anchor,
            mask_token_id=options.mask_token_id,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=size or target.vocab_size,
            num_aux=len(layers),
            layer_ids=layers,
            ids_are_outputs=False,
            own_head=size is not None and options.store_lm_head,
            has_map=size is not None,
            heads=self.heads(),
        )

    def heads(self) -> DSparkConfig | None:
        """What comes behind the block."""
        return None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def num_drafts(self) -> int:
        return self.drafter.max_drafts

    def build(self, token_counts_V: Tensor) -> DFlashModule:
        if self.drafter.mask_token_id is None:
            counts_V = token_counts_V.clone()
            counts_V[[token for token in self.subject.eos_ids if token < len(counts_V)]] = counts_V.max() + 1
            self.drafter = replace(self.drafter, mask_token_id=int(counts_V.argmin()))
        size = self.options.draft_vocab_size
        ids_W = None if size is None else frequent_ids(token_counts_V, size)
        self._module = self.module_class(self.drafter, self.options, self.subject, ids_W)
        return self._module

    def config(self) -> dict[str, Any]:
        drafter, common = self.drafter, speculators_config(self.subject, self.name, self.architecture, self.num_drafts)
        return {
            **common,
            "transformer_layer_config": layer_config(drafter.model, common["torch_dtype"]),
            "draft_vocab_size": drafter.draft_vocab_size,
            "target_hidden_size": drafter.target_hidden_size,
            "block_size": drafter.block_size,
            "mask_token_id": drafter.mask_token_id,
            "sample_from_anchor": drafter.samples_from_anchor,
            "sliding_window_non_causal": True,
            # what enters these layers; `DFlashConfig.aux_layers` reads them so where they stand here
            "aux_hidden_state_layer_ids": list(self.aux_layers),
        }

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.options.train_mask_embedding:
            self._mask_C = state["mask_embedding"].to(self.subject.dtype).clone()
        found = {name: weight.to(self.subject.dtype) for name, weight in self._module.exported(state).items()}
        if self.drafter.has_map:
            ids_W = state["draft_ids"].cpu()
            found |= map_tensors(ids_W, self.subject.vocab_size)
            if self.drafter.own_head:
                found["lm_head.weight"] = self.subject.lm_head.cpu()[ids_W]
        return found

    def files(self, folder: Path) -> None:
        if self._mask_C is not None:
            stored = {"mask_token_id": self.drafter.mask_token_id, "embedding": self._mask_C}
            torch.save(stored, folder / MASK_EMBEDDING)

    def initialise(self, module: nn.Module, folder: Path) -> None:
        mask_C, config = read_mask_embedding(folder), read_config(folder)
        if mask_C is not None and not self.options.train_mask_embedding:
            raise ConfigError(f"the drafter in {str(folder)!r} has {MASK_EMBEDDING}; ask for --train-mask-embedding")
        given, names = parse(config, read_shapes(folder), method=self.method, name=str(folder))
        keys = ("mask_token_id", "block_size", "samples_from_anchor", "has_map", "draft_vocab_size", "heads")
        num_layers = self.subject.config.num_layers
        check_alike(given, self.drafter, keys, self.aux_layers, folder=folder, num_layers=num_layers)
        with open_weights(folder) as tensors, torch.no_grad():
            for name, weight in module.state_dict().items():
                if name == "draft_ids":
                    stored = target_ids(
                        tensors.read(names["d2t"]), vocab_size=self.subject.vocab_size, name=str(folder)
                    )
                elif name == "mask_embedding":
                    stored = self.subject.embed_tokens[self.drafter.mask_token_id] if mask_C is None else mask_C
                elif name == "aux_scale":
                    stored = torch.ones_like(weight)  # they are part of the weights by now
                elif name in names:
                    stored = tensors.read(names[name])
                else:
                    raise ConfigError(f"the drafter in {str(folder)!r} lacks {name}; it has fewer layers or heads")
                copy_stored(weight, stored, name, folder)


class DFlashMethod(BlockMethod[DFlashOptions]):
    """All drafts of a block at once; they do not know of each other."""

    name = "dflash"
    method = "dflash"
    architecture = "DFlashSpeculator"
    samples_from_anchor = False
