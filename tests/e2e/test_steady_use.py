"""Nothing is compiled, captured or allocated once the engine is warm: field cases B55 and B59."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import random
from collections.abc import Iterator

import pytest
import torch

import draftloop.kernels
from draftloop.kernels.triton_import import triton
from draftloop.request import SamplingParams
from draftloop.scheduler.batch import Sequence
from heads import wide_head
from helpers import make_engine, prompts, tiny_model

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = (1, 2, 4, 8, 16)


def warm_engine(device: str, **settings):
    head = {"method": "eagle3", "model": wide_head("eagle3"), "num_speculative_tokens": 3}
    return make_engine(
        model=tiny_model("wide", hidden=256),
        device=device,
        max_num_seqs=16,
        cudagraph_capture_sizes=SIZES,
        speculative_config=head,
        **settings,
    )


def requests(count: int, *, longest: int = 24) -> tuple[list, list[SamplingParams]]:
    """Prompts of every length, greedy and sampled, some without drafts to accept."""
    rng = random.Random(7)
    asked = prompts(count)
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            seed=i,
            max_tokens=rng.randint(1, longest),
        )
        for i in range(count)
    ]
    return asked, params


@DEVICES
def test_graphs_and_memory_stay_as_they_are_over_many_requests(device):
    """B55: after a while, neither graphs nor memory, the device's or the host's, grow with the number of requests."""
    llm = warm_engine(device)
    table = llm.engine.table

    def standing() -> tuple[int, int, int]:
        gc.collect()
        reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
        kept = sum(type(one) is Sequence for one in gc.get_objects())
        return sum(entry.program is not None for _, entry in table._captured.items()), reserved, kept

    # prompts that are found again run in other batches than those that are not
    for asked, params in (requests(30), requests(40), requests(40, longest=6), requests(40, longest=6)):
        llm.generate(asked, params)
    before = standing()
    for _ in range(2):
        llm.generate(*requests(40, longest=6))
    assert standing() == before
    assert device == "cpu" or not any(llm.get_graph_report().eager_runs.values()), "prompts are eager on a CPU"


def compiled_kernels() -> Iterator[tuple[str, int]]:
    """Every kernel of ours, and how many variants of it are loaded."""
    package = draftloop.kernels
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.runtime.jit.JITFunction):
                yield f"{module.name}.{name}", sum(len(cache[0]) for cache in value.device_caches.values())


@pytest.mark.gpu
def test_no_kernel_is_compiled_while_serving():
    """B59: batches of 1 to 16 rows, whatever is accepted, sampled or not, after start-up alone."""
    llm = warm_engine("cuda")
    before = dict(compiled_kernels())
    assert sum(before.values()) > 5, "kernels are found where they are kept"
    for count in range(1, 17):
        llm.generate(*requests(count))
    assert dict(compiled_kernels()) == before
