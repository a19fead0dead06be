"""A GPU's budget: the cache gets what weights, graphs and activations leave, which is measured and not guessed."""

from __future__ import annotations

import gc

import pytest
import torch

from draftloop.drafters.base import DRAFTERS, load_drafters
from draftloop.engine import build
from draftloop.engine.memory import SPARE_BYTES, MemoryLedger
from draftloop.errors import CapacityError
from example_drafters import example_configs
from heads import wide_head
from helpers import answers, engine, greedy, make_engine, oracle, prompts, tiny_model
from transformers_models import LONGER_WINDOW, tiny_of
from virtual_memory import GuardedMemory

load_drafters()
KIB, MIB = 2**10, 2**20
EAGLE3 = {"method": "eagle3", "model": wide_head("eagle3"), "num_speculative_tokens": 3}


class SmallGpu:
    """In whose place a CPU is used: 1 GiB for all, of which graphs take as much as a test says."""

    def __init__(self, *, graphs: int, budget: int = 1 << 30) -> None:
        self.graphs, self.budget, self.taken = graphs, budget, 0
        self.memory = GuardedMemory(granule=1 << 16)

    def replaces_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Ledger(MemoryLedger):
            def __init__(self, device: torch.device, utilization: float) -> None:
                super().__init__(device, utilization)
                self.budget_bytes = gpu.budget

            def in_use(self) -> int:
                return gpu.taken + gpu.memory.in_use

            def virtual_memory(self) -> GuardedMemory:
                return gpu.memory

        def capture(table, *, show: bool) -> None:
            assert gpu.memory.in_use < MIB, "graphs are captured before pages have memory"
            gpu.taken += gpu.graphs
            really_capture(table, show=show)

        monkeypatch.setattr(build, "MemoryLedger", Ledger)
        really_capture = build.capture
        monkeypatch.setattr(build, "capture", capture)


SETTINGS = {"kv_cache_memory_bytes": None, "max_num_seqs": 8, "max_model_len": 128}


@pytest.mark.parametrize("graphs", [0, 300 * MIB, 896 * MIB - 600 * KIB])
def test_pages_get_what_graphs_leave_and_all_together_fill_the_budget(monkeypatch, graphs):
    """B55"""
    gpu = SmallGpu(graphs=graphs)
    gpu.replaces_the_cpu(monkeypatch)
    llm = make_engine(**SETTINGS)
    useful = 8 * (128 // 16 + 1)  # pages of rows at full length, drafts reach over
    memory, pool = llm.engine.memory, llm.engine.pool
    assert memory.in_use() <= gpu.budget - SPARE_BYTES
    assert memory.parts["graphs and workspace"] >= graphs
    assert memory.parts["pages"] == gpu.memory.in_use == pool.nbytes_of(pool.num_pages)
    if pool.num_pages < useful:
        assert gpu.budget - SPARE_BYTES - memory.in_use() < 8 * gpu.memory.granule, "and nothing is left over"
    assert (graphs > 800 * MIB) == (pool.num_pages < useful)
    asked = prompts(9)
    assert answers(llm.generate(asked, greedy(20))) == [oracle(p, 20) for p in asked]


def test_windows_get_pages_for_what_rows_see_and_other_layers_the_rest(monkeypatch):
    gpu = SmallGpu(graphs=896 * MIB - 900 * KIB)
    gpu.replaces_the_cpu(monkeypatch)
    model = tiny_of("gemma3 of longer windows")
    llm = make_engine(model, **{**SETTINGS, "enable_prefix_caching": False, "max_num_batched_tokens": 16})
    pool = llm.engine.pool
    assert gpu.budget - SPARE_BYTES - llm.engine.memory.in_use() < 8 * gpu.memory.granule, "nothing is left over"
    assert pool.num_pages_of(LONGER_WINDOW) < pool.num_pages
    asked = prompts(4)
    assert answers(llm.generate(asked, greedy(60))) == [oracle(p, 60, model=model) for p in asked]


def test_graphs_that_leave_no_room_stop_the_start_saying_how_much_is_needed(monkeypatch):
    SmallGpu(graphs=896 * MIB).replaces_the_cpu(monkeypatch)
    with pytest.raises(CapacityError, match=r"needs \d+ MiB for a single request, but 0 MiB are left"):
        make_engine(**SETTINGS)


def test_as_many_pages_as_are_asked_for_whatever_is_left(monkeypatch):
    SmallGpu(graphs=1 << 31).replaces_the_cpu(monkeypatch)
    llm = make_engine(**{**SETTINGS, "kv_cache_memory_bytes": 1 << 20})
    assert llm.engine.pool.nbytes <= 1 << 20


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_running_everything_at_its_largest_touches_no_request(name):
    """What start-up does on a GPU to give activations their memory, whatever drafts."""
    spec = example_configs()[name][0]
    llm = engine(speculative_config=spec, cudagraph_mode="NONE")
    asked = prompts(3)
    answered = answers(llm.generate(asked, greedy(9)))
    state, caches = llm.engine.core.worker.state, llm.engine.pool.caches
    before = [cache[:, :, 1:].clone() for cache in caches], state.num_tokens_M.clone(), state.tokens_ML[:-1].clone()
    llm.engine.table.run_largest()
    for one, other in zip(before[0], caches, strict=True):
        assert torch.equal(one, other[:, :, 1:]), "padding writes to the null page alone"
    assert torch.equal(before[1], state.num_tokens_M)
    assert torch.equal(before[2], state.tokens_ML[:-1])
    if not DRAFTERS[name].forced_acceptance:  # where each request has another seed
        assert answers(llm.generate(asked, greedy(9))) == answered


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [None, EAGLE3], ids=["plain", "eagle3"])
def test_all_that_serving_takes_stays_within_the_budget_of_a_gpu_and_fills_it(spec):
    """B55: prompts at their longest, full batches and prompt logprobs, on a cache that takes all that is left."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()  # an engine of another test gives its memory back now, not while this one counts
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(device)[1]
    others = total - torch.cuda.mem_get_info(device)[0]
    share = (others + (4 << 30)) / total
    llm = make_engine(
        model=tiny_model("wide-budget", hidden=256, max_len=1 << 19),
        device="cuda",
        speculative_config=spec,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=share,
        max_num_seqs=32,
        max_model_len=1 << 18,
        max_num_batched_tokens=8192,
    )
    memory, pool = llm.engine.memory, llm.engine.pool
    assert pool.num_pages < 32 * (1 << 18) // 16, "the budget is what bounds it"
    left = memory.budget_bytes - memory.in_use()
    assert 0 <= left < SPARE_BYTES + 64 * MIB, memory.format()
    asked = [
        [(index * 31 + i * i) % 160 for i in range(length)] for index, length in enumerate([9000, 40, 700, 16] * 10)
    ]
    params = [greedy(12, prompt_logprobs=2 if index % 8 == 0 else None) for index in range(40)]
    llm.generate(asked, params)
    torch.cuda.synchronize()
    assert memory.in_use() <= memory.budget_bytes, f"{memory.format()}, of which {left / MIB:.0f} MiB were left"
