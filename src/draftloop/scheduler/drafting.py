"""How many tokens each step drafts: always the same, by the number of rows, or what makes the most tokens per second.

Plain data, no tensors. Fewer drafts cost nothing to change to, so that is done at once; more are drafted `DWELL` steps
after the last change, so that rows that come and go do not make it flap: the first step of more drafts verifies slots
in which nothing was drafted yet, and costs more than it gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from draftloop.scheduler.batch import Sequence as Request

DWELL = 16
"""Steps between a change and the next one to more drafts, at least."""
MARGIN = 0.01
"""Another number must promise this much more tokens per second."""
DRAFTS_WEIGH = 1.05
"""A millisecond spent on drafts, in milliseconds of plain decoding. Rows that take several tokens a step end at more
scattered steps, so that prompts run in smaller lots: on an H200 with 256 rows one draft gave 3 % in steps alone, and
lost 3 % of the whole. Beside that, a percent or two is less than is known of costs, and fewer drafts waste less."""
LOOK_EVERY = 8
"""Steps of a device loop between two looks at whether another number would be better."""

FIRST_RATE = 0.7
"""Acceptance of a first draft, before any is known."""
PRIOR_TRIALS = 4.0
"""What is supposed of a place counts as much as so many drafts seen there: that it is as good as the place before."""
WINDOW_TRIALS, WINDOW_STEPS = 256, 32
"""How much of the past counts: so many drafts, or those of so many steps where that is more."""
FORGOTTEN_PER_STEP = 1 / 256
"""Share of what is known of a place that fades in a step in which nothing was drafted there."""
KNOWN_TRIALS = 8.0
"""A place of which fewer drafts are remembered may be probed; a probe ends when it has seen so many."""
HELD_UP = 1.25
"""A step that takes more than so many times what was expected was held up: the excess counts no more."""
PROBE_SHARE = 0.01
"""Of all time, what probing may lose."""
PROBE_SAVINGS = 4 * DWELL
"""Steps' worth of time that may be saved up for probing, as a multiple of one step."""

RowClass = tuple[bool, bool]
"""Sampled, and constrained by a grammar: what acceptance differs by, beside the text."""


def row_class(sequence: Request) -> RowClass:
    return sequence.params.temperature > 0, sequence.grammar is not None


class Drafting(ABC):
    """Chooses the number of drafts of each step."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(sorted(counts))
        """Rising."""
        self.most = self.current = self.counts[-1]
        self.steps_since_change = DWELL
        self.num_changes = 0
        self.steps_by_count: dict[int, int] = dict.fromkeys(self.counts, 0)

    def choose(self, decodes: Sequence[Request], num_joining: int = 0) -> int:
        """Drafts of the next step, in which these rows decode; `num_joining` more will when their prompts have run."""
        if len(self.counts) > 1 and any(sequence.speculation for sequence in decodes):
            self._look(decodes, num_joining)
            if self._may_change(wanted := self._wanted()):
                self._change(wanted)
        return self.current

    def _may_change(self, count: int) -> bool:
        return count < self.current or (count > self.current and self.steps_since_change >= DWELL)

    def _change(self, count: int) -> None:
        self.current = count
        self.steps_since_change = 0
        self.num_changes += 1

    def _look(self, decodes: Sequence[Request], num_joining: int) -> None:
        """Take in which rows decode."""

    @abstractmethod
    def _wanted(self) -> int:
        """What the next step would draft if it were free to."""

    def accepted(self, sequence: Request, num_drafted: int, num_accepted: int) -> None:
        """A row had so many drafts verified, and so many of them stood."""

    def stepped(self, num_rows: int, num_drafts: int, ms: float | None = None) -> None:
        """A decoding step has come back, and `accepted` has been called for its rows; `ms`: what it took, if known."""
        self.steps_since_change += 1
        self.steps_by_count[num_drafts] = self.steps_by_count.get(num_drafts, 0) + 1

    def wants_change(self) -> bool:
        """A loop of steps that runs now had better end."""
        return False


class FixedDrafts(Drafting):
    """The same in every step."""

    def __init__(self, count: int) -> None:
        super().__init__([count])

    def _wanted(self) -> int:
        return self.current


class DraftsByRows(Drafting):
    """By a table of (fewest rows, most rows, drafts); where that says nothing, the most."""

    def __init__(self, counts: Sequence[int], table: Sequence[Sequence[int]]) -> None:
        super().__init__(counts)
        self.table = [(low, high, count) for low, high, count in table]
        self._num_rows = 0

    def _look(self, decodes: Sequence[Request], num_joining: int) -> None:
        self._num_rows = len(decodes)

    def _wanted(self) -> int:
        found = (count for low, high, count in self.table if low <= self._num_rows <= high)
        return next(found, self.most)


# ---- adaptive -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Milliseconds of a decoding step by (rows, drafts), measured on the captured graphs."""

    ms: Mapping[tuple[int, int], float]
    sizes: tuple[int, ...] = field(init=False)
    """The numbers of rows, rising."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted({rows for rows, _ in self.ms})))

    def size_for(self, num_rows: int) -> int:
        """The smallest that serves so many rows, or the largest there is."""
        return self.sizes[min(bisect_left(self.sizes, num_rows), len(self.sizes) - 1)]

    def of(self, num_rows: int, num_drafts: int) -> float:
        """Of the graph that serves so many rows; past the largest in proportion."""
        size = self.size_for(num_rows)
        return self.ms[size, num_drafts] * max(num_rows / size, 1.0)


class StepTimes:
    """Milliseconds of a decoding step in service: what it took at the start, times a factor that is learnt.

    At the start the device is cool, its clock high and no row has a context. Under load a step takes up to 1.4 times
    as long, and not all numbers of drafts alike. So each has a factor, at each size. One that does not run, or has not
    yet, is supposed to be slowed as the steps are that do.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._factor = 1.0
        """Of late, whatever ran."""
        self._factors: dict[tuple[int, int], float] = {}
        self._num_seen = Counter[tuple[int, int]]()

    def of(self, num_rows: int, num_drafts: int) -> float:
        return self.costs.of(num_rows, num_drafts) * self._factor_of(self.costs.size_for(num_rows), num_drafts)

    def _factor_of(self, size: int, num_drafts: int) -> float:
        return self._factors.get((size, num_drafts), self._factor)

    def saw(self, num_rows: int, num_drafts: int, ms: float) -> None:
        """A step took so long."""
        size = self.costs.size_for(num_rows)
        key, expected = (size, num_drafts), self._factor_of(size, num_drafts)
        seen = ms / self.costs.of(num_rows, num_drafts)
        seen = min(max(seen, expected / HELD_UP), expected * HELD_UP)
        self._num_seen[key] = min(self._num_seen[key] + 1, WINDOW_STEPS)
        self._factors[key] = expected + (seen - expected) / (1 + self._num_seen[key])
        self._factor += (seen - self._factor) / WINDOW_STEPS
        for other in self._factors.keys() - {key}:
            if other[0] == size:
                self._factors[other] += (self._factor - self._factors[other]) * FORGOTTEN_PER_STEP


class Acceptance:
    """How often a draft stands, by its place in the chain, given that those before it stood. The past fades."""

    def __init__(self, num_places: int) -> None:
        self.trials, self.hits = [0.0] * num_places, [0.0] * num_places
        self._seen = [0] * num_places
        """Drafts since the last fading."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(min(num_drafted, num_accepted + 1)):
            self.trials[place] += 1
            self.hits[place] += place < num_accepted
            self._seen[place] += 1

    def fade(self) -> None:
        """After each step."""
        for place, seen in enumerate(self._seen):
            window = max(WINDOW_TRIALS, WINDOW_STEPS * seen)
            kept = window / (window + seen) if seen else self._kept_unseen(place)
            self.trials[place] *= kept
            self.hits[place] *= kept
            self._seen[place] = 0

    def _kept_unseen(self, place: int) -> float:
        """However much was seen once, it must be forgotten in time."""
        return min(1 - FORGOTTEN_PER_STEP, WINDOW_TRIALS / max(self.trials[place], 1.0))

    def rates(self) -> list[float]:
        rates, before = [], FIRST_RATE
        for trials, hits in zip(self.trials, self.hits, strict=True):
            before = (hits + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            rates.append(before)
        return rates

    def expected(self) -> list[float]:
        """Tokens that a step with 0, 1, .. drafts emits on average."""
        tokens, reached = [1.0], 1.0
        for rate in self.rates():
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class AdaptiveDrafts(Drafting):
    """What makes the most tokens per second, by measured costs and observed acceptance.

    A place at which nothing was drafted for long is supposed to be as good as the one before it, so that more drafts
    are tried where that would pay. Where even that would not, they are probed now and then, for `PROBE_SHARE` of the
    time at most: acceptance may have come back.
    """

    def __init__(self, counts: Sequence[int], costs: StepCosts) -> None:
        super().__init__(counts)
        self.times = StepTimes(costs)
        self.acceptance: dict[RowClass, Acceptance] = {}
        self.is_probing = False
        self._probed_from = 0
        """The number of drafts before the probe."""
        self._num_rows, self._num_joining, self._rows = 0, 0, Counter[tuple[RowClass, int]]()
        self._savings_ms = 0.0

    def _look(self, decodes: Sequence[Request], num_joining: int) -> None:
        self._num_rows, self._num_joining = len(decodes), num_joining
        self._rows = Counter((row_class(s), s.max_drafts) for s in decodes if s.speculation)

    def _of_class(self, kind: RowClass) -> Acceptance:
        if kind not in self.acceptance:
            self.acceptance[kind] = Acceptance(self.most)
        return self.acceptance[kind]

    def _tokens(self) -> dict[int, float]:
        """That a step of the rows last seen emits on average, by number of drafts."""
        expected = {kind: self._of_class(kind).expected() for kind, _ in self._rows}
        plain = self._num_rows - self._rows.total()
        return {
            count: plain + sum(num * expected[kind][min(count, most)] for (kind, most), num in self._rows.items())
            for count in self.counts
        }

    def step_ms(self, num_rows: int, num_drafts: int) -> float:
        """What a step is held to take: what it does, those of drafts `DRAFTS_WEIGH`ed."""
        fewest = self.times.of(num_rows, self.counts[0])
        return fewest + DRAFTS_WEIGH * (self.times.of(num_rows, num_drafts) - fewest)

    def losses(self) -> dict[int, float]:
        """By number of drafts: the milliseconds that a step takes beyond those that its tokens are worth.

        A token is worth what it takes at best once the rows that join have joined. So where none do, the least loss is
        0, for the most tokens per second; where many do, it is that of a step which is soon over.
        """
        tokens, full = self._tokens(), self._num_rows + self._num_joining
        ms_per_token = min(self.step_ms(full, count) / (tokens[count] * full / self._num_rows) for count in self.counts)
        return {count: self.step_ms(self._num_rows, count) - tokens[count] * ms_per_token for count in self.counts}

    def _wanted(self) -> int:
        if self.is_probing and not self._has_probed():
            return self.current
        losses = self.losses()
        best = min(losses, key=lambda count: losses[count])  # of equals the fewest drafts
        margin = 0.0 if self.is_probing else MARGIN * self.step_ms(self._num_rows, self.current)
        if losses[best] < losses[self.current] - margin:
            return best
        return self._probe(losses)

    def _has_probed(self) -> bool:
        return self.steps_since_change >= DWELL or self._are_known(self._probed_from, self.current)

    def _probe(self, losses: Mapping[int, float]) -> int:
        """The next larger number, if little is known of it and its price has been saved; else the current one."""
        larger = [count for count in self.counts if count > self.current]
        if self.is_probing or not larger or self._are_known(self.current, larger[0]):
            return self.current
        return larger[0] if self._price_ms(larger[0], losses) <= self._savings_ms else self.current

    def _are_known(self, first: int, end: int) -> bool:
        """Enough drafts were seen at each of these places, by each class of rows."""
        return all(min(self._of_class(kind).trials[first:end]) >= KNOWN_TRIALS for kind, _ in self._rows)

    def _price_ms(self, count: int, losses: Mapping[int, float]) -> float:
        """What a probe loses: its first step verifies slots in which nothing was drafted."""
        first = self.step_ms(self._num_rows, count) - self.step_ms(self._num_rows, self.current)
        num_steps = min(ceil(KNOWN_TRIALS / self._rows.total()), DWELL)
        return first + num_steps * (losses[count] - losses[self.current])

    def _change(self, count: int) -> None:
        losses = self.losses()
        self.is_probing = losses[count] > losses[self.current]
        if self.is_probing:
            self._savings_ms -= self._price_ms(count, losses)
            self._probed_from = self.current
        super()._change(count)

    def accepted(self, sequence: Request, num_drafted: int, num_accepted: int) -> None:
        if num_drafted:
            self._of_class(row_class(sequence)).add(num_drafted, num_accepted)

    def stepped(self, num_rows: int, num_drafts: int, ms: float | None = None) -> None:
        super().stepped(num_rows, num_drafts, ms)
        for acceptance in self.acceptance.values():
            acceptance.fade()
        if ms is not None:
            self.times.saw(num_rows, num_drafts, ms)
        took = self.times.of(num_rows, num_drafts)
        self._savings_ms = min(self._savings_ms + PROBE_SHARE * took, PROBE_SAVINGS * took)

    def wants_change(self) -> bool:
        looks = self.steps_since_change % LOOK_EVERY == 0 and bool(self._rows)
        return looks and self._may_change(self._wanted())


def describe(drafting: Drafting) -> str:
    """One line for the start-up log."""
    counts = ", ".join(map(str, drafting.counts))
    if isinstance(drafting, AdaptiveDrafts):
        return f"adaptive, one of {counts}"
    if isinstance(drafting, DraftsByRows):
        parts = [f"{count} for {low} to {high} rows" for low, high, count in drafting.table]
        return "; ".join([*parts, f"else {drafting.most}"])
    return counts
