"""Temperature, min_p, top_k and top_p of each row, against a plain numpy loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.kvcache.rows import RowState
from draftloop.request import SamplingParams
from draftloop.sampling.sampler import SamplingKind, SamplingRows, greedy_tokens, probabilities, request_seed
from parameters import wanted_probs

INF = float("inf")


def rows_of(*params: SamplingParams) -> SamplingRows:
    return SamplingRows(
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.tensor([p.seed or 0 for p in params]),
    )


# dyadic steps keep the reference and float32 on the same side of every cut, ties included
logit = st.one_of(st.integers(-24, 24).map(lambda n: n / 4), st.just(-INF))
row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1.0, 2.0]),
    top_k=st.integers(-1, 9),
    top_p=st.sampled_from([1.0, 0.9001, 0.5003, 0.0107]),
    min_p=st.sampled_from([0.0, 0.0509, 0.303, 1.0]),
)


@settings(max_examples=100)
@given(data=st.data(), vocab=st.integers(1, 8), params=st.lists(row, min_size=1, max_size=5))
def test_every_row_gets_its_own_parameters_as_in_a_plain_loop(data, vocab, params):
    some = st.lists(logit, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -INF)
    logits = [data.draw(some) for _ in params]
    probs = probabilities(torch.tensor(logits), rows_of(*params))
    expected = np.stack([wanted_probs(np.asarray(x), p) for x, p in zip(logits, params, strict=True)])
    np.testing.assert_allclose(probs.numpy(), expected, atol=1e-5)


def one(logits: list[float], **params) -> list[float]:
    return probabilities(torch.tensor([logits]), rows_of(SamplingParams(**params)))[0].tolist()


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 4),
        ({"top_k": 0}, 4),
        ({"top_k": -1}, 4),
        ({"top_k": 1}, 1),
        ({"top_k": 4}, 4),
        ({"top_k": 400}, 4),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.76}, 3),
        ({"top_p": 1.0}, 4),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.49}, 2),
        ({"min_p": 0.19}, 4),
        # top_p is taken from what top_k left: 0.5 / 0.75 of the mass is the first token
        ({"top_k": 2, "top_p": 0.66}, 1),
        # .. and min_p comes before both: 0.5 / 0.75 again
        ({"min_p": 0.4, "top_p": 0.66}, 1),
        # min_p is relative to the maximum after temperature: 0.25 / 0.5 becomes its square root
        ({"min_p": 0.6, "temperature": 2.0}, 2),
    ],
)
def test_edges_of_truncation(params, kept):
    probs = one(LOGITS, **params)
    assert [p > 0 for p in probs] == [i < kept for i in range(4)]
    assert sum(probs) == pytest.approx(1)


def test_tokens_that_tie_at_a_cut_are_kept_together():
    assert one([1.0, 0.0, 0.0, -1.0], top_k=2)[1:3] == one([1.0, 0.0, 0.0, -1.0], top_k=3)[1:3]
    assert one([0.0, 0.0, 0.0, 0.0], top_p=0.3) == [0.25] * 4


def test_full_top_p_keeps_every_token_of_a_large_vocabulary():
    logits = torch.linspace(0, 12, 50_000).flip(0)[None]
    assert (probabilities(logits, rows_of(SamplingParams())) > 0).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.01, 1e6])
def test_extreme_temperatures_and_masked_tokens_make_no_nan(temperature):
    probs = one([3.0, -INF, 1000.0, -1000.0], temperature=temperature, top_k=3, top_p=0.9, min_p=1e-9)
    assert np.isfinite(probs).all()
    assert sum(probs) == pytest.approx(1)
    assert probs[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_is_the_first_likeliest_token_beside_sampled_rows(dtype):
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 150:] = logits[:, :150]  # every maximum is a tie
    params = [SamplingParams(temperature=i % 2, top_p=0.9, top_k=3) for i in range(64)]
    probs = probabilities(logits, rows_of(*params))
    greedy = greedy_tokens(logits)
    assert (greedy < 150).all()
    assert torch.equal(probs[::2], torch.nn.functional.one_hot(greedy[::2], 300).float())
    assert (probs[1::2].max(-1).values < 1).all()


def test_leaving_truncation_out_changes_nothing_where_no_row_asks_for_it():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    rows = rows_of(*[SamplingParams(temperature=t, min_p=m) for t in (0, 0.7, 1) for m in (0, 0.2)])
    torch.testing.assert_close(probabilities(logits, rows, truncate=False), probabilities(logits, rows))


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0.3 + i, top_p=0.9 - i / 10, top_k=50 * i, min_p=i / 100) for i in range(4)]
    together = probabilities(logits, rows_of(*params))
    logits[0] = float("nan")
    for i in range(1, 4):
        alone = probabilities(logits[i : i + 1], rows_of(params[i]))[0]
        assert torch.equal(probabilities(logits, rows_of(*params))[i], alone)
        assert torch.equal(together[i], alone)


def test_parameters_are_gathered_by_row_and_repeated_by_position():
    state = RowState.create(
        num_rows=3, max_model_len=8, num_drafts=1, page_size=4, draft_vocab=0, device=torch.device("cpu")
    )
    state.temperature_M.copy_(torch.tensor([0.1, 0.2, 0.3, 0.0]))
    state.seed_M.copy_(torch.tensor([11, 22, 33, 0]))
    rows = SamplingRows.gather(state, torch.tensor([2, 0, 3, 3], dtype=torch.int32)).repeat(2)
    assert rows.seed_N.tolist() == [33, 33, 11, 11, 0, 0, 0, 0]
    assert rows.temperature_N.tolist() == pytest.approx([0.3, 0.3, 0.1, 0.1, 0, 0, 0, 0])
    assert rows.top_p_N.tolist() == [1.0] * 8


def test_a_request_keeps_its_own_seed_and_others_get_one_each():
    assert request_seed(SamplingParams(seed=7), 0, 1) == request_seed(SamplingParams(seed=7), 5, 9) == 7
    assert request_seed(SamplingParams(seed=0), 3, 1) == 0
    derived = {request_seed(SamplingParams(), engine, number) for engine in (0, 1, 10) for number in range(200)}
    assert len(derived) == 600
    assert all(0 <= seed < 2**63 for seed in derived)
    assert request_seed(SamplingParams(), 1, 0) == request_seed(SamplingParams(), 1, 0)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ([{"temperature": 0}], "greedy"),
        ([{"temperature": 0, "top_k": 3}], "greedy"),
        ([{"temperature": 0}, {"min_p": 0.1}], "sampled"),
        ([{"top_p": 0.5}, {}], "truncated"),
        ([{}, {"top_p": 0.5}], "truncated"),
        ([{"top_k": 5}, {"temperature": 0, "min_tokens": 1}], "constrained"),
        ([], "greedy"),
    ],
)
def test_a_batch_pays_for_the_most_that_some_row_asks_for(batch, kind):
    assert SamplingKind.of(SamplingParams(**params) for params in batch) == kind


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_say_nothing_make_no_distribution(bad, temperature):
    logits = torch.tensor([[0.0, 1.0, bad], [-INF, -INF, -INF], [0.0, 1.0, -INF]])
    probs = probabilities(logits, rows_of(*[SamplingParams(temperature=temperature)] * 3))
    assert probs.isnan().all(-1).tolist() == [True, True, False]
