"""Kernels over trees of drafts against their torch references, and those against what is written out here."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_state import PAGE, VOCAB, draft_rows, make_state, sequences, some_rows

from draftloop.config.draft_tree import DraftTree
from draftloop.drafters.tree import LevelTables
from draftloop.kernels.argmax import UNPACK, chunk_maxima
from draftloop.kernels.compact_kv import compact_kv_torch, compact_kv_triton
from draftloop.kernels.page_slots import page_slots_torch, page_slots_triton
from draftloop.kernels.tree_tokens import tree_tokens_torch, tree_tokens_triton
from draftloop.kernels.write_children import top_torch, top_triton, write_children_torch, write_children_triton
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling.accept_tree import TreeTables, accept_tree_torch, accept_tree_triton, tree_probabilities
from draftloop.sampling.draw_tree import draw_places_triton
from draftloop.sampling.noise import Stream, gumbel_argmax
from draftloop.sampling.sampler import SamplingKind
from trees import SIXTEEN, SMALL, random_tree, tree_passes

FEW = settings(max_examples=6)
SEEDS = st.integers(0, 10**6)


def tree_state(seed: int, tree: DraftTree, device: torch.device) -> RowState:
    """As `make_state`, for the drafts of a tree."""
    state = make_state(seed, torch.device("cpu"))
    noise = torch.Generator().manual_seed(seed)
    rows, padding = state.num_tokens_M.shape[0], state.padding_row
    drafts = torch.randint(NO_DRAFT, VOCAB + 3, (rows, tree.num_drafts), generator=noise, dtype=torch.int32)
    drafts[padding] = NO_DRAFT
    pages = torch.zeros(rows, 40, dtype=torch.int32)
    # no two rows share a page
    pages[:padding] = (torch.randperm(padding * 40, generator=noise) + 1).view(padding, 40)
    limit = torch.randint(0, tree.num_drafts + 1, (rows,), generator=noise, dtype=torch.int32)
    limit[padding] = 0
    made = replace(state, drafts_MK=drafts, page_table_MN=pages, draft_limit_M=limit)
    return RowState(**{name: None if value is None else value.to(device) for name, value in vars(made).items()})


@FEW
@given(seed=SEEDS)
def test_tree_tokens(device, seed):
    tree = random_tree(seed, most=20)
    state = tree_state(seed, tree, device)
    rows = some_rows(state, seed, device)
    for of in tree_passes(tree, device):
        options = {"page_size": PAGE, "num_ids": VOCAB // (1 + seed % 2)}
        expected = tree_tokens_torch(rows, sequences(state), of.tokens, **options)
        for name, out in tree_tokens_triton(rows, sequences(state), of.tokens, **options)._asdict().items():
            assert out.dtype == getattr(expected, name).dtype
            assert torch.equal(out, getattr(expected, name)), name
        sizes = {"num_per_row": of.tokens.drafts_Q.shape[0], "page_size": PAGE}
        for slots in (page_slots_torch, page_slots_triton):
            assert torch.equal(slots(rows, expected.kv_lens_R, state.page_table_MN, **sizes), expected.slots_T)


def test_keys_of_a_tree_follow_each_other_and_positions_are_heights():
    cpu = torch.device("cpu")
    state = tree_state(0, SMALL, cpu)
    state.num_tokens_M[2], state.tokens_ML[2, 9] = 10, 77
    state.drafts_MK[2] = torch.tensor([1, 2, 3, NO_DRAFT, 5, 6, VOCAB])
    row, options = torch.tensor([2], dtype=torch.int32), {"page_size": PAGE, "num_ids": VOCAB}
    block, *levels = tree_passes(SMALL, cpu)
    out = tree_tokens_torch(row, sequences(state), block.tokens, **options)
    assert out.ids_T.tolist() == [77, 1, 2, 3, 0, 5, 6, 0]
    assert out.positions_T.tolist() == [9, 10, 10, 11, 11, 11, 12, 12]
    keys = torch.arange(9, 17)
    assert out.slots_T.tolist() == (state.page_table_MN[2, keys // PAGE] * PAGE + keys % PAGE).tolist()
    assert out.kv_lens_R.tolist() == [17]
    # a pair stands one position before its token; of the second level, draft 2 (place 3) has no children
    seconds = tree_tokens_torch(row, sequences(state), levels[1].tokens, **options)
    assert seconds.ids_T.tolist() == [0, 5]
    assert seconds.positions_T.tolist() == [10, 10]
    assert seconds.kv_lens_R.tolist() == [9 + 4]


@FEW
@given(seed=SEEDS, mapped=st.booleans(), longest=st.sampled_from([None, 20]))
def test_write_children(device, seed, mapped, longest):
    tree = random_tree(seed, most=20)
    state = tree_state(seed, tree, device)
    rows = some_rows(state, seed, device)
    noise = torch.Generator().manual_seed(seed)
    for level in tree.levels:
        tables = LevelTables.of(tree, level, device)
        shape = rows.shape[0] * len(level.places), VOCAB
        logits = torch.randn(shape, generator=noise)
        logits[torch.rand(shape, generator=noise) < 0.3] = 3.0  # many ties
        logits = logits.to(device)
        ids = torch.randperm(2 * VOCAB, generator=noise)[:VOCAB].to(device) if mapped else None
        made, expected = (replace(state, drafts_MK=state.drafts_MK.clone()) for _ in range(2))
        write_children_torch(rows, logits, draft_rows(expected), tables.children, ids, longest=longest)
        write_children_triton(rows, logits, draft_rows(made), tables.children, ids, longest=longest)
        assert torch.equal(made.drafts_MK, expected.drafts_MK)
        # as two ranks' parts of the vocabulary, the second one padded
        half, most = VOCAB // 2 + 3, tables.children.most
        padded = torch.full((shape[0], 2 * half), 9.0, device=device)
        padded[:, :VOCAB] = logits
        live = (half, VOCAB - half)
        parts = [top_triton(padded[:, half * i :][:, :half], most, first=half * i, num_live=live[i]) for i in (0, 1)]
        again = replace(state, drafts_MK=state.drafts_MK.clone())
        write_children_triton(rows, torch.cat(parts, 1), draft_rows(again), tables.children, ids, longest=longest)
        assert torch.equal(again.drafts_MK, expected.drafts_MK)
        assert (made.drafts_MK[state.padding_row] == NO_DRAFT).all()


def test_children_are_the_likeliest_tokens_behind_their_place():
    cpu = torch.device("cpu")
    state = tree_state(0, SMALL, cpu)
    state.draft_limit_M[1], state.drafts_MK[1] = 7, torch.tensor([11, 12, 13, 14, 15, 16, 17])
    logits = torch.zeros(2, 20)
    logits[0, [4, 9]] = torch.tensor([2.0, 3.0])
    logits[1, 0] = -1.0
    level = LevelTables.of(SMALL, SMALL.levels[1], cpu)
    write_children_torch(torch.tensor([1], dtype=torch.int32), logits, draft_rows(state), level.children, None,
                         longest=None)  # fmt: skip
    assert state.drafts_MK[1].tolist() == [11, 12, 9, 4, 1, 16, 17]
    values = torch.tensor([[1.0, float("nan"), -0.0, 0.0, float("inf")]])
    assert (UNPACK - (top_torch(values, 5) & UNPACK)).tolist() == [[1, 4, 0, 2, 3]]


@FEW
@given(seed=SEEDS, dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]))
def test_compact_kv(device, seed, dtype):
    """Against keys moved one by one, each read before anything is written; nothing else changes."""
    tree = random_tree(seed)
    state, source = tree_state(seed, tree, device), torch.Generator().manual_seed(seed)
    rows = some_rows(state, seed, device)
    pick = torch.randint(0, tree.num_places, (rows.shape[0],), generator=source).tolist()
    length = 1 + tree.depth
    path = torch.tensor([[*tree.paths[p], *[0] * (length - len(tree.paths[p]))] for p in pick], dtype=torch.int32)
    emitted = torch.tensor([len(tree.paths[p]) for p in pick], dtype=torch.int32)
    emitted -= torch.randint(0, 2, emitted.shape, generator=source, dtype=torch.int32)  # cut by a limit
    live = (rows != state.padding_row).cpu()
    path[~live], emitted[~live] = 10**6, 10**6  # nothing may follow from what stands there
    before = torch.randint(20, 90, state.num_tokens_M.shape, generator=source, dtype=torch.int32)
    after = before.clone()
    after[rows.cpu().long()[live]] += emitted[live]
    kv = (torch.randn(2, 2, 201, PAGE, 2, 24, generator=source).abs() * 60).to(dtype)
    expected = kv.clone()
    for row, places, count in zip(rows.tolist(), path.tolist(), emitted.tolist(), strict=True):
        if row == state.padding_row:
            continue
        table, first = state.page_table_MN[row].tolist(), before[row].item() - 1
        for target, place in enumerate(places[:count]):
            (from_page, from_slot), (to_page, to_slot) = (divmod(first + key, PAGE) for key in (place, target))
            expected[:, :, table[to_page], to_slot] = kv[:, :, table[from_page], from_slot]
    for run in (compact_kv_torch, compact_kv_triton):
        made = kv.clone().to(device)
        run(made, rows, path.to(device), emitted.to(device), after.to(device), state.page_table_MN)
        assert torch.equal(made.cpu(), expected)


@FEW
@given(
    seed=SEEDS,
    packed=st.booleans(),
    synthetic=st.booleans(),
    bad=st.sampled_from([None, float("nan"), float("-inf")]),
)
def test_accept_tree(device, seed, packed, synthetic, bad):
    tree = random_tree(seed, most=6 if packed else 63)  # every maximum of a chunk is a program
    state = tree_state(seed, tree, torch.device("cpu"))
    rows = some_rows(state, seed, torch.device("cpu"))
    tables = TreeTables.of(tree, torch.device("cpu"))
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows.shape[0] * tree.num_places, VOCAB, generator=noise)
    if bad is not None:
        logits[seed % logits.shape[0]] = bad
    top, targets = logits.max(-1)
    targets = targets.masked_fill(~top.isfinite(), -1)
    for entry, row in enumerate(rows.tolist()):
        # one branch is mostly right
        chosen = targets.view(-1, tree.num_places)[entry]
        for before, place in zip(path := tree.paths[seed % tree.num_places], path[1:], strict=False):
            if row != state.padding_row and torch.rand((), generator=noise) < 0.9:
                state.drafts_MK[row, place - 1] = chosen[before]
    rates = torch.full((tree.depth,), 0.6) if synthetic else None

    def copied(device: torch.device) -> RowState:
        return RowState(**{k: None if v is None else v.clone().to(device) for k, v in vars(state).items()})

    expected, made = copied(torch.device("cpu")), copied(device)
    reported = accept_tree_torch(expected, rows, targets, tables, rates, vocab_size=VOCAB)
    choice = (chunk_maxima(logits.to(device)) if packed else targets.to(device))  # fmt: skip
    on_device = None if rates is None else rates.to(device)
    out = accept_tree_triton(made, rows.to(device), choice, TreeTables.of(tree, device), on_device, vocab_size=VOCAB)
    for mine, theirs in zip(out, reported, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(made.num_tokens_M.cpu(), expected.num_tokens_M)
    assert torch.equal(made.tokens_ML.cpu(), expected.tokens_ML)


@FEW
@given(seed=SEEDS, truncate=st.booleans(), bad=st.sampled_from([None, float("nan"), float("-inf")]))
def test_draw_places(device, seed, truncate, bad):
    """What torch draws from the probabilities of each place."""
    cpu, tree, size = torch.device("cpu"), random_tree(seed, most=4), 3000
    state = tree_state(seed, tree, cpu)
    noise = torch.Generator().manual_seed(seed)
    state.temperature_M.copy_(torch.tensor([0.0, 1.0, 0.7, 2.0, 1e-4, 0.0]))
    if truncate:
        state.top_k_M[:5] = torch.randint(0, 50, (5,), generator=noise, dtype=torch.int32)
        state.top_p_M[:5] = torch.rand(5, generator=noise)
    rows, tables = some_rows(state, seed, cpu), TreeTables.of(tree, cpu)
    logits = torch.randn(rows.shape[0] * tree.num_places, size, generator=noise) * 3
    if bad is not None:
        logits[seed % logits.shape[0], slice(None) if bad < 0 else 7] = bad
    kind = SamplingKind.TRUNCATED if truncate else SamplingKind.SAMPLED
    probs = tree_probabilities(state, rows, logits, tables, kind=kind).flatten(0, 1)
    positions = (state.num_tokens_M[rows.long()][:, None] + tables.heights_Q).flatten()
    seeds = state.seed_M[rows.long()][:, None].expand(-1, tree.num_places).flatten()
    wanted = gumbel_argmax(probs.log(), seeds, positions, Stream.SAMPLE).masked_fill(probs[:, 0].isnan(), -1)
    here = RowState(**{k: None if v is None else v.to(device) for k, v in vars(state).items()})
    heights = tables.heights_Q.to(device)
    best = draw_places_triton(here, rows.to(device), logits.to(device), heights, truncate=truncate).amax(-1).cpu()
    drawn = (UNPACK - (best & UNPACK)).masked_fill(best >> 32 <= -0x7F800001, -1)
    assert torch.equal(drawn, wanted)


@FEW
@given(seed=SEEDS)
def test_the_accepted_branch_is_the_longest_that_says_what_the_target_says(seed):
    """Against a walk from the root, written out."""
    cpu = torch.device("cpu")
    tree = random_tree(seed, most=30)
    state = tree_state(seed, tree, cpu)
    state.max_tokens_M.fill_(70)
    row = torch.tensor([0], dtype=torch.int32)
    noise = torch.Generator().manual_seed(seed)
    for parent in range(tree.num_places):  # siblings differ
        children = [place for place in range(1, tree.num_places) if tree.parents[place - 1] == parent]
        state.drafts_MK[0, [place - 1 for place in children]] = torch.randperm(6, generator=noise)[
            : len(children)
        ].int()
    targets = torch.randint(0, 6, (tree.num_places,), generator=noise)
    before, place, wanted, path = state.num_tokens_M[0].item(), 0, [], [0]
    while True:
        wanted.append(targets[place].item())
        children = [child for child in range(1, tree.num_places) if tree.parents[child - 1] == place]
        right = [child for child in children if state.drafts_MK[0, child - 1] == wanted[-1]]
        if not right:
            break
        (place,) = right
        path.append(place)
    num_emitted, outcome, paths = accept_tree_torch(
        state, row, targets, TreeTables.of(tree, cpu), None, vocab_size=VOCAB
    )
    count = len(wanted)
    assert num_emitted.tolist() == [count]
    assert outcome[0].tolist() == [count, count - 1, tree.num_drafts, *wanted, *[-1] * (tree.num_places - count)]
    assert paths[0, :count].tolist() == path
    assert state.tokens_ML[0, before : before + count].tolist() == wanted


def test_the_shape_of_the_benchmarks_is_a_tree_of_sixteen():
    from draftloop.config.draft_tree import parse_choices

    tree = DraftTree.of_choices(parse_choices(SIXTEEN))
    assert (tree.num_drafts, tree.depth) == (16, 4)
