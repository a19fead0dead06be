"""Training a draft model: a narrow Llama learns what the target would say next, at every token of the target's text.

Source: knowledge distillation (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015) on the
target's own text, as in Zhou et al., "DistillSpec", 2023. A draft is accepted only after accepted drafts, so
feeding the text itself is just what the model meets when it drafts.

Most of a narrow model is its embedding, which is its output head too. It starts as the projection of the
target's output head that loses least.

Shape suffixes: B rows, L tokens of a row, C width of the draft model, X hidden size of the target,
H query heads, D head size, V vocabulary, K drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftloop.errors import ConfigError
from draftloop.models.config import ModelConfig
from draftloop.models.resolve import weight_files
from draftloop.models.tensors import open_tensors
from draftloop.train.attention import attend_dense, attend_flex, document_blocks, document_mask
from draftloop.train.formats import layer_config
from draftloop.train.layers import INITIAL_STD, GatedMLP, Projections, RMSNorm, Rotary
from draftloop.train.losses import soft_cross_entropy
from draftloop.train.method import Batch, Losses, Method, Subject
from draftloop.train.options import DraftModelOptions


class DraftModelMethod(Method[DraftModelOptions]):
    """Exports a plain Llama folder without a tokenizer, since its ids are the target's."""

    name = "draft_model"

    def __init__(self, options: DraftModelOptions, subject: Subject) -> None:
        super().__init__(options, subject)
        target, size = subject.config, options.head_dim
        hidden = options.hidden_size or max(target.hidden_size // 3 // size, 1) * size
        self.model = ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=target.vocab_size,
            hidden_size=hidden,
            intermediate_size=options.intermediate_size or 2 * hidden,
            num_layers=options.num_layers,
            num_heads=options.num_heads or max(hidden // size, 1),
            num_kv_heads=options.num_kv_heads or 1,
            head_dim=size,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            tie_word_embeddings=True,
            bos_token_id=target.bos_token_id,
            eos_token_ids=subject.eos_ids,
        )

    @property
    def num_drafts(self) -> int:
        return self.options.num_drafts

    def config(self) -> dict[str, Any]:
        return layer_config(self.model, str(self.subject.dtype).removeprefix("torch."))

    def build(self, token_counts_V: Tensor) -> nn.Module:
        return DraftModel(self.model, self.options, self.subject, token_counts_V)

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{name}": weight.to(self.subject.dtype) for name, weight in state.items()}

    def initialise(self, module: nn.Module, folder: Path) -> None:
        with open_tensors(weight_files(folder)) as stored, torch.no_grad():
            for own, weight in module.state_dict().items():
                name, needed = f"model.{own}", tuple(weight.shape)
                if (shape := stored.shapes.get(name)) != needed:
                    found = "is missing" if shape is None else f"has shape {list(shape)}"
                    raise ConfigError(
                        f"{name} {found} in {str(folder)!r}, but {list(needed)} is to be trained; give the options "
                        "that it was trained with"
                    )
                weight.copy_(stored.read(name))


class Layer(nn.Module):
    """A decoder layer, in two parts around its attention."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Projections(model)
        self.mlp = GatedMLP(model)

    def before(self, x_BLC: Tensor, rotary: Rotary, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        normed_BLC = self.input_layernorm(x_BLC)
        keys_values = self.self_attn.keys_values(normed_BLC, rotary, positions_BL)
        return self.self_attn.queries(normed_BLC, rotary, positions_BL), *keys_values

    def after(self, attended_BLHD: Tensor, x_BLC: Tensor) -> Tensor:
        """The layer's output, from what attention gave."""
        x_BLC = x_BLC + self.self_attn.output(attended_BLHD)
        return x_BLC + self.mlp(self.post_attention_layernorm(x_BLC))


class DraftModel(nn.Module):
    """The whole model; its parameters are named as in a checkpoint, without the prefix."""

    def __init__(
        self, model: ModelConfig, options: DraftModelOptions, subject: Subject, token_counts_V: Tensor
    ) -> None:
        super().__init__()
        self.options, self.subject = options, subject
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(narrowed(subject.lm_head, token_counts_V, model.hidden_size))
        layers = [Layer(model) for _ in range(model.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.rotary = Rotary(model, subject.row_tokens)
        wrap = torch.compile if subject.compile else lambda function: function
        # plain attributes: what is compiled is not a module of its own
        self._parts = [(wrap(layer.before), wrap(layer.after)) for layer in layers]
        self._scale = model.head_dim**-0.5

    def hidden(self, batch: Batch) -> Tensor:
        """[B, L, C] after the final norm."""
        attend = self._attention(batch.document_BL)
        x_BLC = self.embed_tokens(batch.token_ids_BL)
        for before, after in self._parts:
            x_BLC = after(attend(*before(x_BLC, self.rotary, batch.position_BL)), x_BLC)
        return self.norm(x_BLC)

    def _attention(self, document_BL: Tensor) -> Callable[..., Tensor]:
        compiled = document_BL.is_cuda
        if self.options.attention == "flex" or (self.options.attention == "auto" and self.subject.compile and compiled):
            blocks = document_blocks(document_BL)
            return functools.partial(attend_flex, blocks=blocks, scale=self._scale, compiled=compiled)
        return functools.partial(attend_dense, mask_BLL=document_mask(document_BL), scale=self._scale)

    def forward(self, batch: Batch, progress: float) -> Losses:
        learn_BL = batch.follows(1)
        weight_BL = learn_BL.float()
        loss, ids_BL = soft_cross_entropy(
            self.hidden(batch),
            self.embed_tokens.weight,
            batch.hidden_BLC / self.options.teacher_temperature,
            weight_BL,
            teacher_head=self.subject.lm_head,
            compiled=self.subject.compile,
        )
        right_BL = learn_BL & (ids_BL == batch.token_ids_BL.roll(-1, 1))
        return Losses(loss, weight_BL.sum(), *self._chains(batch, right_BL))

    def _chains(self, batch: Batch, right_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Draft k is made after k - 1 drafts that were right, so the text that was fed tells its fate."""
        accepted, counted = [], []
        reaches_BL, stands_BL = torch.ones_like(right_BL), torch.ones_like(right_BL)
        for k in range(self.options.num_drafts):
            reaches_BL = reaches_BL & batch.follows(k + 1)
            stands_BL = stands_BL & right_BL.roll(-k, 1)
            counted.append(reaches_BL.sum())
            accepted.append((reaches_BL & stands_BL).sum())
        return torch.stack(accepted), torch.stack(counted)


def narrowed(head_VX: Tensor, token_counts_V: Tensor, width: int) -> Tensor:
    """[V, width]: the target's output head in the directions that matter most to frequent ids.

    Scaled so that a normed hidden state gives logits of about unit variance. Beyond the target's own width, random.
    """
    head_VX = head_VX.float().cpu()
    weight_V1 = (1 + token_counts_V.float().cpu())[:, None].sqrt()
    directions_XX = torch.linalg.eigh((head_VX * weight_V1).T @ head_VX).eigenvectors
    best_VC = head_VX @ directions_XX.flip(1)[:, :width]  # eigenvalues rise
    best_VC *= (best_VC.shape[1] ** -0.5) / best_VC.square().mean().sqrt()
    more = torch.randn(head_VX.shape[0], width - best_VC.shape[1]) * INITIAL_STD
    return torch.cat((best_VC, more), 1)
