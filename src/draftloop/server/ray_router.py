"""Which replica answers a request, where conversations stay with the replica that has their prompts cached.

Runs in Ray's proxies.
"""

from __future__ import annotations

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

SLACK = 4
"""Requests that the conversation's replica may hold beyond twice the shortest queue: a cached prompt is worth that."""


class PrefixRouter(ConsistentHashRouter):
    """Sends a conversation where consistent hashing says, so that few of them move when replicas come and go; and to
    the shortest queue while that replica has too much to do."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if not ranks:
            return ranks
        shortest = min(candidate_replicas, key=self._length)
        if self._length(ranks[0][0]) > 2 * self._length(shortest) + SLACK:
            return [[shortest], *ranks]
        return ranks

    def _length(self, replica: RunningReplica) -> int:
        """Requests that it holds, as far as this proxy knows."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
