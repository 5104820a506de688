"""The partition states in ZooKeeper, for leaders: reads, writes of the ISR, and notifications of the controller.

A state is written only by compare-and-set. Each operation defines its outcome if the connection breaks.
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

#: The maximum size of a notification: the states that a broker has written and no controller has processed, about 40
#: bytes each. Every controller reads all notifications at the start of its term.
MAX_NOTIFICATION_BYTES = 500_000


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a write that is durable. The node now has this ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """The outcome of a write that ZooKeeper refused.

    Either the partition's state had another version, or a broker that the write adds to the ISR had another
    incarnation. ``found`` is the current state. If the current state has the version that the write expected, then the
    incarnation of an added broker was the reason.
    """

    found: VersionedState
    reason: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The outcome of a write to a partition that has no state any more, because its topic was deleted."""


@dataclass(frozen=True, slots=True)
class FateUnknown:
    """The outcome of a write after which the caller does not know the partition's state.

    The connection broke, or ZooKeeper returned an unexpected error. If ``sent`` is false, the write was certainly not
    performed. Otherwise it may have been performed. To learn the state, the caller uses ``read_again``.

    If ``why`` is not empty, it is the text of an unexpected error, and the caller pauses before the next attempt.
    """

    sent: bool
    why: str = ""


WriteOutcome = Written | WriteRefused | NodeGone | FateUnknown


class StateStore:
    """A store of the partition states (leader and ISR) in ZooKeeper, over one session.

    Any number of operations may be in flight, because the store keeps no copy of the states.
    """

    def __init__(self, session: ZkSession, unreadable: Unreadable) -> None:
        self._session = session
        self._unreadable = unreadable

    async def read(self, tp: TopicPartition) -> VersionedState | None:
        """Return the partition's state, or None if the partition has no state yet or was deleted."""
        path = paths.state(tp)
        try:
            node = await self._session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode_state(path, node.data, node.version)

    async def read_again(self, tp: TopicPartition) -> VersionedState | None:
        """Read the state after a write with the outcome FateUnknown, to learn whether the write was performed.

        First wait, without a time limit, until the session is connected and the server has caught up. The write cannot
        take effect after this read, because ZooKeeper refuses requests from the session's earlier connection.

        Raises:
          ZkUnreachable: the session was closed.
        """

        async def read() -> VersionedState | None:
            await self._session.sync(paths.state(tp))
            try:
                return await self.read(tp)
            except codecs.ZkFormatError as error:
                raise ZkError(str(error)) from None  # ``patiently`` repeats the read after a pause.

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
        """Send a write of the leader's new state with its ISR. Return a future, which ``isr_outcome`` accepts.

        The write succeeds only if the partition's node has ``expected_version``, and each broker in ``added`` (broker
        id, incarnation) still has this incarnation. ``leader_incarnation`` is the leader's own incarnation, which is
        stored in the state. With ``topic_id`` the write fails if the topic was deleted, even if a new topic has its
        name.

        The method is not a coroutine, because thousands of these writes come together, and a task for each would take
        more time than the write itself. The last of the future's results is the new version of the node.
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
        """Wait for a write that ``send_isr`` has sent with the same arguments, and return its outcome."""
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
        """Notify the controller of partition states that this broker has written as a leader.

        The call may be repeated.

        The notification contains the states, so that the controller need not read thousands of nodes while brokers
        wait. Each broker has one notification node, which collects all states that no controller has processed yet. If
        each change had its own node, ZooKeeper might become unable to list the nodes while there is no controller. The
        node is written even if it already has these states. Its new version keeps a controller that has read the old
        version from deleting the node.
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
                    noted = ()  # It may have named any partition.
                value = _notification(_merged((*noted, *states)) if noted else ())
                await self._session.set(path, value, node.version)
                return


def _notification(states: Iterable[TopicStates]) -> bytes:
    """Encode a notification. If the states are too many for a node, encode none, which means any partition."""
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
