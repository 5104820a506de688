"""The coordinator of a group or a transaction, for clients on an event loop.

It finds the coordinator, caches it, and finds it again after a change. It repeats a request until it succeeds, fails
permanently, or its time is up. The caller handles the response. It does not wait for a coordinator that hangs: the
other brokers name the successor.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.errors import ClientTimeout
from sparklog.client.producer.transaction_run import may_have_acted
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Reply, Request

R = TypeVar("R", bound=Reply)

#: The time without a response after which the coordinator is looked up again. It doubles with each timeout.
_FIRST_PATIENCE_S = 1.0
#: A broker that knows no coordinator waits 5 s for an election: it does not hang.
_FIND_S = 6.0


class LoopCoordinator:
    """The coordinator of one key. Owner: the loop that owns the cluster client."""

    def __init__(self, cluster: LoopCluster, kind: str, key: str, *, request_timeout_s: float) -> None:
        self._cluster = cluster
        self._kind = kind
        self._key = key
        self._request_timeout_s = request_timeout_s
        self._backoff = Backoff()
        self._found: BrokerEndpoint | None = None

    def of(self, kind: str, key: str) -> LoopCoordinator:
        """Return the coordinator of another key."""
        return LoopCoordinator(self._cluster, kind, key, request_timeout_s=self._request_timeout_s)

    async def ask_once(self, request: Request, expected: type[R], *, patience_s: float) -> R:
        """Find the coordinator unless it is known, and ask it. Raises BrokerError."""
        try:
            if self._found is None:
                found = await self._cluster.ask_any(FindCoordinator(0, self._kind, self._key), longest_s=_FIND_S)
                self._found = _expect(found, FindCoordinatorReply).broker
            return _expect(await self._cluster.ask_endpoint(self._found, request, patience_s=patience_s), expected)
        except BrokerError as error:
            if self._cluster.is_closed:
                # A cancelled wait may end with the connection's error instead, and a caller that retries would not end.
                raise asyncio.CancelledError from error
            if error.refresh_metadata:
                self._found = None
            raise

    def pause_s(self, count: int) -> float:
        """Return the delay after failure number ``count``, with jitter."""
        return self._backoff.delay_ms(count, self._cluster.jitter()) / 1000

    def patience_s(self, silences: int) -> float:
        """Return how long to wait for one response after ``silences`` requests without one."""
        return float(min(self._request_timeout_s, _FIRST_PATIENCE_S * 2 ** min(silences, 10)))

    def describe(self, request: Request) -> str:
        return f"{type(request).__name__} of {self._kind} {self._key!r}"


class Attempts:
    """A request that is repeated until its time is up. Several requests may share the time."""

    def __init__(self, coordinator: LoopCoordinator, *, timeout_s: float) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._failures = 0
        self._silences = 0
        #: True if a failed attempt may have had an effect.
        self.uncertain = False

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def patience_s(self) -> float:
        """Return the maximum wait of the next attempt for its response, in seconds."""
        return max(0.001, min(self._coordinator.patience_s(self._silences), self.left_s))

    async def ask(self, request: Request, expected: type[R]) -> R:
        """Repeat the request until it succeeds. Raises BrokerError if it is not retriable, and ClientTimeout."""
        while True:
            began = time.monotonic()
            patience_s = self.patience_s
            try:
                return await self._coordinator.ask_once(request, expected, patience_s=patience_s)
            except BrokerError as error:
                if not error.retriable:
                    raise
                self.uncertain = self.uncertain or may_have_acted(error)
                self._silences += time.monotonic() - began >= patience_s
                delay_s = self._coordinator.pause_s(self._failures)
                self._failures += 1
                if delay_s >= self.left_s:
                    what = self._coordinator.describe(request)
                    raise ClientTimeout(f"{what}: not done within {self._timeout_s:g} s, last: {error}") from error
                await asyncio.sleep(delay_s)


def _expect(reply: Reply, expected: type[R]) -> R:
    if not isinstance(reply, expected):
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{type(reply).__name__} found; expected {expected.__name__}")
    return reply
