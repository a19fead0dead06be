"""`draftloop bench` with the tiles that sweeps found, before anybody has entered them into the tables.

    python -m draftloop.bench.best_tiles --linears wide.json --attention attention.json -- latency llama-3.1-8b ...

The files are those of `sweep_wide` and `sweep_attention`; `sweep_quantised` has such an option itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftloop.bench import sweep_attention, wide_view
from draftloop.bench.sweep_report import gpu, run_bench
from draftloop.kernels.triton_import import gpu_name


def rows_of(file: Path | None) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"] if file else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", type=Path, help="a file of sweep_wide")
    parser.add_argument("--attention", type=Path, help="a file of sweep_attention")
    parser.add_argument("arguments", nargs="+", help="of `draftloop bench`")
    args = parser.parse_args()
    wide_view.set_best(rows_of(args.linears), gpu_name(gpu()))
    sweep_attention.set_best(rows_of(args.attention))
    run_bench(args.arguments)


if __name__ == "__main__":
    main()
