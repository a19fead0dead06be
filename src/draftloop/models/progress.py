"""Progress bars on stderr: on terminals, or where asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(items: Iterable[T], description: str, unit: str, *, show: bool | None) -> Iterator[T]:
    """Pass `items` on and count them; `show` None means on terminals only."""
    return iter(tqdm(items, desc=description, unit=unit, disable=None if show is None else not show))
