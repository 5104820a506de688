"""Finding and asking the coordinator of a group or a transaction: one broker, which may change at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sparklog.client.link import ClusterLink
from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    FetchOffsets,
    FetchOffsetsReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    ListGroups,
    ListGroupsReply,
    Reply,
    Request,
)

R = TypeVar("R", bound=Reply)

GROUP, TRANSACTION = "group", "transaction"


class Coordinator:
    """The coordinator of one key, by its broker id; looked up when first asked and again when it says it is not."""

    def __init__(self, link: ClusterLink, kind: str, key: str) -> None:
        self._link = link
        self._kind = kind
        self._key = key
        self._broker_id: int | None = None

    def ask(self, request: Request, expected: type[R], *, timeout_s: float | None = None) -> R:
        """Ask until it answers: through a change of coordinators, and while a new one reads its state.

        Raises:
            BrokerError: one that is not retriable.
            ClientTimeout: no coordinator answered in time.
        """
        what = f"coordinator of {self._kind} {self._key!r}"
        return self._link.retrying(what, lambda: self.ask_once(request, expected), timeout_s=timeout_s)

    def ask_once(self, request: Request, expected: type[R]) -> R:
        """One attempt. Raises BrokerError."""
        if self._broker_id is None or self._broker_id not in self._link.metadata.brokers:
            self._broker_id = self._find()
        try:
            return self._link.ask_broker(self._broker_id, request, expected)
        except BrokerError as error:
            # While it loads, it is the right one; after anything else another may be.
            if error.code != ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                self._broker_id = None
            raise

    def _find(self) -> int:
        reply = self._link.ask_any(FindCoordinator(0, self._kind, self._key), FindCoordinatorReply)
        if reply.broker.broker_id not in self._link.metadata.brokers:
            self._link.refresh()
        return reply.broker.broker_id


def commit_offsets(
    link: ClusterLink, group: str, offsets: Sequence[GroupOffset], *, timeout_s: float | None = None
) -> None:
    """Set offsets of a group; the others stay.

    Raises:
        BrokerError: of the first partition refused.
        ClientTimeout: no coordinator answered in time; they may have been set.
    """
    coordinator = Coordinator(link, GROUP, group)
    reply = coordinator.ask(CommitOffsets(0, group, tuple(offsets)), CommitOffsetsReply, timeout_s=timeout_s)
    for result in reply.results:
        if result.code:
            raise BrokerError(result.code, result.detail or f"group {group!r}, {result.topic}-{result.partition}")


def group_offsets(link: ClusterLink, group: str) -> tuple[GroupOffset, ...]:
    """All offsets a group has; none for a group that nobody has written to. Raises as ``Coordinator.ask``."""
    return Coordinator(link, GROUP, group).ask(FetchOffsets(0, group), FetchOffsetsReply).offsets


def list_groups(link: ClusterLink) -> list[str]:
    """The groups of all live brokers, in order. Raises as ``ask_all_brokers``."""
    replies = ask_all_brokers(link, "groups", ListGroups(0), ListGroupsReply)
    return sorted({group for reply in replies for group in reply.groups})


def ask_all_brokers(link: ClusterLink, what: str, request: Request, expected: type[R]) -> list[R]:
    """What every live broker answers. One that ends meanwhile is left out: others take over what it coordinated, so
    all are asked again.

    Raises:
        BrokerError: one that is not retriable.
        ClientTimeout: some live broker did not answer.
    """

    def attempt() -> list[R]:
        link.refresh()
        return [link.ask_broker(broker_id, request, expected) for broker_id in sorted(link.metadata.brokers)]

    return link.retrying(what, attempt)
