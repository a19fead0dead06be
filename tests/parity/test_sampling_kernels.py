"""Kernels of sampled and constrained rows against the torch rules: in Triton's interpreter, and with `-m gpu`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from draftloop.bench import sampling_kernels
from draftloop.drafters import write
from draftloop.drafters.write import write_block, write_next
from draftloop.kernels.argmax import best_index
from draftloop.kernels.softmax_statistics import Truncation, softmax_statistics_torch
from draftloop.kvcache.rows import NO_DRAFT, RowState
from draftloop.request import SamplingParams
from draftloop.sampling import commit
from draftloop.sampling.accept import accept_sampled_rows, accept_synthetic_rows
from draftloop.sampling.accept_drawn import DrawnRule, accept_drawn_triton
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.commit import _token_rows, accept_rows_sampled, target_probabilities
from draftloop.sampling.constrain_block import constrain_triton
from draftloop.sampling.constraints import constrain
from draftloop.sampling.logits_processors import BlockPositions, LogitsProcessor
from draftloop.sampling.sampler import SamplingKind
from helpers import engine

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
ROWS, K, VOCAB = 6, 4, 90


def make_state(seed: int, draft_vocab: int) -> RowState:
    """Rows of every kind, with drafts as they come: drawn from what is kept, foreign, and none."""
    state = RowState.create(
        num_rows=ROWS, max_model_len=60, num_drafts=K, page_size=4, draft_vocab=draft_vocab, device=CPU,
        vocab_size=VOCAB,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(seed)
    live = slice(0, ROWS)
    state.tokens_ML[live] = torch.randint(0, VOCAB, state.tokens_ML[live].shape, generator=noise, dtype=torch.int32)
    state.num_tokens_M[live] = torch.randint(8, 40, (ROWS,), generator=noise, dtype=torch.int32)
    state.max_tokens_M[live] = state.num_tokens_M[live] + torch.tensor([9, 9, 9, 9, 2, 9])
    state.seed_M[live] = torch.randint(0, 2**62, (ROWS,), generator=noise)
    asked = (1.0, 0, 1, 0), (0, 0, 1, 0), (0.8, 30, 0.9, 0), (1.0, 5, 1, 0), (1.0, 0, 1, 0.2), (1.5, 0, 1, 0)
    columns = state.temperature_M, state.top_k_M, state.top_p_M, state.min_p_M
    for column, values in zip(columns, torch.tensor(asked).unbind(1), strict=True):
        column[live] = values.to(column.dtype)
    state.drafts_MK[live] = torch.randint(0, VOCAB, (ROWS, K), generator=noise, dtype=torch.int32)
    if state.draft_probs_MKV is not None:
        probs = (torch.randn(ROWS, K, draft_vocab, generator=noise) * 2).softmax(-1)
        drawn = probs.flatten(0, 1).multinomial(1, generator=noise).view(ROWS, K)
        state.drafts_MK[live] = drawn.int()
        state.draft_probs_MKV[live] = probs
    state.drafts_MK[seed % ROWS, seed % K] = (NO_DRAFT, VOCAB, VOCAB + 7)[seed % 3]
    return state


def on(device: torch.device, state: RowState) -> RowState:
    """A copy."""
    columns = {k: None if v is None else v.clone().to(device) for k, v in vars(state).items() if k != "constraints"}
    assert state.constraints is not None
    rules = replace(state.constraints, **{k: v.clone().to(device) for k, v in vars(state.constraints).items()})
    return RowState(**columns, constraints=rules)


def likely_logits(state: RowState, rows_R: Tensor, seed: int) -> Tensor:
    """float32 [R, Q, V] that find many of the drafts likely."""
    logits = torch.randn(len(rows_R), K + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    drafts = state.drafts_MK[rows_R.long()].long()
    logits[:, :-1].scatter_add_(2, drafts.clamp(0, VOCAB - 1)[..., None], torch.full((len(rows_R), K, 1), 3.0))
    if state.draft_probs_MKV is not None and seed % 2:
        width = min(VOCAB, state.draft_probs_MKV.shape[2])
        logits[:, :-1, :width] += state.draft_probs_MKV[rows_R.long()][..., :width].clamp(min=1e-9).log()
    return logits


TORCH_RULES = {
    DrawnRule.STANDARD: accept_sampled_rows,
    DrawnRule.BLOCK: accept_block_rows,
    DrawnRule.COIN: partial(accept_synthetic_rows, rates_K=torch.full((K,), 0.7)),
}


@pytest.mark.parametrize("rule", DrawnRule)
@pytest.mark.parametrize("draft_vocab", [0, VOCAB - 9, VOCAB + 9])
@pytest.mark.parametrize("seed", range(3))
def test_accepts_and_draws_as_torch_does(device: torch.device, rule: DrawnRule, draft_vocab: int, seed: int) -> None:
    state = make_state(seed, draft_vocab)
    rows = torch.cat([torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)), torch.tensor([ROWS] * 2)])
    rows = rows.int()
    logits = likely_logits(state, rows, seed).flatten(0, 1)
    if seed == 2:
        logits[7, 3], logits[13] = NAN, -INF
    wanted = on(CPU, state)
    reported = accept_rows_sampled(wanted, rows, logits, K, rule=TORCH_RULES[rule], width=K + 2)
    made = on(device, state)
    rates = torch.full((K,), 0.7, device=device) if rule is DrawnRule.COIN else None
    logits, rows = logits.to(device), rows.to(device)
    parameters = Truncation(made.temperature_M, made.top_k_M, made.top_p_M, made.min_p_M)
    statistics = softmax_statistics_torch(logits, rows, parameters)
    out = accept_drawn_triton(
        rows, logits, statistics, _token_rows(made), made.temperature_M, made.draft_probs_MKV,
        rule=rule, rates_K=rates, num_drafts=K, width=K + 2,
    )  # fmt: skip
    for mine, theirs in zip(out, reported, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(made.tokens_ML.cpu(), wanted.tokens_ML)
    assert torch.equal(made.num_tokens_M.cpu(), wanted.num_tokens_M)


# ---- constraints ----------------------------------------------------------------------------


def write_rules(state: RowState, seed: int) -> None:
    """Every parameter at once for row 0, some for others, none for row 1."""
    rules = state.constraints
    assert rules is not None
    prompt = 6
    said = state.tokens_ML[:ROWS, :8].tolist()
    drafts = state.drafts_MK[:ROWS].tolist()
    penalties = {"presence_penalty": 1.5, "frequency_penalty": -0.75, "repetition_penalty": 1.3}
    everything = SamplingParams(
        logit_bias={3: 5.0, said[0][0]: -7.5, drafts[0][0] % VOCAB: 2.0},
        allowed_token_ids=[*range(0, VOCAB, 2), *(draft % VOCAB for draft in drafts[0])],
        min_tokens=5,
        **penalties,
    )
    in_prompt = [said[0][5], said[0][6], said[0][7], 12]
    words = [[drafts[0][0], drafts[0][1]], [said[0][7], drafts[0][0]], [4], in_prompt, [77, 5]]
    for row, params, bad_words in (
        (0, everything, words),
        (2, SamplingParams(**penalties), []),
        (3, SamplingParams(logit_bias={seed: 100.0}, min_tokens=3), []),
        (4, SamplingParams(bad_words=["x"]), [[said[4][7]], [drafts[4][0], drafts[4][1], drafts[4][2]]]),
        (5, SamplingParams(frequency_penalty=2.0), []),
    ):
        rules.write(row, params, num_prompt=prompt, bad_words=bad_words, ending_ids=[2, 8], stage=lambda x: x)
    rules.grammar_MQW[5, 1:] = torch.randint(
        -(2**31), 2**31, rules.grammar_MQW[5, 1:].shape, generator=torch.Generator().manual_seed(seed)
    ).int()
    state.num_tokens_M[:ROWS] = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_drafts", [0, K])
@pytest.mark.parametrize("seed", range(2))
def test_constrains_as_torch_does(device: torch.device, dtype: torch.dtype, num_drafts: int, seed: int) -> None:
    state = make_state(seed, 0)
    write_rules(state, seed)
    rows = torch.tensor([3, 0, 5, 1, 4, 2, ROWS, ROWS], dtype=torch.int32)
    logits = (torch.randn(len(rows), num_drafts + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(
        dtype
    )
    logits[4, 0, 30] = NAN
    wanted = constrain(state, rows, logits).flatten(0, 1)
    made = on(device, state)
    changed, best_XC = constrain_triton(made, rows.to(device), logits.flatten(0, 1).to(device))
    is_active = changed.is_changed_M[rows.long()].repeat_interleave(num_drafts + 1).bool().cpu()
    assert is_active.tolist() == [row in (0, 2, 3, 4, 5) for row in rows for _ in range(num_drafts + 1)]
    torch.testing.assert_close(
        changed.logits_XV.cpu()[is_active], wanted[is_active], rtol=1e-6, atol=1e-6, equal_nan=True
    )
    assert torch.equal(best_index(best_XC).cpu(), wanted.argmax(-1))


@pytest.mark.parametrize("kind", [SamplingKind.SAMPLED, SamplingKind.TRUNCATED, SamplingKind.CONSTRAINED])
def test_an_accept_phase_is_made_of_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: SamplingKind
) -> None:
    """The rules that the engine calls: kernels where they take the logits, torch elsewhere."""
    state = make_state(1, VOCAB)
    write_rules(state, 1)
    rows = torch.tensor([4, 0, 2, ROWS], dtype=torch.int32)
    logits = likely_logits(state, rows, 1)[:, : 2 + 1].flatten(0, 1).bfloat16()
    wanted, made = on(CPU, state), on(device, state)
    if not kind.truncates:
        for one in (wanted, made):
            one.top_k_M.fill_(0)
            one.top_p_M.fill_(1)
    probs = target_probabilities(wanted, rows, logits, 2, kind=kind)
    reported = accept_rows_sampled(wanted, rows, logits, 2, kind=kind)
    monkeypatch.setattr(commit, "takes_argmax", lambda x: True)
    rows, logits = rows.to(device), logits.to(device)
    out = target_probabilities(made, rows, logits, 2, kind=kind)
    torch.testing.assert_close(out.cpu(), probs, rtol=1e-4, atol=1e-7)
    for mine, theirs in zip(accept_rows_sampled(made, rows, logits, 2, kind=kind), reported, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(made.tokens_ML.cpu(), wanted.tokens_ML)


def test_processors_come_between(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(1, 0)
    write_rules(state, 1)
    rows = torch.tensor([0, 2], dtype=torch.int32)
    logits = likely_logits(state, rows, 1)[:, :1].flatten(0, 1)

    class Shift(LogitsProcessor):
        def admit(self, row: int, params: SamplingParams) -> None: ...

        def apply(self, logits_RQV: Tensor, positions: BlockPositions) -> Tensor:
            return logits_RQV.roll(1, -1)

    shift = Shift(num_rows=ROWS + 1, vocab_size=VOCAB, device=device)
    options = {"kind": SamplingKind.CONSTRAINED, "processors": [shift]}
    probs = target_probabilities(on(CPU, state), rows, logits, 0, **options)
    monkeypatch.setattr(commit, "takes_argmax", lambda x: True)
    out = target_probabilities(on(device, state), rows.to(device), logits.to(device), 0, **options)
    torch.testing.assert_close(out.cpu(), probs, rtol=1e-4, atol=1e-7)


# ---- drafts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("first", "block"), [(True, False), (False, False), (False, True)])
def test_drafts_are_drawn_as_torch_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mapped: bool, first: bool, block: bool
) -> None:
    state = make_state(3, VOCAB)
    state.num_drafted_M[:ROWS] = torch.tensor([0, 1, 2, 3, 1, 0])
    state.draft_limit_M[:ROWS] = torch.tensor([4, 4, 4, 4, 1, 4])
    rows = torch.tensor([4, 0, 1, 5, 2], dtype=torch.int32)
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(len(rows) * (K if block else 1), VOCAB - 20, generator=noise) * 2
    logits[2, 7] = NAN
    ids = torch.randperm(VOCAB, generator=noise)[: VOCAB - 30] if mapped else None
    wanted, made = on(CPU, state), on(device, state)
    assert wanted.draft_probs_MKV is not None
    assert made.draft_probs_MKV is not None
    options = {"vocab_size": VOCAB - 30, "sampled": True} | ({} if block else {"first": first})
    run = write_block if block else write_next
    run(wanted, rows, logits, target_ids_W=ids, **options)
    monkeypatch.setattr(write, "takes_argmax", lambda x: True)
    run(made, rows.to(device), logits.to(device), target_ids_W=None if ids is None else ids.to(device), **options)
    assert torch.equal(made.drafts_MK.cpu(), wanted.drafts_MK)
    assert torch.equal(made.num_drafted_M.cpu(), wanted.num_drafted_M)
    probs, theirs = made.draft_probs_MKV.cpu(), wanted.draft_probs_MKV
    is_broken = theirs.isnan().any(-1)
    assert torch.equal(probs.isnan().any(-1), is_broken)
    torch.testing.assert_close(probs[~is_broken], theirs[~is_broken], rtol=1e-5, atol=1e-8)


def test_an_engine_says_the_same_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps: prompts, drawn drafts, acceptance, in a batch of rows that ask for different things."""
    if torch.cuda.is_available():
        pytest.skip("engines on a GPU run the kernels anyway")
    asked = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=4, top_p=0.9, presence_penalty=1, logit_bias={5: 3.0}),
        SamplingParams(temperature=0, max_tokens=4),
    ]
    spec = {"method": "eagle3", "model": "eagle3-tiny", "num_speculative_tokens": 2}
    said = []
    for by_kernels in (False, True):
        for module in (commit, write):
            monkeypatch.setattr(module, "takes_argmax", lambda x, by_kernels=by_kernels: by_kernels)
        llm = engine("tiny", load_format="dummy", max_model_len=32, enforce_eager=True, speculative_config=spec)
        said.append([out.outputs[0].token_ids for out in llm.generate([[1, 2, 3, 4], [5, 6, 7]], asked)])
    assert said[0] == said[1]


# ---- at full size ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [accept_sampled_rows, accept_block_rows], ids=["standard", "block"])
@pytest.mark.parametrize("kind", [SamplingKind.SAMPLED, SamplingKind.TRUNCATED, SamplingKind.CONSTRAINED])
def test_an_accept_phase_of_a_whole_vocabulary_captured_and_eager(
    monkeypatch: pytest.MonkeyPatch, kind: SamplingKind, rule: commit.Rule
) -> None:
    device, drafts_per_row = torch.device("cuda"), sampling_kernels.K
    torch.manual_seed(0)
    state = sampling_kernels.make_state(8, device)
    state.max_tokens_M[:-1] = sampling_kernels.LENGTH + 9
    if not kind.truncates:
        state.top_k_M.fill_(0)
        state.top_p_M.fill_(1)
    rows = torch.arange(8, dtype=torch.int32, device=device)
    logits = torch.randn(8 * (1 + drafts_per_row), 128_256, device=device).bfloat16() * 2
    drafts = state.drafts_MK[:8].long()
    logits.view(8, 1 + drafts_per_row, -1)[:, :-1].scatter_(2, drafts[..., None], 9.0)
    by_torch, captured = on(device, state), on(device, state)
    made = accept_rows_sampled(state, rows, logits, drafts_per_row, kind=kind, rule=rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = accept_rows_sampled(captured, rows, logits, drafts_per_row, kind=kind, rule=rule)
    graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, replayed, strict=True))
    monkeypatch.setattr(commit, "takes_argmax", lambda x: False)
    wanted = accept_rows_sampled(by_torch, rows, logits, drafts_per_row, kind=kind, rule=rule)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, wanted, strict=True))
    assert made[0].min() >= 1
    assert made[0].max() > 1
