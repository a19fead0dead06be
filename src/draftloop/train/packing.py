"""Documents into rows of one length, rows into steps, the same for the same seed.

Shape suffixes: B rows of a step, L tokens of a row.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftloop.errors import ConfigError
from draftloop.train.recording import Documents

HELD_OUT_TOKENS = 131_072
"""Held out at most, unless more is asked for."""
OPENING_TOKENS = 64
"""Documents that agree so far are taken for the same."""
OPEN_ROWS = 64
"""Rows that are being filled at a time; more waste less of each, and take longer to pack."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of documents; the fields are those of `Batch`."""

    token_ids_BL: Tensor
    document_BL: Tensor
    position_BL: Tensor
    learn_BL: Tensor
    documents: list[list[int]]
    """Per row, the numbers of its documents in order."""

    @property
    def num_learnt(self) -> int:
        """Tokens to learn, counted where the rows are."""
        return int(self.learn_BL.sum())

    def part(self, rows: slice) -> PackedRows:
        tensors = {name: value[rows] for name, value in vars(self).items()}
        return PackedRows(**tensors)

    def pinned(self) -> PackedRows:
        """In memory that a GPU reads while the host goes on."""
        tensors = {name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return PackedRows(**tensors, documents=self.documents)

    def to(self, device: torch.device) -> PackedRows:
        tensors = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return PackedRows(**tensors, documents=self.documents)


def split(documents: Documents, held_out_tokens: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the documents to train on, and of those to measure with: greedy ones, if there are enough.

    A target invents some prompts again and again. What begins as a document does that is measured with is not
    trained on, or learning by heart would look like acceptance.

    Raises ConfigError where more is held out than a fifth of what there is.
    """
    total = int(documents.lengths.sum())
    if held_out_tokens is None:
        held_out_tokens = min(HELD_OUT_TOKENS, total // 10)
    if held_out_tokens * 5 > total:
        raise ConfigError(
            f"--held-out-tokens is {held_out_tokens}, but there are {total} tokens, of which a fifth may be held out; "
            "lower it, or record more"
        )
    order = np.random.default_rng(seed).permutation(len(documents))
    greedy = documents.temperature[order] == 0
    order = np.concatenate([order[greedy], order[~greedy]])
    count = int(np.searchsorted(np.cumsum(documents.lengths[order]), held_out_tokens)) + 1
    measured = {_opening(documents, index) for index in order[:count]}
    trained = [index for index in order[count:] if _opening(documents, index) not in measured]
    return np.sort(np.array(trained, dtype=order.dtype)), np.sort(order[:count])


def _opening(documents: Documents, index: int) -> bytes:
    start, end = documents.starts[index : index + 2]
    return documents.token_ids[start : min(end, start + OPENING_TOKENS)].tobytes()


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Put documents, in order, into the fullest open row that has room. Returns the documents of each row."""
    done: list[list[int]] = []
    rooms: list[int] = []  # ascending, beside their rows
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room, row = rooms.pop(at), rows.pop(at)
        else:
            if len(rooms) == OPEN_ROWS:
                rooms.pop(0)
                done.append(rows.pop(0))
            room, row = row_tokens, []
        row.append(index)
        at = bisect.bisect_left(rooms, room - length)
        rooms.insert(at, room - length)
        rows.insert(at, row)
    return done + rows


class Packer:
    """Rows of chosen documents, epoch after epoch. What is longer than a row loses its end."""

    def __init__(self, documents: Documents, chosen: np.ndarray, *, row_tokens: int, rows_per_step: int, seed: int):
        """Raises ConfigError where not even one step can be filled."""
        self.documents, self.chosen, self.seed = documents, chosen, seed
        self.row_tokens, self.rows_per_step = row_tokens, rows_per_step
        self._epoch, self._rows = -1, list[list[int]]()
        self.steps_per_epoch = len(self._epoch_rows(0)) // rows_per_step
        if not self.steps_per_epoch:
            tokens = int(documents.lengths[chosen].sum())
            raise ConfigError(
                f"{tokens} tokens fill {len(self._rows)} rows of {row_tokens}, but a step takes {rows_per_step}; "
                "record more (the same command adds to a recording), or lower --batch-tokens"
            )

    def _epoch_rows(self, epoch: int) -> list[list[int]]:
        """Documents are packed anew in every epoch. The last rows of one, which fill no step, are left out."""
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            order = rng.permutation(self.chosen)
            rows = pack(np.minimum(self.documents.lengths[order], self.row_tokens).tolist(), self.row_tokens)
            self._rows = [[int(order[index]) for index in rows[at]] for at in rng.permutation(len(rows))]
            self._epoch = epoch
        return self._rows

    def step(self, number: int) -> PackedRows:
        """The rows of a step, on the host."""
        per_epoch = max(self.steps_per_epoch, 1)
        rows = self._epoch_rows(number // per_epoch)
        # packing anew may give a few rows fewer: those of the beginning come again
        first = number % per_epoch * self.rows_per_step
        return self.rows([rows[(first + index) % len(rows)] for index in range(self.rows_per_step)])

    def steps(self, first: int, last: int | None = None, *, pin: bool = False) -> Iterator[PackedRows]:
        """Step after step; each is made while the one before is worked on."""

        def make(number: int) -> PackedRows:
            made = self.step(number)
            return made.pinned() if pin else made

        with ThreadPoolExecutor(1) as pool:
            number, following = first, pool.submit(make, first)
            while last is None or number < last:
                made = following.result()
                number += 1
                if last is None or number < last:
                    following = pool.submit(make, number)
                yield made

    def rows(self, documents: list[list[int]]) -> PackedRows:
        """The given documents, one list per row."""
        shape = (len(documents), self.row_tokens)
        token_ids, document, position = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        learn = np.zeros(shape, dtype=bool)
        source = self.documents
        for row, numbers in enumerate(documents):
            at = 0
            for count, number in enumerate(numbers, 1):
                start, end = source.starts[number], source.starts[number + 1]
                end = min(end, start + self.row_tokens)
                place = slice(at, at + int(end - start))
                token_ids[row, place] = source.token_ids[start:end]
                document[row, place] = count
                position[row, place] = np.arange(end - start)
                learn[row, at + int(source.num_given[number]) : place.stop] = True
                at = place.stop
        return PackedRows(
            token_ids_BL=torch.from_numpy(token_ids),
            document_BL=torch.from_numpy(document),
            position_BL=torch.from_numpy(position),
            learn_BL=torch.from_numpy(learn),
            documents=documents,
        )


def batch_fields(rows: PackedRows) -> dict[str, Tensor]:
    """What a `Batch` takes from its rows."""
    return {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}


def held_out_steps(documents: Documents, chosen: np.ndarray, *, row_tokens: int, rows: int) -> list[PackedRows]:
    """All of the chosen documents, once; the last step is filled with empty rows."""
    packer = Packer(documents, chosen, row_tokens=row_tokens, rows_per_step=1, seed=0)
    packed = packer._epoch_rows(0)
    packed = packed + [[] for _ in range(-len(packed) % rows)]
    return [packer.rows(packed[at : at + rows]) for at in range(0, len(packed), rows)]
