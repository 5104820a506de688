"""States of partitions in ZooKeeper as their leaders read and write them, and reports of ISR changes to the controller.

A state is written only by compare-and-set. Each operation defines its outcome after a connection that breaks meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sparklog.model import LeaderAndIsr, TopicPartition, TopicStates, VersionedState
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkError, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.session import Check, Op, SetData, ZkSession
from sparklog.zk.unreadable import Unreadable

#: The states that a broker has written and no controller has processed, about 40 bytes each. Every controller reads
#: them at the start of its term.
MAX_NOTIFICATION_BYTES = 500_000


@dataclass(frozen=True, slots=True)
class Written:
    """A durable write; the node now has this ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """A write that lost its compare-and-set and changed nothing.

    ``found`` is the node's current state. If it has the version that the write expected, then the incarnation of an
    added broker was wrong.
    """

    found: VersionedState
    reason: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A partition without a state, because its topic was deleted."""


@dataclass(frozen=True, slots=True)
class FateUnknown:
    """A write whose connection broke.

    If ``sent`` is false, it certainly did not happen. The caller then reads the state with ``read_again`` and
    treats the result as decided.

    ``why`` is set if the connection is intact but the response is not understood. The caller then pauses before the
    next attempt.
    """

    sent: bool
    why: str = ""


WriteOutcome = Written | WriteRefused | NodeGone | FateUnknown


class StateStore:
    """Stateless operations over one session; any number of them may be in flight. Owner: a ``ClusterStore``."""

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    async def read(self, tp: TopicPartition) -> VersionedState | None:
        """Return the partition's state, or None if it has none (yet, or any more)."""
        path = paths.state(tp)
        try:
            node = await self._session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode_state(path, node.data, node.version)

    async def read_again(self, tp: TopicPartition) -> VersionedState | None:
        """Wait for the connection after FateUnknown, let the server catch up, and read the state.

        The wait has no limit. The read comes after the write in any case: the ensemble refuses a session's requests
        over an earlier connection after the session has moved to a new one.

        Raises:
          ZkUnreachable: the session was closed.
        """

        async def read() -> VersionedState | None:
            await self._session.sync(paths.state(tp))
            try:
                return await self.read(tp)
            except codecs.ZkFormatError as error:
                raise ZkError(str(error)) from None  # The read is repeated after a pause.

        return await self._session.patiently(read)

    def send_isr(
        self,
        tp: TopicPartition,
        state: LeaderAndIsr,
        *,
        expected_version: int,
        leader_incarnation: int,
        added: Sequence[tuple[int, int]] = (),
        topic_id: str = "",
    ) -> asyncio.Future[tuple[int, ...]]:
        """Send the leader's new ISR: a write that succeeds only if the node is at ``expected_version``.

        It also requires that the brokers in ``added`` still have these incarnations. ``leader_incarnation`` is the
        writer's current one: it names the process that this leader epoch belongs to. With ``topic_id`` the write fails
        if the topic was deleted, even if a new topic has its name.

        Returns at once: thousands of these writes come together, and a task for each would cost more than the write.
        The last of the results is the node's new version. If the future fails, ``isr_outcome`` returns the meaning.
        """
        path = paths.state(tp)
        ops: list[Op] = [Check(paths.incarnation(broker_id), found) for broker_id, found in added]
        if topic_id:
            ops.append(Check(paths.topic_id(topic_id), -1))
        ops.append(SetData(path, codecs.encode_state(state, leader_incarnation), expected_version))
        return self._session.multi_batched(ops)

    async def isr_outcome(
        self,
        sent: asyncio.Future[tuple[int, ...]],
        tp: TopicPartition,
        *,
        expected_version: int,
        added: Sequence[tuple[int, int]] = (),
    ) -> WriteOutcome:
        """Return the outcome of a write that ``send_isr`` sent with these arguments."""
        try:
            return Written((await sent)[-1])
        except ZkUnreachable as error:
            return FateUnknown(error.sent)
        except ZkMultiFailed as error:
            if isinstance(error.cause, ZkNoNode) and error.index >= len(added):
                return NodeGone()
            if error.index < len(added):
                reason = f"broker {added[error.index][0]} is no longer incarnation {added[error.index][1]}"
            else:
                reason = f"the node is not at version {expected_version} any more"
        except ZkError as error:
            return FateUnknown(sent=True, why=str(error))
        try:
            found = await self.read(tp)
        except ZkUnreachable:
            return FateUnknown(sent=False)
        except (ZkError, codecs.ZkFormatError) as error:
            return FateUnknown(sent=False, why=str(error))
        return NodeGone() if found is None else WriteRefused(found, reason)

    async def notify_isr_change(self, broker_id: int, states: Sequence[TopicStates]) -> None:
        """Notify the controller of the states that this broker wrote as the leader.

        May be repeated.

        The notification contains the states, so the controller need not read thousands of nodes while brokers wait for
        it. Each broker has one node, which collects all states that no controller has processed: without a controller,
        separate nodes would accumulate until ZooKeeper could not list them. The node is written even if it already has
        all of the states, because a controller may have read it before these writes. The new version prevents its
        deletion based on that read.
        """
        path = paths.isr_change(broker_id)
        while True:
            with suppress(ZkNodeExists):
                await self._session.create(path, _notification(states))
                return
            with suppress(ZkNoNode, ZkBadVersion):
                node = await self._session.get(path)
                try:
                    noted = codecs.decode_isr_changes(path, node.data).reported
                except codecs.ZkFormatError as error:
                    self._unreadable.skip(path, error)
                    noted = ()  # The old content is unknown, so any partition may be meant.
                value = _notification(_merged((*noted, *states)) if noted else ())
                await self._session.set(path, value, node.version)
                return


def _notification(states: Iterable[TopicStates]) -> bytes:
    """Encode a notification; one of too many states for a node names none, which means any partition."""
    value = codecs.encode_isr_changes(states)
    return value if len(value) <= MAX_NOTIFICATION_BYTES else codecs.encode_isr_changes(())


def _merged(reports: Iterable[TopicStates]) -> Iterable[TopicStates]:
    """Return the newest state of each partition."""
    topics: dict[tuple[str, str], dict[int, VersionedState]] = {}
    for report in reports:
        newest = topics.setdefault((report.topic, report.topic_id), {})
        for partition, stored in report.states.items():
            known = newest.get(partition)
            if known is None or known.version < stored.version:
                newest[partition] = stored
    return [TopicStates(topic, topic_id, newest) for (topic, topic_id), newest in topics.items()]
