"""`draftloop bench` with the tiles that a sweep found, before anybody has entered them into the tables.

    python -m draftloop.bench.best_tiles --linears wide.json -- latency llama-3.1-8b ...

The file is one of `sweep_wide`; `sweep_quantised` has such an option itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draftloop.bench import wide_view
from draftloop.bench.sweep_report import gpu, run_bench
from draftloop.kernels.triton_import import gpu_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", type=Path, required=True, help="a file of sweep_wide")
    parser.add_argument("arguments", nargs="+", help="of `draftloop bench`")
    args = parser.parse_args()
    wide_view.set_best(json.loads(args.linears.read_text())["rows"], gpu_name(gpu()))
    run_bench(args.arguments)


if __name__ == "__main__":
    main()
