"""What `draftloop serve` may be asked beside the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftloop.config.fields import check, check_fields


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Each docstring is also the option's help."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 listens at all of them."""
    port: int = 8000
    """0 takes a free one, and says which."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must send one of; DRAFTLOOP_API_KEY adds one. Without any, everybody is served."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests know the model by; the first one is answered with. Left out, the model's own."""
    max_waiting: int = 256
    """Answers that may wait for a row; more are refused with status 429."""
    max_body_bytes: int = 8 * 2**20
    """Largest request."""
    shutdown_timeout_s: float = 30.0
    """After SIGTERM, what runs may go on for so long."""
    engine_silence_s: float = 300.0
    """A busy engine that gives no sign of life for so long is given up."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server (CORS); none unless named."""
    chat_template: str | None = None
    """Jinja template, or a file that holds one, instead of the model's."""
    trust_request_chat_template: bool = False
    """Let requests bring chat templates of their own."""
    tool_call_parser: Literal["hermes", "none"] = "hermes"
    """Format in which the model calls tools; none leaves calls in the text."""
    reasoning_parser: Literal["think", "none"] = "none"
    """think: what stands between <think> and </think> becomes the answer's reasoning."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Sampling values that a request leaves out: auto takes the model's generation_config.json, vllm the API's own."""
    smooth_stream: bool = False
    """Show the tokens of a step one by one, evenly until the next step comes, to people who read along."""
    profile_dir: str | None = None
    """Folder for traces; requests to /start_profile and /stop_profile are refused without one."""
    log_requests: bool = False
    """Log a line for each request that has ended."""
    otlp_traces_endpoint: str | None = None
    """Send a span for each request to this OpenTelemetry collector, such as http://localhost:4318/v1/traces."""
    root_path: str = ""
    """Path under which a proxy offers this server."""
    ssl_keyfile: str | None = None
    """Private key, for HTTPS."""
    ssl_certfile: str | None = None
    """Certificate, for HTTPS."""

    def __post_init__(self) -> None:
        check_fields(self)

        def need(ok: bool, name: str, limit: str) -> None:
            check(ok, self, name, limit)

        need(0 <= self.port < 65536, "port", "in [0, 65535]")
        need(self.max_waiting >= 0, "max_waiting", "an integer >= 0")
        need(self.max_body_bytes >= 1024, "max_body_bytes", "an integer >= 1024")
        need(self.shutdown_timeout_s >= 0, "shutdown_timeout_s", "a number >= 0")
        need(self.engine_silence_s > 0, "engine_silence_s", "a number above 0")
        need(all(self.api_key), "api_key", "texts that are not empty")
        need(all(self.served_model_name), "served_model_name", "texts that are not empty")
        need(self.ssl_certfile is not None or self.ssl_keyfile is None, "ssl_keyfile", "given with ssl_certfile")
