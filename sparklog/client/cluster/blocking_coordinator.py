"""Asking the coordinator of a group or a transaction: one broker, found, remembered, and another at any time.

Over blocking connections; ``loop_coordinator`` is the same for a producer's loop.
"""

from __future__ import annotations

from typing import TypeVar

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply, Reply, Request

R = TypeVar("R", bound=Reply)

GROUP, TRANSACTION = "group", "transaction"


class BlockingCoordinator:
    """Owned by the thread that owns ``link``. Remembers who coordinates what it was asked about."""

    def __init__(self, link: BlockingCluster) -> None:
        self._link = link
        self._found: dict[tuple[str, str], int] = {}

    def ask(self, kind: str, key: str, request: Request, expected: type[R], *, timeout_s: float | None = None) -> R:
        """Ask until it answers, for ``timeout_s`` (None: the link's): through a change of coordinators, and while a
        new one reads its state.

        Raises:
            BrokerError: one that is not retriable.
            ClientTimeout: no answer in time; the request may have taken effect, or take it yet.
        """
        what = f"{type(request).__name__}, coordinator of {kind} {key!r}"
        return self._link.retrying(what, lambda: self.ask_once(kind, key, request, expected), timeout_s=timeout_s)

    def ask_once(self, kind: str, key: str, request: Request, expected: type[R]) -> R:
        """Find the coordinator unless it is known, and ask it. Raises BrokerError."""
        broker_id = self._found.get((kind, key))
        if broker_id is None or broker_id not in self._link.metadata.brokers:
            broker_id = self._found[kind, key] = self._find(kind, key)
        try:
            return self._link.ask_broker(broker_id, request, expected)
        except BrokerError as error:
            # While it loads, it is the right one; after anything else another may be.
            if error.code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                self._found.pop((kind, key), None)
            raise

    def _find(self, kind: str, key: str) -> int:
        reply = self._link.ask_any(FindCoordinator(0, kind, key), FindCoordinatorReply)
        if reply.broker.broker_id not in self._link.metadata.brokers:
            self._link.refresh()
        return reply.broker.broker_id


def ask_all_brokers(link: BlockingCluster, what: str, request: Request, expected: type[R]) -> list[R]:
    """What every live broker answers. When one ends meanwhile all are asked again: others take over what it
    coordinated.

    Raises:
        BrokerError: one that is not retriable.
        ClientTimeout: some live broker did not answer.
    """

    def attempt() -> list[R]:
        link.refresh()
        return [link.ask_broker(broker_id, request, expected) for broker_id in sorted(link.metadata.brokers)]

    return link.retrying(what, attempt)
