"""Emitted tokens reach the row state, and only the rows they belong to."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.overrides
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.sampling import commit as rules
from draftloop.sampling.accept import accept_synthetic_rows
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.commit import OUTCOME_COUNTS, commit
from draftloop.sampling.sampler import SamplingKind

VOCAB = 11


def make_state(*, num_drafts: int = 3, draft_vocab: int = 0, max_model_len: int = 16) -> RowState:
    state = RowState.create(
        num_rows=4,
        max_model_len=max_model_len,
        num_drafts=num_drafts,
        page_size=4,
        draft_vocab=draft_vocab,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
    )
    noise = torch.Generator().manual_seed(5)
    state.tokens_ML.copy_(torch.randint(100, 200, state.tokens_ML.shape, generator=noise))
    state.num_tokens_M[:4] = torch.tensor([3, 5, 9, 12])
    state.max_tokens_M[:4] = max_model_len
    state.drafts_MK[:4] = torch.randint(0, VOCAB, (4, num_drafts), generator=noise)
    state.temperature_M[:4] = torch.tensor([0, 1, 0.7, 1])
    state.seed_M[:4] = torch.arange(4) + 40
    if state.draft_probs_MKV is not None:
        state.draft_probs_MKV.fill_(1 / draft_vocab)
    return state


def logits_for(num_rows: int, num_drafts: int) -> torch.Tensor:
    return torch.randn(num_rows * (num_drafts + 1), VOCAB, generator=torch.Generator().manual_seed(9))


def reported(rule, *args) -> dict[str, torch.Tensor]:
    """What a rule reports, by name."""
    num_emitted, outcome = rule(*args)
    names = dict(zip(OUTCOME_COUNTS, outcome.unbind(1), strict=False))
    return {**names, "num_emitted": num_emitted, "emitted": outcome[:, len(OUTCOME_COUNTS) :]}


def accept_rows_greedy(*args) -> dict[str, torch.Tensor]:
    return reported(rules.accept_rows_greedy, *args)


def accept_rows_sampled(*args) -> dict[str, torch.Tensor]:
    return reported(rules.accept_rows_sampled, *args)


def accept_rows_constrained(*args) -> dict[str, torch.Tensor]:
    return reported(partial(rules.accept_rows_sampled, kind=SamplingKind.CONSTRAINED), *args)


def accept_rows_in_blocks(*args) -> dict[str, torch.Tensor]:
    return reported(partial(rules.accept_rows_sampled, rule=accept_block_rows), *args)


def accept_rows_by_coin(*args) -> dict[str, torch.Tensor]:
    """Of a batch that is not greedy."""
    rule = partial(accept_synthetic_rows, rates_K=torch.full((args[3],), 0.7, device=args[2].device))
    return reported(partial(rules.accept_rows_sampled, rule=rule), *args)


def accept_rows_synthetic(*args) -> dict[str, torch.Tensor]:
    return reported(rules.accept_rows_synthetic, *args)


RULES = {
    "greedy": accept_rows_greedy,
    "sampled": accept_rows_sampled,
    "constrained": accept_rows_constrained,
    "block": accept_rows_in_blocks,
    "sampled synthetic": accept_rows_by_coin,
    "synthetic": lambda *args: accept_rows_synthetic(*args, torch.full((args[3],), 0.7)),
}


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_commit_appends_what_was_emitted_and_touches_nothing_else():
    state = make_state()
    before = state.tokens_ML.clone()
    padding = state.padding_row
    emitted = ints([[1, 2, 3, 4], [5, -1, -1, -1], [-1] * 4, [6, 7, -1, -1], [-1] * 4, [-1] * 4])
    commit(state, ints([2, 0, 1, 3, padding, padding]), emitted, ints([4, 1, 0, 2, 0, 0]))
    expected = before.clone()
    expected[2, 9:13] = ints([1, 2, 3, 4])
    expected[0, 3] = 5
    expected[3, 12:14] = ints([6, 7])
    assert torch.equal(state.tokens_ML, expected)
    assert state.num_tokens_M.tolist() == [4, 5, 13, 14, 1]


def test_commit_at_the_very_end_of_the_buffer_loses_nothing():
    state = make_state()
    length = state.tokens_ML.shape[1]
    state.num_tokens_M[0] = length - 1
    commit(state, ints([0]), ints([[8, -1, -1, -1]]), ints([1]))
    assert state.tokens_ML[0, length - 1] == 8


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_padding_rows_emit_nothing_and_stay_as_they_are(rule, num_drafts):
    state = make_state(draft_vocab=VOCAB)
    padding = state.padding_row
    rows = ints([1, padding, 3, padding, padding])
    held = {name: getattr(state, name)[padding].clone() for name in ("tokens_ML", "num_tokens_M", "drafts_MK")}
    logits = logits_for(5, num_drafts)
    logits.view(5, num_drafts + 1, VOCAB)[[1, 3, 4]] = float("nan")
    out = RULES[rule](state, rows, logits, num_drafts)
    for name, value in held.items():
        assert torch.equal(getattr(state, name)[padding], value)
    assert out["emitted"][[1, 3, 4]].eq(-1).all()
    assert out["num_emitted"][[1, 3, 4]].eq(0).all()
    assert out["num_drafted"].tolist() == [num_drafts, 0, num_drafts, 0, 0]
    assert out["num_emitted"][[0, 2]].ge(1).all()
    assert all(value.dtype == torch.int32 for value in out.values())


@pytest.mark.parametrize("rule", RULES)
def test_a_row_stops_at_its_limit_and_its_tokens_are_a_prefix_of_the_unlimited_ones(rule):
    free = make_state()
    rows = ints([0, 1, 2, 3])
    logits = logits_for(4, 3)
    # drafts that greedy accepts in full, so that the limit matters under every rule
    free.drafts_MK[:4] = logits.view(4, 4, VOCAB)[:, :3].argmax(-1).int()
    limited = make_state()
    limited.drafts_MK.copy_(free.drafts_MK)
    limited.max_tokens_M[:4] = limited.num_tokens_M[:4] + ints([0, 1, 2, 4])
    unlimited = RULES[rule](free, rows, logits, 3)
    out = RULES[rule](limited, rows, logits, 3)
    for r, room in enumerate([0, 1, 2, 4]):
        count = min(room, int(unlimited["num_emitted"][r]))
        assert out["num_emitted"][r] == count
        assert out["emitted"][r].tolist() == unlimited["emitted"][r].tolist()[:count] + [-1] * (4 - count)
    assert (limited.num_tokens_M <= limited.max_tokens_M).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_gets_the_same_tokens_alone_and_in_any_batch_and_slot(rule):
    logits = logits_for(4, 3).view(4, 4, VOCAB)
    start, together = make_state(draft_vocab=VOCAB), make_state(draft_vocab=VOCAB)
    out = RULES[rule](together, ints([3, 1, 0, 2]), logits.flatten(0, 1), 3)
    for r, row in enumerate([3, 1, 0, 2]):
        alone = make_state(draft_vocab=VOCAB)
        slot = (row + 1) % 4
        for name in ("num_tokens_M", "drafts_MK", "seed_M", "temperature_M"):
            getattr(alone, name)[slot] = getattr(start, name)[row]
        single = RULES[rule](alone, ints([slot]), logits[r], 3)
        assert single["emitted"][0].tolist() == out["emitted"][r].tolist()


def test_fewer_drafts_than_the_state_has_room_for_use_the_first_ones():
    state = make_state(draft_vocab=VOCAB)
    logits = logits_for(4, 1)
    state.drafts_MK[:4, 0] = logits.view(4, 2, VOCAB)[:, 0].argmax(-1).int()
    out = accept_rows_greedy(state, ints([0, 1, 2, 3]), logits, 1)
    assert out["num_emitted"].tolist() == [2, 2, 2, 2]
    assert accept_rows_sampled(make_state(draft_vocab=VOCAB), ints([0, 1]), logits[:4], 1)["emitted"].shape == (2, 2)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_the_target_does_not_know_are_counted_but_never_emitted(rule):
    state = make_state(draft_vocab=VOCAB + 9)
    state.drafts_MK[:4, 1] = VOCAB + ints([0, 1, 4, 8])
    run = {"synthetic": lambda *args: accept_rows_synthetic(*args, torch.ones(3))}.get(rule, RULES[rule])
    out = run(state, ints([0, 1, 2, 3]), logits_for(4, 3), 3)
    assert out["emitted"].max() < VOCAB
    assert (out["num_emitted"] <= 2).all()
    assert out["num_drafted"].tolist() == [3, 3, 3, 3]


def test_rows_without_drafts_are_not_counted_as_drafted():
    state = make_state()
    state.drafts_MK[0] = NO_DRAFT
    state.drafts_MK[1, 1:] = NO_DRAFT
    out = accept_rows_greedy(state, ints([0, 1, 2]), logits_for(3, 3), 3)
    assert out["num_drafted"].tolist() == [0, 1, 3]
    assert out["num_emitted"][0] == 1


def test_two_of_three_drafts_accepted_every_step_is_an_acceptance_length_of_three():
    steps, vocab = 5, 32
    state = make_state(max_model_len=64)
    accepted = drafted = 0
    for step in range(steps):
        logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(step))
        best = logits.argmax(-1).int()
        state.drafts_MK[0] = torch.stack([best[0], best[1], (best[2] + 1) % vocab])
        out = accept_rows_greedy(state, ints([0]), logits, 3)
        assert out["emitted"][0].tolist() == [*best[:3].tolist(), -1]
        accepted += int(out["num_emitted"][0]) - 1
        drafted += int(out["num_drafted"][0])
    assert (accepted, drafted, 1 + accepted / steps) == (2 * steps, 3 * steps, 3.0)


BAD = {"NaN": float("nan"), "inf": float("inf"), "nothing": float("-inf")}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("rule", RULES)
def test_bad_logits_end_a_row_before_them_and_change_no_neighbour(rule, value):
    logits = logits_for(4, 3).view(4, 4, VOCAB)
    start = make_state(draft_vocab=VOCAB)
    start.temperature_M.zero_()
    start.drafts_MK[:4] = logits[:, :3].argmax(-1).int()  # all of them would stand
    good = RULES[rule](copy.deepcopy(start), ints([0, 1, 2, 3]), logits.flatten(0, 1), 3)
    for place in range(4):
        for bad_ids in (slice(None), slice(2, 3)):  # all of the vocabulary, or one id
            if value == BAD["nothing"] and bad_ids != slice(None):
                continue
            state, broken = copy.deepcopy(start), logits.clone()
            broken[1, place, bad_ids] = value
            out = RULES[rule](state, ints([0, 1, 2, 3]), broken.flatten(0, 1), 3)
            count = min(place, int(good["num_emitted"][1]))
            assert out["num_emitted"][1] == count
            assert out["num_accepted"][1] <= count
            assert out["emitted"][1].tolist() == good["emitted"][1].tolist()[:count] + [-1] * (4 - count)
            assert state.num_tokens_M[1] == start.num_tokens_M[1] + count
            assert state.tokens_ML[1].equal(
                start.tokens_ML[1].index_copy(0, 5 + torch.arange(count), out["emitted"][1, :count])
            )
            for row in (0, 2, 3):
                assert out["emitted"][row].equal(good["emitted"][row])


class NoHostReads(TorchDispatchMode):
    """Refuses what a captured graph cannot do: anything whose shape or branch needs a value on the host."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "repeat_interleave")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.REFUSED, func
        if "index" in func.overloadpacket.__name__:
            for index in torch.utils._pytree.tree_leaves(args):
                assert not (isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("draft_vocab", [0, VOCAB - 3, VOCAB + 3])
def test_rules_can_be_recorded(rule, num_drafts, draft_vocab):
    state = make_state(draft_vocab=draft_vocab)
    rows, logits = ints([0, 1, 2, 3, 4, 4]), logits_for(6, num_drafts)
    with NoHostReads():
        RULES[rule](state, rows, logits, num_drafts)


def test_the_recorder_refuses_what_it_should():
    x = torch.arange(4)
    for forbidden in (lambda: x[x > 1], lambda: x.nonzero(), lambda: bool((x > 1).any())):
        with NoHostReads(), pytest.raises(AssertionError):
            forbidden()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_a_captured_graph_accepts_as_eager_does(rule):
    device = torch.device("cuda")

    def on_gpu() -> RowState:
        here = make_state(draft_vocab=VOCAB)
        moved = {k: v.to(device) for k, v in vars(here).items() if isinstance(v, torch.Tensor)}
        assert here.constraints is not None
        rules = replace(here.constraints, **{k: v.to(device) for k, v in vars(here.constraints).items()})
        return replace(here, **moved, constraints=rules)

    eager, captured = on_gpu(), on_gpu()
    rows, logits = ints([0, 1, 2, 3, 4, 4]).to(device), logits_for(6, 3).to(device)
    rates = torch.full((3,), 0.7, device=device)
    run = {"synthetic": lambda *args: accept_rows_synthetic(*args, rates)}.get(rule, RULES[rule])
    run(on_gpu(), rows, logits, 3)  # warm up outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(captured, rows, logits, 3)
    graph.replay()
    expected = run(eager, rows, logits, 3)
    assert all(torch.equal(out[key], expected[key]) for key in expected)
    assert torch.equal(captured.tokens_ML, eager.tokens_ML)
    assert torch.equal(captured.num_tokens_M, eager.num_tokens_M)
