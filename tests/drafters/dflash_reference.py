"""Block drafters in plain torch, from the description of their format: no cache, no batch, no fused weights.

Names in comments are those of the checkpoints. Shape suffixes: N tokens known, Q slots of a block, C width,
X = aux width, H heads, G key/value heads, D head size, K drafts, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from eagle_reference import norm, rotate
from torch import Tensor

from draftloop.drafters.dflash_config import DFlashConfig

Weights = Mapping[str, Tensor]


class BlockReference:
    """One drafter. `embed` and `head` are the target's tables, used where the checkpoint has none."""

    def __init__(
        self, config: DFlashConfig, weights: Weights, embed: Tensor, head: Tensor, mask: Tensor | None = None
    ) -> None:
        self.config, self.w = config, weights
        self.embed = weights.get("embed_tokens.weight", embed)
        self.mask = self.embed[config.mask_token_id] if mask is None else mask
        self.ids = torch.arange(config.draft_vocab_size)
        if "d2t" in weights:
            self.ids = self.ids + weights["d2t"]
        self.head = weights.get("lm_head.weight", head[self.ids] if "d2t" in weights else head)
        self.eps = config.model.rms_norm_eps

    def project(self, x: Tensor, layer: int, part: str, positions: Tensor) -> Tensor:
        model, name = self.config.model, f"layers.{layer}.self_attn."
        if f"{name}qkv_proj.weight" in self.w:
            q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
            weight = self.w[f"{name}qkv_proj.weight"].split((q, kv, kv))["qkv".index(part)]
        else:
            weight = self.w[f"{name}{part}_proj.weight"]
        y = x @ weight.T
        if (bias := self.w.get(f"{name}{part}_proj.bias")) is not None:
            y = y + bias
        y = y.view(x.shape[0], -1, model.head_dim)
        if part == "v":
            return y
        if (weight := self.w.get(f"{name}{part}_norm.weight")) is not None:
            y = norm(y, weight, self.eps)
        return rotate(y, positions.float(), model.rope.theta)

    def context(self, aux_NX: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, G, D] of each layer for the positions 0, 1, .."""
        x = norm(aux_NX @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.eps)
        at = torch.arange(x.shape[0])
        layers = range(self.config.model.num_layers)
        return [(self.project(x, i, "k", at), self.project(x, i, "v", at)) for i in layers]

    def seen(self, layer: int, num_context: int, num_slots: int) -> Tensor:
        """bool [Q, N + Q], written out pair by pair."""
        model = self.config.model
        window = model.sliding_window if model.layer_types and model.layer_types[layer] == "sliding_attention" else None
        mask = torch.zeros(num_slots, num_context + num_slots, dtype=torch.bool)
        for slot in range(num_slots):
            for key in range(num_context + num_slots):
                later = key > num_context + slot
                too_old = window is not None and key <= num_context + slot - window
                mask[slot, key] = not too_old and not (later and self.config.causal_layers[layer])
        return mask

    def block(self, token: int, aux_NX: Tensor, num_slots: int) -> Tensor:
        """[Q, C]: what the output head reads, for a block that starts at position N."""
        model, count = self.config.model, aux_NX.shape[0]
        context = self.context(aux_NX)
        x = torch.cat([self.embed[token][None], self.mask.expand(num_slots - 1, -1)])
        at = torch.arange(count, count + num_slots)
        group = model.num_heads // model.num_kv_heads
        for layer in range(model.num_layers):
            name = f"layers.{layer}."
            y = norm(x, self.w[f"{name}input_layernorm.weight"], self.eps)
            q, k, v = (self.project(y, layer, part, at) for part in "qkv")
            k, v = (torch.cat(pair).repeat_interleave(group, 1) for pair in zip(context[layer], (k, v), strict=True))
            scores = torch.einsum("qhd,khd->hqk", q, k) * model.head_dim**-0.5
            scores = scores.masked_fill(~self.seen(layer, count, num_slots), float("-inf"))
            weights = scores.softmax(-1)
            if (sinks := self.w.get(f"{name}self_attn.attention_sink_bias")) is not None:
                # each head's weights add up to what its sink leaves of 1
                weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
            out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + out @ self.w[f"{name}self_attn.o_proj.weight"].T
            y = norm(x, self.w[f"{name}post_attention_layernorm.weight"], self.eps)
            gate, up, down = (self.w[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        return norm(x, self.w["norm.weight"], self.eps)

    @torch.no_grad()
    def drafts(self, tokens: list[int], aux_NX: Tensor, num_drafts: int) -> tuple[list[int], Tensor]:
        """Greedy drafts after `tokens`, and each one's logits [K, W].

        `aux_NX`: the target's states; those at positions 0 .. N - 2 are read, N tokens being known.
        """
        first = 0 if self.config.samples_from_anchor else 1
        hidden = self.block(tokens[-1], aux_NX[: len(tokens) - 1], num_drafts + first)[first:]
        logits = hidden @ self.head.T
        return [int(self.ids[i]) for i in logits.argmax(-1)], logits
