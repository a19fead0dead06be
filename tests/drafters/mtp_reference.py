"""A multi-token-prediction module in plain torch, from the description of its format: no cache, no graphs, no pages."""

from __future__ import annotations

import torch
from eagle_reference import Reference, norm
from torch import Tensor

from heads import head_config
from helpers import LAYERS

NAMES = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."),
    "mimo": (
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.final_layernorm",
        "model.mtp_layers.0.",
    ),
    "deepseek": (
        f"model.layers.{LAYERS}.enorm",
        f"model.layers.{LAYERS}.hnorm",
        f"model.layers.{LAYERS}.eh_proj",
        f"model.layers.{LAYERS}.shared_head.norm",
        f"model.layers.{LAYERS}.",
    ),
}


class MtpReference(Reference):
    """One module, with the tensors of its files. `embed` and `head` are the target's tables."""

    def __init__(self, style: str, files: dict[str, Tensor], embed: Tensor, head: Tensor) -> None:
        layer = NAMES[style][-1]
        weights = dict(files)
        if style == "qwen":  # where a norm's weight is what is added to 1
            weights |= {name: weight + 1 for name, weight in files.items() if name.endswith("norm.weight")}
            weights |= {
                name: files[name] + 1 for name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
            }
        super().__init__(head_config("eagle"), weights, embed, head)
        self.style = style
        self.embed = files.get(f"{layer}embed_tokens.weight", embed)
        self.head = files.get(f"{layer}shared_head.head.weight", head)

    def run(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embed_norm, hidden_norm, fc, last_norm, layer = NAMES[self.style]
        e = self.embed[ids].clone()
        if self.style != "qwen":
            e[0] = 0
        e = norm(e, self.w[f"{embed_norm}.weight"], self.eps)
        h = norm(hidden, self.w[f"{hidden_norm}.weight"], self.eps)
        x = torch.cat([h, e] if self.style == "mimo" else [e, h], -1) @ self.w[f"{fc}.weight"].T
        x = x + self.attend(norm(x, self.w[f"{layer}input_layernorm.weight"], self.eps), layer)
        x = x + self.mlp(norm(x, self.w[f"{layer}post_attention_layernorm.weight"], self.eps), layer)
        out = norm(x, self.w[f"{last_norm}.weight"], self.eps)
        return out, out @ self.head.T


@torch.no_grad()
def round_robin(modules: list[MtpReference], tokens: list[int], states: Tensor, num_drafts: int) -> list[int]:
    """Greedy drafts after `tokens`. `states`: the target's at positions 0 .. N - 2.

    Module m pairs the state of module m - 1 at p with the token at p + 1 + m. When each has made a draft, their
    states at the last position follow the target's, and the first goes on.
    """
    hidden, known, drafts = states[: len(tokens) - 1], list(tokens), []
    while True:
        state, last = hidden, []
        for m, module in enumerate(modules):
            state, logits = module.run(torch.tensor(known[1 + m :]), state)
            drafts.append(int(logits[-1].argmax()))
            if len(drafts) == num_drafts:
                return drafts
            known.append(drafts[-1])
            last.append(state[-1:])
        hidden = torch.cat([hidden, *last])
