"""Which branch of a verified tree becomes output, and which token follows it.

The target chooses a token at every place: its likeliest one, or one drawn from its distribution. From the root on,
the branch goes to the child that drafted the choice, as long as there is one; the choice at the last place is the
bonus token.

Drawn choices are lossless, and no other rule for these drafts accepts more. They are SpecInfer's multi-step
speculative sampling (Miao et al. 2024, arXiv 2305.09781, algorithm 2), of which EAGLE's and Sequoia's rules are
variants, for drafts that are chosen without chance. There each draft x of a place is tried in turn: it stands with
probability min(1, p(x) / q(x)), and where it falls, p becomes max(p - q, 0), normalised. With q one-hot at x, the
first draft stands with probability p(x1), and p without x1 remains; the second stands with p(x2) / (1 - p(x1)) of
the rest, which is p(x2) in all; and if none stands, the token comes from p without any of them. So each token comes
out with just its probability p, which is what drawing it from p at once does. Noise is keyed by the position of the
token alone, so a row says what it would have said without speculation.

Shape suffixes: R rows, M rows of the engine, N drafts, Q = 1 + N places, J places of the longest branch, L sequence
length, V vocabulary, W its entries on one rank, X = R * Q, O columns of an outcome, C chunks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftloop.config.draft_tree import DraftTree
from draftloop.kernels.argmax import NO_INDEX, UNPACK, takes_argmax
from draftloop.kernels.triton_import import jit, next_power_of_2, pdl_options, tl
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.models.output_head import Vocabulary
from draftloop.sampling.accept import NO_TOKEN, clip_to_limit
from draftloop.sampling.accept_block import append, outcome_memory
from draftloop.sampling.commit import commit, likeliest, target_probabilities
from draftloop.sampling.constraints import constrain
from draftloop.sampling.draw_tree import draw_places_triton
from draftloop.sampling.logits_processors import LogitsProcessor
from draftloop.sampling.noise import ACCEPT_NOISE, Stream, gumbel_argmax, noise_key, uniform, unit_noise
from draftloop.sampling.sampler import SamplingKind


class TreeTables(NamedTuple):
    """A tree, on the device."""

    parents_Q: Tensor
    """int32: the place before each; the root's is itself."""
    children_Q: Tensor
    """int32: each place's first child, -1 where it has none."""
    heights_Q: Tensor
    """int32"""
    ancestors_Q: Tensor
    """int64: bits of the places from the root to each."""
    paths_QJ: Tensor
    """int32: these places, and 0 past the end."""
    leaf_paths: tuple[Tensor, ...]
    """int64: places from the root to each leaf."""

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> TreeTables:
        def ints(values: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        parents = (0, *tree.parents)
        children = [parents.index(place, 1) if place in tree.parents else -1 for place in range(tree.num_places)]
        masks = [sum(1 << place for place in path) for path in tree.paths]
        length = 1 + tree.depth
        return cls(
            parents_Q=ints(parents),
            children_Q=ints(children),
            heights_Q=ints(tree.heights),
            ancestors_Q=ints([mask - (mask >> 63 << 64) for mask in masks], torch.int64),
            paths_QJ=ints([[*path, *[0] * (length - len(path))] for path in tree.paths]),
            leaf_paths=tuple(ints(path, torch.int64) for path in tree.leaf_paths),
        )


def accept_tree_greedy(
    state: RowState,
    rows_R: Tensor,
    logits_XW: Tensor,
    tables: TreeTables,
    rates_H: Tensor | None = None,
    *,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept for a batch in which every row is greedy; see `_accept` for `rates_H` and what is returned.

    `vocabulary`: of the logits, where ranks have parts of them.
    """
    vocabulary = vocabulary or Vocabulary(logits_XW.shape[1])
    if takes_argmax(logits_XW):
        best_XC = vocabulary.maxima(logits_XW)
        return accept_tree_triton(state, rows_R, best_XC, tables, rates_H, vocab_size=vocabulary.size)
    targets_X, is_good_X = likeliest(logits_XW, vocabulary)
    targets_X = targets_X.masked_fill(~is_good_X, NO_TOKEN)
    return _accept(state, rows_R, targets_X, tables, rates_H, vocab_size=vocabulary.size)


def accept_tree_sampled(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    tables: TreeTables,
    rates_H: Tensor | None = None,
    *,
    kind: SamplingKind = SamplingKind.TRUNCATED,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept for a batch of greedy and sampled rows in any mixture. `kind` promises that no row asks for more."""
    if takes_argmax(logits_XV):
        if kind is SamplingKind.CONSTRAINED:
            logits_XV = constrain_tree(state, rows_R, logits_XV, tables, processors)
        best_XC = draw_places_triton(state, rows_R, logits_XV, tables.heights_Q, truncate=kind.truncates)
        vocab = logits_XV.shape[1]
        return accept_tree_triton(state, rows_R, best_XC, tables, rates_H, vocab_size=vocab)
    probs_XV = tree_probabilities(state, rows_R, logits_XV, tables, kind=kind, processors=processors).flatten(0, 1)
    num_places = tables.heights_Q.shape[0]
    seeds_RQ = state.seed_M.index_select(0, rows_R)[:, None].expand(-1, num_places)
    positions_RQ = state.num_tokens_M.index_select(0, rows_R)[:, None] + tables.heights_Q
    targets_X = gumbel_argmax(probs_XV.log(), seeds_RQ.flatten(), positions_RQ.flatten(), Stream.SAMPLE)
    targets_X = targets_X.masked_fill(probs_XV[:, 0].isnan(), NO_TOKEN)
    return _accept(state, rows_R, targets_X, tables, rates_H, vocab_size=logits_XV.shape[1])


def tree_probabilities(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    tables: TreeTables,
    *,
    kind: SamplingKind,
    processors: Sequence[LogitsProcessor] = (),
    lengths_R: Tensor | None = None,
) -> Tensor:
    """float32 [R, Q, V]: what each place's token is drawn from.

    `lengths_R`: tokens that each row had before the block; None: it has not been accepted yet.
    """
    if kind is SamplingKind.CONSTRAINED:
        logits_XV = constrain_tree(state, rows_R, logits_XV, tables, processors, lengths_R=lengths_R)
        kind = SamplingKind.TRUNCATED
    return target_probabilities(state, rows_R, logits_XV, tables.heights_Q.shape[0] - 1, kind=kind)


def constrain_tree(
    state: RowState,
    rows_R: Tensor,
    logits_XV: Tensor,
    tables: TreeTables,
    processors: Sequence[LogitsProcessor] = (),
    *,
    lengths_R: Tensor | None = None,
) -> Tensor:
    """float32 [X, V]: a copy of the logits, changed as each row's request asks; see `constraints.constrain`.

    Each branch is a chain, for which everything that looks back is written; what branches share comes out alike.
    """
    logits_RQV = logits_XV.unflatten(0, (-1, tables.heights_Q.shape[0]))
    changed_RQV = torch.empty_like(logits_RQV, dtype=torch.float32)
    for path in tables.leaf_paths:
        chain, along_RJV = _along(state, path), logits_RQV.index_select(1, path)
        changed_RQV.index_copy_(1, path, constrain(chain, rows_R, along_RJV, processors, lengths_R=lengths_R))
    return changed_RQV.flatten(0, 1)


def _along(state: RowState, path: Tensor) -> RowState:
    """The rows as if only the drafts of this branch had been made."""
    rules = state.constraints
    assert rules is not None
    return replace(
        state,
        drafts_MK=state.drafts_MK.index_select(1, path[1:] - 1),
        constraints=replace(rules, grammar_MQW=rules.grammar_MQW.index_select(1, path)),
    )


def _accept(
    state: RowState,
    rows_R: Tensor,
    targets_X: Tensor,
    tables: TreeTables,
    rates_H: Tensor | None,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's choices (int64 [X], NO_TOKEN where its logits say nothing), commit, and report.

    With `rates_H` (float32) the first child of a place stands by coin, at the rate of the place's height, whatever
    was chosen there (benchmarks without a trained drafter).

    Returns `num_emitted` int32 [R]; `outcome` int32 [R, 3 + Q], as of a chain; and `path` int32 [R, J]: the places
    that the emitted tokens came from, the bonus token's before the first.
    """
    run = accept_tree_triton if targets_X.is_cuda else accept_tree_torch
    return run(state, rows_R, targets_X, tables, rates_H, vocab_size=vocab_size)


def accept_tree_torch(
    state: RowState,
    rows_R: Tensor,
    targets_X: Tensor,
    tables: TreeTables,
    rates_H: Tensor | None,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `accept_tree_triton`."""
    num_places, length = tables.paths_QJ.shape
    targets_RQ = targets_X.view(-1, num_places)
    drafts_RQ = F.pad(state.drafts_MK.index_select(0, rows_R).long(), (1, 0), value=NO_DRAFT)  # by place
    lengths_R1 = state.num_tokens_M.index_select(0, rows_R)[:, None]
    if rates_H is not None:
        seeds_R1 = state.seed_M.index_select(0, rows_R)[:, None]
        coins_RQ = uniform(seeds_R1, lengths_R1 + tables.heights_Q, Stream.ACCEPT)
        child_RQ = drafts_RQ[:, tables.children_Q.long().clamp(min=0)]
        stands_RQ = (coins_RQ < F.pad(rates_H, (0, 1))[tables.heights_Q]) & (child_RQ >= 0) & (child_RQ < vocab_size)
        targets_RQ = torch.where(stands_RQ & (targets_RQ >= 0) & (tables.children_Q >= 0), child_RQ, targets_RQ)
    index_Q = torch.arange(num_places, device=rows_R.device)
    falls_RQ = (drafts_RQ < 0) | (drafts_RQ != targets_RQ[:, tables.parents_Q.long()])
    falls_RQ[:, 0] = False
    fallen_R1 = (falls_RQ.long() << index_Q).sum(-1, keepdim=True)
    last_R1 = index_Q.masked_fill((tables.ancestors_Q & fallen_R1) != 0, 0).amax(-1, keepdim=True)

    num_accepted_R1 = tables.heights_Q[last_R1]
    path_RJ = tables.paths_QJ[last_R1[:, 0]]
    index_J = torch.arange(length, device=rows_R.device)
    drafted_RJ = drafts_RQ.gather(1, F.pad(path_RJ[:, 1:], (0, 1)).long())
    bonus_R1 = targets_RQ.gather(1, last_R1)
    emitted_RJ = torch.where(index_J < num_accepted_R1, drafted_RJ, bonus_R1).int()
    room_R = state.max_tokens_M.index_select(0, rows_R) - lengths_R1[:, 0]
    num_emitted_R = num_accepted_R1[:, 0] + (bonus_R1[:, 0] >= 0)
    emitted_RJ, num_emitted_R = clip_to_limit(emitted_RJ, num_emitted_R.int(), room_R)
    commit(state, rows_R, emitted_RJ, num_emitted_R)
    num_drafted_R = (drafts_RQ != NO_DRAFT).sum(-1, dtype=torch.int32)
    counts_RO = torch.stack([num_emitted_R, torch.minimum(num_accepted_R1[:, 0], num_emitted_R), num_drafted_R], 1)
    emitted_RQ = F.pad(emitted_RJ, (0, num_places - length), value=NO_TOKEN)
    return num_emitted_R, torch.cat([counts_RO, emitted_RQ], 1), path_RJ


@jit("drafts_width", "tokens_width", "num_chunks", "num_places", "length", "vocab_size")
def _accept_tree_kernel(
    choice_ptr,
    rows_ptr,
    drafts_ptr,
    tokens_ptr,
    num_tokens_ptr,
    max_tokens_ptr,
    seed_ptr,
    rates_ptr,
    parents_ptr,
    children_ptr,
    heights_ptr,
    ancestors_ptr,
    paths_ptr,
    num_emitted_ptr,
    outcome_ptr,
    path_ptr,
    drafts_width,
    tokens_width,
    num_chunks,
    num_places,
    length,  # J
    vocab_size,
    PACKED: tl.constexpr,  # choices are maxima of chunks, not tokens
    RATES: tl.constexpr,
    NO_INDEX: tl.constexpr,
    UNPACK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    entry = tl.program_id(0)
    q = tl.arange(0, BLOCK_Q)
    live = q < num_places
    parent = tl.load(parents_ptr + q, mask=live, other=0)
    height = tl.load(heights_ptr + q, mask=live, other=0)
    ancestors = tl.load(ancestors_ptr + q, mask=live, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_ptr + entry).to(tl.int64)
    if PACKED:
        chunk = tl.arange(0, BLOCK_C)
        best = tl.load(
            choice_ptr + (entry * num_places + q)[:, None] * num_chunks + chunk[None, :],
            mask=live[:, None] & (chunk < num_chunks)[None, :],
            other=NO_INDEX,
        )
        top = tl.max(best, 1)
        # as integers in the order of floats: NaN and inf, or nothing but -inf
        largest = (top >> 32).to(tl.int32)
        is_bad = (largest >= 0x7F800000) | (largest <= -0x7F800001)
        choice = tl.where(is_bad, -1, (UNPACK - (top & UNPACK)).to(tl.int32))
    else:
        choice = tl.load(choice_ptr + entry * num_places + q, mask=live, other=-1).to(tl.int32)
    row_drafts_ptr = drafts_ptr + row * drafts_width
    draft = tl.load(row_drafts_ptr + q - 1, mask=live & (q > 0), other=-1)
    num_tokens = tl.load(num_tokens_ptr + row)
    room = tl.load(max_tokens_ptr + row) - num_tokens
    if RATES:
        noise = unit_noise(noise_key(tl.load(seed_ptr + row), num_tokens + height, ACCEPT_NOISE))
        child = tl.load(children_ptr + q, mask=live, other=-1)
        child_draft = tl.load(row_drafts_ptr + child - 1, mask=child > 0, other=-1)
        rate = tl.load(rates_ptr + height, mask=child > 0, other=0.0)
        # a target can only read what it knows
        known = (child_draft >= 0) & (child_draft < vocab_size)
        choice = tl.where((noise < rate) & known & (choice >= 0), child_draft, choice)

    wanted = tl.sum(tl.where(parent[:, None] == q[None, :], choice[None, :], 0), 1)
    falls = live & (q > 0) & ((draft < 0) | (draft != wanted))
    fallen = tl.sum(falls.to(tl.int64) << q.to(tl.int64), 0)
    last = tl.max(tl.where(live & ((ancestors & fallen) == 0), q, 0), 0)
    bonus = tl.sum(tl.where(q == last, choice, 0), 0)
    num_accepted = tl.load(heights_ptr + last)
    place = tl.load(paths_ptr + last * length + q, mask=q < length, other=0)
    next_place = tl.load(paths_ptr + last * length + q + 1, mask=q < num_accepted, other=1)
    accepted = tl.load(row_drafts_ptr + next_place - 1, mask=q < num_accepted, other=-1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(path_ptr + entry * length + q, place, mask=q < length)
    append(
        entry, row, q, accepted, num_accepted, bonus, num_accepted + (bonus >= 0).to(tl.int32),
        tl.sum((draft != -1).to(tl.int32), 0), num_tokens, room,
        tokens_ptr, num_tokens_ptr, num_emitted_ptr, outcome_ptr, tokens_width, 3 + num_places,
    )  # fmt: skip


def accept_tree_triton(
    state: RowState,
    rows_R: Tensor,
    choice: Tensor,
    tables: TreeTables,
    rates_H: Tensor | None,
    *,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `accept_tree_torch`, one launch; `choice` is the targets [X], or the `chunk_maxima` of the logits."""
    num_places, length = tables.paths_QJ.shape
    num_rows = rows_R.shape[0]
    num_emitted_R, outcome_RO = outcome_memory(rows_R, num_places)
    path_RJ = torch.empty(num_rows, length, dtype=torch.int32, device=rows_R.device)
    num_chunks = choice.shape[1] if choice.dim() == 2 else 1
    if num_rows:
        _accept_tree_kernel[(num_rows,)](
            choice,
            rows_R,
            state.drafts_MK,
            state.tokens_ML,
            state.num_tokens_M,
            state.max_tokens_M,
            state.seed_M,
            rows_R if rates_H is None else rates_H,
            tables.parents_Q,
            tables.children_Q,
            tables.heights_Q,
            tables.ancestors_Q,
            tables.paths_QJ,
            num_emitted_R,
            outcome_RO,
            path_RJ,
            state.drafts_MK.shape[1],
            state.tokens_ML.shape[1],
            num_chunks,
            num_places,
            length,
            vocab_size,
            PACKED=choice.dim() == 2,
            RATES=rates_H is not None,
            NO_INDEX=NO_INDEX,
            UNPACK=UNPACK,
            BLOCK_Q=next_power_of_2(num_places),
            BLOCK_C=next_power_of_2(num_chunks),
            num_warps=4,
            **pdl_options(rows_R.device),
        )
    return num_emitted_R, outcome_RO, path_RJ
