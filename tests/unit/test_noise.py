"""Noise is a pure function of (seed, position, stream), and good enough to sample from."""

import numpy as np
import pytest
import torch
from scipy import stats

from draftloop.sampling import noise
from draftloop.sampling.noise import Stream, gumbel_argmax, uniform

TRIALS = 100_000
PROBS_V = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])

GOLDEN_TOKENS = [[905, 537, 484], [79, 796, 955], [416, 24, 360]]
GOLDEN_UNIFORM = [12434930, 14789330, 11828174]

COUNT = torch.arange(TRIALS)
ZERO = torch.zeros(TRIALS, dtype=torch.int64)
KEYS = {
    "positions": (ZERO + 1234, COUNT),
    "seeds": (COUNT, ZERO + 17),
    "positions of seed 0": (ZERO, COUNT),
    "high bits of seeds": (COUNT << 45, ZERO),
    "every 4096th position": (ZERO + 7, COUNT * 4096),
    "seeds and positions": (COUNT // 300, COUNT % 300),
}


def draw(seeds, positions, stream):
    return gumbel_argmax(PROBS_V.log().expand(len(seeds), -1), seeds, positions, stream)


def independence_p_value(left, right):
    table = np.zeros((len(PROBS_V), len(PROBS_V)))
    np.add.at(table, (left.numpy(), right.numpy()), 1)
    return stats.chi2_contingency(table).pvalue


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stream", Stream)
def test_tokens_follow_their_probabilities_when_only_part_of_the_key_changes(key, stream):
    counts = torch.bincount(draw(*KEYS[key], stream), minlength=len(PROBS_V)).numpy()
    assert stats.chisquare(counts, PROBS_V.double().numpy() / PROBS_V.double().sum().item() * TRIALS).pvalue > 1e-3


@pytest.mark.parametrize("key", KEYS)
def test_uniform_is_uniform_and_neighbours_do_not_correlate(key):
    for stream in Stream:
        u = uniform(*KEYS[key], stream).double().numpy()
        assert 0 < u.min() < 1e-3
        assert 1 - 1e-3 < u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(TRIALS)


@pytest.mark.parametrize(("left", "right"), [("DRAFT", "ACCEPT"), ("DRAFT", "SAMPLE"), ("ACCEPT", "SAMPLE")])
@pytest.mark.parametrize("key", ["positions", "seeds"])
def test_streams_of_one_position_are_independent(key, left, right):
    assert independence_p_value(draw(*KEYS[key], Stream[left]), draw(*KEYS[key], Stream[right])) > 1e-3
    coins = (uniform(*KEYS[key], Stream[right]) * 8).long()
    assert independence_p_value(draw(*KEYS[key], Stream[left]), coins) > 1e-3


def test_the_independence_test_notices_a_shared_stream():
    tokens = draw(*KEYS["positions"], Stream.DRAFT)
    assert independence_p_value(tokens, tokens) < 1e-9


@pytest.mark.parametrize("key", ["positions", "seeds", "seeds and positions"])
def test_neighbouring_keys_give_independent_tokens(key):
    tokens = draw(*KEYS[key], Stream.SAMPLE)
    for lag in (1, 2, 16):
        assert independence_p_value(tokens[:-lag], tokens[lag:]) > 1e-3


def test_noise_of_one_row_is_exponential_and_independent_from_token_to_token():
    for seed in range(4):
        key = torch.tensor([seed]), torch.tensor([3])
        exponential = noise._log_exponential(*key, Stream.SAMPLE, TRIALS)[0].double().exp().numpy()
        assert stats.kstest(exponential, "expon").pvalue > 1e-3
        octave = torch.from_numpy(np.floor((1 - np.exp(-exponential)) * 8).clip(0, 7)).long()
        for lag in (1, 2, 1024, 65_536 // 2):
            assert independence_p_value(octave[:-lag], octave[lag:]) > 1e-3


def test_noise_of_two_rows_is_not_a_shifted_copy():
    a, b = noise._log_exponential(torch.tensor([1, 2]), torch.tensor([5, 5]), Stream.SAMPLE, 4096)
    shared = np.intersect1d(a.numpy(), b.numpy()).size
    assert shared < 8


def test_the_smallest_and_largest_hash_stay_inside_the_unit_interval():
    for bits in (0, 1, 2**31 - 2, 2**31 - 1):
        value = (torch.tensor([bits], dtype=torch.int32).to(torch.float32) + 0.5) * noise.UNIT
        assert 0 < value.item() < 1
        assert torch.log1p(-value).neg().log().isfinite().all()


def test_a_token_without_probability_is_never_drawn():
    log_probs = torch.full((1000, 513), float("-inf"))
    log_probs[:, 400] = -80.0
    assert (gumbel_argmax(log_probs, COUNT[:1000], ZERO[:1000], Stream.SAMPLE) == 400).all()
    log_probs[:, 7] = -80.0
    drawn = gumbel_argmax(log_probs, COUNT[:1000], ZERO[:1000], Stream.SAMPLE)
    assert drawn.unique().tolist() == [7, 400]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_broken_row_still_gives_a_token_of_the_vocabulary(bad):
    drawn = gumbel_argmax(torch.full((50, 9), bad), COUNT[:50], ZERO[:50], Stream.SAMPLE)
    assert ((drawn >= 0) & (drawn < 9)).all()


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should():
    vocab, rows = 50_000, 400
    probs = torch.full((vocab,), 0.5 / (vocab - 1))
    probs[123] = 0.5
    drawn = gumbel_argmax(probs.log().expand(rows, -1), COUNT[:rows], ZERO[:rows], Stream.SAMPLE)
    assert stats.binomtest(int((drawn == 123).sum()), rows, 0.5).pvalue > 1e-3
    assert stats.kstest(drawn[drawn != 123].numpy() / vocab, "uniform").pvalue > 1e-3


def test_the_noise_is_fixed_forever():
    """Changing these numbers changes the output of every seeded request."""
    seeds, positions = torch.tensor([0, 1, 2**62]), torch.tensor([0, 5, 131_072])
    log_probs = torch.zeros(3, 1000)
    assert [gumbel_argmax(log_probs, seeds, positions, s).tolist() for s in Stream] == GOLDEN_TOKENS
    assert (uniform(seeds, positions, Stream.ACCEPT) * 2**24).long().tolist() == GOLDEN_UNIFORM


@pytest.mark.gpu
def test_noise_is_the_same_on_the_gpu():
    seeds, positions = COUNT[:64], COUNT[:64] * 3
    log_probs = torch.zeros(64, 4096)
    for stream in Stream:
        here = gumbel_argmax(log_probs, seeds, positions, stream)
        there = gumbel_argmax(log_probs.cuda(), seeds.cuda(), positions.cuda(), stream).cpu()
        assert torch.equal(here, there)
        assert torch.equal(uniform(seeds, positions, stream), uniform(seeds.cuda(), positions.cuda(), stream).cpu())
