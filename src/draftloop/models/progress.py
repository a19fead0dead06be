"""Progress bars on stderr: on terminals, or where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], description: str, unit: str, *, show: bool | None, total: int | None = None
) -> Iterator[T]:
    """Pass `items` on and count them, of `total` where they have no length; `show` None: on terminals only."""
    return iter(tqdm(items, desc=description, unit=unit, total=total, disable=None if show is None else not show))
