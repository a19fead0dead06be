"""The multi-token-prediction module: a decoder layer fed with an embedding and the hidden state before it.

Shape suffixes: T tokens, R rows, C hidden size, V vocabulary, X the 2C of an embedding and a hidden state or rows
that tokens take their states from, L positions or layers (`kv_L2PSGD`), P pages, S tokens per page, G key/value
heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend, AttentionBatch
from draftloop.distributed.group import ALONE, Group
from draftloop.drafters.mtp_config import LAYER, MtpConfig
from draftloop.graphs.phase import Cost
from draftloop.kernels.linear import linear
from draftloop.kernels.norm_concat import norm_concat
from draftloop.kernels.rms_norm import Store, add_rms_norm
from draftloop.models.layers import DecoderLayer, parameter
from draftloop.models.output_head import Vocabulary
from draftloop.models.rope import cos_sin_table
from draftloop.models.shards import Plain, shard, share
from draftloop.models.weights import plain


class MtpModule(torch.nn.Module):
    """Predicts the token after the next one from a token and the target's (or its own) hidden state before it.

    Both hidden states are those after a final norm, so the module's own takes the place of the target's. So it is
    in transformers, whatever the family; vLLM hands on that of DeepSeek's modules as it is before the norm.
    `embed_tokens` and `lm_head` are the target's where the module has none: give them as arguments.
    """

    target_ids_W: Tensor | None = None

    def __init__(
        self,
        config: MtpConfig,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
        embed_tokens: Tensor,
        lm_head: Tensor,
        group: Group = ALONE,
        reaches_start: bool = False,
    ) -> None:
        """`group`: ranks among which layers and output head are divided. `backend` attends for one rank's heads.
        `reaches_start`: passes that are no prompts may have a first position too."""
        super().__init__()
        self.config, self.backend, self.group = config, backend, group
        self.reaches_start = reaches_start
        model, width = config.model, config.model.hidden_size

        def make(*shape: int) -> torch.nn.Parameter:
            return parameter(*shape, device=device, dtype=dtype)

        # plain attributes where borrowed: what is not ours is neither counted nor filled
        self.embed_tokens = make(model.vocab_size, width) if config.own_embeddings else embed_tokens.detach()
        self.vocabulary = vocabulary = Vocabulary(model.vocab_size if config.own_head else lm_head.shape[0], group)
        self.lm_head = make(vocabulary.width, width) if config.own_head else vocabulary.own_rows(lm_head.detach())
        self.embed_norm, self.hidden_norm, self.final_norm = make(width), make(width), make(width)
        self.fc = make(width, 2 * width)
        self.layer = DecoderLayer(model, 0, device=device, dtype=dtype, group=group)
        self.cos_sin_LD = cos_sin_table(model.rope, head_dim=model.head_dim, max_positions=max_positions, device=device)

    def settle(self) -> None:
        """Once the weights are there: bring each family's to one form."""
        if self.config.style.hidden_first:
            self.fc.copy_(self.fc.roll(self.config.model.hidden_size, 1))
        if self.config.style.norms_from_one:
            for name, weight in self.destinations().items():
                if isinstance(weight, Tensor) and weight.dim() == 1 and name.endswith("norm.weight"):
                    weight += 1

    def fuse(self, aux_TX: Tensor) -> Tensor:
        """The target's hidden states are taken as they are."""
        return aux_TX

    def forward(
        self,
        ids_T: Tensor,
        hidden_XC: Tensor,
        kv_L2PSGD: Tensor,
        batch: AttentionBatch,
        *,
        hidden_rows_T: Tensor | None = None,
        keep_R: Tensor | None = None,
        store: Store | None = None,
    ) -> Tensor:
        """As `PairHead.__call__`."""
        eps = self.config.model.rms_norm_eps
        x_TC, residual_TC = self._enter(ids_T, hidden_XC, batch, hidden_rows_T)
        out, residual_TC = self.layer(x_TC, residual_TC, kv_L2PSGD[0], self.cos_sin_LD, batch, self.backend, keep_R)
        store = store and store._replace(normed=True)
        normed_TC, _ = add_rms_norm(out, residual_TC, self.final_norm, eps, store=store)
        return normed_TC

    def feed(self, ids_T: Tensor, hidden_TC: Tensor, kv_L2PSGD: Tensor, batch: AttentionBatch) -> None:
        """As `PairHead.feed`."""
        x_TC, _ = self._enter(ids_T, hidden_TC, batch, None)
        self.layer.attention.write(x_TC, kv_L2PSGD[0], self.cos_sin_LD, batch)

    def _enter(
        self, ids_T: Tensor, hidden_XC: Tensor, batch: AttentionBatch, hidden_rows_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What the layer's attention reads, and the residual stream."""
        eps = self.config.model.rms_norm_eps
        both_TX, _ = norm_concat(
            self.embed_tokens, hidden_XC, self.embed_norm, self.hidden_norm, eps, first_T=ids_T, second_T=hidden_rows_T
        )
        if self.config.style.zeroed_first and (self.reaches_start or not batch.uniform):
            # of a single module only prompts have a first position; what follows them starts later
            both_TX[:, : self.final_norm.shape[0]].masked_fill_((batch.positions_T == 0)[:, None], 0)
        return self.layer.enter(None, linear(both_TX, self.fc))

    def head_input(self, hidden_RC: Tensor) -> Tensor:
        """The hidden state is normed already."""
        return hidden_RC

    def logits(self, head_input_RC: Tensor) -> Tensor:
        """[R, C] -> this rank's of [R, V]."""
        return linear(head_input_RC, self.lm_head)

    def cost(self, *, fused: bool, tokens_per_row: int = 1) -> Cost:
        """What one pass must read and compute, whatever it starts with."""
        model = self.config.model
        layer, head, fc = sum(p.numel() for p in self.layer.parameters()), self.lm_head.numel(), self.fc.numel()
        # all but fc and the projections to q, k and v run for one token of a row
        early = fc + self.layer.attention.qkv_weight.numel()
        return Cost(
            weight_bytes=(layer + fc + head) * self.fc.dtype.itemsize,
            cache_bytes=share(model, self.group.size).kv_elements_per_token * self.backend.shape.kv_dtype.itemsize,
            flops=2 * (early + (layer + fc + head - early) // tokens_per_row),
        )

    def destinations(self) -> dict[str, Plain]:
        """Plain tensor name -> the weight, or part of a fused one, that it fills."""
        found: dict[str, Plain] = {
            "fc.weight": self.fc,
            "embed_norm.weight": self.embed_norm,
            "hidden_norm.weight": self.hidden_norm,
            "norm.weight": self.final_norm,
            **plain(self.layer.destinations(LAYER.removesuffix("."))),
        }
        if self.config.own_embeddings:
            found["embed_tokens.weight"] = self.embed_tokens
        if self.config.own_head:
            found["lm_head.weight"] = shard(self.lm_head, self.vocabulary.slices)
        return found
