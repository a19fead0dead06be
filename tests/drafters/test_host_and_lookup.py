"""Drafts from a script and from the row's own tokens: what is counted, and what stays exact."""

from __future__ import annotations

import itertools

import pytest

from draftloop.errors import ConfigError
from helpers import answering, answers, engine, greedy, lookup_reference, make_engine, oracle, prompts, run_through

K = 3


def scripted(script, *, k: int = K, **settings):
    spec = {"method": "scripted", "script": script, "num_speculative_tokens": k}
    return make_engine(
        speculative_config=spec, max_num_seqs=4, cudagraph_capture_sizes=(4,), cudagraph_mode="FULL", **settings
    )


def knowing(asked: list[list[int]], right: int):
    """A script that drafts `right` tokens of the true text and then wrong ones; nothing for odd requests."""

    def script(request_id: str, token_ids: list[int], k: int) -> list[int]:
        prompt = asked[int(request_id)]
        if int(request_id) % 2:
            return []
        done = len(token_ids) - len(prompt)
        text = oracle(prompt, done + k)[done:]
        return [token if i < right else (token + 1) % 160 for i, token in enumerate(text)]

    return script


@pytest.mark.parametrize("right", range(K + 1))
def test_acceptance_is_counted_as_it_happened(right):
    """B60: a drafter with exactly 2 of 3 right gives n drafts, 3n drafted, 2n accepted, length 3.0."""
    asked, steps = prompts(3), 8
    llm = scripted(knowing(asked, right))
    core = llm.engine.core
    for i, prompt in enumerate(asked):
        core.add(str(i), prompt, greedy(1 + steps * (right + 1)))
    sequences = list(core._sequences.values())
    ended = run_through(llm)
    assert ended == {str(i): oracle(prompt, 1 + steps * (right + 1)) for i, prompt in enumerate(asked)}

    n = 2 * steps  # requests 0 and 2; steps without drafts are no drafts
    metrics = llm.get_metrics()
    assert metrics["spec_decode_num_drafts"] == n
    assert metrics["spec_decode_num_draft_tokens"] == K * n
    assert metrics["spec_decode_num_accepted_tokens"] == right * n
    assert metrics["spec_decode_num_accepted_tokens_per_pos"] == [n if i < right else 0 for i in range(K)]
    assert metrics["mean_acceptance_length"] == right + 1
    # the requests' own numbers add up to the global ones
    histograms = [sequence.acceptance_histogram for sequence in sequences]
    assert [sum(column) for column in zip(*histograms, strict=True)] == [n if i == right else 0 for i in range(K + 1)]
    assert sum(sequence.num_draft_tokens for sequence in sequences) == K * n
    assert histograms[1] == [0] * (K + 1)


def test_a_request_reports_its_own_acceptance():
    asked = prompts(1)
    llm = scripted(knowing(asked, 2))
    spec = llm.generate(asked[0], greedy(1 + 8 * 3))[0].spec
    assert (spec.num_spec_tokens, spec.num_spec_steps) == (3, 8)
    assert (spec.num_draft_tokens, spec.num_accepted_draft_tokens) == (24, 16)
    assert spec.acceptance_histogram == (0, 0, 8, 0)
    assert spec.acceptance_per_position == (1.0, 1.0, 0.0)
    assert (spec.mean_acceptance_length, spec.draft_acceptance_rate) == (3.0, 16 / 24)


@pytest.mark.parametrize(
    "script",
    [
        lambda request_id, token_ids, k: [],
        lambda request_id, token_ids, k: [0] * k,
        lambda request_id, token_ids, k: [159] * (len(token_ids) % (k + 1)),
        lambda request_id, token_ids, k: [-1] * k,
        lambda request_id, token_ids, k: [token_ids[-1], -1, 3][:k],
    ],
    ids=["nothing", "wrong", "ragged", "minus_one", "hole"],
)
def test_no_script_changes_the_text(script):
    asked = prompts(4)
    llm = scripted(script)
    llm.engine.table.poison = True
    assert answers(llm.generate(asked, greedy(20))) == [oracle(p, 20) for p in asked]


def test_a_script_is_told_what_was_accepted():
    calls: list[tuple[str, list[int], int]] = []

    def script(request_id: str, token_ids: list[int], k: int) -> list[int]:
        calls.append((request_id, list(token_ids), k))
        token_ids.clear()  # it is given a copy
        return []

    prompt = prompts(1)[0]
    scripted(script).generate(prompt, greedy(5))
    text = prompt + oracle(prompt, 5)
    assert calls == [("0", text[: len(prompt) + i], K) for i in range(1, 5)]


def test_a_script_that_drafts_too_much_is_refused():
    llm = scripted(lambda request_id, token_ids, k: [1] * (k + 1))
    with pytest.raises(ConfigError, match="'scripted' drafted 4 tokens; at most 3"):
        llm.generate(prompts(1)[0], greedy(5))


def test_a_host_drafter_cannot_overlap_steps():
    with pytest.raises(ConfigError, match="async_scheduling"):
        scripted(lambda request_id, token_ids, k: [], async_scheduling=True)


# ---- lookup ---------------------------------------------------------------------------------


def lookup_engine(low: int, high: int, k: int = 4):
    spec = {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high, "num_speculative_tokens": k}
    return engine(speculative_config=spec, cudagraph_capture_sizes=(2, 8), cudagraph_mode="FULL", poison=True)


def near_misses(start: int) -> list[int]:
    """A template of nine tokens, five times, with one place that differs: lookup drafts the wrong one."""
    template = [(start + 11 * i) % 160 for i in range(9)]
    return list(itertools.chain.from_iterable([*template[:5], (start + i) % 160, *template[6:]] for i in range(5)))


def test_a_template_with_near_misses_is_continued_as_without_drafts():
    """B25: min 2, five near-miss repetitions; three runs are identical."""
    llm = lookup_engine(2, 4)
    asked = [near_misses(start) for start in (3, 40, 77, 120)]
    runs = [answers(llm.generate(asked, greedy(40))) for _ in range(3)]
    assert runs[0] == [oracle(p, 40) for p in asked]
    assert runs[1] == runs[2] == runs[0]
    metrics = llm.get_metrics()
    assert metrics["spec_decode_num_draft_tokens"] > metrics["spec_decode_num_accepted_tokens"]
    assert metrics["spec_decode_num_drafts"] > 0


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 4)])
def test_drafts_are_looked_up_in_all_that_was_accepted(low, high):
    llm = lookup_engine(low, high)
    core, state = llm.engine.core, llm.engine.core.worker.state
    for i, prompt in enumerate(prompts(5)):
        core.add(str(i), prompt, greedy(30))
    found = []

    def check() -> None:
        for sequence in answering(core):
            want = lookup_reference(sequence.token_ids, 4, low, high)
            assert state.drafts_MK[sequence.row].tolist() == want
            found.append(want[0] >= 0)

    run_through(llm, check)
    assert set(found) == {True, False}


def test_a_step_without_drafts_costs_what_plain_decoding_costs():
    llm = lookup_engine(1, 3)
    assert answers(llm.generate(prompts(6)[5], greedy(60))) == [oracle(prompts(6)[5], 60)]
    replays, metrics = llm.get_graph_report().replays, llm.get_metrics()
    assert replays["target.verify"] == metrics["spec_decode_num_drafts"] > 0
    assert replays["target.decode"] > 0
    steps = replays["target.verify"] + replays["target.decode"]
    assert steps <= 59 - metrics["spec_decode_num_accepted_tokens"]
    assert replays["ngram.draft"] == steps + 1, "it looks again after every step"


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        ({}, 2, 4),
        ({"prompt_lookup_max": 1}, 1, 1),
        ({"prompt_lookup_max": 6}, 2, 6),
        ({"prompt_lookup_min": 5}, 5, 5),
        ({"prompt_lookup_min": 1}, 1, 4),
    ],
)
def test_lookup_lengths_that_are_left_out(spec, low, high):
    llm = make_engine(
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, **spec}, enforce_eager=True, max_num_seqs=1
    )
    drafter = llm.engine.drafter
    assert (drafter.shortest, drafter.longest) == (low, high)


def test_a_lookup_longer_than_any_sequence_is_refused():
    with pytest.raises(ConfigError, match="prompt_lookup_max is 128, but sequences have at most 128 tokens"):
        make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 128})
