"""Greedy and synthetic acceptance, and the row's limit, against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.errors import ConfigError
from draftloop.kvcache.rows import NO_DRAFT
from draftloop.sampling.accept import accept_greedy, accept_synthetic, clip_to_limit, conditional_rates


@settings(max_examples=200)
@given(data=st.data(), rows=st.integers(1, 4), num_drafts=st.integers(0, 4), vocab=st.integers(1, 5))
def test_greedy_accepts_the_longest_right_prefix_and_one_more_token(data, rows, num_drafts, vocab):
    logits = torch.tensor(
        data.draw(
            st.lists(
                st.sampled_from([-2.0, 0.0, 1.0, 3.0]),
                min_size=rows * (num_drafts + 1) * vocab,
                max_size=rows * (num_drafts + 1) * vocab,
            )
        )
    ).view(rows, num_drafts + 1, vocab)
    # NO_DRAFT and ids that the target does not know are among the drafts
    draft_ids = st.lists(st.integers(-1, vocab), min_size=num_drafts, max_size=num_drafts)
    drafts = [data.draw(draft_ids) for _ in range(rows)]
    emitted, num_emitted = accept_greedy(logits, torch.tensor(drafts, dtype=torch.int32).view(rows, num_drafts))
    assert emitted.dtype == num_emitted.dtype == torch.int32
    for r in range(rows):
        best = [int(np.argmax(position)) for position in logits[r].numpy()]
        expected = []
        for draft, target in zip([*drafts[r], None], best, strict=True):
            expected.append(target)
            if draft != target:
                break
        assert num_emitted[r] == len(expected)
        assert emitted[r].tolist() == expected + [-1] * (num_drafts + 1 - len(expected))


@settings(max_examples=100)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 5))
def test_a_limit_keeps_a_prefix(data, rows, width):
    counts = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    rooms = data.draw(st.lists(st.integers(-1, width + 2), min_size=rows, max_size=rows))
    emitted = torch.tensor([[10 + i if i < n else -1 for i in range(width)] for n in counts], dtype=torch.int32)
    clipped, num = clip_to_limit(
        emitted, torch.tensor(counts, dtype=torch.int32), torch.tensor(rooms, dtype=torch.int32)
    )
    for r in range(rows):
        keep = max(0, min(counts[r], rooms[r]))
        assert num[r] == keep
        assert clipped[r].tolist() == emitted[r].tolist()[:keep] + [-1] * (width - keep)
    assert clipped.dtype == num.dtype == torch.int32


def synthetic_steps(rates: list[float], rows: int = 100_000):
    num_drafts = len(rates)
    drafts = torch.arange(num_drafts).expand(rows, -1) + 100
    targets = torch.arange(num_drafts + 1).expand(rows, -1) + 500
    seeds, positions = torch.arange(rows) // 100, torch.arange(rows) % 100 * 8
    return accept_synthetic(targets, drafts, torch.tensor(rates), seeds, positions)


@pytest.mark.parametrize(("num_drafts", "length"), [(1, 1.3), (3, 2.5), (5, 3.5), (7, 1.0), (7, 8.0)])
def test_synthetic_acceptance_has_the_mean_length_asked_for(num_drafts, length):
    emitted, num_emitted = synthetic_steps(conditional_rates(num_drafts, synthetic_acceptance_length=length))
    assert num_emitted.double().mean() == pytest.approx(length, rel=0.01)
    for count in num_emitted.unique().tolist():
        row = emitted[num_emitted == count][0].tolist()
        assert row == [100 + j for j in range(count - 1)] + [500 + count - 1] + [-1] * (num_drafts + 1 - count)


def test_synthetic_acceptance_has_the_rates_asked_for_at_each_position():
    shares = [0.9, 0.6, 0.6, 0.05, 0.0]
    _, num_emitted = synthetic_steps(conditional_rates(5, synthetic_acceptance_rates=shares))
    measured = [(num_emitted > j).double().mean().item() for j in range(1, 6)]
    assert measured == pytest.approx(shares, abs=0.006)


def test_synthetic_acceptance_ends_where_nothing_was_drafted():
    drafts = torch.tensor([[1, 2, 3], [1, NO_DRAFT, 3], [NO_DRAFT] * 3])
    targets = torch.arange(4).expand(3, -1) + 50
    emitted, num = accept_synthetic(targets, drafts, torch.ones(3), torch.arange(3), torch.arange(3))
    assert emitted.tolist() == [[1, 2, 3, 53], [1, 51, -1, -1], [50, -1, -1, -1]]
    assert num.tolist() == [4, 2, 1]


@settings(max_examples=100)
@given(num_drafts=st.integers(1, 32), share=st.floats(0, 1))
def test_a_length_becomes_one_rate_with_that_mean(num_drafts, share):
    length = 1 + share * num_drafts
    rates = conditional_rates(num_drafts, synthetic_acceptance_length=length)
    assert len(rates) == num_drafts
    assert len(set(rates)) == 1
    assert 0 <= rates[0] <= 1
    assert 1 + np.cumprod(rates).sum() == pytest.approx(length, abs=1e-6)


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1, allow_subnormal=False).map(lambda x: round(x, 6)), min_size=1, max_size=8))
def test_shares_become_the_rates_that_multiply_to_them(shares):
    shares = sorted(shares, reverse=True)
    rates = conditional_rates(len(shares), synthetic_acceptance_rates=shares)
    assert all(0 <= rate <= 1 for rate in rates)
    assert np.cumprod(rates).tolist() == pytest.approx(shares)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, 0.3], "synthetic_acceptance_length": 2.0}, "exactly one of"),
        ({"synthetic_acceptance_length": 0.9}, r"synthetic_acceptance_length is 0.9; it must be in \[1, 4\]"),
        ({"synthetic_acceptance_length": 4.1}, r"synthetic_acceptance_length is 4.1; it must be in \[1, 4\]"),
        ({"synthetic_acceptance_length": float("nan")}, "synthetic_acceptance_length is nan"),
        ({"synthetic_acceptance_rates": [0.5, 0.4]}, "one value per draft token, 3 in all"),
        ({"synthetic_acceptance_rates": [1.5, 0.4, 0.1]}, r"synthetic_acceptance_rates is .*in \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, float("nan"), 0.1]}, r"in \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "must not rise"),
    ],
)
def test_impossible_acceptance_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        conditional_rates(3, **options)
