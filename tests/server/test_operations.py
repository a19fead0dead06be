"""What whoever runs a server asks of it: profiles, logs, spans, and the model's own sampling values."""

from __future__ import annotations

import gzip
import http.server
import json
import shutil
import sys
import threading

import pytest
from servers import EAGER, byte_model, running

from draftloop.errors import ConfigError
from draftloop.request import SamplingParams
from draftloop.server.tracing import SPAN, Tracer, make_tracer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OpenTelemetry exporter posts."""

    posts: list[tuple[str, bytes]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.posts.append((self.path, gzip.decompress(data) if self.headers["Content-Encoding"] == "gzip" else data))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The byte model, whose makers want it greedy."""
    folder = tmp_path_factory.mktemp("models") / "greedy"
    shutil.copytree(byte_model(), folder)
    path = folder / "generation_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "do_sample": True, "temperature": 0.0, "top_k": -7, "max_new_tokens": 5}))
    return str(folder)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    traces = tmp_path_factory.mktemp("traces")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        options = ["--profile-dir", str(traces), "--log-requests", "--otlp-traces-endpoint", endpoint]
        with running(*EAGER, *options, model=model, DRAFTLOOP_LOG_FORMAT="json", OTEL_BSP_SCHEDULE_DELAY="100") as one:
            one.traces = traces
            yield one
        collector.shutdown()


def records(server) -> list[dict]:
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def test_values_that_a_request_leaves_out_are_the_models_own(server):
    asked = {key: value for key, value in BODY.items() if key != "max_tokens"}
    greedy = server.post(COMPLETIONS, {**asked, "temperature": 0, "max_tokens": 5})["choices"]
    assert server.post(COMPLETIONS, asked)["choices"] == greedy
    messages = [{"role": "user", "content": "hello"}]
    chat = server.post(CHAT, {"messages": messages, "ignore_eos": True})
    assert chat["usage"]["completion_tokens"] == 5
    drawn = [server.post(COMPLETIONS, {**asked, "temperature": 1, "seed": seed})["choices"] for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    wrong = [record["message"] for record in records(server) if record["level"] == "WARNING"]
    assert ["left out of the model's generation_config.json: top_k is -7" in one for one in wrong] == [True]


def test_a_profile_is_a_trace_with_steps_and_phases_in_the_folder(server):
    assert server.refusal("/stop_profile", {})[1]["message"] == "no profile is being recorded; start one first"
    server.post("/start_profile", {})
    assert "already" in server.refusal("/start_profile", {})[1]["message"]
    answer = server.post(COMPLETIONS, {**BODY, "temperature": 0})
    file = server.traces / server.post("/stop_profile", {})["file"]
    assert [file] == list(server.traces.iterdir())
    names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert names.count("target.prefill") == 1
    assert names.count("step") >= 8
    assert "aten::add" in names or "aten::mm" in names or "aten::linear" in names
    assert server.post(COMPLETIONS, {**BODY, "temperature": 0})["choices"] == answer["choices"]


def test_cached_prefixes_are_counted_kept_apart_by_salt_and_forgotten_when_asked(server):
    def cached(**fields) -> int:
        usage = server.post(COMPLETIONS, {**BODY, "prompt": [7, 8] * 20, "temperature": 0, **fields})["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    before = server.metrics()
    assert cached() == 0
    found = cached(priority=-1)
    assert found >= 16
    assert [cached(cache_salt="other"), cached(cache_salt="other"), cached()] == [0, found, found]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = server.stream(COMPLETIONS, {**BODY, "prompt": [7, 8] * 20, "temperature": 0, **options})[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
    assert server.post("/reset_prefix_cache", {}) == {"success": True}
    assert cached() == 0
    after = server.metrics()
    growth = {name: value - before[name] for name, value in after.items() if name in before}
    assert growth["vllm:prompt_tokens_cached_total"] == growth["vllm:prefix_cache_hits_total"] == 4 * found
    assert growth["vllm:prefix_cache_queries_total"] == growth["vllm:prompt_tokens_total"] == 7 * 40
    assert growth["vllm:num_preemptions_total"] == 0


def test_the_log_is_an_object_on_each_line_and_says_how_requests_ended(server):
    server.post(COMPLETIONS, {**BODY, "request_id": "by-name", "n": 2, "temperature": 1})
    found = []
    server.wait_until(
        lambda: found.extend(r for r in records(server) if r.get("request_id") == "cmpl-by-name") or found
    )
    (record,) = found
    assert (record["level"], record["logger"]) == ("INFO", "draftloop.server.serving")
    assert record["message"].startswith("cmpl-by-name: 5 prompt tokens, 16 tokens, length, length, ")
    assert (record["prompt_tokens"], record["completion_tokens"]) == (5, 16)
    assert record["finish_reasons"] == ["length", "length"]
    assert 0 < record["time_to_first_token"] < record["seconds"]
    assert any(record["logger"].startswith("draftloop.engine") for record in records(server)), "the engine's too"


# ---- spans ----------------------------------------------------------------------------------


def test_spans_of_requests_are_sent_to_the_collector(server):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    server.post(COMPLETIONS, {**BODY, "request_id": "traced"})
    server.wait_until(lambda: any(b"cmpl-traced" in data for path, data in Collector.posts if path == "/v1/traces"))


class Ended:
    """A reply that has ended."""

    id, params = "cmpl-1", SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, n=2)

    def __init__(self, *reasons: str) -> None:
        self._reasons = list(reasons)

    def facts(self):
        return {
            "request_id": self.id, "prompt_tokens": 3, "completion_tokens": 9, "finish_reasons": self._reasons,
            "seconds": 2.0, "time_to_first_token": 0.5, "queue_s": 0.1, "prefill_s": 0.4, "decode_s": 1.5,
        }  # fmt: skip


def test_a_span_has_vllms_attributes_and_continues_the_clients_trace():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer(exporter, "m")
    tracer.record(Ended("stop", "length"), {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    tracer.record(Ended("error"), {})
    tracer.close()
    first, second = exporter.get_finished_spans()
    assert (first.name, first.kind.name) == (SPAN, "SERVER")
    assert f"{first.context.trace_id:x}" == "a" * 32
    assert f"{first.parent.span_id:x}" == "b" * 16
    assert second.parent is None
    assert (first.status.status_code.name, second.status.status_code.name) == ("UNSET", "ERROR")
    assert first.end_time - first.start_time == pytest.approx(2e9, abs=1e6)
    assert dict(first.attributes) == {
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 9,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.time_in_queue": 0.1,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_model_prefill": 0.4,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 1.9,
    }


def test_without_the_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'draftloop\[otel\]'"):
        make_tracer("http://localhost:4318/v1/traces")
