"""Replicas of the server on Ray Serve. Needs the extra `ray`; replica_options.py can be read without it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from dataclasses import fields
from typing import Any

import ray
from ray import serve
from ray.serve.config import ControllerOptions, HTTPOptions
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from draftloop.config import EngineConfig, Environment
from draftloop.errors import CapacityError, ConfigError
from draftloop.observability import log
from draftloop.server.app import make_app
from draftloop.server.client import EngineClient, wait_for_state
from draftloop.server.options import ServerOptions
from draftloop.server.ray_proxy import LAST_WORDS_S
from draftloop.server.replica_options import ReplicaOptions

DEPLOYMENT = "engine"
HEALTH_PERIOD_S = 2.0
"""Ray gives a replica up after three checks that fail."""
CONSTRUCTOR_TRIES = 2
CONNECT_S = 10.0
"""How long a cluster's address has to answer."""
PROXY_CALLBACK = "draftloop.server.ray_proxy.middlewares"
ROUTERS: dict[str, dict[str, Any]] = {
    "least_loaded": {},  # Ray's own
    "prefix": {"request_router_class": "draftloop.server.ray_router:PrefixRouter"},
}
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
"""For Serve's own processes; the engines log as ever."""

logger = log.get_logger(__name__)


class Replica:
    """One engine behind the application that `draftloop serve` serves, in a process of Ray's."""

    def __init__(self, config: EngineConfig, options: ServerOptions, log_level: str) -> None:
        log.setup(log_level, Environment.read().log_format)
        self._options = options
        self._client = EngineClient(
            config,
            max_waiting=options.max_waiting,
            silence_s=options.engine_silence_s,
            log_level=log_level,
            name=serve.get_replica_context().replica_id.unique_id,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._client, self._options)

    async def check_health(self) -> None:
        """What /health says; the first time, which is before anything is routed here, it waits for the engine."""
        client = self._client
        if not client.has_started:
            await wait_for_state(client, "ready", "dead")
            if client.state == "dead":
                raise ConfigError(client.reason)
            self._follower = asyncio.create_task(self._end_with_engine())
        if client.state == "dead":
            raise CapacityError(client.reason)

    async def _end_with_engine(self) -> None:
        """A replica that refuses at once has the shortest queue, and would draw all requests until it is found out."""
        await wait_for_state(self._client, "dead")
        await asyncio.sleep(LAST_WORDS_S)
        os._exit(1)


def make_application(
    config: EngineConfig, options: ServerOptions, replicas: ReplicaOptions, *, log_level: str = "INFO"
) -> serve.Application:
    """What Ray deploys, and under which rules."""
    rows = config.max_num_seqs * config.data_parallel_size
    deploy = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": replicas.cpus_per_replica, "num_gpus": gpus_per_replica(config, replicas)},
        # A replica holds what it runs and as much again; what waits beyond that may still go to any of them.
        max_ongoing_requests=2 * rows,
        max_queued_requests=max(options.max_waiting, 1),
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.most_replicas,
            "target_ongoing_requests": replicas.target_requests or rows,
            "upscale_delay_s": 10.0,
            "downscale_delay_s": 300.0,
        },
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.shutdown_timeout_s + 10,  # the engine has to end after its requests
        request_router_config=ROUTERS[replicas.routing],
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        max_surge_percent=replicas.max_surge_percent,
        logging_config=QUIET,
    )
    return deploy(serve.ingress()(Replica)).bind(config, options, log_level)


def build(settings: dict[str, Any]) -> serve.Application:
    """For Ray's own configuration files, `import_path: draftloop.server.ray_serve:build`.

    `args` are the names and values of EngineConfig, ServerOptions and ReplicaOptions, in one mapping. Raises
    ConfigError.
    """
    values = {"ray": True, **settings}
    options = ServerOptions(**_take(ServerOptions, values))
    replicas = ReplicaOptions(**_take(ReplicaOptions, values))
    return make_application(EngineConfig.from_mapping(**values), options, replicas)


def _take(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Move what belongs to a dataclass out of `values`; the files' lists are its tuples."""
    found = {field.name: values.pop(field.name) for field in fields(cls) if field.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def gpus_per_replica(config: EngineConfig, replicas: ReplicaOptions) -> int:
    if replicas.gpus_per_replica is not None:
        return replicas.gpus_per_replica
    on_cpu = config.device == "cpu" or (config.device == "auto" and not ray.cluster_resources().get("GPU"))
    return 0 if on_cpu else config.tensor_parallel_size * config.data_parallel_size


def serve_replicas(
    config: EngineConfig, options: ServerOptions, replicas: ReplicaOptions, *, log_level: str = "INFO"
) -> None:
    """Deploy, and serve until SIGTERM or SIGINT; on a cluster that was there before, return once the replicas serve.

    Raises ConfigError if they cannot start.
    """
    is_own = replicas.ray_address is None
    try:
        _connect(replicas.ray_address)
        if is_own:
            replicas.check_room(ray.cluster_resources(), gpus_per_replica(config, replicas))
        url = _start_proxies(options)
        _deploy(make_application(config, options, replicas, log_level=log_level), replicas.ray_app_name)
        cluster = ray.get_runtime_context().gcs_address
        logger.info("listening at %s; %d replicas are ready (cluster %s)", url, replicas.min_replicas, cluster)
        if is_own:
            _wait_for_signal()
            logger.info("shutting down: requests may go on for %.0f s", options.shutdown_timeout_s)
            serve.delete(replicas.ray_app_name)
    except KeyboardInterrupt:
        logger.info("shutting down before the replicas are ready")
    finally:
        if is_own and ray.is_initialized():
            serve.shutdown()
        ray.shutdown()


def _connect(address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of this cluster
    try:
        if address is not None and re.fullmatch(r"[\w.-]+:\d+", address):  # ray would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address or "local", include_dashboard=False if address is None else None)
    except Exception as error:  # ray raises just that where a node has not started within 30 s
        if address is None:
            raise CapacityError(f"no Ray cluster could be started on this machine: {error}") from error
        hint = "where it wants a token, set RAY_AUTH_MODE=token"
        raise ConfigError(f"no Ray cluster can be reached at ray_address {address!r} ({hint}): {error}") from error
    # ray has set a handler of its own, which ends this process on the spot
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _start_proxies(options: ServerOptions) -> str:
    """The address that they listen at. Where Serve runs already, its own stays."""
    port = options.port
    if port == 0:
        with socket.create_server((options.host, 0)) as free:
            port = free.getsockname()[1]
    http = HTTPOptions(host=options.host, port=port, ssl_keyfile=options.ssl_keyfile, ssl_certfile=options.ssl_certfile)
    environment = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_CALLBACK}
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options=http,
            logging_config=QUIET,
            controller_options=ControllerOptions(runtime_env={"env_vars": environment}),
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot listen at {options.host}:{port}: {error}; choose another --port or --host"
        ) from error
    return f"{'https' if options.ssl_certfile else 'http'}://{options.host}:{port}"


def _deploy(application: serve.Application, name: str) -> None:
    try:
        serve.run(application, name=name, route_prefix="/")
    except RuntimeError as error:
        found = serve.status().applications.get(name)
        reports = [one.message for one in found.deployments.values()] if found else []
        # the last line of a traceback says what is wrong
        last = next(line for line in reversed("\n".join([str(error), *reports]).splitlines()) if line.strip())
        reason = re.sub(r"^[\w.]*Error: ", "", last.strip())
        raise ConfigError(f"the replicas cannot start: {reason}") from error


def _wait_for_signal() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
