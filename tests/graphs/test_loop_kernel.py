"""The loop's kernel decides as its twin in Python does. Compiled as C++ for one thread, so that no GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftloop.engine.device_loop import make_device_loop
from draftloop.errors import GraphError
from draftloop.graphs.cuda_loop import SOURCE, _arguments, definitions
from draftloop.graphs.loop import Watched
from draftloop.graphs.ring import Ring, Stop, Word
from draftloop.kernels.cuda_source import compile_source, kept_image

ONE_THREAD = """
#define __global__
#define __device__
#define __shared__ static
static const struct { int x; } threadIdx = {0}, blockDim = {1};
static void __syncthreads() {}
static void __threadfence_system() {}
extern "C" { unsigned int goes_on; void cudaGraphSetConditional(unsigned long long, unsigned int value) { goes_on = value; } }
"""  # noqa: E501
ENGINE_ROWS, NUM_SLOTS = 9, 5
COUNTS, TOKENS = 3, 4


@functools.cache
def kernel() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.cpp", Path(folder) / "loop.so"
        source.write_text(ONE_THREAD + SOURCE.read_text())
        options = [f"-D{name}={value}" for name, value in definitions().items()]
        subprocess.run(["c++", "-shared", "-fPIC", *options, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def random_case(seed: int) -> tuple[Watched, Ring, int]:
    """A batch in which some rows end and most do not, and a ring in the middle of its life."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, below: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator, dtype=torch.int32)

    num_rows = rng.randint(1, ENGINE_ROWS - 1)
    live = rng.randint(1, num_rows)
    rows = rng.sample(range(ENGINE_ROWS - 1), live) + [ENGINE_ROWS - 1] * (num_rows - live)
    outcome_RW = numbers(num_rows, COUNTS + TOKENS, below=40)
    outcome_RW[:, 0] = numbers(num_rows, below=TOKENS + 1)
    num_tokens_M = numbers(ENGINE_ROWS, below=100)
    stop_ids_MS = torch.where(numbers(ENGINE_ROWS, 8, below=8) == 0, numbers(ENGINE_ROWS, 8, below=40), -1)
    watched = Watched(
        rows_R=torch.tensor(rows, dtype=torch.int32),
        outcome_RW=outcome_RW,
        first_token=COUNTS,
        num_tokens_M=num_tokens_M,
        max_tokens_M=num_tokens_M + numbers(ENGINE_ROWS, below=30),
        stop_ids_MS=stop_ids_MS.int(),
        padding_row=ENGINE_ROWS - 1,
    )
    ring = Ring(num_rows, COUNTS + TOKENS, device=torch.device("cpu"), num_slots=NUM_SLOTS)
    published = rng.randint(0, 30)
    ring.number.fill_(published)
    ring.words_W[Word.PUBLISHED] = published
    ring.words_W[Word.READ] = published - rng.randint(0, min(published, NUM_SLOTS - 1))
    ring.words_W[Word.LAUNCH] = rng.randint(2, 4)
    ring.words_W[Word.INTERRUPT] = rng.choice([0, 1, 2, 3])
    ring.words_W[Word.LIMIT] = published + rng.choice([1, 2, 50])
    return watched, ring, num_rows


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_it_publishes_and_decides_as_the_twin_does():
    seen = set()
    for seed in range(400):
        watched, ring, num_rows = random_case(seed)
        _, theirs, _ = random_case(seed)
        values, types = _arguments(7, num_rows, watched, ring)
        kernel().next_iteration(*(kind(value) for kind, value in zip(types, values, strict=True)))
        stop = theirs.publish(watched.outcome_RW.numpy(), row_ended=watched.row_ended(num_rows))
        assert torch.equal(ring.slots_NS, theirs.slots_NS), (seed, stop)
        assert torch.equal(ring.words_W, theirs.words_W), (seed, stop)
        assert int(ring.number) == theirs.published
        assert ctypes.c_uint.in_dll(kernel(), "goes_on").value == (stop is Stop.NONE)
        seen.add(stop)
    assert seen == set(Stop)


class Rank:
    """One of several, whose words are the host's memory."""

    def __init__(self, rank: int, words: Tensor) -> None:
        self.rank, self.size = rank, words.shape[0]
        self.addresses = torch.tensor([word.data_ptr() for word in words])
        self.symmetric = self
        self.word_addresses = self.addresses.data_ptr()
        self.clear_words = words.zero_


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_other_ranks_stop_when_the_first_one_does():
    for seed in range(40):
        words = torch.zeros(3, 1, dtype=torch.int64)
        watched, ring, num_rows = random_case(seed)
        goes_on, published = [], int(ring.number)
        for rank in range(3):
            mine = ring if rank == 0 else random_case(seed)[1]
            untouched = mine.words_W.clone()
            place = dataclasses.replace(watched, group=Rank(rank, words))
            values, types = _arguments(7, num_rows, place, mine)
            kernel().next_iteration(*(kind(value) for kind, value in zip(types, values, strict=True)))
            goes_on.append(ctypes.c_uint.in_dll(kernel(), "goes_on").value)
            assert int(mine.number) == published + 1
            assert rank == 0 or torch.equal(mine.words_W, untouched), "another rank has no host"
        assert len(set(goes_on)) == 1, (seed, goes_on)
        assert words[0] == 0


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_the_last_decision_of_an_earlier_engine_is_none_of_the_next_one():
    """Ranks and their words outlive an engine: one that read "stop after 900" would end its loop, and the other not."""
    words = torch.full((2, 1), 900 * len(Stop) + Stop.COUNT)
    watched, _, num_rows = random_case(0)
    watched.max_tokens_M.fill_(1000)
    watched.stop_ids_MS.fill_(-1)
    buffers = {"rows": watched.rows_R, "outcome": watched.outcome_RW}
    table = SimpleNamespace(buffers=buffers, repeat=lambda *_: "")
    places = [dataclasses.replace(watched, group=Rank(rank, words)) for rank in range(2)]
    loops = [make_device_loop(table, [SimpleNamespace(name="it")], watched, 8, group=one.group) for one in places]
    loops[0].ring.begin(8)

    def decide(rank: int) -> None:
        values, types = _arguments(7, num_rows, places[rank], loops[rank].ring)
        kernel().next_iteration(*(kind(value) for kind, value in zip(types, values, strict=True)))

    other = threading.Thread(target=decide, args=(1,), daemon=True)
    other.start()
    other.join(0.1)
    assert other.is_alive(), "it has not waited for rank 0"
    decide(0)
    other.join()
    assert ctypes.c_uint.in_dll(kernel(), "goes_on").value == 1
    assert [int(loop.ring.number) for loop in loops] == [1, 1]


def test_it_compiles_and_the_result_is_kept(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA builds")
    image = kept_image(SOURCE, definitions(), (9, 0), tmp_path)
    assert image.startswith(b"\x7fELF")
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"kept")
    assert kept_image(SOURCE, definitions(), (9, 0), tmp_path) == b"kept"


def test_what_the_compiler_says_is_passed_on(monkeypatch):
    """With stand-ins for the calls of NVRTC, so that no library is needed."""
    log = b"loop.cu(1): error: no such type\n\0"

    def read_log(program: str, memory: bytes) -> tuple[int]:
        ctypes.memmove(memory, log, len(log))
        return (0,)

    nvrtc = ModuleType("nvrtc")
    nvrtc.nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)
    nvrtc.nvrtcCreateProgram = lambda *arguments: (0, "program")
    nvrtc.nvrtcCompileProgram = lambda *arguments: (6,)
    nvrtc.nvrtcGetProgramLogSize = lambda program: (0, len(log))
    nvrtc.nvrtcGetProgramLog = read_log
    destroyed = []
    nvrtc.nvrtcDestroyProgram = destroyed.append
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", ModuleType("bindings"))):
        module.nvrtc = nvrtc
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(GraphError, match=r"NVRTC cannot compile loop\.cu: loop\.cu\(1\): error: no such type$"):
        compile_source(SOURCE, definitions(), (9, 0))
    assert destroyed == ["program"]
    nvrtc.nvrtcCreateProgram = lambda *arguments: (4,)
    nvrtc.nvrtcGetErrorString = lambda code: (0, b"NVRTC_ERROR_INVALID_PROGRAM")
    with pytest.raises(GraphError, match="NVRTC: NVRTC_ERROR_INVALID_PROGRAM"):
        compile_source(SOURCE, definitions(), (9, 0))
