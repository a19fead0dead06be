"""How many tokens a step drafts: by a table, or by costs and acceptance, without flapping."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.config.speculative import SpeculativeConfig
from draftloop.errors import ConfigError
from draftloop.scheduler.drafting import DWELL, MARGIN, AdaptiveDrafts, Drafting, DraftsByRows, StepCosts
from helpers import make_request

COUNTS = (0, 1, 2, 3, 5)
SIZES = (1, 8, 32, 128, 256)


def costs(per_token: float = 0.04, per_draft: float = 0.2) -> StepCosts:
    """Like a GPU's: weights at first, then in proportion to the tokens that are verified."""
    return StepCosts(ms={(r, k): max(3.5, per_token * r * (1 + k)) + per_draft * k for r in SIZES for k in COUNTS})


def rows(count: int) -> list:
    return [make_request(f"r{i}", 4, speculation=True, max_drafts=5) for i in range(count)]


def run(drafting: Drafting, batch: list, steps: int, rate: float, seed: int = 0) -> list[int]:
    """Take steps whose drafts stand with that probability; what was drafted in each."""
    coin, chosen = random.Random(seed), []
    had = drafting.current
    for _ in range(steps):
        count = drafting.choose(batch)
        chosen.append(count)
        for sequence in batch:
            drafted = min(count, had)  # what the step before left
            accepted = 0
            while accepted < drafted and coin.random() < rate:
                accepted += 1
            drafting.accepted(sequence, drafted, accepted)
        had = count
        drafting.stepped(len(batch), count)
    return chosen


def best(rate: float, num_rows: int, at: StepCosts) -> tuple[int, dict[int, float]]:
    speed = {k: num_rows * sum(rate**i for i in range(k + 1)) / at.of(num_rows, k) for k in COUNTS}
    return max(speed, key=lambda k: speed[k]), speed


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.7, 0.95])
def test_it_settles_at_a_number_that_is_nearly_the_best(num_rows, rate):
    drafting = AdaptiveDrafts(COUNTS, costs())
    batch = rows(num_rows)
    run(drafting, batch, 400, rate)
    _, speed = best(rate, num_rows, drafting.times.costs)
    chosen = run(drafting, batch, 800, rate, seed=1)
    time = sum(drafting.times.costs.of(num_rows, k) for k in chosen)
    tokens = sum(speed[k] * drafting.times.costs.of(num_rows, k) for k in chosen)
    assert tokens / time >= 0.97 * max(speed.values())


@settings(max_examples=60)
@given(
    rate=st.floats(0, 1),
    num_rows=st.sampled_from(SIZES),
    per_token=st.floats(0.001, 0.2),
    per_draft=st.floats(0, 2),
)
def test_it_never_stays_where_its_own_model_says_that_another_number_is_better(rate, num_rows, per_token, per_draft):
    drafting = AdaptiveDrafts(COUNTS, costs(per_token, per_draft))
    batch = rows(num_rows)
    run(drafting, batch, 4, rate)
    for _ in range(6):
        run(drafting, batch, DWELL, rate)
        is_free = drafting.steps_since_change >= DWELL
        chosen = drafting.choose(batch)
        if is_free and not drafting.is_probing:
            losses = drafting.losses()
            assert losses[chosen] - min(losses.values()) <= MARGIN * drafting.step_ms(num_rows, chosen) + 1e-9


def test_speculation_that_loses_is_left_and_found_again_when_acceptance_returns():
    drafting = AdaptiveDrafts(COUNTS, costs())
    batch = rows(32)
    assert set(run(drafting, batch, 200, 0.0)[-100:]) <= {0, 1}
    lost = run(drafting, batch, 4000, 0.0)
    assert lost.count(0) > 0.85 * len(lost), "probing costs little"
    assert sum(k > 0 for k in lost) > 0, "but it is done"
    found = run(drafting, batch, 1500, 0.95)
    assert found[-1] > 0


@pytest.mark.parametrize("kind", ["table", "adaptive"])
def test_rows_that_come_and_go_do_not_make_it_flap(kind):
    """B51: at most one change to more drafts in so many steps, wherever the thresholds are; fewer cost nothing."""
    drafting: Drafting = AdaptiveDrafts(COUNTS, costs())
    if kind == "table":
        drafting = DraftsByRows(COUNTS, [(1, 8, 5), (9, 256, 1)])
    source, chosen = random.Random(3), []
    few, many = rows(8), rows(32)
    for _ in range(300):
        chosen += run(drafting, source.choice([few, many]), 1, 0.7, seed=source.random())
    changes = [at for at in range(1, len(chosen)) if chosen[at] != chosen[at - 1]]
    assert all(b - a >= DWELL for a, b in pairwise(changes) if chosen[b] > chosen[b - 1])
    assert changes


def test_the_table_counts_rows_that_decode():
    drafting = DraftsByRows((0, 1, 3), [(1, 4, 3), (5, 8, 1), (9, 64, 0)])
    assert [DraftsByRows(drafting.counts, drafting.table).choose(rows(n)) for n in (1, 4, 5, 8, 9, 64, 65)] == [
        3, 3, 1, 1, 0, 0, 3,
    ]  # fmt: skip
    assert drafting.choose(rows(4), num_joining=60) == 3, "prompts that join are no part of it yet"


def test_fewer_are_drafted_at_once_when_rows_join():
    drafting = DraftsByRows((1, 5), [(1, 8, 5), (9, 256, 1)])
    run(drafting, rows(4), 2, 0.7)
    assert run(drafting, rows(9), 3, 0.7) == [1, 1, 1]
    assert run(drafting, rows(4), DWELL + 1, 0.7) == [1] * (DWELL - 3) + [5] * 4


def test_a_step_is_soon_over_where_many_rows_wait_for_their_prompts():
    """What a full batch makes of the time is worth more than further drafts of a few rows."""
    drafting, few = AdaptiveDrafts(COUNTS, costs()), rows(8)
    run(drafting, few, 200, 0.7)
    assert drafting.choose(few) == drafting.choose(few, num_joining=1) > 1
    assert drafting.choose(few, num_joining=248) == 1


def serve(drafting: Drafting, batch: list, steps: int, rate: float, took: StepCosts) -> int:
    """Take steps that last so long; the number of drafts that they have settled at."""
    for seed in range(steps):
        [count] = run(drafting, batch, 1, rate, seed)
        if isinstance(drafting, AdaptiveDrafts):
            drafting.times.saw(len(batch), count, took.of(len(batch), count))
    return drafting.current


def test_what_steps_take_in_service_counts_not_what_they_took_at_the_start():
    """Each number is slowed by a factor of its own, which is known once it has run."""
    at_start, batch = costs(), rows(128)
    wrong, _ = best(0.7, 128, at_start)
    slowed = {(r, k): ms * (1.6 if k == wrong else 1.2) for (r, k), ms in at_start.ms.items()}
    in_service = StepCosts(ms=slowed)
    right, _ = best(0.7, 128, in_service)
    assert right != wrong
    drafting = AdaptiveDrafts(COUNTS, at_start)
    assert serve(drafting, batch, 200, 0.7, at_start) == wrong
    for count in COUNTS * 40:
        drafting.times.saw(128, count, in_service.of(128, count))
    assert serve(drafting, batch, 200, 0.7, in_service) == right


def test_all_steps_slowed_alike_change_no_choice():
    """As by a clock that falls under load: a shared extra, not a factor, would favour more drafts."""
    batch, at_start = rows(256), costs()
    slow = StepCosts(ms={key: 1.4 * ms for key, ms in at_start.ms.items()})
    settled = [serve(AdaptiveDrafts(COUNTS, at_start), batch, 200, 0.7, took) for took in (at_start, slow)]
    assert settled[0] == settled[1]


def test_a_step_that_was_held_up_says_little():
    drafting, batch = AdaptiveDrafts(COUNTS, costs()), rows(32)
    before = serve(drafting, batch, 100, 0.7, drafting.times.costs)
    drafting.times.saw(32, before, 1000.0)
    assert drafting.step_ms(32, before) < 1.02 * drafting.times.costs.of(32, before)
    assert run(drafting, batch, 20, 0.7) == [before] * 20


def test_a_probe_ends_when_it_has_seen_enough():
    drafting, batch = AdaptiveDrafts(COUNTS, costs(per_draft=3.0)), rows(32)
    chosen = run(drafting, batch, 3000, 0.3)
    probes = "".join("." if count == 0 else "p" for count in chosen[200:]).split(".")
    assert 0 < max(map(len, probes)) <= 3


def test_rows_that_decline_speculation_change_nothing():
    drafting = DraftsByRows((0, 3), [(1, 4, 0)])
    assert drafting.choose([make_request("a", 4, speculation=False)]) == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, r"\[lowest, highest, drafts\]"),
        ({"num_speculative_tokens_per_batch_size": [[4, 1, 2]]}, "1 <= lowest <= highest"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 8, 1]]}, "ends at 4 rows"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 9]]}, "num_speculative_tokens, 3"),
        ({"num_speculative_tokens_per_batch_size": "x"}, "must be a list"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 2]], "adaptive": True}, "both say"),
        ({"adaptive_num_tokens": [1, 2]}, "left out where adaptive is not set"),
        ({"adaptive": True, "adaptive_num_tokens": [4]}, "0 to num_speculative_tokens, 3"),
        ({"adaptive": "yes"}, "true or false"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 3, **settings})


def test_every_number_of_a_schedule_gets_graphs():
    table = {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 2], [17, 64, 0]]}
    spec = SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 5, **table})
    assert spec.draft_counts(5) == (5, 2, 0)
    spec = SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 4, "adaptive": True})
    assert spec.draft_counts(4) == (4, 3, 2, 1, 0)


def test_a_tree_keeps_its_shape():
    with pytest.raises(ConfigError, match="speculative_token_tree"):
        SpeculativeConfig.from_mapping({"method": "eagle3", "speculative_token_tree": [[0], [1]], "adaptive": True})
