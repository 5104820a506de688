"""Requests to the coordinator of a group or a transaction, for clients on an event loop.

A request is repeated until it succeeds, fails permanently, or its time is up. The caller handles the response. The
client does not wait long for a coordinator that hangs, because the other brokers can name its successor.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from sparklog.client.cluster.coordinator_search import CoordinatorSearch
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.retry import Retry
from sparklog.client.cluster.routing_core import next_timeout_s
from sparklog.errors import BrokerError
from sparklog.protocol.messages import Reply, Request

R = TypeVar("R", bound=Reply)


class LoopCoordinator:
    """An asyncio client of the coordinator of one group or transactional id.

    Not thread-safe: use it only on the event loop of its cluster client.
    """

    def __init__(self, cluster: LoopCluster, kind: str, key: str, *, request_timeout_s: float) -> None:
        self.cluster = cluster
        self.search = CoordinatorSearch(cluster.core, kind, key)
        self._request_timeout_s = request_timeout_s

    def of(self, kind: str, key: str) -> LoopCoordinator:
        """Return a client of the coordinator of another group or transactional id."""
        return LoopCoordinator(self.cluster, kind, key, request_timeout_s=self._request_timeout_s)

    async def ask_once(self, request: Request, expected: type[R], *, timeout_s: float) -> R:
        """Find the coordinator unless it is known, and send the request once. Raises BrokerError."""
        return await self.cluster.run(self.search.ask(request, expected, timeout_s=timeout_s))

    def pause_s(self, count: int) -> float:
        """Return the delay, in seconds with jitter, after failure number ``count`` (from 0)."""
        return self.cluster.pause_s(count)

    def timeout_s(self, silences: int) -> float:
        """Return how long to wait for a response. ``silences`` is the number of earlier requests without a response."""
        return next_timeout_s(silences, self._request_timeout_s)


class Attempts:
    """The repetition of a request until it succeeds or its time is up. Several requests may share one time limit."""

    def __init__(self, coordinator: LoopCoordinator, *, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._retry = Retry(now_s=time.monotonic(), timeout_s=timeout_s)

    @property
    def deadline(self) -> float:
        return self._retry.deadline_s

    @property
    def uncertain(self) -> bool:
        """Return whether a failed attempt may have had an effect."""
        return self._retry.uncertain

    @property
    def left_s(self) -> float:
        return self._retry.left_s(time.monotonic())

    @property
    def timeout_s(self) -> float:
        """Return how long the next attempt waits for its response, in seconds."""
        return max(0.001, min(self._coordinator.timeout_s(self._retry.silences), self.left_s))

    async def ask(self, request: Request, expected: type[R]) -> R:
        """Repeat the request until it succeeds. Raises a BrokerError that is not retriable, or ClientTimeout."""
        coordinator = self._coordinator
        while True:
            try:
                return await coordinator.ask_once(request, expected, timeout_s=self.timeout_s)
            except BrokerError as error:  # noqa: PERF203 - a retry loop
                what, now_s = coordinator.search.describe(request), time.monotonic()
                roll = coordinator.cluster.core.roll()
                await asyncio.sleep(self._retry.delay_s(what, error, now_s=now_s, roll=roll))
