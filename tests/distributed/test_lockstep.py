"""Engines that take every step together, each with requests of its own: two processes, whose layers exchange tokens.

Both are asked: mixtures of experts, of which each rank has half; and a dense model that stands for one, drafters
included, whose layers gather the tokens of both ranks, each of which computes half of every output. B56: ranks that
disagreed about one step would hang.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from draftloop.config.engine import EngineConfig
from draftloop.distributed.group import ALONE, Group
from draftloop.distributed.launcher import Ranks
from draftloop.distributed.replica import Replica
from draftloop.engine import startup
from draftloop.engine.llm import LLM
from draftloop.engine.lockstep import Lockstep
from draftloop.errors import ConfigError, RankError
from draftloop.kernels.gated_linear import gated_linear
from draftloop.kernels.linear import linear
from draftloop.models.layers import GatedMLP
from draftloop.request import SamplingParams
from draftloop.sampling.sampler import SamplingKind
from experts import CONFIGS, tiny_experts
from helpers import drafting_spec, greedy, make_engine, oracle, prompts, run_through, tiny_model
from ranks import WATCHDOG_S, on_ranks, watch

NOTICED_S = 10
"""By then the death of a rank must be known."""
VARIANTS = {kind.value for kind in SamplingKind}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}


@dataclass
class Case:
    """Requests by rank: (step at which it comes, prompt, parameters, with speculation)."""

    requests: tuple[list[tuple[int, list[int], SamplingParams, bool]], ...]
    num_steps: int = 0


@dataclass
class Found:
    """What a rank saw of a case."""

    exchanged: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Every collective between devices, in order."""
    num_agreed: int = 0
    """Collectives between hosts."""
    num_steps: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)
    reports: dict[str, int] = field(default_factory=dict)
    """Logprobs of each request: of its prompt and answer together."""
    graphs: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Replays of each size of each phase."""
    eager: dict[str, str] = field(default_factory=dict)


class LoggedGroup(Group):
    """Notes what reaches the other rank, from tapes too."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def _gather(self, x: Tensor) -> Tensor:
        self.log.append(("gather", tuple(x.shape)))
        return super()._gather(x)

    def _sum(self, x: Tensor) -> Tensor:
        self.log.append(("sum", tuple(x.shape)))
        return super()._sum(x)

    def max(self, values: Any) -> list[int]:
        self.log.append(("max", (len(values),)))
        return super().max(values)


def exchange_tokens(group: Group) -> None:
    """Let every MLP, of target and drafter, compute half of each output for the tokens of both ranks."""

    def forward(self: GatedMLP, x_TC: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        everyone_XC = group.all_gather(x_TC)
        inner_XI = gated_linear(everyone_XC, self.gate_up_weight, None, activation=self.activation)
        half = inner_XI.shape[1] // group.size
        mine = slice(group.rank * half, (group.rank + 1) * half)
        out_XC = linear(inner_XI[:, mine].contiguous(), self.down_weight[:, mine].contiguous(), None)
        return group.reduce_scatter(out_XC)

    GatedMLP.forward = forward  # type: ignore[method-assign]


def make(group: Group, device: str = "cpu", **settings: Any) -> LLM:
    defaults = {
        "max_model_len": 128, "max_num_seqs": 8, "max_prefill_rows": 4, "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 23, "device": device, "data_parallel_size": 2, "enable_expert_parallel": True,
    }  # fmt: skip
    config = EngineConfig.from_mapping(**{"model": tiny_model(), **defaults, **settings})
    place = torch.device(device, group.rank) if device == "cuda" else torch.device(device)
    ranks = Ranks(group=ALONE, device=place, engines=group, steps=group)
    return LLM.from_config(config, ranks=ranks)


def run_case(llm: LLM, group: LoggedGroup, case: Case) -> Found:
    core, found, running = llm.engine.core, Found(), {}
    lockstep = core.lockstep
    assert lockstep is not None
    llm.engine.table.reset_counts()
    group.log.clear()
    before = lockstep.num_steps
    mine = list(case.requests[group.rank])
    while True:
        now = lockstep.num_steps - before
        for index, (step, prompt, params, speculation) in enumerate(mine):
            if step == now:
                running[str(index)] = core.add(str(index), prompt, params, speculation=speculation)
        if now > case.num_steps and lockstep.at_rest:
            break
        core.step()
    found.num_steps = lockstep.num_steps - before
    found.exchanged = [entry for entry in group.log if entry[0] != "max"]
    found.num_agreed = len(group.log) - len(found.exchanged)
    found.answers = {name: list(sequence.output_ids) for name, sequence in running.items()}
    found.reports = {name: len(s.logprobs) + len(s.prompt_logprobs) for name, s in running.items()}
    for row in llm.get_graph_report().rows:
        if row.replays and row.phase.startswith(("target.", "draft", "iteration")):
            # which variant for its rows' parameters a rank runs is its own affair: they exchange the same
            phase = ".".join(part for part in row.phase.split(".") if part not in VARIANTS)
            found.graphs[phase, row.rows, row.tokens] += row.replays
        if row.eager_runs:
            found.eager[row.phase] = row.reason
    return found


def mixed(seed: int, num_steps: int, count: int) -> Case:
    """Requests of every kind, that come at any time to either rank."""
    source = random.Random(seed)
    requests = ([], [])
    for index, prompt in enumerate(prompts(count, seed=seed)):
        options = source.choice([{}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"min_tokens": 3}])
        params = greedy(source.randrange(1, 20), **options)
        rank = source.randrange(2) if index % 7 else 0  # at times one has all of them
        requests[rank].append((source.randrange(num_steps), prompt, params, source.random() < 0.7))
    return Case(requests, num_steps)


def cases() -> dict[str, Case]:
    ids = prompts(7)
    many = [(0, prompt, greedy(12), True) for prompt in ids[:6]]
    one = [(0, ids[6], greedy(24), True)]
    return {
        "one is idle": Case((many[:3], [])),
        "one drafts nothing": Case(([(0, ids[0], greedy(16), False)], one)),
        "one has no graph": Case((many, one)),
        "one reports": Case(([(1, ids[0], greedy(9, logprobs=1, prompt_logprobs=0), True)], one)),
        "mixed": mixed(3, 200, 24),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "draft_model": {
        "speculative_config": drafting_spec(3), "cudagraph_capture_sizes": (1, 2, 4), "iteration_graph": True,
    },
    "qwen3_moe": {"speculative_config": NGRAM, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": (1, 2, 4)},
    "mixtral": {"speculative_config": NGRAM, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": (1, 2, 4)},
}  # fmt: skip


def cases_of(method: str) -> dict[str, Case]:
    """Mixtral's layers are those of Qwen3-MoE: a few steps are enough."""
    return {name: case for name, case in cases().items() if method != "mixtral" or name != "mixed"}


def model_of(method: str) -> str:
    return tiny_experts(method) if method in CONFIGS else tiny_model()


def _both(whole: Group, device: str = "cpu") -> dict[str, Any]:
    """Every case on every engine."""
    group = LoggedGroup(torch.distributed.group.WORLD)
    startup.check_engines = lambda *args: None  # type: ignore[assignment]
    exchange_tokens(group)
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        watch(
            f"{name}, which starts", WATCHDOG_S if device == "cpu" else 2 * WATCHDOG_S
        )  # a GPU's kernels are compiled
        llm = make(group, device, model=model_of(name), **settings)
        for case_name, case in cases_of(name).items():
            watch(f"{name}: {case_name}")
            found[f"{name}: {case_name}"] = run_case(llm, group, case)
        llm.close()
    return found


def _both_on_gpus(whole: Group) -> dict[str, Any]:
    return _both(whole, "cuda")


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return on_ranks(_both, 2)


each = pytest.mark.parametrize("name", [f"{method}: {case}" for method in SETTINGS for case in cases_of(method)])


@each
def test_ranks_exchange_the_same_in_the_same_order_and_answer_as_if_alone(name: str, both) -> None:
    first, second = (found[name] for found in both)
    method, _, case = name.partition(": ")
    assert first.exchanged == second.exchanged
    assert first.exchanged, "nothing was exchanged"
    assert first.num_agreed == second.num_agreed == first.num_steps == second.num_steps, "one agreement for each step"
    for rank, found in enumerate((first, second)):
        for index, (_, prompt, params, _) in enumerate(cases()[case].requests[rank]):
            answer = found.answers[str(index)]
            expected = oracle(prompt, params.max_tokens or 0, model=model_of(method))
            assert answer == expected, "the other rank's requests change an answer"
            expected = (params.logprobs is not None) * len(answer) + (params.prompt_logprobs is not None) * len(prompt)
            assert found.reports[str(index)] == expected


@each
def test_ranks_run_the_same_graphs_and_fall_back_together(name: str, both) -> None:
    first, second = (found[name] for found in both)
    shared = [
        {key: count for key, count in found.graphs.items() if not key[0].startswith("target.prefill")}
        for found in (first, second)
    ]
    assert shared[0] == shared[1]
    eager = [{phase for phase in found.eager if phase.startswith(("target.", "draft"))} for found in (first, second)]
    assert eager[0] == eager[1]
    if name.endswith("one has no graph"):
        # five or six: requests come while ranks step
        why = first.eager["target.verify"].split("; ")[0]
        assert re.fullmatch("[56] rows exceed the largest captured size 4", why)
        assert f"{why}, on another rank" in second.eager["target.verify"]


def test_one_that_is_idle_runs_padding_at_the_others_sizes(both) -> None:
    idle = both[1]["draft_model: one is idle"]
    assert idle.answers == {}
    assert any(phase.startswith("iteration") for phase, _, _ in idle.graphs)


@pytest.mark.gpu
def test_captured_exchanges_of_two_gpus_agree() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    both = on_ranks(_both_on_gpus, 2, "cuda")
    for method in SETTINGS:
        for case_name, case in cases_of(method).items():
            first, second = (found[f"{method}: {case_name}"] for found in both)
            assert first.num_steps == second.num_steps
            assert first.exchanged == second.exchanged, "what was not captured"
            for rank, found in enumerate((first, second)):
                for index, (_, prompt, params, _) in enumerate(case.requests[rank]):
                    expected = oracle(prompt, params.max_tokens or 0, model=model_of(method))
                    assert found.answers[str(index)] == expected


def test_a_step_is_agreed_on_while_the_device_runs_the_one_before(monkeypatch) -> None:
    """With two steps in flight, as on a GPU."""
    llm = make_engine(speculative_config=drafting_spec(3), enforce_eager=True)
    core = llm.engine.core
    core.pipeline_depth, core.worker.overlaps, core.lockstep = 2, True, Lockstep(ALONE)
    running, agree = [], core.lockstep.agree

    def note(shape, *, is_idle: bool):
        running.append(len(core._in_flight))
        return agree(shape, is_idle=is_idle)

    monkeypatch.setattr(core.lockstep, "agree", note)
    core.add("0", [1, 2, 3], greedy(24))
    assert run_through(llm) == {"0": oracle([1, 2, 3], 24)}
    assert running[0] == 0
    assert set(running[1:]) == {1}, "the device waits while hosts agree"
    llm.close()


def test_experts_that_cannot_be_shared_evenly_are_refused() -> None:
    config = EngineConfig(model=tiny_experts(), data_parallel_size=4, enable_expert_parallel=True, device="cpu")
    with pytest.raises(ConfigError, match="data_parallel_size is 4, which does not divide the 6 experts"):
        startup.start(config, replica=Replica(rank=0, size=4))


def test_the_device_loop_is_off_and_says_why() -> None:
    config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True, device_loop=8, iteration_graph=True)
    with pytest.raises(ConfigError, match="device_loop is 8, but engines that share experts agree on every step"):
        startup.resolve(config, facts=FACTS)
    auto = EngineConfig(data_parallel_size=2, enable_expert_parallel=True)
    (choice,) = (one for one in startup.resolve(auto, facts=FACTS).choices if one.name == "device_loop")
    assert (choice.value, choice.reason) == (0, "engines that share experts agree on every step")


FACTS = startup.Facts(cuda_available=True, model_max_len=64, model_dtype="bfloat16")


def _survives(group: Group) -> tuple[str, float]:
    """Rank 1 is killed in the middle; what rank 0 says, and after how long."""
    startup.check_engines = lambda *args: None  # type: ignore[assignment]
    exchange_tokens(group)
    core = make(group, enforce_eager=True).engine.core
    core.add("0", [1, 2, 3], greedy(100))
    for _ in range(5):
        core.step()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while True:
            core.step()
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin


def test_a_rank_that_is_killed_is_noticed_within_ten_seconds() -> None:
    (message, seconds), *_ = on_ranks(_survives, 2, expected=1)
    assert seconds < NOTICED_S
    assert "RankError: rank 0 of 2 waited in vain for the others before step" in message
