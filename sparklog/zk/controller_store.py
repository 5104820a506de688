"""The election of a controller in ZooKeeper, and the controller's writes, which check its controller epoch.

Each election changes the version of ``/controller_epoch``. A multi that checks this version fails as soon as another
controller has been elected, even if this controller does not know that. Writes are pipelined, with one multi per
partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from sparklog.model import NO_EPOCH, LeaderAndIsr, TopicPartition, TopicRecord
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore, encode_record
from sparklog.zk.controller_levels import ControllerLevels
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNoNode, ZkUnreachable, raise_other_than
from sparklog.zk.session import Check, Create, Delete, Node, Op, SetData, ZkSession
from sparklog.zk.state_store import FateUnknown, NodeGone, WriteOutcome, WriteRefused, Written
from sparklog.zk.topic_deletion import TopicDeletion

#: The expected version for a node that does not exist yet.
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class EpochLost:
    """The outcome of a write that did not happen because another controller has been elected."""


@dataclass(frozen=True, slots=True)
class WriteSuperseded:
    """The outcome of a write that did not happen because a node has an unexpected version or does not exist."""

    reason: str


StateOutcome = WriteOutcome | EpochLost


class StateChange(NamedTuple):
    """The new state of one partition, which ``write_topic`` writes."""

    tp: TopicPartition
    state: LeaderAndIsr
    leader_incarnation: int
    expected_version: int


class ControllerStore:
    """A store for one controller's reads and writes in ZooKeeper.

    Call ``elect`` before any write, because writes check the controller epoch that ``elect`` returns. The reads in
    ``levels`` do not need the epoch.
    """

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self.cluster = ClusterStore(session)
        #: The nodes that were skipped because they are unreadable.
        self.unreadable = self.cluster.unreadable
        self.levels = ControllerLevels(self.cluster)
        self._deletion = TopicDeletion(self.levels)
        self._epoch_version = NO_NODE
        #: A lock with which only one caller at a time drops a deletion request. Otherwise, if two callers read the same
        #: request, one caller could delete it, and the other caller could delete the next request with that name.
        self._dropping = asyncio.Lock()
        #: The newest epoch that ``elect`` has returned.
        self._given = NO_EPOCH

    async def elect(self, controller_id: str) -> int | None:
        """Try to become the controller: create ``/controller`` and assign a new controller epoch.

        Return the epoch, which no earlier controller has had. Return None if there is another controller.
        """
        if self._given != NO_EPOCH:
            await self._delete_served_claim()
        epoch = await self._claim(controller_id)
        if epoch is not None:
            self._given = epoch
        return epoch

    async def _delete_served_claim(self) -> None:
        """Delete the ``/controller`` node of an earlier term of this session, if it still exists.

        A second term with the same epoch would number its updates from the start again, and brokers would ignore them
        as outdated.
        """
        try:
            holder = await self.session.get(paths.CONTROLLER)
        except ZkNoNode:
            return
        held = self._held(holder)
        if self.owns(holder) and (held is None or held.controller_epoch <= self._given):
            with suppress(ZkNoNode):
                await self.session.delete(paths.CONTROLLER, holder.version)

    def _held(self, holder: Node) -> codecs.ControllerNode | None:
        """Return the value of ``/controller``, or None if it is unreadable."""
        try:
            return codecs.decode(paths.CONTROLLER, holder.data, codecs.ControllerNode)
        except codecs.ZkFormatError as error:
            self.unreadable.skip(paths.CONTROLLER, error)
            return None

    def _newest_epoch(self, node: Node) -> int:
        """Return the newest controller epoch that is known to be assigned.

        This works even if the value of ``/controller_epoch`` is lost: each election writes the node once, so its
        version is at least the last valid epoch.

        Raises:
          ZkFormatError: the value has a newer format.
        """
        try:
            value = codecs.decode(paths.CONTROLLER_EPOCH, node.data, codecs.CounterNode).value
        except codecs.ZkFormatError as error:
            if error.newer:
                raise
            self.unreadable.skip(paths.CONTROLLER_EPOCH, error)
            value = NO_EPOCH
        return max(value, node.version, self._given)

    async def _claim(self, controller_id: str) -> int | None:
        node = await self.session.get(paths.CONTROLLER_EPOCH)
        epoch = self._newest_epoch(node) + 1
        claim = codecs.ControllerNode(controller_id, epoch)
        try:
            _, version = await self.session.multi(
                [
                    Create(paths.CONTROLLER, codecs.encode(claim), ephemeral=True),
                    SetData(paths.CONTROLLER_EPOCH, codecs.encode(codecs.CounterNode(epoch)), node.version),
                ]
            )
        except ZkMultiFailed:
            return await self._own_claim()
        self._epoch_version = version
        return epoch

    async def _own_claim(self) -> int | None:
        """Return the epoch if this session was elected by a multi whose response was lost, or None.

        A ``/controller`` node that is not ephemeral is deleted: no controller created it, and while it exists none can
        be elected.
        """
        try:
            holder = await self.session.get(paths.CONTROLLER)
            counter = await self.session.get(paths.CONTROLLER_EPOCH)
        except ZkNoNode:
            return None
        held = self._held(holder)
        if not holder.ephemeral_owner:
            self.unreadable.skip(paths.CONTROLLER, "it is not ephemeral: no controller's session holds it; removed")
            with suppress(ZkNoNode, ZkBadVersion):
                await self.session.delete(paths.CONTROLLER, holder.version)
            return None
        if held is None or not self.owns(holder):
            return None
        newest = codecs.decode(paths.CONTROLLER_EPOCH, counter.data, codecs.CounterNode).value
        if held.controller_epoch != newest:
            return None
        self._epoch_version = counter.version
        return newest

    def owns(self, holder: Node | None) -> bool:
        """Return whether this session created ``/controller``.

        ``holder`` is this node, or None if it does not exist.
        """
        return holder is not None and holder.ephemeral_owner == self.session.session_id

    # --- writes ----------------------------------------------------------------------------------------------------

    def write_state(
        self,
        tp: TopicPartition,
        state: LeaderAndIsr,
        *,
        topic_id: str,
        leader_incarnation: int,
        expected_version: int,
        on_outcome: Callable[[TopicPartition, StateOutcome | None], None],
    ) -> None:
        """Send a compare-and-set of a partition's state and return at once.

        ``on_outcome`` is called in the event loop with the partition and the outcome. The outcome is None if the node
        does not have ``expected_version``. The caller must then read the current state.

        This method is not a coroutine, because ten thousand writes may be in flight, and a task for each of them would
        take more time than the write itself.
        """
        value = codecs.encode_state(state, leader_incarnation)
        ops: list[Op] = [Check(paths.CONTROLLER_EPOCH, self._epoch_version), Check(paths.topic_id(topic_id), -1)]
        if expected_version == NO_NODE:
            ops += [Create(paths.partition(tp), b""), Create(paths.state(tp), value)]
            written = self.session.multi(ops)  # The topic's deletion could overtake a batch.
        else:
            ops.append(SetData(paths.state(tp), value, expected_version))
            written = self.session.multi_batched(ops)

        def done(future: asyncio.Future[tuple[int, ...]]) -> None:
            if not future.cancelled():
                on_outcome(tp, _outcome(future, expected_version))

        written.add_done_callback(done)

    async def write_topic(
        self, record: TopicRecord, expected_version: int, changes: Sequence[StateChange]
    ) -> Written | WriteSuperseded | EpochLost | FateUnknown:
        """Replace the topic's metadata and the states of these partitions, in one multi (ZooKeeper transaction).

        Raises:
          BrokerError: INVALID_PARTITIONS if the metadata is too large for one node.
        """
        ops: list[Op] = [
            Check(paths.CONTROLLER_EPOCH, self._epoch_version),
            Check(paths.topic_id(record.topic_id), -1),
            SetData(paths.topic(record.name), encode_record(record), expected_version),
        ]
        for change in changes:
            value = codecs.encode_state(change.state, change.leader_incarnation)
            ops.append(SetData(paths.state(change.tp), value, change.expected_version))
        try:
            return Written((await self.session.multi(ops))[2])
        except ZkUnreachable as error:
            return FateUnknown(error.sent)
        except ZkMultiFailed as error:
            return EpochLost() if error.index == 0 else WriteSuperseded(str(error))

    async def drop_election(self, name: str) -> None:
        """Delete the node of a finished election request."""
        try:
            await self.session.delete(f"{paths.ELECTIONS}/{name}")
        except ZkNoNode:
            return

    async def delete_topic(self, name: str, topic_id: str) -> bool:
        """Delete a topic's nodes and its deletion request. See ``TopicDeletion.delete``.

        Raises:
          ZkUnreachable: a part may have been deleted.
        """
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        return await self._deletion.delete(name, topic_id, fence)

    async def delete_isr_changes(self, nodes: Mapping[str, int]) -> bool:
        """Delete processed ISR change notifications. ``nodes`` maps the name of each node to the version that was read.

        Keep a node that has changed since, and return False if there is one.

        The deletion checks the controller epoch, because a replaced controller must not delete notifications that the
        new controller has not read.
        """
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        deletions = [
            self.session.multi([fence, Delete(f"{paths.ISR_CHANGES}/{name}", version)])
            for name, version in nodes.items()
        ]
        results = await asyncio.gather(*deletions, return_exceptions=True)
        raise_other_than(results, ZkMultiFailed)
        return not any(isinstance(r, ZkMultiFailed) and isinstance(r.cause, ZkBadVersion) and r.index for r in results)

    async def raise_counters(self, controller_epoch: int, *, producer_ids: int) -> None:
        """Raise the controller epoch and the counter of producer ids to at least these values.

        This changes the epoch's node, so all later writes of this controller fail. If another controller has been
        elected, do nothing.

        Raises:
          ZkUnreachable: the counters may have been raised.
        """
        while True:
            epoch = await self.session.get(paths.CONTROLLER_EPOCH)
            ids = await self.session.get(paths.PRODUCER_IDS)
            if epoch.version != self._epoch_version:
                return
            newest = self._newest_epoch(epoch)
            given = self.levels.decode(paths.PRODUCER_IDS, ids, codecs.CounterNode) or codecs.CounterNode()
            next_id = given.value
            with suppress(ZkMultiFailed):
                await self.session.multi(
                    [
                        _counter(paths.CONTROLLER_EPOCH, max(newest, controller_epoch), epoch.version),
                        _counter(paths.PRODUCER_IDS, max(next_id, producer_ids), ids.version),
                    ]
                )
                return

    async def drop_deletion_request(self, name: str, topic_id: str) -> None:
        """Delete the deletion request for this topic.

        Keep a request to delete another topic with the same name, even if it is written during the call. If another
        controller has been elected, delete nothing.
        """
        path = paths.delete_topic(name)
        async with self._dropping:
            try:
                node = await self.session.get(path)
                request = self.levels.decode(path, node, codecs.DeletionRequest)
                if request is not None and request.topic_id == topic_id:
                    fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
                    await self.session.multi([fence, Delete(path, node.version)])
            except ZkNoNode:
                return
            except ZkMultiFailed as error:
                if not isinstance(error.cause, (ZkNoNode, ZkBadVersion)):
                    raise

    async def trust_broker(self, broker_id: int, incarnation: int) -> None:
        """Delete the node that marks this broker as untrusted, unless another incarnation has registered since."""
        try:
            await self.session.multi(
                [Check(paths.incarnation(broker_id), incarnation), Delete(paths.untrusted(broker_id))]
            )
        except ZkMultiFailed:
            return


def _counter(path: str, value: int, version: int) -> SetData:
    return SetData(path, codecs.encode(codecs.CounterNode(value)), version)


def _outcome(future: asyncio.Future[tuple[int, ...]], expected_version: int) -> StateOutcome | None:
    error = future.exception()
    if error is None:
        return Written(0 if expected_version == NO_NODE else future.result()[-1])
    if isinstance(error, ZkUnreachable):
        return FateUnknown(error.sent)
    if isinstance(error, ZkMultiFailed):
        if error.index == 0:
            return EpochLost()
        if isinstance(error.cause, ZkNoNode):
            return NodeGone()
        return None
    # Any other error: the write may have been performed.
    return FateUnknown(sent=True)


__all__ = [
    "NO_NODE",
    "ControllerStore",
    "EpochLost",
    "FateUnknown",
    "NodeGone",
    "WriteRefused",
    "StateChange",
    "StateOutcome",
    "WriteSuperseded",
    "Written",
]
