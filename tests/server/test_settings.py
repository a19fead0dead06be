"""Options of the server, what it logs, and metrics by their names."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from draftloop import cli
from draftloop.config import EngineConfig
from draftloop.errors import ConfigError, RequestError
from draftloop.server import run as run_module
from draftloop.server.client import EngineClient, EngineUnavailableError, wait_for_state
from draftloop.server.engine_rank import EngineRank
from draftloop.server.log_stats import stats_lines
from draftloop.server.messages import AdapterCounters, Counters, Ending, Ready
from draftloop.server.metrics import Metrics
from draftloop.server.options import ServerOptions
from draftloop.server.serving import read_template

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def served(monkeypatch):
    """What `draftloop serve` would serve."""
    calls = []
    monkeypatch.setattr(run_module, "serve", lambda config, options, log_level: calls.append((config, options)))
    monkeypatch.setattr(cli.log, "setup", lambda *options: None)
    return calls


def test_serve_takes_the_engines_options_and_its_own(served, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_API_KEY", "from the environment")
    engine = "--max-num-seqs 3 --spec-method ngram --spec-tokens 2"
    own = "--port 9000 --api-key a,b --api-key c --served-model-name m --reasoning-parser think"
    cli.main(["serve", "some/model", *engine.split(), *own.split()])
    ((config, options),) = served
    assert (config.model, config.max_num_seqs, config.speculation.num_speculative_tokens) == ("some/model", 3, 2)
    assert (options.port, options.host, options.reasoning_parser) == (9000, "127.0.0.1", "think")
    assert options.api_key == ("a,b", "c", "from the environment")
    assert options.served_model_name == ("m",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "port is 70000; it must be in [0, 65535]"),
        (["--max-waiting", "-1"], "max_waiting is -1"),
        (["--engine-silence-s", "0"], "engine_silence_s is 0.0"),
        (["--ssl-keyfile", "k"], "given with ssl_certfile"),
        (["--tool-call-parser", "magic"], "magic"),
    ],
)
def test_wrong_options_are_one_line(served, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert served == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setattr(cli.log, "setup", lambda *options: None)
    for name in [name for name in sys.modules if name.startswith("draftloop.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit):
        cli.main(["serve"])
    assert "(fastapi): pip install 'draftloop[serve]'" in capsys.readouterr().err


def test_a_port_in_use_is_named():
    sock = run_module._listen("127.0.0.1", 0)
    with sock, pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1:{sock.getsockname()[1]}: .*in use"):
        run_module._listen("127.0.0.1", sock.getsockname()[1])


def test_a_chat_template_is_a_text_or_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "t.jinja")) == read_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "nothing"))


def test_a_wrong_chat_template_stops_the_start():
    with pytest.raises(RequestError, match="the chat template cannot be read"):
        run_module.serve(EngineConfig(model="m"), ServerOptions(chat_template="{% for %}"))


def make_client(max_waiting: int = 2) -> EngineClient:
    client = EngineClient(EngineConfig(model="m"), max_waiting=max_waiting, silence_s=1)
    client.ranks[0].ready = Ready(
        tokenizer=None, chat_template=None, special_tokens={}, vocab_size=9, max_model_len=64, max_num_seqs=4,
        num_pages=10, page_size=16, num_spec_tokens=2, info={},
    )  # fmt: skip
    return client


def test_room_is_for_rows_and_those_that_wait():
    async def check() -> None:
        client = make_client()
        with pytest.raises(EngineUnavailableError, match="the engine is starting"):
            client.check_room(1)
        client.state = "ready"
        client.check_room(6)
        with pytest.raises(RequestError, match="n asks for 7 answers; this server holds at most 6"):
            client.check_room(7)

    asyncio.run(check())


def test_a_message_that_cannot_be_taken_ends_the_server_rather_than_all_answers_for_ever(monkeypatch, caplog):
    async def unreadable(self):
        raise ValueError("no message")

    monkeypatch.setattr(EngineRank, "start", lambda self, *args, **options: None)
    monkeypatch.setattr(EngineRank, "receive", unreadable)

    async def check() -> None:
        client = EngineClient(EngineConfig(model="m"), max_waiting=2, silence_s=100)
        client.start()
        await asyncio.wait_for(wait_for_state(client, "dead"), 10)
        assert client.reason == "what listens to the engine has failed: ValueError: no message"
        await client.close()

    asyncio.run(check())


def test_log_lines_say_speed_and_acceptance_of_the_time_between():
    before = Counters(num_spec_steps=10, acceptance_histogram=[10, 0, 0])
    after = Counters(
        prompt_tokens=50, generated_tokens=100, num_spec_steps=20, num_draft_tokens=20, num_accepted_tokens=15,
        acceptance_histogram=[10, 5, 5], num_running=3, num_waiting=1, num_pages_in_use=5,
    )  # fmt: skip
    speed, speculation = stats_lines(before, after, seconds=10.0, num_pages=10)
    assert "generation throughput: 10.0 tokens/s, running: 3, waiting: 1, KV cache usage: 50.0%" in speed
    assert "mean acceptance length 2.50, accepted 15 of 20 drafts (75.0%), per position 1.000, 0.500" in speculation
    assert len(stats_lines(after, after, seconds=1.0, num_pages=10)) == 1


def metric_names() -> set[str]:
    """Every metric that a server has, without the suffixes of its samples."""

    async def render() -> str:
        client = make_client()
        client.state = "ready"
        part = AdapterCounters(num_spec_steps=1, num_draft_tokens=2, num_accepted_tokens=1)
        client.ranks[0].counters = Counters(acceptance_histogram=[0, 0, 0], by_adapter={"a": part})
        metrics = Metrics(client, "m")
        engine = metrics.engines[0]
        engine.request(n=1, max_tokens=5)
        engine.first_token(0.1)
        engine.tokens(0.3, 3)
        engine.ended(Ending(finish_reason="stop", decode_s=0.3), seconds=0.4, num_prompt_tokens=3, num_tokens=4)
        row = {"phase": "p", "rows": 1, "tokens": 1, "captured": True, "replays": 2, "eager_runs": 0}
        text = metrics.render([{"rows": [row]}]).decode()
        assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 3.0' in text
        assert 'vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.3' in text
        return text

    found = re.findall(r"^# TYPE (\S+) (\w+)", asyncio.run(render()), re.MULTILINE)
    names = {name.removesuffix("_total") if kind == "counter" else name for name, kind in found}
    return {name for name in names if not name.endswith("_created")}


def test_the_page_about_metrics_names_them_all():
    documented = set(re.findall(r"`((?:vllm|draftloop):\w+)", (DOCS / "metrics.md").read_text()))
    assert documented == metric_names()


def test_the_page_about_serving_names_every_option_of_the_server():
    text = (DOCS / "serving.md").read_text()
    for name in ServerOptions.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_every_metric_of_the_dashboard_exists():
    dashboard = json.loads((DOCS.parent / "examples" / "grafana.json").read_text())
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    used = {re.sub("_(total|bucket|sum|count)$", "", name) for name in re.findall(r"(?:vllm|draftloop):\w+", text)}
    assert used <= metric_names()
    assert len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]}) > 10
