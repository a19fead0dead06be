"""DSpark in plain torch, from the description of its format: the block of DFlash, then drafts left to right.

Shape suffixes: K drafts, C width, N rank of the Markov head, W draft vocabulary.
"""

from __future__ import annotations

import torch
from dflash_reference import BlockReference
from torch import Tensor


class DSparkReference(BlockReference):
    """One drafter, greedy."""

    def bias(self, previous: int, hidden_C: Tensor, memory_N: Tensor) -> tuple[Tensor, Tensor]:
        """Correction [W] of a draft after the token `previous`, and the memory that follows."""
        heads, w1 = self.config.heads, self.w["markov_head.markov_w1.weight"][previous]
        latent = w1
        if heads.markov_kind == "gated":
            gate = self.w["markov_head.gate_proj.weight"] @ torch.cat([hidden_C, w1])
            latent = torch.sigmoid(gate + self.w["markov_head.gate_proj.bias"]) * w1
        if heads.markov_kind == "rnn":
            joint = self.w["markov_head.joint_proj.weight"] @ torch.cat([memory_N, w1, hidden_C])
            gate, candidate, out = (joint + self.w["markov_head.joint_proj.bias"]).chunk(3)
            latent = torch.tanh(out)
            memory_N = torch.sigmoid(gate) * memory_N + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        return self.w["markov_head.markov_w2.weight"] @ latent, memory_N

    @torch.no_grad()
    def drafts(self, tokens: list[int], aux_NX: Tensor, num_drafts: int) -> tuple[list[int], Tensor]:
        found, logits, _ = self.all(tokens, aux_NX, num_drafts)
        return found, logits

    @torch.no_grad()
    def all(
        self, tokens: list[int], aux_NX: Tensor, num_drafts: int, said: list[int] | None = None
    ) -> tuple[list[int], Tensor, Tensor]:
        """Drafts, logits [K, W] and confidences [K]; `said` are the drafts that were chosen, if not the likeliest."""
        heads, first = self.config.heads, 0 if self.config.samples_from_anchor else 1
        hidden = self.block(tokens[-1], aux_NX[: len(tokens) - 1], num_drafts + first)[first:]
        memory, previous = torch.zeros(heads.markov_rank), tokens[-1]
        drafts, logits, confidence = [], [], []
        for k in range(num_drafts):
            row = self.head @ hidden[k]
            if heads.markov_kind:
                bias, memory = self.bias(previous, hidden[k], memory)
                row = row + bias
            if heads.confidence:
                features = hidden[k]
                if heads.confidence_reads_markov:
                    features = torch.cat([features, self.w["markov_head.markov_w1.weight"][previous]])
                score = self.w["confidence_head.proj.weight"] @ features
                if heads.confidence_bias:
                    score = score + self.w["confidence_head.proj.bias"]
                confidence.append(torch.sigmoid(score)[0])
            logits.append(row)
            drafts.append(int(self.ids[row.argmax()]))
            previous = drafts[-1] if said is None else said[k]
        return drafts, torch.stack(logits), torch.stack(confidence) if confidence else torch.empty(0)
