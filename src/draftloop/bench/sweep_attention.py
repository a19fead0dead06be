"""How attention of few tokens a row is launched fastest: what `kernels.attention_tiles.MEASURED` is made of.

    python -m draftloop.bench.sweep_attention --out sweep.json      # on the GPU; keeps what it has when cut off
    python -m draftloop.bench.sweep_attention --entries sweep.json  # anywhere: the table's entries
    python -m draftloop.bench.best_tiles --attention sweep.json -- latency ...   # `draftloop bench` with them

Times are those of both kernels, that of the splits and that which combines them. Whether lengths and page numbers are
read early is tried on what was fastest without.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftloop.attention.base import AttentionBackend
from draftloop.bench import kernels
from draftloop.bench.kernels import BYTES_PER_SECOND, attention_batches, kv_bytes, make_backend, time_us
from draftloop.bench.sweep_report import GAIN, SweepReport, attempting, complaints, gpu, relative_error, usable
from draftloop.kernels.attention_tiles import MAX_SPLITS, MEASURED, Launch, Shape
from draftloop.kernels.linear import sm_count
from draftloop.kernels.paged_attention import paged_attention_triton
from draftloop.kernels.triton_import import next_power_of_2, pdl_options

CASES = ("8x6x768", "32x6x768", "32x1x768")
"""Rows, tokens of each and its keys."""
PAGE_SIZE = 16
PROGRAMS_PER_SM = (1, 2, 3, 4, 6)
FINALISTS = 4


class Case(NamedTuple):
    shape: Shape
    num_keys: int


def parse_case(text: str, num_sms: int) -> Case:
    """Of ROWSxTOKENSxKEYS. Raises ValueError for anything else."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{text!r} is no case of attention; one is ROWSxTOKENSxKEYS, as in {CASES[0]}")
    rows, query_len, num_keys = map(int, numbers)
    group = kernels.HEADS // kernels.KV_HEADS
    return Case(Shape(num_sms, rows, query_len, group, kernels.KV_HEADS, kernels.HEAD_DIM), num_keys)


def candidates(case: Case) -> list[Launch]:
    """Programs of one product's 16 rows, or of all tokens of a row; no more splits than make some for each SM."""
    shape = case.shape
    whole = max(16, next_power_of_2(shape.query_len * shape.group))
    found = []
    for block_m, block_n, warps, stages in itertools.product({16, whole}, (16, 32, 64), (1, 2, 4), (2, 3, 4, 5)):
        if block_m < whole and (stages != 3 or block_n == 16):
            continue  # rows' keys are read more than once: tried, not swept
        if block_m * (shape.head_dim + block_n) > 2560 * warps:
            continue  # sums and scores are more than registers hold
        programs = shape.num_rows * -(-shape.query_len // (block_m // shape.group)) * shape.num_kv_heads
        most = min(MAX_SPLITS, -(-case.num_keys // block_n))
        splits = {max(1, min(most, shape.num_sms * per_sm // programs)) for per_sm in PROGRAMS_PER_SM}
        found += [Launch(block_m, block_n, warps, stages, count) for count in sorted(splits)]
    return found


def attention(backend: AttentionBackend, case: Case) -> Callable[[Launch | None], list[Callable[[], Tensor]]]:
    """A launch, or today's -> calls over pages that no recent one has read. Each returns what it wrote."""
    shape, num_keys = case
    q, kv, batches = attention_batches(backend, shape.num_rows, shape.query_len, num_keys, uniform=True)
    pdl = bool(pdl_options(backend.device)["PDL"])

    def calls(launch: Launch | None) -> list[Callable[[], Tensor]]:
        out, page_table = torch.empty_like(q), batches[0].page_table_MN
        tiles = None if launch is None else launch.tiles(shape, page_table.shape[1] * PAGE_SIZE)

        def attend(batch: Any) -> Tensor:
            paged_attention_triton(
                q,
                kv,
                batch.rows_R,
                batch.query_starts_R1,
                batch.kv_lens_R,
                batch.page_table_MN,
                out,
                query_len=shape.query_len,
                causal=True,
                window=0,
                scale=backend.shape.scale,
                num_sms=shape.num_sms,
                pdl=pdl,
                tiles=tiles,
            )
            return out

        return [functools.partial(attend, batch) for batch in batches]

    return calls


class Sweep:
    """One case, of which all but the finalists' variants compiles from the beginning."""

    def __init__(self, case: Case, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self.case, self._pool = case, pool
        self.calls = attention(make_backend("triton", PAGE_SIZE, device), case)
        self.compiled = self._compile(candidates(case))

    def _compile(self, launches: Sequence[Launch]) -> dict[Launch, Future[Tensor]]:
        """One kernel serves any number of splits, and one that does not split."""
        kernels: dict[Launch, Future[Tensor]] = {}
        for launch in launches:
            kernel = launch._replace(num_splits=min(launch.num_splits, 2))
            if kernel not in kernels:
                kernels[kernel] = self._pool.submit(lambda launch=launch: self.calls(launch)[0]())
        return {launch: kernels[launch._replace(num_splits=min(launch.num_splits, 2))] for launch in launches}

    @torch.inference_mode()
    def measure(self) -> dict[str, Any]:
        shape, num_keys = self.case
        wait(self.compiled.values())  # compiling launches too, which would be measured
        today = self.calls(None)
        expected, today_us = today[0]().clone(), time_us(today, repeats=7)[0]
        results = [self._result(launch, expected) for launch in self.compiled]
        results.sort(key=_us)
        finalists = [Launch(*result["launch"])._replace(reads_early=True) for result in usable(results)[:FINALISTS]]
        self.compiled |= self._compile(finalists)
        wait(self.compiled.values())
        results += [self._result(launch, expected) for launch in finalists]
        num_bytes = kv_bytes(shape.num_rows, num_keys) + 2 * expected.nbytes
        return {
            "shape": list(shape),
            "keys": num_keys,
            "floor_us": num_bytes / BYTES_PER_SECOND * 1e6,
            "today_us": today_us,
            "results": sorted(results, key=_us),
        }

    def _result(self, launch: Launch, expected: Tensor) -> dict[str, Any]:
        result: dict[str, Any] = {"launch": list(launch)}
        with attempting(result):
            self.compiled[launch].result()
            calls = self.calls(launch)
            result["error"] = relative_error(calls[0](), expected)
            result["us"] = time_us(calls, repeats=7)[0]
        return result


def _us(result: dict[str, Any]) -> float:
    return result.get("us", float("inf"))


def table(row: dict[str, Any]) -> Iterator[str]:
    shape, today = Shape(*row["shape"]), row["today_us"]
    yield f"{shape.num_rows} x {shape.query_len}, {row['keys']} keys: floor {row['floor_us']:.1f}, today {today:.2f} us"
    for result in usable(row["results"])[:6]:
        yield f"    {result['us']:6.2f} us {result['us'] / today:5.2f}  {Launch(*result['launch'])}"
    yield from complaints(row["results"], lambda result: str(Launch(*result["launch"])))


def best(rows: Sequence[dict[str, Any]]) -> dict[Shape, tuple[Launch, str]]:
    """Entries of `MEASURED`, with what to say of each."""
    found = {}
    for row in rows:
        fastest = usable(row["results"])[:1]
        if fastest and fastest[0]["us"] < GAIN * row["today_us"]:
            said = f"{fastest[0]['us']:.1f} us, without {row['today_us']:.1f} ({row['keys']} keys)"
            found[Shape(*row["shape"])] = Launch(*fastest[0]["launch"]), said
    return found


def set_best(rows: Sequence[dict[str, Any]]) -> None:
    """Have the engine serve with what these rows found, in this process."""
    MEASURED.update({shape: launch for shape, (launch, _) in best(rows).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; written anew after every case")
    parser.add_argument("--entries", type=Path, help="print the table's entries of such a file, and measure nothing")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="ROWSxTOKENSxKEYS")
    parser.add_argument("--seconds", type=float, default=60, help="start no new case after this long")
    args = parser.parse_args()
    if args.entries:
        print("# kernels/attention_tiles.py")
        for shape, (launch, said) in best(json.loads(args.entries.read_text())["rows"]).items():
            print(f"Shape{tuple(shape)}: Launch{tuple(launch)},  # {said}")
        return
    report, device = SweepReport(args.out, args.seconds), gpu()
    cases = [parse_case(text, sm_count(device)) for text in args.cases]
    with ThreadPoolExecutor(16) as pool:
        sweeps = [Sweep(case, pool, device) for case in cases]
        for sweep in sweeps:
            wait([compiled for other in sweeps for compiled in other.compiled.values()])
            if report.is_late():
                break
            row = sweep.measure()
            report.add(row, table(row))


if __name__ == "__main__":
    main()
