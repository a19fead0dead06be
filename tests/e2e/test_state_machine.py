"""Any traffic: requests that share prefixes arrive, are aborted, preempted and reset, in pools of a few pages.

After every step each page and row is held by who says so or is free. Every answer is what the plain engine says, with
poison in all that nobody owns, and in the end nothing is held. `--traffic-examples` makes it run for hours; a failing
traffic is printed as data: keep it in `KEPT`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine.llm import LLM
from draftloop.kvcache.pages import pages_in_sight
from draftloop.scheduler.drafting import DWELL, DraftsByRows
from draftloop.scheduler.row_pages import tokens_per_step
from example_drafters import example_configs, works_on_host
from helpers import assert_all_free, check_books, engine, example_target, greedy, oracle, shrink
from transformers_models import LONGER_WINDOW, tiny_of

load_drafters()

CASES: list[Any] = [
    None,
    *((name, index) for name, configs in sorted(example_configs().items()) for index in range(len(configs))),
]
LONGEST, NUM_ROWS = 96, 3
ROOM_FOR_ONE = 8
"""Pages that one request of the longest kind may need, drafts included, and the page of nobody."""

# ---- traffic, as data -----------------------------------------------------------------------

arrival = st.tuples(
    st.just("add"),
    st.integers(0, 1),  # which text the prompt begins with
    st.sampled_from([1, 15, 16, 17, 33, 48]),  # tokens of it
    st.integers(0, 2),  # and how it goes on
    st.sampled_from([1, 2, 9, 30]),  # tokens to answer
    st.integers(0, 1),  # priority
    st.sampled_from([False, True, "one"]),  # speculation; one draft a step at most
    st.sampled_from([None, None, "salt"]),
)
traffic = st.lists(
    st.one_of(
        arrival,
        arrival,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
        st.just(("reset",)),
        st.tuples(st.just("draft"), st.integers(0, 2)),  # so many tokens from now on: none, one, all
    ),
    min_size=6,
    max_size=24,
)
engines = st.fixed_dictionaries(
    {
        "spare_pages": st.integers(0, 5),
        "page_size": st.sampled_from([16, 32]),
        "kind": st.sampled_from(["steps", "overlap", "loop"]),
        "follows": st.booleans(),  # the number of drafts may change
    }
)
KEPT: list[tuple[dict[str, Any], list[Any]]] = [
    # a loop was launched behind another: the plan that had interrupted it had no prompt in the end
    (
        {"spare_pages": 2, "page_size": 16, "kind": "loop"},
        [
            ("add", 0, 48, 1, 30, 0, True, None),
            ("add", 1, 33, 2, 30, 1, True, None),
            ("step", 6),
            ("preempt", 1),
            ("add", 0, 48, 0, 30, 0, True, None),
            ("step", 6),
            ("preempt", 0),
            ("step", 6),
        ],
    ),
    # a prompt ends while nothing is drafted, is taken up again while all is, and the other way round
    (
        {"spare_pages": 2, "page_size": 16, "kind": "overlap", "follows": True},
        [
            ("draft", 0),
            ("add", 0, 33, 1, 30, 0, True, None),
            ("add", 1, 17, 2, 30, 0, "one", None),
            ("step", 5),
            ("draft", 2),
            ("step", 4),
            ("preempt", 0),
            ("add", 0, 48, 0, 9, 0, True, None),
            ("step", 4),
            ("draft", 0),
            ("preempt", 1),
            ("step", 5),
            ("draft", 1),
        ],
    ),
]
"""Traffic that once failed, and has to be run for every drafter."""


def prompt_of(text: int, length: int, ending: int) -> list[int]:
    base = [(text * 71 + i * i * 13 + i) % 160 for i in range(length)]
    if ending == 2:  # the second page of both texts is the same, and is not, since the first ones differ
        base[16:32] = [(i * 11 + 3) % 160 for i in range(16, min(length, 32))]
    return base + [(ending * 31 + i * 7) % 160 for i in range(3 * ending)]


class Traffic:
    """Runs it, and keeps the books."""

    def __init__(self, llm: LLM, model: str | None, *, exact: bool) -> None:
        self.llm, self.core, self.model, self.exact = llm, llm.engine.core, model, exact
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.open: list[str] = []
        self.count = 0

    def run(self, actions: list[Any]) -> None:
        for action, *values in actions:
            getattr(self, action)(*values)
            self.check()
        for _ in range(2000):
            if self.core.idle:
                break
            self.step(1)
        assert self.core.idle, "it never ends"
        assert not self.open
        assert_all_free(self.llm)

    def add(
        self, text: int, length: int, ending: int, most: int, priority: int, speculation: bool | str, salt: str | None
    ) -> None:
        request_id = f"r{self.count}"
        self.count += 1
        prompt = prompt_of(text, length, ending)
        one = speculation == "one" and self.core.worker.num_drafts > 0
        params = greedy(most, speculative={"num_tokens": 1} if one else None)
        self.core.add(request_id, prompt, params, priority=priority, speculation=bool(speculation), cache_salt=salt)
        self.asked[request_id] = prompt, most
        self.open.append(request_id)

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.idle:
                return
            for sequence, _ in self.core.step():
                if sequence.finish_reason is not None:
                    self.ended(sequence.request_id, sequence.finish_reason, sequence.output_ids)
            self.check()

    def ended(self, request_id: str, reason: str, tokens: list[int]) -> None:
        prompt, most = self.asked[request_id]
        assert reason == "length"
        if self.exact:
            assert tokens == oracle(prompt, most, model=self.model, max_model_len=LONGEST), request_id
        assert len(tokens) == most
        self.open.remove(request_id)

    def abort(self, which: int) -> None:
        if self.open:
            request_id = self.open.pop(which % len(self.open))
            self.core.abort(request_id)
            self.core.abort(request_id)

    def preempt(self, which: int) -> None:
        if self.open:
            self.core.preempt(self.open[which % len(self.open)])

    def draft(self, which: int) -> None:
        drafting = self.core.scheduler.drafting
        if isinstance(drafting, DraftsByRows):
            drafting.table = [(1, NUM_ROWS, drafting.counts[which % len(drafting.counts)])]
            drafting.steps_since_change = DWELL

    def reset(self) -> None:
        assert self.core.reset_prefix_cache()

    def check(self) -> None:
        check_books(self.core.scheduler, num_rows=NUM_ROWS)


def by_rows(most: int) -> list[list[int]]:
    """Drafts by the rows that decode."""
    return [[1, 1, 0], [2, 2, most], [3, NUM_ROWS, 1]]


def make(
    case: Any,
    *,
    spare_pages: int,
    page_size: int,
    kind: str,
    follows: bool = False,
    model: str | None = None,
    spec: dict[str, Any] | None = None,
) -> LLM:
    spec = example_configs()[case[0]][case[1]] if case else spec
    if follows and spec and DRAFTERS[spec["method"]].follows_load and "speculative_token_tree" not in spec:
        most = spec["num_speculative_tokens"]
        spec = {**spec, "num_speculative_tokens_per_batch_size": by_rows(most)}
    on_host = case is not None and works_on_host(*case)
    settings: dict[str, Any] = {"async_scheduling": None if on_host else kind != "steps"}
    if kind == "loop" and not on_host and (case is None or DRAFTERS[case[0]].drafts):
        settings |= {"cudagraph_mode": "FULL", "device_loop": 7}
    llm = engine(
        model,
        speculative_config=spec,
        max_num_seqs=NUM_ROWS,
        max_prefill_rows=2,
        max_num_batched_tokens=24,
        max_model_len=LONGEST,
        block_size=page_size,
        cudagraph_capture_sizes=(2, 3),
        poison=True,
        **settings,
    )
    windows = [window for window in llm.engine.pool.windows if window is not None]
    sight = {w: pages_in_sight(w, tokens_per_step(2), page_size) + 1 + spare_pages // 2 for w in windows}
    shrink(llm, ROOM_FOR_ONE * 16 // page_size + spare_pages, by_window=sight)
    scheduler = llm.engine.core.scheduler
    if isinstance(scheduler.drafting, DraftsByRows):  # as new, whatever was run before
        scheduler.drafting = DraftsByRows(scheduler.drafting.counts, by_rows(scheduler.num_drafts))
    return llm


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}" if case else "plain")
def test_any_traffic(case, request):
    exact = case is None or not DRAFTERS[case[0]].forced_acceptance
    model = example_target(example_configs()[case[0]][case[1]]) if case else None

    def body(how: dict[str, Any], actions: list[Any]) -> None:
        llm = make(case, **how)
        Traffic(llm, model, exact=exact).run(actions)

    run_traffic(body, request)


@pytest.mark.parametrize(("name", "drafts"), [("gemma3 of longer windows", True), ("mistral", False)])
def test_any_traffic_through_windows(name, drafts, request):
    """Layers that let go of what is behind their window, with pages for what one row sees, and few more."""
    model = tiny_of(name)
    near = tiny_of(name, noise=0.01)
    spec = {"method": "draft_model", "model": near, "num_speculative_tokens": 2} if drafts else None

    def body(how: dict[str, Any], actions: list[Any]) -> None:
        llm = make(None, **how, model=model, spec=spec)
        assert LONGER_WINDOW in llm.engine.pool.windows
        Traffic(llm, model, exact=True).run(actions)

    run_traffic(body, request)


def run_traffic(body: Callable[[dict[str, Any], list[Any]], None], request: pytest.FixtureRequest) -> None:
    """What was kept, and what is made up now."""
    test = settings(
        max_examples=request.config.getoption("--traffic-examples"),
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )(given(how=engines, actions=traffic)(body))
    for how, actions in KEPT:
        test = example(how=how, actions=actions)(test)
    test()


def test_the_books_notice_a_page_that_is_lost():
    """A control: a fault in the accounting does show."""
    llm = make(None, spare_pages=0, page_size=16, kind="steps")
    core = llm.engine.core
    core.add("a", [1] * 40, greedy(4))
    core.step()
    lost = core.scheduler.running[0].held[0].ids.pop()
    with pytest.raises(AssertionError):
        check_books(core.scheduler, num_rows=NUM_ROWS)
    core.scheduler.running[0].held[0].ids.append(lost)
    core.abort("a")

    assert_all_free(llm)
