"""What `draftloop serve --ray` may be asked beside the server's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from draftloop.config.fields import check, check_fields
from draftloop.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Each docstring is also the option's help."""

    ray: bool = False
    """Serve from replicas of this server on Ray Serve; needs the extra `ray`."""
    ray_address: str | None = None
    """Cluster to deploy to, such as auto for the one on this machine: the command returns once the replicas serve, and
    given again it updates them one after the other. Left out, it starts a cluster of one node that ends with it."""
    ray_app_name: str = "draftloop"
    """Name of the application on the cluster; deploying under the same name updates it."""
    min_replicas: int = 1
    """Replicas at least."""
    max_replicas: int | None = None
    """Replicas at most; left out, as many as at least, so that their number never changes."""
    target_requests: int | None = None
    """Requests, running and waiting, that a replica should hold: with more on average another one is started, with
    fewer one is ended. Left out, --max-num-seqs."""
    routing: Literal["least_loaded", "prefix"] = "least_loaded"
    """Where a request goes: least_loaded, the shorter queue of two; prefix, where its conversation was before, unless
    many wait there."""
    cpus_per_replica: float = 1.0
    """Processors that Ray sets aside for a replica."""
    gpus_per_replica: int | None = None
    """GPUs of a replica; left out, as many as its engines and their ranks need, and none with --device cpu."""
    max_surge_percent: int = 0
    """Replicas that an update may add while it runs, in percent. With 0 an old one ends before its successor starts,
    which needs no spare GPU, but leaves a gap where there is one replica only."""

    def __post_init__(self) -> None:
        check_fields(self)

        def need(ok: bool, name: str, limit: str) -> None:
            check(ok, self, name, limit)

        need(self.min_replicas >= 1, "min_replicas", "an integer >= 1")
        least = self.min_replicas
        need(self.most_replicas >= least, "max_replicas", f"an integer >= min_replicas, which is {least}")
        need(self.target_requests is None or self.target_requests >= 1, "target_requests", "an integer >= 1")
        need(self.cpus_per_replica > 0, "cpus_per_replica", "a number above 0")
        need(self.gpus_per_replica is None or self.gpus_per_replica >= 0, "gpus_per_replica", "an integer >= 0")
        need(0 <= self.max_surge_percent <= 100, "max_surge_percent", "in [0, 100]")
        need(bool(self.ray_app_name) and "#" not in self.ray_app_name, "ray_app_name", "a text without #")
        if not self.ray:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise ConfigError(f"{field.name} is for replicas on Ray Serve only; add --ray, or leave it out")

    @property
    def most_replicas(self) -> int:
        return self.min_replicas if self.max_replicas is None else self.max_replicas

    def check_room(self, found: Mapping[str, float], gpus_per_replica: int) -> None:
        """Raises ConfigError where replicas would wait forever for what a cluster that does not grow has not got.

        `found` is its "CPU" and "GPU".
        """
        for what, name, each in (
            ("CPU", "cpus_per_replica", self.cpus_per_replica),
            ("GPU", "gpus_per_replica", gpus_per_replica),
        ):
            if each * self.most_replicas > found.get(what, 0):
                raise ConfigError(
                    f"{self.most_replicas} replicas need {each * self.most_replicas:g} {what}s ({name} is {each:g}), "
                    f"and this machine has {found.get(what, 0):g}; lower max_replicas or {name}, or name a cluster "
                    "with ray_address"
                )
