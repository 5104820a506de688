"""The coordinators of groups and transactions, over blocking connections.

``loop_coordinator`` is the same for an event loop.
"""

from __future__ import annotations

from typing import TypeVar

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.coordinator_search import CoordinatorSearch
from sparklog.protocol.messages import Reply, Request

R = TypeVar("R", bound=Reply)


class BlockingCoordinator:
    """The coordinator of one key. Owner: the thread that owns the cluster client."""

    def __init__(self, cluster: BlockingCluster, kind: str, key: str) -> None:
        self._cluster = cluster
        self._search = CoordinatorSearch(cluster.core, kind, key)

    def ask(self, request: Request, expected: type[R], *, timeout_s: float | None = None) -> R:
        """Ask until there is a response, for ``timeout_s`` (None: the client's default).

        Retries cover a change of coordinators, and the time in which a new one loads its state.

        Raises:
            BrokerError: one that is not retriable.
            ClientTimeout: no response in time; the request may have had an effect, or may still have one.
        """
        what = self._search.describe(request)
        return self._cluster.retrying(what, lambda: self.ask_once(request, expected), timeout_s=timeout_s)

    def ask_once(self, request: Request, expected: type[R]) -> R:
        """Find the coordinator unless it is known, and ask it. Raises BrokerError."""
        return self._cluster.run(self._search.ask(request, expected))


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
