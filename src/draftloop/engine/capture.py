"""Capturing all graphs, with bars that show how far it is."""

from __future__ import annotations

from tqdm import tqdm

from draftloop.graphs.phase import Key
from draftloop.graphs.table import GraphTable


def capture(table: GraphTable, *, show: bool) -> None:
    total = 0 if table.recorder.on_first_use else len(table.keys())
    hide = None if show and total else True  # None: shown on terminals only
    with (
        tqdm(total=total, desc="Compiling kernels", disable=hide, leave=False) as warm_bar,
        tqdm(total=total, desc="Capturing graphs", disable=hide, leave=False) as bar,
    ):

        def progress(key: Key, total: int) -> None:
            bar.set_postfix_str(f"{key.phase}, {key.rows} rows, {key.tokens} tokens")
            bar.update()

        def warmed() -> None:
            warm_bar.update()

        table.capture(progress, warmed)
