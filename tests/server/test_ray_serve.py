"""Two replicas of SmolLM2 on a Ray cluster of one node: lost replicas, lost engines, updates, all under load."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from servers import events, running

from draftloop.errors import ConfigError
from draftloop.server.replica_options import ReplicaOptions

MODEL, ROWS = "smollm2-135m", 4
ENGINE = ["--max-model-len", "512", "--max-num-seqs", str(ROWS), "--kv-cache-memory-bytes", str(1 << 27)]
LIMITS = [*ENGINE, "--device", "cpu", "--dtype", "float32", "--enforce-eager", "--spec-tokens", "0"]
REPLICAS = ["--ray", "--min-replicas", "2", "--cpus-per-replica", "0.25"]
COMPLETIONS = "/v1/completions"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.yaml"


@pytest.fixture(scope="module")
def server():
    with running(*REPLICAS, model=MODEL, limits=LIMITS, start_s=240, command=True, RAY_DEDUP_LOGS="0") as one:
        yield one


def replicas(server) -> list[int]:
    """Process ids of the replicas of this cluster."""
    return [pid for pid, name in _descendants(server.process.pid) if name.startswith("ray::ServeReplica")]


def _descendants(pid: int) -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(OSError):
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
        for child in map(int, children.split()):
            name = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found += [(child, name), *_descendants(child)]
    return found


def ask(server, at: int, num_tokens: int = 8) -> list[int]:
    """A whole answer's tokens."""
    body = {"prompt": [at + 1] * 8, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post(COMPLETIONS, {**body, "return_token_ids": True})
    return answer["choices"][0]["token_ids"]


def read(stream) -> str:
    """What ended a stream that has begun: a finish reason, or an error's code."""
    connection, response = stream
    with contextlib.closing(connection):
        *_, last, done = events(response)
    assert done == "[DONE]"
    return last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]


def start(server, at: int, num_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    return server.start_stream(COMPLETIONS, {"prompt": [at + 1] * 8, "max_tokens": num_tokens, "ignore_eos": True})


def test_answers_are_those_of_the_plain_server_whole_and_streamed(server):
    assert server.get("/v1/models")["data"][0]["id"] == MODEL
    messages = [{"role": "user", "content": "What is the capital of France? One sentence."}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    whole = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert "France" in whole or "Paris" in whole
    chunks = server.stream("/v1/chat/completions", body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    assert len(chunks) > 4, "it must come in pieces"
    assert server.refusal(COMPLETIONS, {"prompt": "x", "temperature": -1})[0] == 400


def test_a_replica_killed_under_load_loses_only_the_streams_that_it_had_begun(server):
    expected = [ask(server, at) for at in range(2)]
    victim, other = replicas(server)
    streams = [start(server, at, num_tokens=40) for at in range(6)]
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, server, at % 2) for at in range(10)]
        time.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        later = [pool.submit(ask, server, at % 2) for at in range(4)]
        reasons = list(pool.map(read, streams))
        # whatever had not begun was answered by the other replica, or is by the next one
        assert [one.result() for one in answers + later] == [expected[at % 2] for at in [*range(10), *range(4)]]
    assert set(reasons) == {"length", "replica_lost"}
    assert reasons.count("replica_lost") <= 2 * ROWS
    server.wait_until(lambda: len(replicas(server)) == 2, timeout_s=120)
    assert victim not in replicas(server)
    assert other in replicas(server)


def test_a_dead_engine_takes_its_replica_along_and_no_new_request_with_it(server):
    server.wait_until(lambda: server.log.read_text().count("start_log: graphs:") >= 3, timeout_s=120)
    victim = replicas(server)[0]
    engine = next(pid for pid, name in _descendants(victim) if "spawn_main" in name)
    stream = start(server, 1, num_tokens=80), start(server, 2, num_tokens=80)
    os.kill(engine, signal.SIGKILL)
    assert {read(one) for one in stream} <= {"engine_unavailable", "length"}
    for at in range(3):
        ask(server, at)
    server.wait_until(lambda: victim not in replicas(server), timeout_s=60)


def test_an_update_under_load_loses_nothing(server):
    cluster = re.findall(r"\(cluster (\S+)\)", server.log.read_text())[0]
    command = [sys.executable, "-m", "draftloop", "serve", MODEL, *LIMITS, "--ray", "--ray-address", cluster]
    new = [
        "--cpus-per-replica",
        "0.5",
        "--routing",
        "prefix",
        "--served-model-name",
        "new",
        "--max-surge-percent",
        "100",
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}  # what a cluster of one's own wants
    count = 0
    with subprocess.Popen(
        [*command, *new], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as update:
        while update.poll() is None:
            ask(server, count)
            count += 1
            time.sleep(0.25)
        assert update.returncode == 0, update.communicate()[0].decode()
    assert count >= 4
    server.wait_until(lambda: server.get("/v1/models")["data"][0]["id"] == "new", timeout_s=60)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"CPU": 1.0, "GPU": 2.0}, "2 replicas need 4 CPUs (cpus_per_replica is 2), and this machine has 1"),
        ({"CPU": 8.0, "GPU": 1.0}, "2 replicas need 2 GPUs (gpus_per_replica is 1), and this machine has 1"),
    ],
)
def test_replicas_that_the_machine_has_no_room_for_are_refused(found, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ReplicaOptions(ray=True, min_replicas=2, cpus_per_replica=2).check_room(found, gpus_per_replica=1)


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What a process without a cluster says of both tests below: to import ray takes seconds."""
    settings = yaml.safe_load(EXAMPLE.read_text())["applications"][0]["args"]
    code = f"""
from types import SimpleNamespace
import ray
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from draftloop.errors import CapacityError, ConfigError
from draftloop.server.ray_serve import _connect, build
deployment = build({settings | {"served_model_name": ["a", "b"]}!r})._bound_deployment
config, options, _ = deployment.init_args
print(config.max_num_seqs, options.served_model_name, deployment._deployment_config.max_ongoing_requests)
scaling = deployment._deployment_config.autoscaling_config
print(scaling.min_replicas, scaling.max_replicas)
for running, requests in (2, 16), (2, 64), (4, 8):
    now = SimpleNamespace(config=scaling, current_num_replicas=running, total_num_requests=requests)
    print(replica_queue_length_autoscaling_policy(now)[0])
print(deployment._deployment_config.request_router_config.request_router_class)
try: build({{"modell": "x"}})
except Exception as error: print(error)
def init(**options): raise Exception("The current node timed out")
ray.init = init
try: _connect(None)
except CapacityError as error: print(error)
def init(**options): raise ValueError("Invalid address format: nonsense")
ray.init = init
for address in "nonsense", "127.0.0.1:1":
    try: _connect(address)
    except ConfigError as error: print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_configuration_file_of_rays_names_the_same_settings_and_queues_decide_how_many_replicas(said):
    assert said[:-3] == [
        "8 ('a', 'b') 16",
        "2 8",
        *["2.0", "8.0", "1.0"],
        "draftloop.server.ray_router:PrefixRouter",
        "unknown engine setting 'modell'; did you mean 'model'?",
    ]


def test_a_cluster_that_does_not_start_or_is_not_there_is_one_line(said):
    assert said[-3] == "no Ray cluster could be started on this machine: The current node timed out"
    for line, address, why in zip(said[-2:], ("nonsense", "127.0.0.1:1"), ("Invalid address", "refused"), strict=True):
        assert line.startswith(f"no Ray cluster can be reached at ray_address {address!r}")
        assert why in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-replicas", "2"], "min_replicas is for replicas on Ray Serve only; add --ray"),
        (["--ray", "--min-replicas", "0"], "min_replicas is 0; it must be an integer >= 1"),
        (["--ray", "--min-replicas", "3", "--max-replicas", "2"], "max_replicas is 2; it must be"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, options, message):
    from draftloop.cli import main

    with pytest.raises(SystemExit):
        main(["serve", MODEL, *options])
    assert message in capsys.readouterr().err


def test_where_ray_is_missing_the_extra_is_named(capsys, monkeypatch):
    from draftloop.cli import main

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "draftloop.server.ray_serve", raising=False)
    with pytest.raises(SystemExit):
        main(["serve", MODEL, "--ray"])
    assert "pip install 'draftloop[ray]'" in capsys.readouterr().err
