"""Whatever the drafts, emitted tokens follow the target: chi-square over 100k trials, one row each.

The target is a Markov chain, so what a token should follow depends on the token before it. Each
trial runs iterations until three tokens are out; their joint distribution is tested, which covers
accepted drafts, replacements, bonus tokens and the seams between iterations.
"""

from functools import partial

import pytest
import torch
from scipy import stats

from draftloop.kvcache.rows import NO_DRAFT
from draftloop.sampling import block_verification
from draftloop.sampling.accept import accept_greedy, accept_sampled, accept_sampled_rows
from draftloop.sampling.block_verification import accept_block_rows
from draftloop.sampling.noise import Stream, gumbel_argmax, in_block, uniform
from draftloop.sampling.sampler import SamplingRows, probabilities

TRIALS = 100_000
VOCAB = 8
TOKENS = 3

SEEDS_R = torch.arange(TRIALS)
POSITIONS_R = torch.full((TRIALS,), 10)


def chain(width: int, seed: int, sharpness: float = 1.2) -> torch.Tensor:
    """[V, width]: distribution of the next token after each token."""
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCAB, width, generator=noise) * sharpness).softmax(-1)


TARGET = chain(VOCAB, 1)


def sampled_drafts(draft_VW, last_R, seeds_R, positions_R, num_drafts, stream=Stream.DRAFT, place=in_block):
    """Drafts drawn from a chain, and the distributions that they were drawn from."""
    drafts, probs = [], []
    for j in range(num_drafts):
        # a drafter with a wider vocabulary may leave the target's; what follows such a draft is never used
        q_RW = draft_VW[last_R.clamp(max=VOCAB - 1)]
        last_R = gumbel_argmax(q_RW.log(), seeds_R, place(positions_R, j), stream)
        drafts.append(last_R)
        probs.append(q_RW)
    return torch.stack(drafts, 1), torch.stack(probs, 1)


def coin_drafts(draft_VW, last_R, seeds_R, positions_R, num_drafts):
    """The same, drawn with the noise of the acceptance test: wrong on purpose."""
    q_RW = draft_VW[last_R]
    u_R1 = uniform(seeds_R, positions_R, Stream.ACCEPT)[:, None]
    return (q_RW.cumsum(-1) < u_R1).sum(-1, keepdim=True).clamp(max=VOCAB - 1), q_RW[:, None]


def greedy_drafts(draft_VW, last_R, seeds_R, positions_R, num_drafts):
    drafts = []
    for _ in range(num_drafts):
        last_R = draft_VW[last_R.clamp(max=VOCAB - 1)].argmax(-1)
        drafts.append(last_R)
    return torch.stack(drafts, 1), None


def emit_tokens(draft, seeds_R, positions_R, num_drafts, rule=accept_sampled_rows) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, TOKENS] tokens after a token 0, and how many drafts the first iteration accepted."""
    rows = torch.arange(len(seeds_R))
    out = torch.zeros(len(seeds_R), 1 + TOKENS + (TOKENS + 1) * (num_drafts + 1), dtype=torch.int64)
    count = torch.zeros_like(rows)
    first = None
    for _ in range(TOKENS):
        last_R = out[rows, count]
        drafts_RK, probs_RKW = draft(last_R, seeds_R, positions_R + count, num_drafts)
        context_RQ = torch.cat([last_R[:, None], drafts_RK], 1).clamp(0, VOCAB - 1)
        emitted, num = rule(TARGET[context_RQ], drafts_RK, probs_RKW, rows, seeds_R, positions_R + count)
        first = num - 1 if first is None else first
        for j in range(num_drafts + 1):
            out[rows, count + 1 + j] = emitted[:, j].long()
        count = count + num
    return out[:, 1 : 1 + TOKENS], first


def p_value(tokens_RT: torch.Tensor) -> float:
    """Chance of a deviation like this one from the chain's joint distribution of three tokens."""
    joint = TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None]
    cell = (tokens_RT * torch.tensor([VOCAB * VOCAB, VOCAB, 1])).sum(-1)
    observed = torch.bincount(cell, minlength=VOCAB**TOKENS).double()
    expected = joint.flatten().double() * len(tokens_RT) / joint.double().sum()
    rare = expected < 5
    pooled = [torch.cat([x[~rare], x[rare].sum()[None]]).numpy() for x in (observed, expected)]
    return stats.chisquare(*pooled).pvalue


def holes(drafts_RK, seeds_R):
    """Nothing drafted at some places: a third of them, chosen without regard to anything else."""
    chance_RK = uniform(seeds_R[:, None] + 2**40, torch.arange(drafts_RK.shape[1]), Stream.ACCEPT)
    return drafts_RK.masked_fill(chance_RK < 0.33, NO_DRAFT)


def with_holes(draft):
    def run(last_R, seeds_R, positions_R, num_drafts):
        drafts_RK, probs_RKW = draft(last_R, seeds_R, positions_R, num_drafts)
        return holes(drafts_RK, seeds_R), probs_RKW

    return run


def with_bad_rows(value):
    """Some rows of q are broken, wholly, after the draft was drawn."""

    def run(last_R, seeds_R, positions_R, num_drafts):
        drafts_RK, probs_RKW = sampled_drafts(chain(VOCAB, 2), last_R, seeds_R, positions_R, num_drafts)
        broken_RK = holes(drafts_RK, seeds_R) == NO_DRAFT
        return drafts_RK, probs_RKW.masked_fill(broken_RK[..., None], value)

    return run


def cut(*, by_itself):
    """A block ends before some drafts: chosen by the token before each, or by the draft itself, wrong on purpose."""

    def run(last_R, seeds_R, positions_R, num_drafts):
        drafts_RK, probs_RKW = sampled_drafts(chain(VOCAB, 2), last_R, seeds_R, positions_R, num_drafts)
        before_RK = torch.cat([last_R[:, None], drafts_RK[:, :-1]], 1)
        ends_RK = ((drafts_RK if by_itself else before_RK) % 3 == 0).cumsum(1) > 0
        return drafts_RK.masked_fill(ends_RK, NO_DRAFT), probs_RKW

    return run


def of(rule, draft_VW):
    return lambda *args: rule(draft_VW, *args)


def self_draft(*args):
    return sampled_drafts(TARGET, *args)


def nearly_self_draft(*args):
    """q is p but for rounding, as when draft and verification run in different kernels."""
    drafts_RK, probs_RKW = sampled_drafts(TARGET, *args)
    return drafts_RK, probs_RKW * (1 + 1e-6)


DRAFTS = {
    "greedy": of(greedy_drafts, chain(VOCAB, 2)),
    "sampled": of(sampled_drafts, chain(VOCAB, 2)),
    "sampled, sharp": of(sampled_drafts, chain(VOCAB, 3, sharpness=4)),
    "the target itself": self_draft,
    "the target but for rounding": nearly_self_draft,
    "greedy, wider vocabulary": of(greedy_drafts, chain(VOCAB + 3, 8)),
    "sampled, wider vocabulary": of(sampled_drafts, chain(VOCAB + 3, 4)),
    "sampled, narrower vocabulary": of(sampled_drafts, chain(VOCAB - 2, 5)),
    "greedy with holes": with_holes(of(greedy_drafts, chain(VOCAB, 2))),
    "sampled with holes": with_holes(of(sampled_drafts, chain(VOCAB, 2))),
    "sampled, cut by what came before": cut(by_itself=False),
    "q sometimes NaN": with_bad_rows(float("nan")),
    "q sometimes zero": with_bad_rows(0.0),
    "q sometimes infinite": with_bad_rows(float("inf")),
}


RULES = {"standard": accept_sampled_rows, "block": accept_block_rows}


@pytest.mark.cases(where=lambda draft, depth: depth == 3 or draft == "sampled")
@pytest.mark.parametrize(("rule", "depth"), [("standard", 1), ("standard", 3), ("block", 3)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_emitted_tokens_follow_the_target(rule, draft, depth):
    tokens, _ = emit_tokens(DRAFTS[draft], SEEDS_R, POSITIONS_R, depth, RULES[rule])
    assert p_value(tokens) > 1e-3


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_follow_the_target_along_one_sequence(rule, draft):
    """One seed, and trials at positions of their own."""
    tokens, _ = emit_tokens(DRAFTS[draft], torch.full((TRIALS,), 7), torch.arange(TRIALS) * 16, 2, RULES[rule])
    assert p_value(tokens) > 1e-3


def test_blocks_accept_more_than_draft_by_draft_and_as_much_where_there_is_one():
    draft = DRAFTS["sampled"]
    means = {}
    for depth in (1, 3):
        for name, rule in RULES.items():
            _, accepted = emit_tokens(draft, SEEDS_R, POSITIONS_R, depth, rule)
            means[name, depth] = accepted.double().mean().item()
    assert means["block", 1] == pytest.approx(means["standard", 1], abs=0.006)
    assert means["block", 3] > means["standard", 3] + 0.02


def test_a_block_accepts_as_many_as_its_paper_says():
    """The chance of accepting at least i drafts is the mean of the running product of p / q, cut at 1."""
    depth = 3
    drafts_RK, q_RKV = DRAFTS["sampled"](torch.zeros(TRIALS, dtype=torch.int64), SEEDS_R, POSITIONS_R, depth)
    p_RQV = TARGET[torch.cat([torch.zeros(TRIALS, 1, dtype=torch.int64), drafts_RK], 1)]
    _, num = accept_block_rows(p_RQV, drafts_RK, q_RKV, torch.arange(TRIALS), SEEDS_R, POSITIONS_R)
    ratio_RK = (p_RQV[:, :-1].gather(2, drafts_RK[..., None]) / q_RKV.gather(2, drafts_RK[..., None])).squeeze(-1)
    share_R = torch.ones(TRIALS)
    for i in range(depth):
        share_R = (share_R * ratio_RK[:, i]).clamp(max=1)
        assert rate_of(num - 1, i + 1) == pytest.approx(share_R.double().mean().item(), abs=0.006)


@pytest.mark.parametrize("shared", ["drafts", "tests"])
def test_blocks_that_share_noise_are_noticed(monkeypatch, shared):
    """The next block goes over places whose drafts had a say already: with the noise of those it would be wrong."""
    by_place = lambda start, j: start + j  # noqa: E731
    draft = of(partial(sampled_drafts, place=by_place if shared == "drafts" else in_block), chain(VOCAB, 2, 0.5))
    if shared == "tests":
        monkeypatch.setattr(block_verification, "in_block", by_place)
    tokens, _ = emit_tokens(draft, SEEDS_R, POSITIONS_R, 3, accept_block_rows)
    assert p_value(tokens) < 1e-9


def test_plain_sampling_is_the_same_function_with_nothing_drafted():
    for seeds_R, positions_R in [(SEEDS_R, POSITIONS_R), (POSITIONS_R, SEEDS_R * 4)]:
        tokens = torch.zeros(TRIALS, 1, dtype=torch.int64)
        for t in range(TOKENS):
            p = TARGET[tokens[:, -1]][:, None]
            emitted, num = accept_sampled(p, tokens[:, :0], None, seeds_R, positions_R + t)
            assert (num == 1).all()
            tokens = torch.cat([tokens, emitted.long()], 1)
        assert p_value(tokens[:, 1:]) > 1e-3


@pytest.mark.parametrize(
    "draft",
    [
        lambda *args: sampled_drafts(chain(VOCAB, 2), *args, stream=Stream.SAMPLE, place=torch.add),
        of(coin_drafts, chain(VOCAB, 2)),
        cut(by_itself=True),
        # a drafter that lies about q: it says uniform, and draws from something else
        lambda *args: (sampled_drafts(chain(VOCAB, 2), *args)[0], torch.full((TRIALS, 1, VOCAB), 1 / VOCAB)),
    ],
    ids=["draft and replacement share noise", "draft and test share noise", "cut by the draft itself", "wrong q"],
)
def test_the_distribution_test_notices(draft):
    tokens, _ = emit_tokens(draft, SEEDS_R, POSITIONS_R, 1)
    assert p_value(tokens) < 1e-9


@pytest.mark.parametrize("depth", [1, 3])
def test_the_noise_of_a_token_belongs_to_its_position_however_the_token_was_reached(depth):
    rows = 1000
    seeds, positions = SEEDS_R[:rows], SEEDS_R[:rows] * 3
    p = TARGET[:1].expand(rows, depth + 1, -1).clone()
    drafts = torch.arange(rows * depth).view(rows, depth) % VOCAB
    p[:, :depth] = torch.nn.functional.one_hot(drafts, VOCAB).float()  # all drafts are accepted
    emitted, num = accept_sampled(p, drafts, None, seeds, positions)
    assert (num == depth + 1).all()
    plain, _ = accept_sampled(p[:, depth:], drafts[:, :0], None, seeds, positions + depth)
    assert torch.equal(emitted[:, depth], plain[:, 0])


def rate_of(accepted: torch.Tensor, least: int = 1) -> float:
    return (accepted >= least).double().mean().item()


def test_sampled_drafts_are_accepted_as_often_as_the_distributions_overlap():
    draft_VW = chain(VOCAB, 2)
    _, accepted = emit_tokens(of(sampled_drafts, draft_VW), SEEDS_R, POSITIONS_R, 2)
    assert rate_of(accepted) == pytest.approx(torch.minimum(TARGET[0], draft_VW[0]).sum().item(), abs=0.006)


def test_drafts_of_the_target_itself_are_accepted_and_greedy_ones_as_often_as_they_are_likely():
    _, accepted = emit_tokens(self_draft, SEEDS_R, POSITIONS_R, 3)
    assert (accepted == 3).double().mean() == 1
    _, accepted = emit_tokens(nearly_self_draft, SEEDS_R, POSITIONS_R, 3)
    assert (accepted == 3).double().mean() > 0.99
    _, accepted = emit_tokens(of(greedy_drafts, TARGET), SEEDS_R, POSITIONS_R, 1)
    assert rate_of(accepted) == pytest.approx(TARGET[0].max().item(), abs=0.006)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [VOCAB - 2, VOCAB, VOCAB + 3])
@pytest.mark.parametrize("keep_probs", [True, False])
def test_greedy_rows_of_a_mixed_batch_accept_as_in_a_greedy_batch_and_others_follow_the_target(rule, width, keep_probs):
    num_drafts, rows = 3, 4000
    noise = torch.Generator().manual_seed(width)
    logits = torch.randn(rows, num_drafts + 1, VOCAB, generator=noise).round(decimals=1)  # with ties
    # mostly right drafts; q is anything, also what could not have drawn the draft
    right = torch.rand(rows, num_drafts, generator=noise) < 0.8
    drafts = torch.where(right, logits[:, :-1].argmax(-1), torch.randint(-1, width, right.shape, generator=noise))
    q = torch.randn(rows, num_drafts, width, generator=noise).mul(8).softmax(-1)
    q[::3] = torch.nn.functional.one_hot(q[::3].argmax(-1), width).float()
    q[::7] = float("nan")
    temperature = (torch.arange(rows) % 2).float()
    zero = torch.zeros(rows)
    sampling = SamplingRows(temperature, zero.int(), zero + 1, zero, torch.arange(rows))
    p = probabilities(logits.flatten(0, 1), sampling.repeat(num_drafts + 1)).view_as(logits)
    positions = torch.full((rows,), 5)
    index = torch.arange(rows)
    emitted, num = RULES[rule](p, drafts, q if keep_probs else None, index, sampling.seed_N, positions)
    greedy_emitted, greedy_num = accept_greedy(logits, drafts)
    assert torch.equal(emitted[::2], greedy_emitted[::2])
    assert torch.equal(num[::2], greedy_num[::2])
    assert not torch.equal(emitted[1::2], greedy_emitted[1::2])
    alone, _ = RULES[rule](
        p[1::2], drafts[1::2], q if keep_probs else None, index[1::2], torch.arange(1, rows, 2), positions[1::2]
    )
    assert torch.equal(emitted[1::2], alone)


@pytest.mark.parametrize("keep_probs", [True, False])
def test_ids_outside_the_target_vocabulary_are_never_emitted(keep_probs):
    rows, width = 500, VOCAB + 5
    p = chain(VOCAB, 6)[torch.arange(rows) % VOCAB][:, None].expand(-1, 3, -1)
    drafts = torch.arange(rows * 2).view(rows, 2) % (width + 4)
    q = torch.full((rows, 2, width), 1 / width) if keep_probs else None
    emitted, num = accept_sampled(p, drafts, q, SEEDS_R[:rows], POSITIONS_R[:rows])
    assert emitted.max() < VOCAB
    assert ((emitted >= 0).sum(-1) == num).all()
    assert (num[drafts[:, 0] >= VOCAB] == 1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("place", [1, 2])
def test_tokens_before_a_position_that_says_nothing_follow_the_target(rule, place):
    """Found by the fuzzer: behind a wrong draft, a block took NaN for certainty."""
    drafts, q = DRAFTS["sampled"](torch.zeros(TRIALS, dtype=torch.int64), SEEDS_R, POSITIONS_R, 3)
    p = TARGET[torch.cat([torch.zeros(TRIALS, 1, dtype=torch.int64), drafts], 1)]
    p[:, place:] = float("nan")
    emitted, num = RULES[rule](p, drafts, q, SEEDS_R, SEEDS_R, POSITIONS_R)
    first = torch.bincount(emitted[:, 0].long(), minlength=VOCAB).double()
    assert (
        stats.chisquare(first.numpy(), (TARGET[0].double() / TARGET[0].double().sum() * TRIALS).numpy()).pvalue > 1e-3
    )
    assert (num <= place + 1).all()
    assert (num == place + 1).any()


def test_a_broken_target_row_stays_inside_the_vocabulary_and_harms_no_neighbour():
    p = TARGET[torch.arange(64) % VOCAB][:, None].repeat(1, 3, 1)
    drafts = torch.arange(128).view(64, 2) % VOCAB
    args = (drafts, None, SEEDS_R[:64], POSITIONS_R[:64])
    clean, _ = accept_sampled(p, *args)
    p[::2] = float("nan")
    broken, num = accept_sampled(p, *args)
    assert torch.equal(broken[1::2], clean[1::2])
    assert (num[::2] == 1).all()
    assert ((broken[::2, 0] >= 0) & (broken[::2, 0] < VOCAB)).all()
