"""EAGLE heads in plain torch, from the description of their format: no cache, no batch, no fused weights.

Names in comments are those of the checkpoints. Shape suffixes: N tokens known, T = N - 1 pairs, C width of the head,
X = aux width, H heads, G key/value heads, D head size, W draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftloop.drafters.eagle_config import EagleConfig

Weights = Mapping[str, Tensor]


@functools.cache
def hf_model(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hf_states(folder: str, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """By transformers: what enters each layer and what leaves the last one, and the states after the final norm."""
    model = hf_model(folder)
    left: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: left.append(out[0] if isinstance(out, tuple) else out)
    )
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return [*(state[0] for state in states[:-1]), left[0].reshape(states[0][0].shape)], states[-1][0]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_THD: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x_THD.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """One head. `embed` and `head` are the target's tables, used where the checkpoint has none."""

    def __init__(self, config: EagleConfig, weights: Weights, embed: Tensor, head: Tensor) -> None:
        self.config, self.w = config, weights
        self.embed, self.head = weights.get("embed_tokens.weight", embed), weights.get("lm_head.weight", head)
        self.eps = config.model.rms_norm_eps

    def fuse(self, aux_TX: Tensor) -> Tensor:
        config = self.config
        if config.norm_before_fc:
            aux_TX = norm(aux_TX, self.w["input_norm.weight"], self.eps)
        if config.fc_norm:
            chunks = aux_TX.chunk(config.num_aux, -1)
            aux_TX = torch.cat([norm(c, self.w[f"fc_norm.{i}.weight"], self.eps) for i, c in enumerate(chunks)], -1)
        return aux_TX @ self.w["fc.weight"].T

    def attend(self, x: Tensor, layer: str) -> Tensor:
        model = self.config.model
        positions = torch.arange(x.shape[0]).float()

        def project(name: str, heads: int) -> Tensor:
            y = x @ self.w[f"{layer}self_attn.{name}_proj.weight"].T
            if (bias := self.w.get(f"{layer}self_attn.{name}_proj.bias")) is not None:
                y = y + bias
            y = y.view(-1, heads, model.head_dim)
            if (weight := self.w.get(f"{layer}self_attn.{name}_norm.weight")) is not None:
                y = norm(y, weight, self.eps)
            return rotate(y, positions, model.rope.theta) if name in "qk" else y

        group = model.num_heads // model.num_kv_heads
        q, k, v = (
            project(n, h) for n, h in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads))
        )
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * model.head_dim**-0.5
        later = torch.ones(x.shape[0], x.shape[0]).triu(1).bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        return out.flatten(1) @ self.w[f"{layer}self_attn.o_proj.weight"].T

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        gate, up, down = (self.w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def run(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs at positions 0, 1, ..: what the next step takes, and the logits."""
        e = self.embed[ids]
        if self.config.method == "eagle":
            hidden = torch.cat([e, hidden], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(()))
        for index in range(self.config.model.num_layers):
            layer = f"layers.{index}."
            residual = hidden
            if f"{layer}hidden_norm.weight" in self.w:
                g = norm(hidden, self.w[f"{layer}hidden_norm.weight"], self.eps)
                x = torch.cat([norm(e, self.w[f"{layer}input_layernorm.weight"], self.eps), g], -1)
                if self.config.norm_before_residual:
                    residual = g
            elif f"{layer}input_layernorm.weight" in self.w:
                x = norm(hidden, self.w[f"{layer}input_layernorm.weight"], self.eps)
            else:
                x = hidden
            hidden = residual + self.attend(x, layer)
            hidden = hidden + self.mlp(norm(hidden, self.w[f"{layer}post_attention_layernorm.weight"], self.eps), layer)
        if "norm.weight" not in self.w:
            return hidden, hidden @ self.head.T
        normed = norm(hidden, self.w["norm.weight"], self.eps)
        return normed if self.config.norm_output else hidden, normed @ self.head.T

    def target_ids(self) -> Tensor:
        ids = torch.arange(self.head.shape[0])
        return ids + self.w["d2t"] if "d2t" in self.w else ids

    @torch.no_grad()
    def chain(self, tokens: list[int], aux_TX: Tensor, num_drafts: int) -> tuple[list[int], Tensor, Tensor]:
        """Greedy drafts after `tokens`, the last hidden state and each step's logits [K, W].

        `aux_TX`: the target's states at positions 0 .. N - 2. Pair p is (token p + 1, state p).
        """
        aux_TX = aux_TX[: len(tokens) - 1]
        hidden = self.fuse(aux_TX) if self.config.method == "eagle3" else aux_TX
        ids, drafts, logits = list(tokens[1:]), [], []
        for _ in range(num_drafts):
            recycled, step_logits = self.run(torch.tensor(ids), hidden)
            logits.append(step_logits[-1])
            drafts.append(int(self.target_ids()[step_logits[-1].argmax()]))
            # what has been seen stays; the chain goes on with its own state at the next position
            hidden, ids = torch.cat([hidden, recycled[-1:]]), [*ids, drafts[-1]]
        return drafts, recycled[-1], torch.stack(logits)
