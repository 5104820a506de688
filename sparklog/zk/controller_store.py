"""What a controller reads and writes in ZooKeeper. Every write is bound to its controller epoch.

The epoch is held by the version of ``/controller_epoch``: a multi that checks it fails as soon as another controller
has been elected, whatever this one believes. Writes are pipelined, one multi a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sparklog.model import (
    NO_EPOCH,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
)
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore, FateUnknown, NodeGone, Refused, WriteOutcome, Written, encode_record
from sparklog.zk.errors import ZkBadVersion, ZkError, ZkMultiFailed, ZkNoNode, ZkUnreachable
from sparklog.zk.session import Check, Create, Delete, Node, Op, SetData, ZkSession

#: Version of a node that does not exist yet.
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class EpochLost:
    """Nothing was written: another controller has been elected."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """Nothing was written: a node is at another version than expected, or gone."""

    reason: str


StateOutcome = WriteOutcome | EpochLost


class StoredTopic(NamedTuple):
    """``version`` is of the topic's own node."""

    record: TopicRecord
    states: dict[int, VersionedState]
    version: int


class IsrChangesRead(NamedTuple):
    """Notifications: ``nodes`` with their versions, what they tell, and the partitions of which they only say that they
    have changed; None: it may be any."""

    nodes: dict[str, int]
    told: tuple[TopicStates, ...]
    named: tuple[TopicPartition, ...] | None


class StateChange(NamedTuple):
    """One partition's part of ``write_topic``."""

    tp: TopicPartition
    state: LeaderAndIsr
    leader_incarnation: int
    expected_version: int


class ControllerStore:
    """One controller's view. ``elect`` first; its writes need the epoch that gives."""

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self.cluster = ClusterStore(session)
        self._epoch_version = NO_NODE
        #: One deletion request is dropped at a time: what two had read, one would drop, and the other its successor.
        self._dropping = asyncio.Lock()
        #: The newest epoch that ``elect`` has given.
        self._given = NO_EPOCH

    async def elect(self, controller_id: str) -> int | None:
        """Take ``/controller`` and a new controller epoch, which no term has had. None: another controller holds it."""
        if self._given != NO_EPOCH:
            await self._give_up_served()
        epoch = await self._claim(controller_id)
        if epoch is not None:
            self._given = epoch
        return epoch

    async def _give_up_served(self) -> None:
        """A claim that has served a term goes: it could not be deleted when that ended. A second term under the same
        epoch would count its updates from the beginning, and brokers would take them for old ones."""
        try:
            holder = await self.session.get(paths.CONTROLLER)
        except ZkNoNode:
            return
        held = codecs.decode(paths.CONTROLLER, holder.data, codecs.ControllerNode)
        if self.owns(holder) and held.controller_epoch <= self._given:
            with suppress(ZkNoNode):
                await self.session.delete(paths.CONTROLLER, holder.version)

    async def _claim(self, controller_id: str) -> int | None:
        node = await self.session.get(paths.CONTROLLER_EPOCH)
        epoch = codecs.decode(paths.CONTROLLER_EPOCH, node.data, codecs.CounterNode).value + 1
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
        """The epoch of a claim made by this very session, whose answer was lost."""
        try:
            holder = await self.session.get(paths.CONTROLLER)
            counter = await self.session.get(paths.CONTROLLER_EPOCH)
        except ZkNoNode:
            return None
        held = codecs.decode(paths.CONTROLLER, holder.data, codecs.ControllerNode)
        newest = codecs.decode(paths.CONTROLLER_EPOCH, counter.data, codecs.CounterNode).value
        if not self.owns(holder) or held.controller_epoch != newest:
            return None
        self._epoch_version = counter.version
        return newest

    def owns(self, holder: Node | None) -> bool:
        """Whether ``/controller``, as read, is this session's."""
        return holder is not None and holder.ephemeral_owner == self.session.session_id

    # --- levels ----------------------------------------------------------------------------------------------------

    async def read_brokers(self) -> tuple[BrokerRegistration, ...]:
        """Live brokers. One is untrusted while its mark stands, whatever its registration says: a controller has
        taken the mark away when it had acted on it."""
        live = await self.cluster.live_brokers()
        marked = {int(name) for name in await self.session.children(paths.UNTRUSTED)}
        return tuple(msgspec.structs.replace(found, trusted=found.broker_id not in marked) for found in live)

    async def read_retired(self, live: Collection[int]) -> frozenset[int]:
        """Brokers other than the ``live`` ones whose last incarnation was proved dead. Read after the live ones: a
        mark is made together with the deletion of the registration."""
        names = await self.session.children(paths.RETIRED)
        absent = [broker_id for broker_id in map(int, names) if broker_id not in live]
        marks = await asyncio.gather(*(self.session.get(paths.retired(i)) for i in absent))
        counters = await asyncio.gather(*(self.session.get(paths.incarnation(i)) for i in absent))
        return frozenset(
            broker_id
            for broker_id, mark, counter in zip(absent, marks, counters, strict=True)
            if mark.data
            and codecs.decode(paths.retired(broker_id), mark.data, codecs.CounterNode).value == counter.version
        )

    async def read_absent(self, live: Collection[int]) -> tuple[BrokerRegistration, ...]:
        """Last registrations of brokers other than the ``live`` ones: where their processes are, if they live. Not of
        those whose logs nobody vouches for."""
        marked = await self.session.children(paths.UNTRUSTED)
        names = [name for name in await self.session.children(paths.INCARNATIONS) if name not in marked]
        absent = sorted(broker_id for broker_id in map(int, names) if broker_id not in live)
        nodes = await asyncio.gather(*(self.session.get(paths.incarnation(i)) for i in absent))
        found = []
        for broker_id, node in zip(absent, nodes, strict=True):
            if node.data:  # an earlier release left it empty
                known = codecs.decode_broker(paths.incarnation(broker_id), node.data, broker_id)
                found.append(msgspec.structs.replace(known, incarnation=node.version, trusted=True))
        return tuple(found)

    async def read_stopping(self) -> dict[int, int]:
        """Brokers that ask to be relieved, with the incarnation that asked."""
        nodes = await self._read_children(paths.STOPPING)
        return {
            int(name): codecs.decode(f"{paths.STOPPING}/{name}", node.data, codecs.StoppingNode).incarnation
            for name, node in nodes.items()
        }

    async def read_deletions(self) -> dict[str, str]:
        """Topics to be deleted, with the id of the topic that is meant."""
        nodes = await self._read_children(paths.DELETE_TOPICS)
        return {
            name: codecs.decode(f"{paths.DELETE_TOPICS}/{name}", node.data, codecs.DeletionRequest).topic_id
            for name, node in nodes.items()
        }

    async def read_isr_changes(self) -> IsrChangesRead:
        """What leaders say they wrote."""
        nodes = await self._read_children(paths.ISR_CHANGES)
        told: list[TopicStates] = []
        named: dict[TopicPartition, None] | None = {}
        for name, node in nodes.items():
            said = codecs.decode_isr_changes(f"{paths.ISR_CHANGES}/{name}", node.data)
            told += said.told
            if not any(said):
                named = None
            elif named is not None:
                named.update(dict.fromkeys(said.named))
        versions = {name: node.version for name, node in nodes.items()}
        return IsrChangesRead(versions, tuple(told), None if named is None else tuple(named))

    async def delete_isr_changes(self, nodes: Mapping[str, int]) -> bool:
        """Delete notifications that were acted on, as they were read. False: one says more by now. Bound to the epoch:
        a deposed controller must not swallow what the new one has not seen."""
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        deletions = [
            self.session.multi([fence, Delete(f"{paths.ISR_CHANGES}/{name}", version)])
            for name, version in nodes.items()
        ]
        results = await asyncio.gather(*deletions, return_exceptions=True)
        _raise_other_than(results, ZkMultiFailed)
        return not any(isinstance(r, ZkMultiFailed) and isinstance(r.cause, ZkBadVersion) and r.index for r in results)

    async def read_topics(self) -> tuple[StoredTopic, ...]:
        """All topics with the states of their partitions."""
        names = await self.session.children(paths.TOPICS)
        found = await asyncio.gather(*(self.cluster.read_topic(name) for name in names))
        topics = [read for read in found if read is not None]
        tps = [TopicPartition(record.name, p) for record, _ in topics for p in range(len(record.assignment))]
        states = await self.read_states(tps)
        by_topic: dict[str, dict[int, VersionedState]] = {record.name: {} for record, _ in topics}
        for tp, stored in states.items():
            if stored is not None:
                by_topic[tp.topic][tp.partition] = stored
        return tuple(StoredTopic(record, by_topic[record.name], version) for record, version in topics)

    async def read_topic_again(self, name: str) -> tuple[TopicRecord, int] | None:
        """The topic's record and version as they are after everything written through this session."""
        await self.session.sync(paths.topic(name))
        return await self.cluster.read_topic(name)

    async def read_elections(self) -> dict[str, codecs.ElectionRequest]:
        """Requests for elections, by the name of their node."""
        nodes = await self._read_children(paths.ELECTIONS)
        return {
            name: codecs.decode(f"{paths.ELECTIONS}/{name}", node.data, codecs.ElectionRequest)
            for name, node in nodes.items()
        }

    async def read_states(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        """These partitions' states, None where there is none. Sees everything written through this session."""
        if tps:
            await self.session.sync(paths.TOPICS)
        nodes = await asyncio.gather(*(self.session.get(paths.state(tp)) for tp in tps), return_exceptions=True)
        _raise_other_than(nodes, ZkNoNode)
        return {
            tp: codecs.decode_state(paths.state(tp), node.data, node.version) if isinstance(node, Node) else None
            for tp, node in zip(tps, nodes, strict=True)
        }

    async def _read_children(self, path: str) -> Mapping[str, Node]:
        names = await self.session.children(path)
        nodes = await asyncio.gather(*(self.session.get(f"{path}/{name}") for name in names), return_exceptions=True)
        _raise_other_than(nodes, ZkNoNode)
        return {name: node for name, node in zip(names, nodes, strict=True) if isinstance(node, Node)}

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
        """Send one compare-and-set; return at once. ``on_outcome`` is called in the loop, with None where the write
        lost and what the node holds has still to be read.

        A callback and not a coroutine: there may be ten thousand, and a task for each would cost more than the write.
        """
        value = codecs.encode_state(state, leader_incarnation)
        ops: list[Op] = [Check(paths.CONTROLLER_EPOCH, self._epoch_version), Check(paths.topic_id(topic_id), -1)]
        if expected_version == NO_NODE:
            ops += [Create(paths.partition(tp), b""), Create(paths.state(tp), value)]
            written = self.session.multi(ops)  # not overtaken by what deletes the topic
        else:
            ops.append(SetData(paths.state(tp), value, expected_version))
            written = self.session.multi_in_company(ops)

        def done(future: asyncio.Future[tuple[int, ...]]) -> None:
            if not future.cancelled():
                on_outcome(tp, _outcome(future, expected_version))

        written.add_done_callback(done)

    async def write_topic(
        self, record: TopicRecord, expected_version: int, changes: Sequence[StateChange]
    ) -> Written | Superseded | EpochLost | FateUnknown:
        """Replace the topic's record and these partitions' states, all of it or nothing.

        Raises:
            BrokerError: INVALID_PARTITIONS when the record is too large for one node.
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
            return EpochLost() if error.index == 0 else Superseded(str(error))

    async def drop_election(self, name: str) -> None:
        """A request is carried out."""
        try:
            await self.session.delete(f"{paths.ELECTIONS}/{name}")
        except ZkNoNode:
            return

    async def delete_topic(self, name: str, topic_id: str) -> bool:
        """Delete a topic's nodes and its deletion request; doing it twice is the same as once, also where a topic of
        that name was made anew meanwhile. False: another controller has been elected.

        Raises:
            ZkUnreachable: part of it may be done.
        """
        try:
            partitions = await self.session.children(paths.partitions(name))
        except ZkNoNode:
            partitions = ()
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        same = Check(paths.topic_id(topic_id), -1)
        deletions = []
        for number in partitions:
            tp = TopicPartition(name, int(number))
            deletions.append(self.session.multi([fence, same, Delete(paths.state(tp)), Delete(paths.partition(tp))]))
        for result in await asyncio.gather(*deletions, return_exceptions=True):
            if isinstance(result, ZkMultiFailed) and result.index == 0:
                return False
            if isinstance(result, BaseException) and not _is_missing(result):
                raise result
        rest = [paths.partitions(name), paths.topic(name), paths.delete_topic(name)]
        return await self._delete_all([fence, Delete(same.path)], rest)

    async def _delete_all(self, bound: list[Op], rest: list[str]) -> bool:
        """Delete these nodes in one multi with ``bound``, without those that are gone already. Nothing, where the topic
        id is gone: it goes with all of them, and what stands there is another topic's. False: the fence has fallen."""
        try:
            await self.session.multi([*bound, *(Delete(path) for path in rest)])
        except ZkMultiFailed as error:
            if error.index == 0:
                return False
            if not _is_missing(error):
                raise
            found = error.index - len(bound)
            return found < 0 or await self._delete_all(bound, rest[:found] + rest[found + 1 :])
        return True

    async def drop_deletion_request(self, name: str, topic_id: str) -> None:
        """Delete the request that means this topic; one that means another of that name stays, also one that takes its
        place meanwhile. Nothing, where another controller has been elected."""
        path = paths.delete_topic(name)
        async with self._dropping:
            try:
                node = await self.session.get(path)
                if codecs.decode(path, node.data, codecs.DeletionRequest).topic_id == topic_id:
                    fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
                    await self.session.multi([fence, Delete(path, node.version)])
            except ZkNoNode:
                return
            except ZkMultiFailed as error:
                if not isinstance(error.cause, (ZkNoNode, ZkBadVersion)):
                    raise

    async def trust_broker(self, broker_id: int, incarnation: int) -> None:
        """Take an untrusted broker's mark away, unless another incarnation has registered since."""
        try:
            await self.session.multi(
                [Check(paths.incarnation(broker_id), incarnation), Delete(paths.untrusted(broker_id))]
            )
        except ZkMultiFailed:
            return


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
    # Not understood: it may have been carried out.
    return FateUnknown(sent=True)


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ZkMultiFailed) and isinstance(error.cause, ZkNoNode)


def _raise_other_than(results: Sequence[object], allowed: type[ZkError]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, allowed):
            raise result


__all__ = [
    "NO_NODE",
    "ControllerStore",
    "EpochLost",
    "FateUnknown",
    "NodeGone",
    "Refused",
    "StateChange",
    "StateOutcome",
    "StoredTopic",
    "Superseded",
    "Written",
]
