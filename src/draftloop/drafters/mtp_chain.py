"""Several multi-token-prediction modules, each of which makes the draft that it was trained for.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2. Module m (from 0) pairs, at position p, the
state of module m - 1 (the target's for the first) with the token at p + 1 + m, and predicts the token after that.
So one round of all modules over the same positions drafts N tokens, all of them at the last position with a state
of the target. There module m reads m drafts; keys and values made from them are made anew in the next round, for
which the target's states of a row's last positions are kept.

The state of module m at position p is trained to tell what the target's tells at p + 1 + m. For more drafts than
modules the N states of a round's last position are therefore the next round's, in the place of the target's.

Shape suffixes: N modules that draft, R rows, M rows of the engine plus one, T = R * Q tokens, Q positions of a block,
H positions whose states are kept, C hidden size, L layers, as many as modules (`kv_L2PSGD`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from draftloop.attention.base import GraphSupport
from draftloop.attention.batches import ragged_batch, tail_batch
from draftloop.drafters.base import Rounds, count_name, sampled_name
from draftloop.drafters.mtp_model import MtpModule
from draftloop.drafters.write import write_next
from draftloop.graphs.phase import Cost, GraphMode, Launch, Pad, Phase, Slot, Unit, rows_slot
from draftloop.kvcache.rows import RowState


class ModuleChain:
    """The phases of N > 1 modules, and when they run."""

    def __init__(
        self,
        modules: Sequence[MtpModule],
        kv_L2PSGD: Tensor,
        state: RowState,
        *,
        counts: Sequence[int],
        page_size: int,
        vocab_size: int,
        longest: int | None,
        sampled: bool,
        support: GraphSupport,
    ) -> None:
        """`counts`, `longest` and `sampled` are the drafter's; there are no more modules than drafts."""
        self.modules, self.state, self.page_size, self.support = modules, state, page_size, support
        self.kv_NL2PSGD = kv_L2PSGD.split(1)
        self.counts, self.num_drafts, self.longest, self.sampled = counts, max(counts), longest, sampled
        first = modules[0]
        self.num_embedded = first.embed_tokens.shape[0]
        self.num_known = min(first.vocabulary.size, vocab_size)
        self.width, dtype, device = first.config.model.hidden_size, first.final_norm.dtype, first.final_norm.device
        num_rows, num_kept = state.padding_row + 1, len(modules) + self.num_drafts
        self.kept_MHC = torch.zeros(num_rows, num_kept, self.width, dtype=dtype, device=device)
        """Per engine row, the target's state of position p at p % H."""
        self.states_MNC = torch.zeros(num_rows, len(modules), self.width, dtype=dtype, device=device)
        """Per engine row, each module's state at the last position of its last round."""

    def row_memory(self) -> Mapping[str, Tensor]:
        return {"kept_MHC": self.kept_MHC, "states_MNC": self.states_MNC}

    # ---- what runs --------------------------------------------------------------------------

    def _prompt(
        self, launch: Launch, rows: Tensor, query_starts: Tensor, kv_lens: Tensor, aux_hidden: Tensor
    ) -> Mapping[str, Tensor]:
        """Keys and values of a chunk. What depends on tokens past the prompt is made anew by `_first`."""
        state, num = self.state, len(self.modules)
        batch, row_T = ragged_batch(state, rows, query_starts, kv_lens, self.page_size, launch)
        hidden_TC = aux_hidden
        for m, (module, kv) in enumerate(zip(self.modules, self.kv_NL2PSGD, strict=True)):
            wanted_T = (batch.positions_T + 1 + m).clamp(max=state.tokens_ML.shape[1] - 1)
            ids_T = state.tokens_ML[row_T, wanted_T].clamp(0, self.num_embedded - 1)
            if m == num - 1:
                module.feed(ids_T, hidden_TC, kv, batch)
            else:
                hidden_TC = module(ids_T, hidden_TC, kv, batch)
        # earlier tokens of a chunk would be written over: they are left to the padding row
        entry_T = torch.searchsorted(query_starts[1:], self._count(launch.tokens), right=True)
        behind_T = kv_lens[entry_T.clamp(max=launch.rows - 1)]
        row_T = torch.where(batch.positions_T >= behind_T - num, row_T, state.padding_row)
        self.kept_MHC.index_put_((row_T, batch.positions_T % self.kept_MHC.shape[1]), aux_hidden)
        return {}

    def _count(self, num: int) -> Tensor:
        return torch.arange(num, dtype=torch.int32, device=self.kept_MHC.device)

    def _round(
        self, launch: Launch, rows: Tensor, emitted_R: Tensor, *, num_new: int, sampled: bool, drafts: bool = True
    ) -> Mapping[str, Tensor]:
        """All modules up to the last position with a state of the target, of which `num_new` are past the N - 1 that
        run again; their states are kept. The first rows start at position 0 rather than before it."""
        num, state = len(self.modules), self.state
        back_R = torch.minimum(emitted_R + (num - 1), state.num_tokens_M[rows] - 1).int()
        hidden_TC = None
        for m, module in enumerate(self.modules):
            batch, tokens = tail_batch(
                state,
                rows,
                num - 1 + num_new,
                self.page_size,
                launch,
                offset=-1,
                emitted_R=back_R,
                ahead=1 + m,
                num_ids=self.num_embedded,
            )
            if hidden_TC is None:
                row_T = rows.long().repeat_interleave(num - 1 + num_new)
                hidden_TC = self.kept_MHC[row_T, tokens.positions_T % self.kept_MHC.shape[1]]
            if not drafts and m == num - 1:
                module.feed(tokens.ids_T, hidden_TC, self.kv_NL2PSGD[m], batch)
                break
            hidden_TC = module(tokens.ids_T, hidden_TC, self.kv_NL2PSGD[m], batch)
            if drafts:
                self._draft(m, rows, hidden_TC, tokens.last_R, sampled=sampled, first=m == 0)
        return {}

    def _first(self, launch: Launch, rows: Tensor, *, sampled: bool) -> Mapping[str, Tensor]:
        return self._round(launch, rows, torch.ones_like(rows), num_new=1, sampled=sampled)

    def _prefill(
        self, launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor, *, verified: int, sampled: bool
    ) -> Mapping[str, Tensor]:
        self._keep(rows, num_emitted, aux_hidden, verified)
        return self._round(launch, rows, num_emitted, num_new=verified, sampled=sampled)

    def _feed(self, launch: Launch, rows: Tensor, num_emitted: Tensor, aux_hidden: Tensor) -> Mapping[str, Tensor]:
        self._keep(rows, num_emitted, aux_hidden, 1)
        return self._round(launch, rows, num_emitted, num_new=1, sampled=False, drafts=False)

    def _keep(self, rows: Tensor, num_emitted: Tensor, aux_TC: Tensor, verified: int) -> None:
        first_R = (self.state.num_tokens_M[rows] - num_emitted - 1).long()
        positions_RQ = first_R[:, None] + self._count(verified)
        slots_RQ = positions_RQ % self.kept_MHC.shape[1]  # of the padding row too, whatever it emitted
        self.kept_MHC.index_put_((rows.long()[:, None], slots_RQ), aux_TC.view(-1, verified, self.width))

    def _decode(self, launch: Launch, rows: Tensor, *, num_modules: int, sampled: bool) -> Mapping[str, Tensor]:
        """A round over the N positions that the last one drafted."""
        num = len(self.modules)
        hidden_TC = self.states_MNC[rows].flatten(0, 1)
        for m in range(num_modules):
            # each draft written moves what `drafted` counts from
            batch, tokens = tail_batch(
                self.state,
                rows,
                num,
                self.page_size,
                launch,
                offset=-1 - num - m,
                drafted=True,
                ahead=1 + m,
                num_ids=self.num_embedded,
            )
            hidden_TC = self.modules[m](tokens.ids_T, hidden_TC, self.kv_NL2PSGD[m], batch)
            self._draft(m, rows, hidden_TC, tokens.last_R, sampled=sampled, first=False)
        return {}

    def _draft(self, m: int, rows: Tensor, hidden_TC: Tensor, last_R: Tensor, *, sampled: bool, first: bool) -> None:
        hidden_RC = hidden_TC.index_select(0, last_R)
        self.states_MNC[:, m].index_copy_(0, rows.long(), hidden_RC)
        logits_RV = self.modules[m].logits(hidden_RC)
        write_next(
            self.state,
            rows,
            logits_RV,
            vocab_size=self.num_known,
            sampled=sampled,
            first=first,
            vocabulary=self.modules[m].vocabulary,
            longest=self.longest,
        )

    # ---- when -------------------------------------------------------------------------------

    def phases(self) -> list[Phase]:
        num, support = len(self.modules), self.support
        full = {GraphMode.FULL} if support.uniform else set()
        whole = frozenset({GraphMode.NONE, *full})
        ragged = frozenset({GraphMode.NONE, GraphMode.PIECEWISE, *([GraphMode.FULL] if support.ragged else [])})
        why = support.reason or "a round of all modules is captured whole or not at all"
        rows = rows_slot(self.state.padding_row)
        aux = Slot(unit=Unit.TOKEN, dtype=self.kept_MHC.dtype, shape=(self.width,))
        emitted = Slot(unit=Unit.ROW, dtype=torch.int32)
        verified = {"rows": rows, "num_emitted": emitted, "aux_hidden": aux}
        bounds = Slot(unit=Unit.ROW_BOUND, dtype=torch.int32, pad=Pad.LAST)
        kv_lens = Slot(unit=Unit.ROW, dtype=torch.int32)
        phases = [
            Phase(
                name="draft.prompt",
                fn=self._prompt,
                slots={"rows": rows, "query_starts": bounds, "kv_lens": kv_lens, "aux_hidden": aux},
                tokens_per_row=None,
                modes=ragged,
                reason=support.reason,
            )
        ]
        for sampled in (False, True) if self.sampled else (False,):
            phases.append(
                Phase(
                    name=sampled_name("draft.first", sampled),
                    fn=partial(self._first, sampled=sampled),
                    slots={"rows": rows},
                    tokens_per_row=num,
                    modes=whole,
                    reason=why,
                    cost=self._cost(num),
                )
            )
            phases += [
                Phase(
                    name=count_name(sampled_name("draft.prefill", sampled), k, self.num_drafts),
                    fn=partial(self._prefill, verified=k + 1, sampled=sampled),
                    slots=verified,
                    tokens_per_row=k + 1,
                    modes=whole,
                    reason=why,
                    cost=self._cost(num),
                )
                for k in self.counts
                if k
            ]
            phases += [
                Phase(
                    name=self._decode_name(count, sampled=sampled),
                    fn=partial(self._decode, num_modules=count, sampled=sampled),
                    slots={"rows": rows},
                    tokens_per_row=num,
                    modes=whole,
                    reason=why,
                    cost=self._cost(count),
                )
                for count in sorted(set(self._later_rounds()))
            ]
        if 0 in self.counts:
            phases.append(Phase(name="draft.feed", fn=self._feed, slots=verified, modes=whole, reason=why))
        return phases

    def _cost(self, num_modules: int) -> Cost:
        costs = [module.cost(fused=True) for module in self.modules[:num_modules]]
        return Cost(
            weight_bytes=sum(cost.weight_bytes for cost in costs),
            cache_bytes=sum(cost.cache_bytes for cost in costs),
            flops=sum(cost.flops for cost in costs),
        )

    def _later_rounds(self) -> list[int]:
        """How many modules draft in each round after the first."""
        num = len(self.modules)
        return [min(num, self.num_drafts - made) for made in range(num, self.num_drafts, num)]

    def _decode_name(self, count: int, *, sampled: bool) -> str:
        return sampled_name("draft.decode" if count == len(self.modules) else f"draft.decode.{count}", sampled)

    def rounds(self, *, sampled: bool) -> Rounds:
        sampled = sampled and self.sampled
        chain = tuple(self._decode_name(count, sampled=sampled) for count in self._later_rounds())
        return Rounds(
            prompt=("draft.prompt",),
            first=(sampled_name("draft.first", sampled), *chain),
            next=(sampled_name("draft.prefill", sampled), *chain),
            plain=(),  # rows without drafts are past their limit, or declined them: they never draft again
        )

    def rounds_after(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        if not num_drafts:
            return ("draft.feed",)
        prefill, *chain = self.rounds(sampled=sampled).next
        return (count_name(prefill, num_drafts, self.num_drafts), *chain[: self._num_later(num_drafts)])

    def first_rounds(self, num_drafts: int, *, sampled: bool) -> tuple[str, ...]:
        return self.rounds(sampled=sampled).first[: 1 + self._num_later(num_drafts)] if num_drafts else ()

    def _num_later(self, num_drafts: int) -> int:
        """Rounds after the first that so many drafts take."""
        return -(-max(num_drafts - len(self.modules), 0) // len(self.modules))
