"""Requests to the coordinators of groups and transactions, over blocking connections.

``loop_coordinator`` does the same for clients on an event loop.
"""

from __future__ import annotations

from typing import TypeVar

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.coordinator_search import CoordinatorSearch
from sparklog.protocol.messages import Reply, Request

R = TypeVar("R", bound=Reply)


class BlockingCoordinator:
    """A client of the coordinator of one group or transactional id.

    Not thread-safe: use it only in the thread of its cluster client.
    """

    def __init__(self, cluster: BlockingCluster, kind: str, key: str) -> None:
        self._cluster = cluster
        self._search = CoordinatorSearch(cluster.core, kind, key)

    def ask(self, request: Request, expected: type[R], *, timeout_s: float | None = None) -> R:
        """Repeat a request until it succeeds, for at most ``timeout_s`` (None: the client's default).

        Among other failures, retry after a change of the coordinator, and while a new coordinator loads its state.

        Raises:
            BrokerError: an error that is not retriable.
            ClientTimeout: there was no response in time. The request may have had an effect, or may have one later.
        """
        what = self._search.describe(request)
        return self._cluster.retrying(what, lambda: self.ask_once(request, expected), timeout_s=timeout_s)

    def ask_once(self, request: Request, expected: type[R]) -> R:
        """Find the coordinator unless it is known, and send the request once. Raises BrokerError."""
        return self._cluster.run(self._search.ask(request, expected))


def ask_all_brokers(cluster: BlockingCluster, what: str, request: Request, expected: type[R]) -> list[R]:
    """Send a request to all live brokers, and return their responses.

    If a broker ends in the meantime, ask all brokers again, because other brokers become the coordinators of its groups
    and transactions.

    Raises:
        BrokerError: an error that is not retriable.
        ClientTimeout: a live broker did not respond.
    """

    def attempt() -> list[R]:
        cluster.refresh()
        return [cluster.ask_broker(broker_id, request, expected) for broker_id in sorted(cluster.metadata.brokers)]

    return cluster.retrying(what, attempt)
