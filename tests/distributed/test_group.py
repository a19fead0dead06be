"""Collectives, eager and replayed: the same on every rank."""

from __future__ import annotations

import pytest
import torch

from draftloop.distributed.group import ALONE, Group, _machine, _symmetric
from draftloop.distributed.symmetric import SymmetricMemory
from draftloop.graphs.program import in_place
from draftloop.graphs.tape import TapeRecorder
from ranks import on_ranks


def _collectives(group: Group) -> dict[str, torch.Tensor | list[int]]:
    x = torch.arange(8.0).view(4, 2) + 100 * group.rank
    inside, across = group.divide(1)
    assert (inside.size, across.size) == (1, group.size)
    with group.quiet():
        quiet = group.all_gather(x, -1)
    memory, out = torch.zeros(4, 2), torch.zeros(4, 4)

    def body(attend) -> None:
        out.copy_(group.all_gather(group.all_reduce(memory), 1))

    tape = TapeRecorder().record(body, piecewise=False)
    memory.copy_(x)
    tape.replay()
    found = {
        "sum": group.all_reduce(x),
        "rows": group.all_gather(x),
        "columns": group.all_gather(x, -1, out=torch.zeros(4, 4)),
        "part": group.reduce_scatter(x),
        "bf16": group.all_reduce(x.bfloat16()),
        "int": group.all_gather(x.int()),
        "replayed": out,
        "num ops": [len(tape._ops)],
        "quiet": quiet,
        "max": group.max([group.rank, -group.rank]),
        "min": group.min([group.rank, 5]),
        "input": x,
    }
    return found


def test_every_rank_gets_the_same():
    first, second = on_ranks(_collectives, 2)
    x, y = first["input"], second["input"]
    for found in (first, second):
        assert torch.equal(found["sum"], x + y)
        assert torch.equal(found["rows"], torch.cat([x, y]))
        assert torch.equal(found["columns"], torch.cat([x, y], 1))
        assert torch.equal(found["bf16"], (x + y).bfloat16())
        assert torch.equal(found["int"], torch.cat([x, y]).int())
        assert torch.equal(found["replayed"], torch.cat([x + y, x + y], 1))
        assert found["num ops"] == [3], "a collective is one op of a tape"
        assert (found["max"], found["min"]) == ([1, 0], [0, 5])
    assert torch.equal(torch.cat([first["part"], second["part"]]), x + y)
    assert torch.equal(first["quiet"], torch.cat([x, x], 1)), "a quiet group hears nobody"


def test_one_rank_alone_does_nothing():
    x = torch.randn(4, 2)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x, 1) is x
    assert ALONE.reduce_scatter(x) is x
    assert ALONE.max([3]) == [3]


def test_parts_that_do_not_fill_a_group_are_refused():
    with pytest.raises(ValueError, match="1 ranks cannot be divided into parts of 2"):
        ALONE.divide(2)


class Beside(Group):
    """Of two ranks one; the other has these numbers."""

    def __init__(self, others: list[int]) -> None:
        super().__init__()
        self.others = others

    def max(self, values):
        return list(map(max, values, self.others)) if len(values) == len(self.others) else list(values)


@pytest.mark.parametrize(
    ("num_made", "machine", "why"),
    [
        (1, _machine(), "some ranks have met others before; make the next engine in a process of its own"),
        (0, _machine() ^ 1, "ranks are on several machines"),
    ],
)
def test_ranks_that_cannot_meet_in_memory_do_not_wait_for_each_other(num_made, machine, why, monkeypatch, caplog):
    """Torch counts a process's meetings, and finds other processes by their numbers on this machine."""
    monkeypatch.setattr(SymmetricMemory, "__init__", None)
    other = Beside([num_made, -num_made, machine, -machine])
    assert _symmetric(None, other, torch.device("cpu")) is None
    assert caplog.messages == [f"GPUs do not read each other's memory, all that they exchange goes through NCCL: {why}"]


def _on_gpus(group: Group) -> list[torch.Tensor]:
    from torch.distributed import group as groups

    from draftloop.graphs.cuda import CudaRecorder

    device = torch.device("cuda", group.rank)
    fast = Group(groups.WORLD, SymmetricMemory(groups.WORLD, device))
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1, 64), (48, 4096), (300, 8192)):
            generator = torch.Generator("cuda").manual_seed(group.rank)
            x = torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
            out = torch.empty(shape[0], 2 * shape[1], device=device, dtype=dtype)

            def body(attend, x=x, out=out) -> None:
                fast.all_gather(fast.all_reduce(x) + group.rank, -1, out=out)

            body(in_place)
            expected = out.clone()
            program = CudaRecorder(device, fast).record(body, piecewise=False)
            for _ in range(20):
                program.replay()
            assert torch.equal(out, expected), (dtype, shape)
            everyone = group.all_gather(x)
            total = everyone[: shape[0]].float() + everyone[shape[0] :].float()
            torch.testing.assert_close(out[:, : shape[1]].float(), total, atol=0.05, rtol=0.01)
            torch.testing.assert_close(out[:, shape[1] :].float(), total + 1, atol=0.05, rtol=0.01)
            found.append(out.cpu())
    return found


@pytest.mark.gpu
def test_captured_collectives_of_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for first, second in zip(*on_ranks(_on_gpus, 2, "cuda"), strict=True):
        assert torch.equal(first, second)
