"""Ranks that step together: from what each needs follows one step for all of them."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.engine.lockstep import Lockstep
from draftloop.graphs.phase import GraphMode, Phase
from draftloop.graphs.sizes import Ladders
from draftloop.scheduler.step_shape import NO_STEP, StepShape

SIZES = st.integers(0, 40)
SHAPES = st.builds(
    StepShape,
    prompt_tokens=SIZES,
    prompt_reports=st.booleans(),
    first_rows=SIZES,
    decode_rows=SIZES,
    num_drafts=st.sampled_from([0, 3]),
    redrafts=st.booleans(),
    is_stepwise=st.booleans(),
)


def covering(shapes: list[StepShape]) -> StepShape:
    """What a collective that takes the largest of each makes of these."""
    return StepShape.from_ints([max(values) for values in zip(*(shape.to_ints() for shape in shapes), strict=True)])


@given(shapes=st.lists(SHAPES, min_size=1, max_size=5))
def test_the_common_step_is_large_enough_for_each_rank_and_no_larger(shapes):
    common = covering(shapes)
    assert StepShape.from_ints(common.to_ints()) == common
    for name, value in vars(common).items():
        needed = [getattr(shape, name) for shape in shapes]
        assert (value, type(value)) == (max(needed), type(needed[0]))
    assert bool(common) == any(shapes)


@given(shapes=st.lists(SHAPES, min_size=2, max_size=4), ladder=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_graph_and_padded_size_follow_from_the_common_step_alone(shapes, ladder):
    """B56: one rank's rows fit a graph, another's do not; one drafts, another does not; one is idle."""
    common = covering(shapes)
    ladders = Ladders(rows=sorted(set(ladder)), tokens=sorted(set(ladder)), prefill_rows=64)
    verify = Phase(name="verify", fn=lambda launch: {}, slots={}, tokens_per_row=1 + common.num_drafts)
    key = ladders.key(verify, GraphMode.FULL, common.decode_rows)
    for shape in shapes:
        own = ladders.key(verify, GraphMode.FULL, shape.decode_rows)
        assert shape.decode_rows <= (key.rows if key else common.decode_rows)
        assert own is not None or key is None, "no rank runs a graph where another one has none"


@dataclass
class Mailbox:
    """A rank as its requests see it: calls come late, in order."""

    lockstep: Lockstep
    calls: deque[tuple[int, int]] = field(default_factory=deque)
    """(number, steps of work that come with it)"""
    work: int = 0


class Meeting:
    """A group's maximum over ranks that are stepped one after the other, in one process."""

    size = 3

    def __init__(self) -> None:
        self.common: list[int] = []

    def max(self, values):
        return self.common or list(values)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_no_rank_rests_while_another_waits_for_it(seed):
    """Calls reach the ranks at unlike times, and requests one rank only: none is left undone, and all rest at last."""
    source = random.Random(seed)
    groups = [Meeting() for _ in range(Meeting.size)]
    ranks = [Mailbox(Lockstep(group)) for group in groups]  # type: ignore[arg-type]
    number, to_send, done, sent = 0, 12, 0, 0
    for _ in range(3000):
        if to_send and source.random() < 0.2:
            number, to_send = number + 1, to_send - 1
            busy, amount = source.choice(ranks), source.randrange(4)
            sent += amount
            for rank in ranks:
                rank.calls.append((number, amount if rank is busy else 0))
        for rank in ranks:
            while rank.calls and source.random() < 0.5:  # the rest is on its way
                call, amount = rank.calls.popleft()
                rank.lockstep.hear(call)
                rank.work += amount
        if any(rank.lockstep.at_rest for rank in ranks):
            continue  # those that do not rest wait in the collective: they must not wait for ever
        needs = [StepShape(decode_rows=int(rank.work > 0)) for rank in ranks]
        for group in groups:
            group.common = [
                max(place)
                for place in zip(
                    *(
                        [*need.to_ints(), need != NO_STEP, rank.lockstep.last_call, -rank.lockstep.last_call]
                        for need, rank in zip(needs, ranks, strict=True)
                    ),
                    strict=True,
                )
            ]
        for rank, need in zip(ranks, needs, strict=True):
            assert rank.lockstep.agree(need, is_idle=need == NO_STEP) == covering(needs)
            done += bool(need)
            rank.work -= bool(need)
        assert len({rank.lockstep.at_rest for rank in ranks}) == 1, "some rest, others do not"
    assert done == sent, "work was left undone: somebody waits for a rank that rests"
    assert all(rank.lockstep.at_rest for rank in ranks), "idle ranks go on stepping"
