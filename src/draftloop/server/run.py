"""From settings to a server that runs until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import uvicorn

from draftloop.config import EngineConfig
from draftloop.errors import ConfigError
from draftloop.observability import log
from draftloop.server.app import make_app
from draftloop.server.client import EngineClient, EngineMain, wait_for_state
from draftloop.server.engine_process import run as run_engine
from draftloop.server.log_stats import log_stats
from draftloop.server.options import ServerOptions

logger = log.get_logger(__name__)


def serve(
    config: EngineConfig, options: ServerOptions, *, log_level: str = "INFO", engine: EngineMain = run_engine
) -> None:
    """Serve until SIGTERM or SIGINT, then let requests end. Raises ConfigError if the engine cannot start."""
    client = EngineClient(
        config,
        max_waiting=options.max_waiting,
        silence_s=options.engine_silence_s,
        log_level=log_level,
        engine=engine,
    )
    app = make_app(client, options)
    sock = _listen(options.host, options.port)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            # what is failed at the deadline is still sent
            timeout_graceful_shutdown=int(options.shutdown_timeout_s) + 5,
        ),
        client,
        options,
    )
    # uvicorn raises the signal again once it has shut down: ending as asked is no failure. Before it listens to
    # signals itself, one ends it as soon as it has begun
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[sock])
    finally:
        client.kill()  # a second SIGINT skips the engine's orderly end
    if not client.has_started and client.state == "dead":
        raise ConfigError(client.reason)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error


class _Server(uvicorn.Server):
    """Follows the engine's state, and drains at the end."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, options: ServerOptions) -> None:
        super().__init__(config)
        self._client, self._options = client, options
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        host, port = sockets[0].getsockname()[:2]
        scheme = "https" if self._options.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        logger.info("listening at %s://%s:%d; the engine is starting", scheme, shown, port)
        self._tasks.append(asyncio.create_task(self._follow()))
        if not self._client.config.disable_log_stats:
            self._tasks.append(asyncio.create_task(log_stats(self._client)))

    async def _follow(self) -> None:
        start = time.perf_counter()
        await wait_for_state(self._client, "ready", "dead")
        if self._client.state == "ready":
            logger.info("ready after %.1f s", time.perf_counter() - start)
        else:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self._client.drain()
        count, limit = self._client.num_open, self._options.shutdown_timeout_s
        if count:
            logger.info("shutting down: %d requests may go on for %.0f s", count, limit)
        at_deadline = asyncio.get_running_loop().call_later(
            limit, self._client.fail_open, f"the server is shutting down, and {limit:.0f} s have passed"
        )
        await super().shutdown(sockets)
        at_deadline.cancel()
