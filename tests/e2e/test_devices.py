"""The whole engine on each device: every real phase is the same captured as eager, and text does not change."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from blocks import wide_block
from draftloop.engine.llm import LLM
from draftloop.graphs.phase import GraphMode, Key
from draftloop.graphs.table import GraphTable
from draftloop.request import SamplingParams
from gemma4 import gemma4_assistant, gemma4_target
from heads import wide_head, wide_mtp_target
from helpers import MODES, answers, assert_all_free, greedy, make_engine, prompts, tiny_model
from medusa_heads import medusa_config, tiny_medusa
from parallel import tiny_pard, wide_peagle


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def target() -> str:
    return tiny_model("wide", hidden=256)


def near() -> str:
    return tiny_model("wide-near", hidden=256, noise=0.06)


CONFIGS = {
    "none": None,
    "cascade": {"method": "cascade", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 3},
    "dspark": {"method": "dspark", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "eagle3_tree": {
        "method": "eagle3",
        "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]",
    },
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp_of_2": {"method": "mtp", "num_speculative_tokens": 3},
    "gemma4_mtp": {"method": "gemma4_mtp", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},
    "pard": {"method": "pard", "num_speculative_tokens": 3},
    "peagle": {"method": "peagle", "num_speculative_tokens": 3},
}
MEANT_FOR_GPU = {"cascade", "eagle3_tree", "medusa", "mtp", "mtp_of_2", "pard", "peagle"}
"""On a CPU their own tests and those of all drafters run what these would."""
WITH_MODELS = {
    "draft_model": near,
    "dflash": functools.partial(wide_block, "dflash"),
    "dspark": functools.partial(wide_block, "dspark"),
    "eagle": functools.partial(wide_head, "eagle"),
    "eagle3": functools.partial(wide_head, "eagle3"),
    "eagle3_tree": functools.partial(wide_head, "eagle3"),
    "gemma4_mtp": functools.partial(gemma4_assistant, ordered=True, wide=True),
    "medusa": lambda: tiny_medusa("wide", medusa_config(hidden_size=256)),
    "pard": lambda: tiny_pard(near()),
    "peagle": wide_peagle,
}
TARGETS = {
    "mtp": wide_mtp_target,
    "mtp_of_2": functools.partial(wide_mtp_target, 2),
    "gemma4_mtp": functools.partial(gemma4_target, wide=True),
}


def start(device: str, drafter: str, *, beside: str = "", **settings) -> LLM:
    """An engine of the drafter's target, or without one of the target of the drafter `beside` it."""
    spec = CONFIGS[drafter]
    if drafter in WITH_MODELS:
        spec = {**spec, "model": WITH_MODELS[drafter]()}
    if drafter == "cascade":
        parts = {"method": "ngram", "prompt_lookup_min": 1}, {"method": "eagle3", "model": wide_head("eagle3")}
        spec = {**spec, "drafters": parts}
    folder = TARGETS.get(beside or drafter, target)()
    return make_engine(folder, device=device, speculative_config=spec, cudagraph_capture_sizes=(2, 8), **settings)


def everything(llm: LLM) -> dict[str, Tensor]:
    """All memory that a phase may write: row state, caches without the null page, buffers."""
    state, table = llm.engine.core.worker.state, llm.engine.table
    found = {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}
    found |= {f"cache {i}": cache for i, cache in enumerate(llm.engine.pool.caches)}
    found |= llm.engine.drafter.row_memory()
    return found | {f"buffer {name}": table.buffers[name] for p in table.phases.values() for name in p.outputs}


def fill_slots(table: GraphTable, key: Key, generator: torch.Generator, padding_row: int) -> None:
    """A plausible full batch for any phase, by what its slots are called."""
    phase, rows = table.phases[key.phase], min(key.rows, 7)
    bounds = [key.tokens * i // rows for i in range(rows + 1)] + [key.tokens] * (key.rows - rows)
    for name, slot in phase.slots.items():
        buffer = table.buffers[name]
        if name in ("rows", "ending_rows"):
            values = torch.tensor([*range(rows), *[padding_row] * (key.rows - rows)])
        elif name == "query_starts":
            values = torch.tensor(bounds)
        elif name == "kv_lens":
            values = torch.tensor([b - a for a, b in itertools.pairwise(bounds)])
        elif name == "num_emitted":
            values = torch.tensor([1 + i % 3 if i < rows else 0 for i in range(key.rows)])
        else:
            values = torch.randn(slot.unit.count(key.rows, key.tokens), *slot.shape, generator=generator)
        buffer[: values.shape[0]].copy_(values)


def is_told_by_a_cpu(device: str, drafter: str, dtype: str = "float32", mode: str = "FULL_AND_PIECEWISE") -> bool:
    """A GPU runs everything; on a CPU the others would say what these do."""
    if device == "cuda":
        return True
    if (dtype, mode) == ("bfloat16", "FULL"):
        return drafter in ("draft_model", "eagle3")
    return (dtype, mode) == ("float32", "FULL_AND_PIECEWISE") and drafter not in MEANT_FOR_GPU


@pytest.mark.cases(where=is_told_by_a_cpu)
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("drafter", [name for name in CONFIGS if name != "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_phase_is_bit_for_bit_the_same_captured_and_eager(device, drafter, mode, dtype):
    llm = start(device, drafter, cudagraph_mode=mode, dtype=dtype)
    table, state = llm.engine.table, llm.engine.core.worker.state
    core = llm.engine.core
    for i, prompt in enumerate(prompts(7)):
        core.add(str(i), prompt, greedy(60))
    for _ in range(8):  # rows, pages and caches as in the middle of their work
        core.step()
    core.close()
    generator = torch.Generator().manual_seed(0)
    before = {name: value.clone() for name, value in everything(llm).items()}
    for name, value in before.items():
        if name.endswith("num_drafted_M") and (most := llm.engine.drafter.num_drafts):
            value.clamp_(max=most - 1)  # each phase may draft one more
    seen = set()
    for key in table.keys():  # noqa: SIM118  not a dict
        results = []
        for captured in (True, False):
            for name, value in everything(llm).items():
                value.copy_(before[name])
            fill_slots(table, key, generator.manual_seed(1), state.padding_row)
            if captured:
                entry = table._captured[key]
                if entry.program is None:
                    table._captured.record(key, table._body(key))  # records by running once; what counts is the replay
                    for name, value in everything(llm).items():
                        value.copy_(before[name])
                    fill_slots(table, key, generator.manual_seed(1), state.padding_row)
                entry.program.replay()
            else:
                with torch.inference_mode():
                    table._call(key.phase, key.rows, key.tokens, lambda call: call())
            results.append({name: value.clone() for name, value in everything(llm).items()})
        for name, value in results[0].items():
            ours, theirs = value, results[1][name]
            if name.startswith("cache"):  # the null page takes all padding, in no order
                ours, theirs = ours[:, :, 1:], theirs[:, :, 1:]
            elif name.rpartition("_")[2].startswith("M"):  # so does the padding row, the last of M
                ours, theirs = ours[:-1], theirs[:-1]
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), (key, name)
        seen.add(key.mode)
    assert (GraphMode.FULL in seen) == (mode != "PIECEWISE")
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", CONFIGS)
def test_greedy_text_is_the_same_in_every_mode(drafter, mode):
    """On a CPU tests/drafters/test_all_drafters.py shows it."""
    plain = start("cuda", "none", beside=drafter, cudagraph_mode="NONE", dtype="float32")
    asked = prompts(7)
    expected = answers(plain.generate(asked, greedy(24)))
    llm = start("cuda", drafter, cudagraph_mode=mode.value, dtype="float32")
    for poison in (False, True):
        llm.engine.table.poison = poison
        assert answers(llm.generate(asked, greedy(24))) == expected, poison
        assert answers([llm.generate(p, greedy(24))[0] for p in asked[:2]]) == expected[:2], poison
    assert_all_free(llm)
    llm.close()


@pytest.mark.cases(where=is_told_by_a_cpu)
@pytest.mark.parametrize("drafter", [name for name in CONFIGS if name != "none"])
def test_a_steady_step_runs_no_phase_eager(device, drafter):
    llm = start(device, drafter, cudagraph_mode="FULL_AND_PIECEWISE", require_graphs=True)
    llm.generate(prompts(7), greedy(24))
    assert sum(llm.get_graph_report().eager_runs.values()) == 0
    llm.close()


@pytest.mark.cases(  # on a CPU tests/e2e/test_device_loop.py compares the others
    where=lambda device, drafter, overlap: (
        device == "cuda" or (overlap and drafter in ("none", "ngram", "draft_model", "eagle3"))
    )
)
@pytest.mark.parametrize("overlap", [False, True], ids=["depth_1", "depth_2"])
@pytest.mark.parametrize("drafter", CONFIGS)
def test_a_step_as_one_graph_says_the_same_as_phase_by_phase(device, drafter, overlap):
    settings = {"cudagraph_mode": "FULL_AND_PIECEWISE", "dtype": "float32", "async_scheduling": overlap}
    apart = start(device, drafter, iteration_graph=False, **settings)
    whole = start(device, drafter, iteration_graph=True, **settings)
    asked = prompts(7)
    for temperature, seed in ((0.0, None), (0.8, 7)):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=8 + 2 * i) for i in range(7)]
        for poison in (False, True):
            whole.engine.table.poison = poison
            whole.reset_graph_counts()
            assert answers(whole.generate(asked, params)) == answers(apart.generate(asked, params)), (
                temperature,
                poison,
            )
            replays = whole.get_graph_report().replays
            assert replays["iteration" if temperature == 0 else "iteration.sampled"] > 0
            if overlap or drafter != "ngram":  # without overlap, a step for which nothing was drafted is plain
                assert replays["target.verify" if drafter != "none" else "target.decode"] == 0
    assert_all_free(whole)
    apart.close()
    whole.close()
