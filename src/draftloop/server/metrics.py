"""Prometheus metrics: vLLM's names and labels, so that its dashboards and tools read them, and some of our own.

The engine counts; counters are read off its last message. What only the API can see (times of requests, how they
ended) is observed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftloop.server.client import EngineClient
from draftloop.server.engine_rank import EngineRank
from draftloop.server.messages import AdapterCounters, Ending, Ready

LABELS = ("model_name", "engine")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FEW = (1, 2, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All metrics of one server; `engine` among the labels tells its engines apart."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels = [(model_name, str(rank.rank)) for rank in client.ranks]
        self._counted = _EngineCollector(client, labels)
        self.registry.register(self._counted)
        families = _Families(self.registry)
        self.engines = [EngineMetrics(families, of) for of in labels]
        client.on_step = lambda rank, num_tokens: self.engines[rank].step(num_tokens)

    def render(self, graphs: Sequence[dict[str, Any]] | None) -> bytes:
        """The text that Prometheus reads. `graphs`: the engines' coverage tables, where there are some."""
        self._counted.graphs = graphs
        return generate_latest(self.registry)


class _Families:
    """What is observed here, of all engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, what: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"vllm:{name}", what, LABELS, buckets=tuple(buckets), registry=registry)

        def seconds(name: str, what: str) -> Histogram:
            return histogram(name, what, _SECONDS)

        self.first_token = seconds("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between_tokens = histogram(
            "inter_token_latency_seconds",
            "Time between what two steps gave to an answer, over the tokens of the later one; once for each of them.",
            _BETWEEN_TOKENS,
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Decoding time of an answer over its tokens.", _BETWEEN_TOKENS
        )
        self.whole = seconds("e2e_request_latency_seconds", "From a request's arrival to its last token.")
        self.queue = seconds("request_queue_time_seconds", "Time that a request waited for a row.")
        self.prefill = seconds("request_prefill_time_seconds", "From a request's first step to its first token.")
        self.decode = seconds("request_decode_time_seconds", "From a request's first token to its last one.")
        self.inference = seconds("request_inference_time_seconds", "From a request's first step to its last token.")
        self.prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _COUNTS)
        self.generation = histogram("request_generation_tokens", "Tokens of an answer.", _COUNTS)
        self.n = histogram("request_params_n", "Answers that a request asks for.", _FEW)
        self.max_tokens = histogram("request_params_max_tokens", "Tokens that a request asks for.", _COUNTS)
        self.step = histogram("iteration_tokens_total", "Prompt and answer tokens of a step.", _COUNTS)
        self.success = Counter(
            "vllm:request_success",
            "Answers that have ended, by how.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )


class EngineMetrics:
    """What is observed of one engine's answers."""

    def __init__(self, families: _Families, labels: tuple[str, str]) -> None:
        def of(histogram: Histogram) -> Histogram:
            return histogram.labels(*labels)

        self._first_token = of(families.first_token)
        self._between_tokens = of(families.between_tokens)
        self._per_token = of(families.per_token)
        self._whole = of(families.whole)
        self._queue = of(families.queue)
        self._prefill = of(families.prefill)
        self._decode = of(families.decode)
        self._inference = of(families.inference)
        self._prompt = of(families.prompt)
        self._generation = of(families.generation)
        self._n = of(families.n)
        self._max_tokens = of(families.max_tokens)
        self._step = of(families.step)
        self._ended = {reason: families.success.labels(*labels, reason) for reason in FINISH_REASONS}

    def step(self, num_tokens: int) -> None:
        """A step that processed and produced so many tokens."""
        self._step.observe(num_tokens)

    def request(self, *, n: int, max_tokens: int | None) -> None:
        """A request has been accepted."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after those before them."""
        for _ in range(count):
            self._between_tokens.observe(seconds / count)

    def ended(self, ending: Ending, *, seconds: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """An answer is complete."""
        self._ended[ending.finish_reason].inc()
        self._whole.observe(seconds)
        self._queue.observe(ending.queue_s)
        self._prefill.observe(ending.prefill_s)
        self._decode.observe(ending.decode_s)
        self._inference.observe(ending.prefill_s + ending.decode_s)
        self._prompt.observe(num_prompt_tokens)
        self._generation.observe(num_tokens)
        if num_tokens > 1:
            self._per_token.observe(ending.decode_s / (num_tokens - 1))

    def aborted(self) -> None:
        """A client went away before its answer was complete."""
        self._ended["abort"].inc()


class _EngineCollector(Collector):
    """What the engines count, as they last said."""

    def __init__(self, client: EngineClient, labels: list[tuple[str, str]]) -> None:
        self._client, self._labels = client, labels
        self.graphs: Sequence[dict[str, Any]] | None = None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each name: samples of all engines stand together."""
        families: dict[str, Metric] = {}
        for place, rank in enumerate(self._client.ranks):
            graphs = self.graphs[place] if self.graphs is not None else None
            is_ready = self._client.state in ("ready", "draining")
            for metric in _Counted(rank, self._labels[place], is_up=is_ready, graphs=graphs).collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        yield from families.values()


class _Counted:
    """One engine's."""

    def __init__(
        self, rank: EngineRank, labels: tuple[str, str], *, is_up: bool, graphs: dict[str, Any] | None
    ) -> None:
        self._rank, self._labels, self._is_up, self._graphs = rank, labels, is_up, graphs

    def collect(self) -> Iterator[Metric]:
        c = self._rank.counters
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", c.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens produced.", c.generated_tokens)
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Verified blocks of drafts, each of at least one draft.", c.num_spec_steps
        )
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", c.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", c.num_accepted_tokens)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Blocks whose draft at this position was accepted.",
            labels=[*LABELS, "position"],
        )
        for position, count in enumerate(c.accepted_per_position):
            per_position.add_metric([*self._labels, str(position)], count)
        yield per_position
        yield from self._by_adapter(c.by_adapter)
        yield self._counter(
            "draftloop:steps_without_drafts",
            "Steps of speculating requests for which nothing was drafted.",
            c.num_steps_without_drafts,
        )
        yield self._steps(c.steps_by_drafts)
        yield self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that did not have to be computed.", c.cached_prompt_tokens
        )
        yield self._counter("vllm:num_preemptions", "Requests that lost their row for a while.", c.num_preemptions)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.", c.prompt_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens whose state was found there.", c.cached_prompt_tokens
        )
        yield self._gauge("vllm:num_requests_running", "Requests that have a row.", c.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a row.", c.num_waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for a row (capacity) or for their grammar (deferred).",
            labels=[*LABELS, "reason"],
        )
        by_reason.add_metric([*self._labels, "capacity"], c.num_waiting - min(c.num_compiling, c.num_waiting))
        by_reason.add_metric([*self._labels, "deferred"], min(c.num_compiling, c.num_waiting))
        yield by_reason
        yield self._gauge("draftloop:engine_up", "1 while the engine serves.", self._is_up)
        if self._rank.ready is not None:
            yield from self._cache(self._rank.ready, c.num_pages_in_use)
            yield self._gauge("draftloop:spec_k", "Drafts in a block at most, K.", self._rank.ready.num_spec_tokens)
            yield self._gauge("draftloop:spec_k_now", "Drafts that a step is to verify now.", self._rank.num_drafts)
        if self._graphs is not None:
            yield from self._graph_runs(self._graphs["rows"])

    def _by_adapter(self, parts: Mapping[str, AdapterCounters]) -> Iterator[Metric]:
        for name, count, what in (
            ("drafts", "num_spec_steps", "Verified blocks of drafts of an adapter's requests."),
            ("draft_tokens", "num_draft_tokens", "Drafts verified for an adapter's requests."),
            ("accepted_tokens", "num_accepted_tokens", "Drafts accepted for an adapter's requests."),
        ):
            made = CounterMetricFamily(f"draftloop:adapter_num_{name}", what, labels=[*LABELS, "adapter"])
            for adapter, part in parts.items():
                made.add_metric([*self._labels, adapter], getattr(part, count))
            if parts:
                yield made

    def _steps(self, steps_by_drafts: Sequence[int]) -> Metric:
        made = CounterMetricFamily(
            "draftloop:steps",
            "Decoding steps, by the drafts that they were to verify of each row.",
            labels=[*LABELS, "drafts"],
        )
        for count, steps in enumerate(steps_by_drafts):
            made.add_metric([*self._labels, str(count)], steps)
        return made

    def _cache(self, ready: Ready, num_pages_in_use: int) -> Iterator[Metric]:
        share = num_pages_in_use / ready.num_pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages that requests hold, 0 to 1.", share)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's size.", labels=["engine", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._labels[1], str(ready.page_size), str(ready.num_pages)], 1)
        yield info

    def _graph_runs(self, rows: list[dict[str, Any]]) -> Iterator[Metric]:
        replays = CounterMetricFamily(
            "draftloop:graph_replays", "Replays of a phase's graph.", labels=[*LABELS, "phase", "rows", "tokens"]
        )
        runs: dict[str, int] = {}
        for row in rows:
            runs[row["phase"]] = runs.get(row["phase"], 0) + row["eager_runs"]
            if row["captured"]:
                sizes = (row["phase"], str(row["rows"]), str(row["tokens"]))
                replays.add_metric([*self._labels, *sizes], row["replays"])
        yield replays
        eager = CounterMetricFamily(
            "draftloop:graph_eager", "Runs of a phase without a graph.", labels=[*LABELS, "phase"]
        )
        for phase, count in runs.items():
            eager.add_metric([*self._labels, phase], count)
        yield eager

    def _counter(self, name: str, what: str, value: float) -> Metric:
        made = CounterMetricFamily(name, what, labels=LABELS)
        made.add_metric(self._labels, value)
        return made

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        made = GaugeMetricFamily(name, what, labels=LABELS)
        made.add_metric(self._labels, value)
        return made
