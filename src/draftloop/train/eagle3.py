"""EAGLE-3 heads, trained on their own drafts (training-time test).

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", 2025. Every place of the text begins a chain: step 0 reads the next token and the target's states,
step i the token i places further on and the state that the head itself made in step i - 1, as drafting does
when all drafts are accepted. Keys of step 0 are seen causally, those of later steps by their own place only.
The loss of each step is the cross-entropy to the target's probabilities over the draft vocabulary.

Shape suffixes: B rows, L tokens of a row, C width of the head, X numbers that the target hands over per
token, W draft vocabulary, K drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftloop.drafters.eagle_config import EagleConfig, parse
from draftloop.drafters.files import open_weights, read_shapes
from draftloop.drafters.fill import target_ids
from draftloop.models.config import ModelConfig
from draftloop.models.config_file import read_config
from draftloop.train.attention import chain_attention_dense, chain_attention_flex, document_blocks, document_mask
from draftloop.train.fitting import check_alike, check_draft_vocab_size, choose_aux_layers, copy_stored
from draftloop.train.formats import layer_config, speculators_config
from draftloop.train.layers import GatedMLP, Projections, RMSNorm, Rotary, linear
from draftloop.train.losses import soft_cross_entropy
from draftloop.train.method import Batch, Losses, Method, Subject
from draftloop.train.options import Eagle3Options
from draftloop.train.vocabulary import frequent_ids, is_known, map_tensors


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, model: ModelConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.self_attn = Projections(model, input_size=2 * width)
        self.mlp = GatedMLP(model)

    def before(
        self, embedded: Tensor, hidden: Tensor, rotary: Rotary, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual stream, query, key and value."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embedded), normed), -1)
        key, value = self.self_attn.keys_values(x, rotary, positions)
        query = self.self_attn.queries(x, rotary, positions)
        return normed if self.norm_before_residual else hidden, query, key, value

    def after(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output, from what attention gave."""
        hidden = residual + self.self_attn.output(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Module(nn.Module):
    """The head with its loss. Tensors are named as in the `speculators` layout."""

    def __init__(self, head: EagleConfig, options: Eagle3Options, subject: Subject, draft_ids_W: Tensor | None) -> None:
        super().__init__()
        model = head.model
        self.options, self.subject = options, subject
        self.fc = linear(head.aux_width, model.hidden_size)
        self.input_norm = RMSNorm(head.aux_width, model.rms_norm_eps) if head.norm_before_fc else None
        self.layers = nn.ModuleList([Eagle3Layer(model, norm_before_residual=head.norm_before_residual)])
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.norm.weight.data.copy_(subject.final_norm)
        self.rotary = Rotary(model, subject.row_tokens + options.ttt_steps)
        # part of the state: a recording that has grown has other frequent ids
        self.register_buffer("draft_ids", draft_ids_W)
        self.lm_head: nn.Linear | None = None
        if options.train_lm_head:
            self.lm_head = linear(model.hidden_size, head.draft_vocab_size)
            rows = subject.lm_head.cpu()
            self.lm_head.weight.data.copy_(rows if draft_ids_W is None else rows[draft_ids_W])
        wrap = torch.compile if subject.compile else lambda function: function
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        # plain attributes: what is compiled is not a module of its own
        self._before, self._after = wrap(layer.before), wrap(layer.after)
        attention = options.attention
        if attention == "auto":
            attention = "flex" if subject.compile and subject.device.type == "cuda" else "dense"
        self.attention = attention

    def forward(self, batch: Batch, progress: float) -> Losses:
        """All steps of all chains; see `Losses` for what is returned."""
        length, steps = batch.token_ids_BL.shape[1], self.options.ttt_steps
        ids_W, head_WC = self.draft_ids, self.head()
        # padded, so that every step takes a part of the same size
        teacher = F.pad(batch.hidden_BLC, (0, 0, 0, steps)) @ self._target_rows().T
        ids_BL = F.pad(batch.token_ids_BL, (0, steps + 1))
        known_BL = torch.ones_like(ids_BL, dtype=torch.bool)
        if ids_W is not None:
            # where the target says an id that cannot be drafted, nothing can be learnt
            known_BL = F.pad(is_known(batch.hidden_BLC, self.subject.lm_head, ids_W), (0, steps + 1))
        loss = weight = torch.zeros((), device=ids_BL.device)
        begins_BL = right_BL = batch.follows(2)
        accepted, counted = [], []
        for step, head_input_BLC in enumerate(self.passes(batch)):
            # place p has seen the token at p + 1 + step, so that the target at that place is its teacher
            seen = slice(1 + step, 1 + step + length)
            follows_BL = batch.follows(2 + step)
            weight_BL = (follows_BL & known_BL[:, seen]).float() * self.options.ttt_decay**step
            step_loss, found_BL = soft_cross_entropy(
                head_input_BLC,
                head_WC,
                teacher[:, seen],
                weight_BL,
                acceptance=self.options.acceptance_loss,
                compiled=self.subject.compile,
            )
            loss, weight = loss + step_loss, weight + weight_BL.sum()
            said_BL = ids_BL[:, 2 + step : 2 + step + length]
            right_BL = right_BL & (self.target_ids(found_BL) == said_BL)
            counts_BL = follows_BL & begins_BL
            accepted.append((right_BL & counts_BL).sum())
            counted.append(counts_BL.sum())
        return Losses(loss, weight, torch.stack(accepted), torch.stack(counted))

    def passes(self, batch: Batch) -> Iterator[Tensor]:
        """What the output head reads after each step, [B, L, C]: at place p it predicts the token at p + 2 + step."""
        length = batch.token_ids_BL.shape[1]
        ids_BL = F.pad(batch.token_ids_BL, (0, self.options.ttt_steps))
        attend = self._attention(batch.document_BL)
        hidden_BLC = self.fuse(batch.aux_BLX)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.options.ttt_steps):
            embedded_BLC = F.embedding(ids_BL[:, 1 + step : 1 + step + length], self.subject.embed_tokens)
            position_BL = batch.position_BL + step
            residual, query, key, value = self._before(embedded_BLC, hidden_BLC, self.rotary, position_BL)
            keys.append(key)
            values.append(value)
            hidden_BLC = self._after(attend(query, keys, values), residual)
            yield self.norm(hidden_BLC)

    def head(self) -> Tensor:
        """[W, C]"""
        return self._target_rows() if self.lm_head is None else self.lm_head.weight

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of ids of the draft vocabulary."""
        return draft_ids if self.draft_ids is None else self.draft_ids[draft_ids]

    def _target_rows(self) -> Tensor:
        """The target's output head over the draft vocabulary."""
        lm_head = self.subject.lm_head
        return lm_head if self.draft_ids is None else lm_head[self.draft_ids]

    def fuse(self, aux_BLX: Tensor) -> Tensor:
        """The target's states, in the place of a hidden state of the head's own: [B, L, X] -> [B, L, C]."""
        return self.fc(aux_BLX if self.input_norm is None else self.input_norm(aux_BLX))

    def _attention(self, document_BL: Tensor) -> Any:
        scale = self.rotary.get_buffer("cos_sin_PD").shape[1] ** -0.5
        if self.attention == "flex":
            blocks = document_blocks(document_BL)
            compiled = document_BL.is_cuda
            return functools.partial(chain_attention_flex, blocks=blocks, scale=scale, compiled=compiled)
        return functools.partial(chain_attention_dense, mask_BLL=document_mask(document_BL), scale=scale)


class Eagle3Method(Method[Eagle3Options]):
    """One layer of the target's own shape over three of its hidden states."""

    name = "eagle3"

    def __init__(self, options: Eagle3Options, subject: Subject) -> None:
        super().__init__(options, subject)
        target, size = subject.config, options.draft_vocab_size
        check_draft_vocab_size(size, subject)
        layers = choose_aux_layers(options.aux_layer_ids, subject)
        self._aux_layers = layers
        model = target.plain(architecture="LlamaForCausalLM", num_layers=1)
        reduced = size is not None
        self.head = EagleConfig(
            method="eagle3",
            layout="speculators",
            model=model,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=size or target.vocab_size,
            num_aux=len(layers),
            layer_ids=layers,
            wide_layers=(True,),
            input_norms=(True,),
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.norm_before_fc,
            own_head=options.train_lm_head or (reduced and options.store_lm_head),
            has_map=reduced,
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    @property
    def num_drafts(self) -> int:
        return self.options.ttt_steps

    def build(self, token_counts_V: Tensor) -> Eagle3Module:
        ids_W = None
        if self.head.has_map:
            ids_W = frequent_ids(token_counts_V, self.head.draft_vocab_size)
        return Eagle3Module(self.head, self.options, self.subject, ids_W)

    def config(self) -> dict[str, Any]:
        head, subject = self.head, self.subject
        common = speculators_config(subject, "eagle3", "Eagle3Speculator", self.num_drafts)
        return {
            **common,
            "transformer_layer_config": layer_config(head.model, common["torch_dtype"]),
            "draft_vocab_size": head.draft_vocab_size,
            "target_hidden_size": head.target_hidden_size,
            "norm_before_residual": head.norm_before_residual,
            "norm_before_fc": head.norm_before_fc,
            "fc_norm": head.fc_norm,
            "norm_output": head.norm_output,
            "embed_requires_grad": False,
            # what enters these layers; `EagleConfig.aux_layers` reads them so where they stand here
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
        }

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: weight.to(self.subject.dtype) for name, weight in state.items() if name != "draft_ids"}
        if self.head.has_map:
            ids_W = state["draft_ids"].cpu()
            found |= map_tensors(ids_W, self.subject.vocab_size)
            if self.head.own_head and not self.options.train_lm_head:
                found["lm_head.weight"] = self.subject.lm_head.cpu()[ids_W]
        return found

    def initialise(self, module: nn.Module, folder: Path) -> None:
        given, names = parse(read_config(folder), read_shapes(folder), method="eagle3", name=str(folder))
        keys = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "has_map", "draft_vocab_size")
        num_layers = self.subject.config.num_layers
        check_alike(given, self.head, keys, self.aux_layers, folder=folder, num_layers=num_layers)
        with open_weights(folder) as tensors, torch.no_grad():
            for name, weight in module.state_dict().items():
                if name == "draft_ids":
                    ids = target_ids(tensors.read(names["d2t"]), vocab_size=self.subject.vocab_size, name=str(folder))
                    weight.copy_(ids)
                elif name in names:
                    copy_stored(weight, tensors.read(names[name]), name, folder)
