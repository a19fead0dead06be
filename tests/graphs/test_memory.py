"""Memory ends while graphs are captured: what fits is used, and what does not is said."""

from __future__ import annotations

import logging

import pytest
import torch
from sample_phases import simple_phase

from draftloop.errors import CapacityError, GraphError
from draftloop.graphs.phase import Phase, chain
from draftloop.graphs.tape import TapeRecorder
from helpers import make_table


class SmallRecorder(TapeRecorder):
    """Has no memory for graphs of 4 rows."""

    on_first_use = False

    def record(self, body, *, piecewise, repeats=False):
        program = super().record(body, piecewise=piecewise, repeats=repeats)
        if self.rows == 4:
            raise CapacityError("1 GiB asked for, 20 MiB free")
        return program


def small_table(phases: list[Phase], **options):
    table = make_table(phases, capture=False, recorder=(recorder := SmallRecorder()), **options)
    table.capture(progress=lambda key, total: setattr(recorder, "rows", key.rows))
    return table


def test_a_graph_without_memory_is_named_and_its_batches_run_without_it(caplog):
    with caplog.at_level(logging.WARNING):
        table = small_table([simple_phase()])
    assert "no memory for the graph of double at 4 rows" in caplog.text
    assert "20 MiB free" in caplog.text
    assert "--gpu-memory-utilization" in caplog.text
    assert table.key_for("double", 2) is not None
    assert table.key_for("double", 3) is None
    x = torch.arange(3.0)
    (out,) = table.run("double", 3, {"x": x}).values()
    assert torch.equal(out, 2 * x)
    (row,) = [row for row in table.report().rows if row.eager_runs]
    assert row.reason == "memory did not suffice for a graph of this size"


def test_a_chain_without_memory_is_not_covered():
    phase = simple_phase()
    table = small_table([phase, chain("both", [phase, phase])])
    assert table.covers("both", 2)
    assert not table.covers("both", 4)


def test_where_graphs_are_required_it_is_an_error():
    with pytest.raises(GraphError, match=r"--require-graphs: no memory for the graph of double at 4 rows"):
        small_table([simple_phase()], require_graphs=True)


@pytest.mark.gpu
def test_a_capture_that_runs_out_of_device_memory_is_told_apart():
    from draftloop.graphs.cuda import CudaRecorder

    device = torch.device("cuda")
    recorder = CudaRecorder(device)

    def body(attend) -> None:
        torch.empty(1 << 42, dtype=torch.uint8, device=device)

    with pytest.raises(CapacityError, match="out of memory"):
        recorder.record(body, piecewise=False)
    kept = torch.zeros(4, device=device)
    recorder.record(lambda attend: kept.add_(1), piecewise=False).replay()
    torch.cuda.synchronize()
    assert kept.eq(1).all(), "the next one is captured as ever"
