"""The CPU tape has the semantics of a captured CUDA graph, so that their faults fail on a laptop too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftloop.errors import GraphError
from draftloop.graphs.program import Attend
from draftloop.graphs.tape import Tape, TapeRecorder, poison_

KINDS = pytest.mark.parametrize("piecewise", [False, True], ids=["registers", "static"])


def record(fn: Callable[[], Tensor], out: Tensor, *, piecewise: bool) -> Tape:
    """Record `out <- fn()`, as the table does."""

    def body(attend: Attend) -> None:
        out.copy_(fn())

    return TapeRecorder().record(body, piecewise=piecewise)


def replay(tape: Tape) -> None:
    tape.poison()
    tape.replay()


@KINDS
def test_replay_reads_static_inputs_of_the_moment(piecewise):
    x, out, weight = torch.zeros(4, 8), torch.empty(4, 6), torch.randn(8, 6)
    tape = record(lambda: torch.relu(x @ weight).cumsum(1), out, piecewise=piecewise)
    for _ in range(3):
        x.normal_()
        replay(tape)
        assert torch.equal(out, torch.relu(x @ weight).cumsum(1))


@KINDS
def test_python_scalars_and_branches_are_frozen(piecewise):
    x, out, settings = torch.ones(4), torch.empty(4), {"factor": 2, "add": True}
    tape = record(
        lambda: x * settings["factor"] + 1 if settings["add"] else x * settings["factor"], out, piecewise=piecewise
    )
    settings.update(factor=5, add=False)
    replay(tape)
    assert out.tolist() == [3.0] * 4


@KINDS
def test_device_scalars_are_not_frozen(piecewise):
    x, out, factor = torch.ones(4), torch.empty(4), torch.tensor(2.0)
    tape = record(lambda: x * factor, out, piecewise=piecewise)
    factor.fill_(5)
    replay(tape)
    assert out.tolist() == [5.0] * 4


HOST_READS = {
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "range": lambda x: list(range(x.sum().int())),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask_index": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "where_without_values": lambda x: torch.where(x > 0),
    "argwhere": lambda x: torch.argwhere(x > 0),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(),
    "mask_assignment": lambda x: x.index_put_((x > 0,), torch.zeros(3)),
}


@KINDS
@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused(name, piecewise):
    x = torch.ones(3)
    with pytest.raises(GraphError, match="capture"):
        TapeRecorder().record(lambda attend: HOST_READS[name](x), piecewise=piecewise)
    assert x.sum().item() == 3, "reading is allowed again once recording is over"


@KINDS
def test_one_value_may_be_assigned_by_mask(piecewise):
    x, out = torch.zeros(3), torch.empty(3)

    def body() -> Tensor:
        y = x + 1
        y[y > 2] = -1
        return y

    tape = record(body, out, piecewise=piecewise)
    x.copy_(torch.tensor([0.0, 5, 1]))
    replay(tape)
    assert out.tolist() == [1, -1, 2]


@KINDS
def test_in_place_writes_reach_memory_outside_of_the_tape(piecewise):
    cache, slots, keys = torch.zeros(10, 2), torch.zeros(3, dtype=torch.long), torch.zeros(3, 2)
    tape = TapeRecorder().record(lambda attend: cache.index_copy_(0, slots, keys), piecewise=piecewise)
    slots.copy_(torch.tensor([4, 5, 6]))
    keys.fill_(7)
    replay(tape)
    assert cache[4:7].eq(7).all()
    assert cache[7:].eq(0).all()


@KINDS
def test_in_place_writes_to_results_are_seen_through_views(piecewise):
    x, out = torch.zeros(2, 3), torch.empty(2, 3)

    def body() -> Tensor:
        y = x + 1
        y[:, 1].mul_(10)  # a view of a result
        y.view(-1)[0] = -1
        return y

    tape = record(body, out, piecewise=piecewise)
    x.fill_(1)
    replay(tape)
    assert out.tolist() == [[-1, 20, 2], [2, 20, 2]]


@KINDS
def test_views_and_slices_of_static_inputs_follow_them(piecewise):
    x, out = torch.zeros(4, 4), torch.empty(2, 2)
    tape = record(lambda: x[1:3].transpose(0, 1)[1:3].contiguous(), out, piecewise=piecewise)
    x.copy_(torch.arange(16).view(4, 4))
    replay(tape)
    assert torch.equal(out, x[1:3].T[1:3])


@KINDS
def test_a_conversion_that_only_sometimes_copies_is_not_folded(piecewise):
    """`.to()` of the same type is a view of its input; of another type it is a new value each time."""
    short, long = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    out = torch.empty(2, 3, dtype=torch.int64)
    tape = record(lambda: torch.stack([short.to(torch.int64), long.to(torch.int64)]), out, piecewise=piecewise)
    short.copy_(torch.tensor([1, 2, 3]))
    long.copy_(torch.tensor([4, 5, 6]))
    replay(tape)
    assert out.tolist() == [[1, 2, 3], [4, 5, 6]]


@KINDS
@pytest.mark.parametrize("shape", ["reshape", "flatten", "contiguous"])
def test_a_reshape_that_only_sometimes_copies_is_not_folded(shape, piecewise):
    x, out = torch.zeros(3, 2), torch.empty(2, 6)
    kinds = {
        "reshape": lambda t: t.reshape(6),
        "flatten": lambda t: t.flatten(),
        "contiguous": lambda t: t.contiguous().view(6),
    }
    tape = record(lambda: torch.stack([kinds[shape](x), kinds[shape](x.T)]), out, piecewise=piecewise)
    x.copy_(torch.arange(6).view(3, 2))
    replay(tape)
    assert out.tolist() == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 3, 5]]


@KINDS
def test_a_kept_output_is_overwritten_by_the_next_replay(piecewise):
    x, out = torch.zeros(2), torch.empty(2)
    tape = record(lambda: x + 1, out, piecewise=piecewise)
    x.fill_(1)
    replay(tape)
    kept, copied = out, out.clone()
    x.fill_(9)
    replay(tape)
    assert (kept.tolist(), copied.tolist()) == ([10, 10], [2, 2])


@KINDS
@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(2), lambda: torch.empty_like(torch.ones(2)), lambda: torch.ones(2).new_empty(2)],
    ids=["empty", "empty_like", "new_empty"],
)
def test_poison_finds_reads_of_memory_that_was_never_written(make, piecewise):
    out = torch.zeros(2)

    def body() -> Tensor:
        scratch = make()
        scratch[:1].fill_(1)  # half of it is forgotten
        return scratch

    tape = record(body, out, piecewise=piecewise)
    replay(tape)
    assert out[0] == 1
    assert out[1].isnan()


@KINDS
def test_poison_spares_what_is_written_before_it_is_read(piecewise):
    x, out = torch.zeros(2, 3), torch.zeros(2, 3)

    def body() -> Tensor:
        scratch = torch.empty(2, 3)
        torch.add(x, 1, out=scratch)
        first, second = scratch.split(1)
        return torch.cat([second, first]).softmax(-1)

    tape = record(body, out, piecewise=piecewise)
    for value in range(3):
        x.copy_(torch.arange(6).view(2, 3) * value)
        replay(tape)
        assert torch.equal(out, (x + 1).flip(0).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_poison_is_no_value_that_anybody_means(dtype):
    memory = torch.zeros(3, dtype=dtype)
    poison_(memory)
    if dtype.is_floating_point:
        assert memory.isnan().all()
    elif dtype in (torch.int32, torch.int64):
        assert (memory < -(2**29)).all()
    elif dtype is torch.bool:
        assert memory.all()


def test_calls_between_segments_see_the_values_of_the_moment():
    x, out, seen = torch.zeros(3), torch.empty(3), []

    def body(attend: Attend) -> None:
        query, result = x * 2, torch.empty(3)

        def call() -> None:  # reads on the host, as an attention backend between segments may
            seen.append(query.tolist())
            result.copy_(query + len(seen))

        attend(call)
        out.copy_(result * 10)

    tape = TapeRecorder().record(body, piecewise=True)
    for value in (1, 5):
        x.fill_(value)
        replay(tape)
    assert seen == [[0] * 3, [2] * 3, [10] * 3]
    assert out.tolist() == [130.0] * 3


def test_a_full_recording_takes_the_call_in_place():
    x, out = torch.zeros(3), torch.empty(3)

    def body(attend: Attend) -> None:
        result = torch.empty(3)
        attend(lambda: result.copy_(x + 1))
        out.copy_(result)

    tape = TapeRecorder().record(body, piecewise=False)
    x.fill_(4)
    replay(tape)
    assert out.tolist() == [5.0] * 3


def test_a_full_recording_refuses_a_call_that_reads_on_the_host():
    x = torch.zeros(3)
    with pytest.raises(GraphError, match="tolist"):
        TapeRecorder().record(lambda attend: attend(lambda: x.tolist()), piecewise=False)


@KINDS
def test_ops_with_several_results_and_nested_arguments(piecewise):
    x, out = torch.zeros(2, 4), torch.empty(2, 6)

    def body() -> Tensor:
        values, indices = x.topk(2)
        low, high = x.aminmax(dim=1)
        return torch.cat([values, indices.float(), low[:, None], high[:, None]], 1)

    tape = record(body, out, piecewise=piecewise)
    x.copy_(torch.tensor([[3.0, 1, 4, 1.5], [9, 2, 6, 5]]))
    replay(tape)
    assert out.tolist() == [[4, 3, 2, 0, 1, 4], [9, 6, 0, 2, 2, 9]]


def test_registers_are_dropped_after_their_last_use():
    """A tape must not hold a value of every op: a model's worth of activations for each size."""
    x, out = torch.zeros(64), torch.empty(64)
    tape = record(lambda: ((x + 1) * 2 - 3).relu(), out, piecewise=False)
    freed = [register for op in tape._ops for register in op.frees]
    assert sorted(freed) == list(range(tape._count))
    assert all(op.out is None for op in tape._ops)
