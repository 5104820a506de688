"""The coordinators of groups and transactions, over blocking connections.

``loop_coordinator`` is the same for an event loop.
"""

from __future__ import annotations

from typing import TypeVar

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Reply, Request

R = TypeVar("R", bound=Reply)

GROUP, TRANSACTION = "group", "transaction"


class BlockingCoordinator:
    """A cache of coordinators by key. Owner: the thread that owns the cluster client."""

    def __init__(self, cluster: BlockingCluster) -> None:
        self._cluster = cluster
        self._found: dict[tuple[str, str], int] = {}

    def ask(self, kind: str, key: str, request: Request, expected: type[R], *, timeout_s: float | None = None) -> R:
        """Ask until there is a response, for ``timeout_s`` (None: the client's default).

        Retries cover a change of coordinators, and the time in which a new one loads its state.

        Raises:
            BrokerError: one that is not retriable.
            ClientTimeout: no response in time; the request may have had an effect, or may still have one.
        """
        what = f"{type(request).__name__}, coordinator of {kind} {key!r}"
        return self._cluster.retrying(what, lambda: self.ask_once(kind, key, request, expected), timeout_s=timeout_s)

    def ask_once(self, kind: str, key: str, request: Request, expected: type[R]) -> R:
        """Find the coordinator unless it is known, and ask it. Raises BrokerError."""
        broker_id = self._found.get((kind, key))
        if broker_id is None or broker_id not in self._cluster.metadata.brokers:
            broker_id = self._found[kind, key] = self._find(kind, key)
        try:
            return self._cluster.ask_broker(broker_id, request, expected)
        except BrokerError as error:
            # A coordinator that loads is the right one. After any other error, another broker may be.
            if error.code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                self._found.pop((kind, key), None)
            raise

    def _find(self, kind: str, key: str) -> int:
        reply = self._cluster.ask_any(FindCoordinator(0, kind, key), FindCoordinatorReply)
        if reply.broker.broker_id not in self._cluster.metadata.brokers:
            self._cluster.refresh()
        return reply.broker.broker_id


def ask_all_brokers(cluster: BlockingCluster, what: str, request: Request, expected: type[R]) -> list[R]:
    """Return the responses of all live brokers.

    If a broker ends in the meantime, all are asked again, because other brokers become the coordinators of its keys.

    Raises:
        BrokerError: one that is not retriable.
        ClientTimeout: a live broker did not respond.
    """

    def attempt() -> list[R]:
        cluster.refresh()
        return [cluster.ask_broker(broker_id, request, expected) for broker_id in sorted(cluster.metadata.brokers)]

    return cluster.retrying(what, attempt)
