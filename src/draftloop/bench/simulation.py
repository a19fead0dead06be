"""A discrete-event simulation of replicas: requests arrive, are routed, wait for a row, and are stepped like batches.

A replica's step takes what it was measured to take: an iteration by its number of decoding rows, and so much for each
token of a prompt. The drafts of a row are accepted by a coin, at the rate that gives the measured acceptance length.
Not modelled: preemption (all rows are taken to fit the cache), the growth of an iteration with the context, and what
HTTP and routing take.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

PREFIX_SLACK = 4
"""Requests beyond twice the shortest queue at which a conversation leaves its replica, as in server/ray_router.py."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one replica was measured to take."""

    iteration_s: tuple[tuple[int, float], ...]
    """Rows and seconds, rows ascending."""
    prompt_token_s: float
    acceptance_length: float = 1.0
    """Tokens that an iteration gives a row, on average."""
    num_drafts: int = 0

    def iteration(self, rows: int) -> float:
        """Seconds for so many rows: on straight lines between what was measured, the last of which goes on."""
        if rows == 0:
            return 0.0
        table = self.iteration_s
        if rows <= table[0][0] or len(table) == 1:
            return table[0][1] * max(1.0, rows / table[0][0])
        at = min(bisect_left(table, (rows, 0.0)), len(table) - 1)
        (left, before), (right, after) = table[at - 1], table[at]
        return before + (after - before) * (rows - left) / (right - left)

    @property
    def accepted_rate(self) -> float:
        """The chance of each draft whose predecessors stand: 1 + p + .. + p^K is the acceptance length."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            length = sum(middle**place for place in range(self.num_drafts + 1))
            low, high = (middle, high) if length < self.acceptance_length else (low, middle)
        return low


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    conversation: int = 0
    known_tokens: int = 0
    """How much of the prompt is cached where an earlier turn of the conversation was answered."""


@dataclass(kw_only=True)
class Served:
    """What became of a job; times are seconds of the simulation's clock."""

    job: Job
    replica: int
    arrived: float
    first_token: float = 0.0
    finished: float = 0.0
    prompt_left: int = 0
    num_tokens: int = 0


@dataclass(kw_only=True)
class Replica:
    """A queue, and rows that are stepped together."""

    waiting: deque[Served] = field(default_factory=deque)
    running: list[Served] = field(default_factory=list)
    conversations: set[int] = field(default_factory=set)
    is_stepping: bool = False
    busy_s: float = 0.0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)


Route = Callable[[Job, Sequence[Replica], random.Random, int], int]
"""Takes the job, the replicas, a source of chance and how many jobs were routed before; the chosen replica."""


def round_robin(job: Job, replicas: Sequence[Replica], chance: random.Random, number: int) -> int:
    return number % len(replicas)


def least_loaded(job: Job, replicas: Sequence[Replica], chance: random.Random, number: int) -> int:
    """The shortest queue of all; of equal ones the next in turn."""
    order = [(number + at) % len(replicas) for at in range(len(replicas))]
    return min(order, key=lambda at: replicas[at].load)


def two_choices(job: Job, replicas: Sequence[Replica], chance: random.Random, number: int) -> int:
    """The shorter of two queues drawn at random."""
    drawn = chance.sample(range(len(replicas)), min(2, len(replicas)))
    return min(drawn, key=lambda at: replicas[at].load)


def prefix(job: Job, replicas: Sequence[Replica], chance: random.Random, number: int) -> int:
    """Where its conversation belongs, unless too many wait there."""
    home = random.Random(job.conversation).randrange(len(replicas))
    shortest = least_loaded(job, replicas, chance, number)
    return shortest if replicas[home].load > 2 * replicas[shortest].load + PREFIX_SLACK else home


ROUTES: dict[str, Route] = {one.__name__: one for one in (round_robin, least_loaded, two_choices, prefix)}


def make_jobs(
    num_jobs: int, *, requests_per_s: float, prompt_tokens: int, output_tokens: int, turns: float = 1.0, seed: int = 0
) -> list[Job]:
    """Poisson arrivals. With several turns on average a prompt goes on where its conversation was, answers included."""
    chance, now, jobs, numbers = random.Random(seed), 0.0, [], count()
    open_: list[tuple[int, int]] = []
    """Conversations that go on, with their tokens so far."""
    for _ in range(num_jobs):
        now += chance.expovariate(requests_per_s)
        goes_on = open_ and chance.random() > 1 / turns
        conversation, known = open_.pop(chance.randrange(len(open_))) if goes_on else (next(numbers), 0)
        prompt = known + prompt_tokens
        jobs.append(
            Job(
                arrival_s=now,
                prompt_tokens=prompt,
                output_tokens=output_tokens,
                conversation=conversation,
                known_tokens=known,
            )
        )
        if chance.random() > 1 / turns:
            open_.append((conversation, prompt + output_tokens))
    return jobs


class Simulation:
    """Replicas that are alike, over one list of jobs."""

    def __init__(
        self, costs: Costs, *, replicas: int, rows: int, route: Route, prompt_budget: int = 2048, seed: int = 0
    ) -> None:
        """Each replica has so many rows, and reads at most `prompt_budget` tokens of prompts a step."""
        self.costs, self.rows, self.route, self.prompt_budget = costs, rows, route, prompt_budget
        self.replicas = [Replica() for _ in range(replicas)]
        self._chance, self._rate = random.Random(seed), costs.accepted_rate
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._num_routed = 0
        self._next_job: Callable[[float], None] = lambda now: None
        self.served: list[Served] = []

    def run(self, jobs: Sequence[Job], *, concurrency: int | None = None) -> list[Served]:
        """Serve all jobs. With `concurrency`, so many are open at any time, and arrival times count for nothing."""
        waiting = deque(jobs)
        if concurrency is None:
            for job in waiting:
                self._at(job.arrival_s, lambda now, job=job: self._arrive(job, now))
        else:

            def next_job(now: float) -> None:
                if waiting:
                    self._arrive(waiting.popleft(), now)

            self._next_job = next_job
            for _ in range(min(concurrency, len(jobs))):
                self._at(0.0, next_job)
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return self.served

    def _at(self, time_s: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happens))

    def _arrive(self, job: Job, now: float) -> None:
        at = self.route(job, self.replicas, self._chance, self._num_routed)
        self._num_routed += 1
        replica = self.replicas[at]
        left = job.prompt_tokens - (job.known_tokens if job.conversation in replica.conversations else 0)
        replica.conversations.add(job.conversation)
        replica.waiting.append(Served(job=job, replica=at, arrived=now, prompt_left=left))
        if not replica.is_stepping:
            replica.is_stepping = True
            self._at(now, lambda now: self._step(replica, now))  # after all that happens at this moment

    def _step(self, replica: Replica, now: float) -> None:
        """Begin a step, if there is anything to do."""
        while replica.waiting and len(replica.running) < self.rows:
            replica.running.append(replica.waiting.popleft())
        replica.is_stepping = bool(replica.running)
        if not replica.running:
            return
        decoding = [one for one in replica.running if one.prompt_left == 0]
        budget = self.prompt_budget
        for one in replica.running:
            read = min(one.prompt_left, budget)
            one.prompt_left -= read
            budget -= read
        seconds = (self.prompt_budget - budget) * self.costs.prompt_token_s + self.costs.iteration(len(decoding))
        replica.busy_s += seconds
        self._at(now + seconds, lambda now: self._end_step(replica, decoding, now))

    def _end_step(self, replica: Replica, decoding: list[Served], now: float) -> None:
        for one in decoding:
            one.num_tokens += self._draw_tokens()
        for one in replica.running:
            if one.prompt_left == 0 and one.num_tokens == 0:
                one.first_token, one.num_tokens = now, 1
        ended = [one for one in replica.running if one.num_tokens >= one.job.output_tokens]
        replica.running = [one for one in replica.running if one.num_tokens < one.job.output_tokens]
        for one in ended:
            one.finished = now
            self.served.append(one)
            self._next_job(now)
        self._step(replica, now)

    def _draw_tokens(self) -> int:
        tokens = 1
        while tokens <= self.costs.num_drafts and self._chance.random() < self._rate:
            tokens += 1
        return tokens


def costs_from_rows(rows: Sequence[dict]) -> Costs | None:
    """Out of a file of `draftloop bench latency` or `throughput`; None if it has no iterations.

    A prompt token takes what the quickest prompt of a single request took, divided by its tokens.
    """
    steps = [row for row in rows if row["metric"] == "iteration_ms"]
    prompts = [row for row in rows if row["metric"] == "ttft_ms" and row.get("prompt")]
    if not steps or not prompts:
        return None
    first = min(prompts, key=lambda row: row["batch"])
    lengths = [row["acceptance_length"] for row in steps]
    table = sorted((row["batch"], row["value"] / 1e3) for row in steps)
    assert all(left[0] < right[0] for left, right in pairwise(table)), "one iteration for each number of rows"
    return Costs(
        iteration_s=tuple(table),
        prompt_token_s=first.get("min", first["value"]) / 1e3 / first["prompt"],
        acceptance_length=sum(lengths) / len(lengths),
        num_drafts=steps[0]["k"],
    )
