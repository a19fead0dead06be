"""What finds races of CUDA kernels on the host (races.h): small kernels that are right and wrong, and the real ones, of
which one kind of order is forgotten at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from attention_cases import Case
from cluster_attention_host import HostAttention
from host_kernels import HostKernel
from multicast_linear_host import HostLinear
from streamed_cases import CASES
from streamed_host import HostPass

from draftloop.kernels.cluster_attention import Clusters
from draftloop.kernels.linear_multicast import MulticastTiles
from draftloop.kernels.linear_wide import Kind

SAMPLES = {
    "threads of a block meet": "",
    "threads do not meet": "written by thread .* then read by thread",
    "threads meet too early": "written by thread .* then read by thread",
    "threads of a warp meet": "",
    "another warp meets": "written by thread .* then read by thread",
    "a shuffle": "written by thread .* then read by thread",
    "halves of a word": "",
    "equal values": "written by thread .* then written by thread",
    "a copy": "",
    "a copy that is not awaited": "written by a copy of thread 0 of .* then read by thread 0",
    "a copy that another awaits": "written by a copy of thread 0 of .* then read by thread 1",
    "a barrier": "",
    "a barrier that is not awaited": "written by thread 0 of .* then read by thread 40|read .* then written",
    "a barrier that others make": "written by thread 0 of .* then stored as a word by thread",
    "a released word": "",
    "a word": r"handed_on \+ 0: written by .* block 0 .* then read by thread 0 of block 1",
    "a word to a place behind a fence": "",
    "a word to a place without a fence": r"handed_on \+ 0: written by .* then stored as a word by thread 0 of block 1",
    "what was read": "",
    "what may still be read": r"handed_on \+ 0: read by .* then written by thread 0 of block 1",
    "a block that others wait for": "",
    "a block that may have ended": "block 0 .* stored as a word by thread 0 of block 1 .* then the block ended",
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return HostKernel("races_host.cpp", {}, tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize(("name", "race"), SAMPLES.items(), ids=SAMPLES)
def test_small_kernels(samples: HostKernel, name: str, race: str) -> None:
    found = samples.launch(name.encode())
    assert any(re.search(race, one) for one in found) if race else not found, found


STREAMED = {
    "syncthreads": "written by thread 0 of .* then (loaded|stored) as a word by thread 256",
    "syncwarp": "read by thread .* then written by the copy engine",
    "named_barrier": "shared memory .* then read by thread",
    "mbarrier": "read by thread .* then written by the copy engine",
    "copy_engine": "written by the copy engine .* then read by thread",
    "shown_barriers": "a barrier that copies were not shown",
    "threads_copies": "written by a copy of thread .* then read by thread",
    "words": "handed_on .* loaded as a word .* then written by thread",
    "counter": "handed_on .* written by thread .* then (loaded|stored) as a word",
    "threadfence": "handed_on .* written by thread .* then stored as a word",
}
MULTICAST = {
    "cluster_barrier": "written by thread 0 of .* then stored as a word by the copy engine",
    "mbarrier": "read by products .* then written by the copy engine",
    "copy_engine": "written by the copy engine .* then read by products",
    "shown_barriers": "a barrier that copies were not shown",
    "products": "read by products .* then written by the copy engine",
}

ATTENTION = {
    "cluster_barrier": "written by thread .* then read by thread",
    "syncthreads": "read by thread .* then written by a copy of thread|written by thread .* then read by thread",
    "threads_copies": "written by a copy of thread .* then read by thread",
}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPass]:
    """Of more layers than there are sets of what is handed on: those that were wiped are used again."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        yield HostPass(CASES[-1], tmp_path_factory.mktemp("streamed"), patch)


@pytest.fixture(scope="module")
def multicast(tmp_path_factory: pytest.TempPathFactory) -> HostLinear:
    x, weight, bias = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((70, 256), (256, 256), (256,)))
    tiles = MulticastTiles(128, 1, 2, True, 3, 192)
    return HostLinear(x, weight, bias, Kind.GATED, tiles, tmp_path_factory.mktemp("multicast"))


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> HostAttention:
    """Of more keys than there are stages for."""
    case = Case(lens=((2, 450),), heads=2, kv_heads=1, uniform=True)
    return HostAttention(case, Clusters(2), tmp_path_factory.mktemp("attention"))


@pytest.mark.parametrize("forgotten", STREAMED)
def test_a_pass_needs_each_kind_of_order(streamed: HostPass, forgotten: str) -> None:
    found = streamed.run(0, forgotten)
    assert any(re.search(STREAMED[forgotten], one) for one in found), found


@pytest.mark.parametrize("forgotten", MULTICAST)
def test_a_linear_needs_each_kind_of_order(multicast: HostLinear, forgotten: str) -> None:
    found = multicast.run(0, forgotten)
    assert any(re.search(MULTICAST[forgotten], one) for one in found), found


@pytest.mark.parametrize("forgotten", ATTENTION)
def test_attention_needs_each_kind_of_order(attention: HostAttention, forgotten: str) -> None:
    assert not attention.run(0)
    found = attention.run(0, forgotten)
    assert any(re.search(ATTENTION[forgotten], one) for one in found), found
