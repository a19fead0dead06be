"""The kernels that read and write the row state, in Triton and in C, against their torch references."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftloop.kernels.argmax import chunk_maxima
from draftloop.kernels.native.functions import available, switched_off
from draftloop.kernels.page_slots import page_slots_torch, page_slots_triton
from draftloop.kernels.row_tokens import Sequences, row_tokens, row_tokens_torch, row_tokens_triton
from draftloop.kernels.write_draft import DraftRows, write_draft, write_draft_torch, write_draft_triton
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.accept_block import accept_block_triton
from draftloop.sampling.commit import _token_rows, accept_rows_greedy, accept_rows_synthetic

NUM_ROWS, K, PAGE, VOCAB = 5, 4, 4, 9000
FEW = settings(max_examples=25)


def make_state(seed: int, device: torch.device) -> RowState:
    state = RowState.create(
        num_rows=NUM_ROWS, max_model_len=40, num_drafts=K, page_size=PAGE, draft_vocab=0, device=torch.device("cpu")
    )
    noise = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=noise, dtype=torch.int32)

    padding = state.padding_row
    state.tokens_ML[:padding] = random(0, VOCAB, *state.tokens_ML[:padding].shape)
    state.num_tokens_M[:padding] = random(8, 38, padding)
    state.max_tokens_M[:padding] = state.num_tokens_M[:padding] + random(0, 8, padding)
    state.max_tokens_M.clamp_(max=40)
    state.drafts_MK[:padding] = random(NO_DRAFT, VOCAB + 3, padding, K)
    state.num_drafted_M[:padding] = random(0, K, padding)
    state.draft_limit_M[:padding] = random(0, K + 1, padding)
    state.page_table_MN[:padding] = random(0, 50, padding, state.page_table_MN.shape[1])
    state.seed_M[:padding] = torch.randint(0, 2**62, (padding,), generator=noise)
    return RowState(**{name: None if value is None else value.to(device) for name, value in vars(state).items()})


def some_rows(state: RowState, seed: int, device: torch.device) -> Tensor:
    """Distinct rows, then padding."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))[: 1 + seed % NUM_ROWS]
    return torch.cat([order, torch.full((seed % 3,), state.padding_row)]).int().to(device)


def implementations(device: torch.device, triton, public):
    """Triton's on the device or in its interpreter, and on the CPU the C twin too."""
    if device.type == "cuda":
        return [triton]
    assert available()
    return [triton, public]


def sequences(state: RowState) -> Sequences:
    return Sequences(state.tokens_ML, state.num_tokens_M, state.drafts_MK, state.page_table_MN)


def draft_rows(state: RowState) -> DraftRows:
    return DraftRows(state.drafts_MK, state.num_drafted_M, state.draft_limit_M, state.num_tokens_M)


@FEW
@given(
    seed=st.integers(0, 10**6),
    num_per_row=st.integers(1, K + 2),
    offset=st.integers(-2, 0),
    ahead=st.integers(0, 1),
    drafted=st.booleans(),
    emitted=st.booleans(),
    num_ids=st.sampled_from([VOCAB, VOCAB // 2]),
)
def test_row_tokens(device, seed, num_per_row, offset, ahead, drafted, emitted, num_ids) -> None:
    state = make_state(seed, device)
    rows = some_rows(state, seed, device)
    counts = (rows % 4 + 1).masked_fill(rows == state.padding_row, 0) if emitted else None
    arguments = (rows, sequences(state), state.num_drafted_M if drafted else None, counts)
    options = {"num_per_row": num_per_row, "page_size": PAGE, "offset": offset, "ahead": ahead, "num_ids": num_ids}
    expected = row_tokens_torch(*arguments, **options)
    for run in implementations(device, row_tokens_triton, row_tokens):
        for name, out in run(*arguments, **options)._asdict().items():
            assert out.dtype == getattr(expected, name).dtype
            assert torch.equal(out, getattr(expected, name)), name
    for slots in (page_slots_torch, page_slots_triton):
        out = slots(rows, expected.kv_lens_R, state.page_table_MN, num_per_row=num_per_row, page_size=PAGE)
        assert torch.equal(out, expected.slots_T), "what is known of the keys says where they are in any table"


def test_a_block_is_a_row_s_last_tokens_and_then_its_drafts() -> None:
    state = make_state(0, torch.device("cpu"))
    state.num_tokens_M[2], state.num_drafted_M[2] = 10, 2
    state.drafts_MK[2] = torch.tensor([11, 12, NO_DRAFT, 14])
    state.tokens_ML[2, 8:10] = torch.tensor([8, 9])
    block = partial(row_tokens, torch.tensor([2], dtype=torch.int32), sequences(state), page_size=PAGE, num_ids=VOCAB)
    out = block(num_per_row=6, offset=-2)
    assert out.ids_T.tolist() == [8, 9, 11, 12, 0, 14], "a draft that is none has no embedding"
    assert out.positions_T.tolist() == [8, 9, 10, 11, 12, 13]
    assert out.kv_lens_R.tolist() == [14]
    assert out.last_R.tolist() == [5]
    assert block(num_per_row=2, offset=-2, ahead=1).ids_T.tolist() == [9, 11]
    assert block(state.num_drafted_M, num_per_row=1, offset=-1).ids_T.tolist() == [12]
    emitted = block(None, torch.tensor([2], dtype=torch.int32), num_per_row=4, offset=0)
    assert (emitted.positions_T[0].item(), emitted.last_R.item()) == (8, 1)


def test_what_does_not_exist_is_not_read() -> None:
    """On the CPU, as torch's own indexing: an error and not a crash."""
    state = make_state(0, torch.device("cpu"))
    options = {"num_per_row": 1, "page_size": PAGE, "num_ids": VOCAB}
    with pytest.raises(IndexError, match="does not exist"):
        row_tokens(torch.tensor([77], dtype=torch.int32), sequences(state), offset=-1, **options)
    with pytest.raises(IndexError, match="does not exist"):
        row_tokens(torch.tensor([0], dtype=torch.int32), sequences(state), offset=99, **options)
    state.num_drafted_M[0] = K
    with pytest.raises(IndexError, match="one more draft"):
        write_draft(torch.tensor([0], dtype=torch.int32), torch.tensor([3]), draft_rows(state))


@FEW
@given(
    seed=st.integers(0, 10**6),
    mapped=st.booleans(),
    first=st.booleans(),
    longest=st.sampled_from([None, 20]),
    packed=st.booleans(),
)
def test_write_draft(device, seed, mapped, first, longest, packed) -> None:
    state = make_state(seed, device)
    rows = some_rows(state, seed, device)
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows.shape[0], VOCAB, generator=noise).to(device)
    ids = torch.randperm(2 * VOCAB, generator=noise)[:VOCAB].to(device) if mapped else None
    expected = replace(state, drafts_MK=state.drafts_MK.clone(), num_drafted_M=state.num_drafted_M.clone())
    options = {"first": first, "longest": longest}
    write_draft_torch(rows, logits.argmax(-1), draft_rows(expected), ids, **options)
    triton = lambda rows, token, *rest, **options: write_draft_triton(  # noqa: E731
        rows, chunk_maxima(logits) if packed else token, *rest, **options
    )
    for run in implementations(device, triton, write_draft):
        made = replace(state, drafts_MK=state.drafts_MK.clone(), num_drafted_M=state.num_drafted_M.clone())
        run(rows, logits.argmax(-1), draft_rows(made), ids, **options)
        assert torch.equal(made.drafts_MK, expected.drafts_MK)
        assert torch.equal(made.num_drafted_M, expected.num_drafted_M)
        assert made.num_drafted_M[state.padding_row] == 0


@FEW
@given(
    seed=st.integers(0, 10**6),
    num_drafts=st.integers(0, K),
    synthetic=st.booleans(),
    width=st.integers(0, 2),
    bad=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
def test_accept_block(device, seed, num_drafts, synthetic, width, bad) -> None:
    width += num_drafts + 1
    cpu = torch.device("cpu")
    state = make_state(seed, cpu)
    rows = some_rows(state, seed, cpu)
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows.shape[0] * (num_drafts + 1), VOCAB, generator=noise)
    right = torch.rand(rows.shape[0], num_drafts, generator=noise) < 0.7
    targets = logits.view(rows.shape[0], num_drafts + 1, VOCAB).argmax(-1)[:, :-1].int()
    live = rows != state.padding_row
    state.drafts_MK[rows[live], :num_drafts] = torch.where(right, targets, state.drafts_MK[rows, :num_drafts])[live]
    if bad is not None:
        logits[seed % logits.shape[0], slice(None) if seed % 2 or bad < 0 else seed % VOCAB] = bad
    rates = torch.full((num_drafts,), 0.6) if synthetic and num_drafts else None

    def copied(device: torch.device) -> RowState:
        return RowState(**{k: None if v is None else v.clone().to(device) for k, v in vars(state).items()})

    def public(rows, logits, made, rates):
        if rates is not None:
            return accept_rows_synthetic(made, rows, logits, num_drafts, rates, width=width)
        return accept_rows_greedy(made, rows, logits, num_drafts, width=width)

    def triton(rows, logits, made, rates):
        best, sizes = chunk_maxima(logits), {"num_drafts": num_drafts, "width": width, "vocab_size": VOCAB}
        return accept_block_triton(rows, best, _token_rows(made), rates, **sizes)

    expected = copied(cpu)
    with switched_off():
        reported = public(rows, logits, expected, rates)
    for run in implementations(device, triton, public):
        made = copied(device)
        out = run(rows.to(device), logits.to(device), made, None if rates is None else rates.to(device))
        for mine, theirs in zip(out, reported, strict=True):
            assert torch.equal(mine.cpu(), theirs)
        assert torch.equal(made.num_tokens_M.cpu(), expected.num_tokens_M)
        assert torch.equal(made.tokens_ML.cpu(), expected.tokens_ML)
