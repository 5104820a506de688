"""The reads and writes of a controller in ZooKeeper.

Every write is bound to its controller epoch.

The version of ``/controller_epoch`` holds the epoch: a multi that checks it fails as soon as another controller has
been elected, whatever this one believes. Writes are pipelined, with one multi per partition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from sparklog.errors import ClusterError
from sparklog.model import (
    NO_EPOCH,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    check_topic_name,
)
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore, FateUnknown, NodeGone, Refused, WriteOutcome, Written, encode_record
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNoNode, ZkNotEmpty, ZkUnreachable
from sparklog.zk.session import Check, Create, Delete, Node, Op, SetData, ZkSession

#: The maximum number of ids of deleted topics that are listed.
_DELETED_KEPT = 10_000
_T = TypeVar("_T")
#: The levels of nodes below a topic that its deletion removes; sparklog's own nodes have three.
_DEEPEST = 20
#: The version of a node that does not exist yet.
NO_NODE = -1


@dataclass(frozen=True, slots=True)
class EpochLost:
    """A write that did not happen because another controller has been elected."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A write that did not happen because a node has another version than expected, or is gone."""

    reason: str


StateOutcome = WriteOutcome | EpochLost


class StoredTopic(NamedTuple):
    """A topic with its states. ``version`` is the one of the topic's own node."""

    record: TopicRecord
    states: dict[int, VersionedState]
    version: int


class TopicsRead(NamedTuple):
    """All topics, and the names of those with an unreadable record or unreadable states."""

    topics: tuple[StoredTopic, ...]
    unreadable: frozenset[str]


class IsrChangesRead(NamedTuple):
    """The ISR change notifications.

    ``nodes`` has their versions, ``told`` the reported states, and ``named`` the partitions that changed without a
    reported state; None means that any partition may have changed.
    """

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
    """One controller's access to ZooKeeper. ``elect`` comes first; the writes need its epoch."""

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self.cluster = ClusterStore(session)
        #: The nodes that were skipped.
        self.unreadable = self.cluster.unreadable
        self._epoch_version = NO_NODE
        #: Only one deletion request is dropped at a time: if two callers read the same request, one would drop it, and
        #: the other its successor.
        self._dropping = asyncio.Lock()
        #: The newest epoch that ``elect`` has returned.
        self._given = NO_EPOCH

    async def elect(self, controller_id: str) -> int | None:
        """Take ``/controller`` and a new controller epoch, which no earlier term had.

        None: another controller holds it.
        """
        if self._given != NO_EPOCH:
            await self._delete_served_claim()
        epoch = await self._claim(controller_id)
        if epoch is not None:
            self._given = epoch
        return epoch

    async def _delete_served_claim(self) -> None:
        """Delete a claim that has served a term and could not be deleted at its end.

        A second term with the same epoch would number its updates from the start, and brokers would treat them as old
        ones.
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
        """Return the newest epoch that ``/controller_epoch`` proves to be assigned.

        This works even if the value is lost: each election writes the node once, so its version is at least the last
        valid epoch.

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
        """Return the epoch of a claim that this session made and whose response was lost.

        A node that no session holds is deleted: a controller's node is ephemeral, and no controller would be elected
        while this one exists.
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
        """Return whether ``/controller``, as read, belongs to this session."""
        return holder is not None and holder.ephemeral_owner == self.session.session_id

    # --- levels ----------------------------------------------------------------------------------------------------

    async def read_brokers(self) -> tuple[BrokerRegistration, ...]:
        """Return the live brokers, with their trust according to the marks.

        A broker is untrusted while its mark exists, whatever its registration says: a controller deletes the mark after
        it has acted on it.
        """
        live = await self.cluster.live_brokers()
        marks = await self._read_children(paths.UNTRUSTED)
        return tuple(self._marked(found, marks.get(str(found.broker_id))) for found in live)

    def _marked(self, registration: BrokerRegistration, mark: Node | None) -> BrokerRegistration:
        """Return the registration with the doubts of its mark. An unreadable mark doubts all logs."""
        if mark is None:
            return msgspec.structs.replace(registration, trusted=True, doubted=())
        said = self._read(paths.untrusted(registration.broker_id), mark, codecs.UntrustedNode)
        doubted = tuple(TopicPartition(*pair) for pair in said.partitions) if said is not None else ()
        return msgspec.structs.replace(registration, trusted=False, doubted=doubted)

    async def read_retired(self, live: Collection[int]) -> frozenset[int]:
        """Return the brokers, other than the ``live`` ones, whose last incarnation is proved dead.

        This is read after the live ones, because the deletion of a registration and the creation of its mark are one
        multi.
        """
        absent = [broker_id for broker_id in await self._ids(paths.RETIRED) if broker_id not in live]
        marks = await self._nodes([paths.retired(i) for i in absent])
        counters = await self._nodes([paths.incarnation(i) for i in absent])
        return frozenset(
            broker_id
            for broker_id, mark, counter in zip(absent, marks, counters, strict=True)
            if mark is not None
            and counter is not None
            and mark.data
            and (said := self._read(paths.retired(broker_id), mark, codecs.CounterNode)) is not None
            and said.value == counter.version
        )

    async def _ids(self, path: str) -> list[int]:
        return self.unreadable.numbers(path, await self.session.children(path))

    async def _nodes(self, found: Sequence[str]) -> list[Node | None]:
        """Read these nodes; the result has None for each that does not exist."""
        nodes = await asyncio.gather(*map(self.session.get, found), return_exceptions=True)
        _raise_other_than(nodes, ZkNoNode)
        return [node if isinstance(node, Node) else None for node in nodes]

    def _read(self, path: str, node: Node, kind: type[_T]) -> _T | None:
        """Return the node's value, or skip it and return None if it is unreadable."""
        try:
            return codecs.decode(path, node.data, kind)
        except codecs.ZkFormatError as error:
            self.unreadable.skip(path, error)
            return None

    async def read_absent(self, live: Collection[int]) -> tuple[BrokerRegistration, ...]:
        """Return the last registrations of brokers other than the ``live`` ones, which have their processes' addresses.

        Brokers with untrusted logs are excluded.
        """
        marked = await self._ids(paths.UNTRUSTED)
        absent = [i for i in await self._ids(paths.INCARNATIONS) if i not in marked and i not in live]
        nodes = await self._nodes([paths.incarnation(i) for i in absent])
        found = []
        for broker_id, node in zip(absent, nodes, strict=True):
            if node is None or not node.data:  # An earlier release left the node empty.
                continue
            try:
                known = codecs.decode_broker(paths.incarnation(broker_id), node.data, broker_id)
            except codecs.ZkFormatError as error:
                self.unreadable.skip(paths.incarnation(broker_id), error)
            else:
                found.append(msgspec.structs.replace(known, incarnation=node.version, trusted=True))
        return tuple(found)

    async def read_stopping(self) -> dict[int, int]:
        """Return the brokers that request a controlled shutdown, with the incarnation that requested it."""
        found = await self._read_values(paths.STOPPING, codecs.StoppingNode)
        return {i: found[str(i)].incarnation for i in self.unreadable.numbers(paths.STOPPING, tuple(found))}

    async def read_deletions(self) -> dict[str, str]:
        """Return the topics to delete, with the id of the requested topic."""
        found = await self._read_values(paths.DELETE_TOPICS, codecs.DeletionRequest)
        return {name: request.topic_id for name, request in found.items()}

    async def read_isr_changes(self) -> IsrChangesRead:
        """Return the ISR changes that leaders report.

        An unreadable notification still proves a change, which may be of any partition.
        """
        nodes = await self._read_children(paths.ISR_CHANGES)
        told: list[TopicStates] = []
        named: dict[TopicPartition, None] | None = {}
        for name, node in nodes.items():
            path = f"{paths.ISR_CHANGES}/{name}"
            try:
                said = codecs.decode_isr_changes(path, node.data)
            except codecs.ZkFormatError as error:
                self.unreadable.skip(path, error)
                said = codecs.IsrChanges()
            told += said.told
            if not any(said):
                named = None
            elif named is not None:
                named.update(dict.fromkeys(said.named))
        versions = {name: node.version for name, node in nodes.items()}
        return IsrChangesRead(versions, tuple(told), None if named is None else tuple(named))

    async def delete_isr_changes(self, nodes: Mapping[str, int]) -> bool:
        """Delete processed notifications with the versions that were read.

        Returns False if one has changed since.

        The deletion is bound to the epoch: a deposed controller must not delete what the new one has not seen.
        """
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        deletions = [
            self.session.multi([fence, Delete(f"{paths.ISR_CHANGES}/{name}", version)])
            for name, version in nodes.items()
        ]
        results = await asyncio.gather(*deletions, return_exceptions=True)
        _raise_other_than(results, ZkMultiFailed)
        return not any(isinstance(r, ZkMultiFailed) and isinstance(r.cause, ZkBadVersion) and r.index for r in results)

    async def read_topics(self) -> TopicsRead:
        """Read all topics with the states of their partitions. Children with invalid names are not topics."""
        names = await self.topic_names()
        found = await asyncio.gather(*(self.cluster.read_topic(name) for name in names), return_exceptions=True)
        _raise_other_than(found, codecs.ZkFormatError)
        for name, read in zip(names, found, strict=True):
            if isinstance(read, codecs.ZkFormatError):
                self.unreadable.skip(paths.topic(name), read)
        topics = [read for read in found if isinstance(read, tuple)]
        tps = [TopicPartition(record.name, p) for record, _ in topics for p in range(len(record.assignment))]
        states = await self.read_states(tps)
        by_topic: dict[str, dict[int, VersionedState]] = {record.name: {} for record, _ in topics}
        for tp, stored in states.items():
            if stored is not None:
                by_topic[tp.topic][tp.partition] = stored
        unread = {n for n, read in zip(names, found, strict=True) if isinstance(read, codecs.ZkFormatError)}
        unread.update(tp.topic for tp in tps if tp not in states)
        read_whole = tuple(StoredTopic(record, by_topic[record.name], version) for record, version in topics)
        return TopicsRead(read_whole, frozenset(unread))

    async def topic_names(self) -> list[str]:
        """Return the children of ``/brokers/topics`` with valid topic names; skip the others."""
        names = []
        for name in await self.session.children(paths.TOPICS):
            problem = check_topic_name(name)
            if problem is None:
                names.append(name)
            else:
                self.unreadable.skip(paths.topic(name), problem)
        return names

    async def read_topic_again(self, name: str) -> tuple[TopicRecord, int] | None:
        """Return the topic's record and version as they are after everything written through this session."""
        await self.session.sync(paths.topic(name))
        return await self.cluster.read_topic(name)

    async def read_elections(self) -> dict[str, codecs.ElectionRequest]:
        """Return the requests for elections, by the name of their node."""
        return await self._read_values(paths.ELECTIONS, codecs.ElectionRequest)

    async def read_refusals(self) -> tuple[codecs.TruncationRefusal, ...]:
        """Return the truncations that replicas refuse.

        The parent node is created if it is missing, as in a cluster of an earlier release.
        """
        await self.session.ensure(paths.CUT_REFUSALS)
        return tuple((await self._read_values(paths.CUT_REFUSALS, codecs.TruncationRefusal)).values())

    async def read_states(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        """Return these partitions' states, None for those without one; omit those whose state is unreadable.

        The result includes everything written through this session.
        """
        if tps:
            await self.session.sync(paths.TOPICS)
        nodes = await self._nodes([paths.state(tp) for tp in tps])
        found: dict[TopicPartition, VersionedState | None] = {}
        for tp, node in zip(tps, nodes, strict=True):
            path = paths.state(tp)
            try:
                found[tp] = None if node is None else codecs.decode_state(path, node.data, node.version)
            except codecs.ZkFormatError as error:
                self.unreadable.skip(path, error)
        return found

    async def _read_values(self, path: str, kind: type[_T]) -> dict[str, _T]:
        """Return the values of a node's children by name, without the unreadable ones."""
        nodes = await self._read_children(path)
        values = {name: self._read(f"{path}/{name}", node, kind) for name, node in nodes.items()}
        return {name: value for name, value in values.items() if value is not None}

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
        """Send one compare-and-set and return at once.

        ``on_outcome`` is called in the loop, with None if the write lost and the caller must read the node's state.

        It is a callback and not a coroutine: there may be ten thousand, and a task for each would cost more than the
        write.
        """
        value = codecs.encode_state(state, leader_incarnation)
        ops: list[Op] = [Check(paths.CONTROLLER_EPOCH, self._epoch_version), Check(paths.topic_id(topic_id), -1)]
        if expected_version == NO_NODE:
            ops += [Create(paths.partition(tp), b""), Create(paths.state(tp), value)]
            written = self.session.multi(ops)  # A batched write could be overtaken by the deletion of the topic.
        else:
            ops.append(SetData(paths.state(tp), value, expected_version))
            written = self.session.multi_batched(ops)

        def done(future: asyncio.Future[tuple[int, ...]]) -> None:
            if not future.cancelled():
                on_outcome(tp, _outcome(future, expected_version))

        written.add_done_callback(done)

    async def write_topic(
        self, record: TopicRecord, expected_version: int, changes: Sequence[StateChange]
    ) -> Written | Superseded | EpochLost | FateUnknown:
        """Replace the topic's record and these partitions' states, in one multi.

        Raises:
          BrokerError: INVALID_PARTITIONS if the record is too large for one node.
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
        """Delete the node of a finished election request."""
        try:
            await self.session.delete(f"{paths.ELECTIONS}/{name}")
        except ZkNoNode:
            return

    async def delete_topic(self, name: str, topic_id: str) -> bool:
        """Delete a topic's nodes and its deletion request, and list its id as deleted.

        The call is idempotent, even if a topic of that name was recreated meanwhile. False: another controller has been
        elected.

        Raises:
          ZkUnreachable: part of it may be done.
        """
        try:
            partitions = await self.session.children(paths.partitions(name))
        except ZkNoNode:
            partitions = ()
        fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
        same = Check(paths.topic_id(topic_id), -1)
        numbers = self.unreadable.numbers(paths.partitions(name), partitions)
        tps = [TopicPartition(name, number) for number in numbers]
        deletions = [
            self.session.multi([fence, same, Delete(paths.state(tp)), Delete(paths.partition(tp))]) for tp in tps
        ]
        for result in await asyncio.gather(*deletions, return_exceptions=True):
            if isinstance(result, ZkMultiFailed) and result.index == 0:
                return False
            if isinstance(result, BaseException) and not _is_missing(result) and not _has_other_children(result):
                raise result
        rest = [paths.partitions(name), paths.topic(name), paths.delete_topic(name)]
        await self.session.ensure(paths.DELETED_TOPICS)
        await self._drop_old_deletions()
        named = codecs.DeletedTopic(name, time.time_ns() // 1_000_000)
        deleted = Create(paths.deleted_topic(topic_id), codecs.encode(named))
        try:
            return await self._delete_all([fence, Delete(same.path), deleted], rest)
        except ZkMultiFailed as error:
            if not _has_other_children(error):
                raise
        await self._clear(paths.topic(name), [fence, same])
        return await self._delete_all([fence, Delete(same.path), deleted], rest)

    async def _drop_old_deletions(self) -> None:
        """Drop the older half of the listed deleted topics if there are too many.

        A broker that was absent for the whole time keeps their logs until an operator decides.
        """
        if len(await self.session.children(paths.DELETED_TOPICS)) < _DELETED_KEPT:
            return
        found = await self._read_values(paths.DELETED_TOPICS, codecs.DeletedTopic)
        times = {name: deleted.deleted_ms for name, deleted in found.items()}
        oldest = sorted(times, key=times.__getitem__)[: len(times) // 2]
        gone = await asyncio.gather(
            *(self.session.delete(paths.deleted_topic(name)) for name in oldest), return_exceptions=True
        )
        _raise_other_than(gone, ZkNoNode)

    async def _clear(self, path: str, bound: list[Op], *, depth: int = _DEEPEST) -> None:
        """Delete all nodes below a topic's node that remain or that another actor created.

        If ``bound`` no longer holds, it deletes nothing, and ``_delete_all`` detects that.
        """
        names = await self.session.children(path) if depth else ()
        for child in (f"{path}/{name}" for name in names):
            with suppress(ZkNoNode):
                await self._clear(child, bound, depth=depth - 1)
            with suppress(ZkMultiFailed):
                await self.session.multi([*bound, Delete(child)])
                self.unreadable.skip(child, "it is in a deleted topic and is deleted with it")

    async def _delete_all(self, bound: list[Op], rest: list[str]) -> bool:
        """Delete these nodes in one multi with ``bound``; skip nodes that no longer exist.

        If the topic id is gone, nothing is deleted: it goes with all of them, and remaining nodes belong to another
        topic. False: the epoch check failed.
        """
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

    async def raise_counters(self, controller_epoch: int, *, producer_ids: int) -> None:
        """Raise the controller epoch and the counter of producer ids to at least these values.

        This ends this controller's epoch. It does nothing if another controller has been elected.

        Raises:
          ZkUnreachable: it may be done.
        """
        while True:
            epoch = await self.session.get(paths.CONTROLLER_EPOCH)
            ids = await self.session.get(paths.PRODUCER_IDS)
            if epoch.version != self._epoch_version:
                return
            newest = self._newest_epoch(epoch)
            given = self._read(paths.PRODUCER_IDS, ids, codecs.CounterNode) or codecs.CounterNode()
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
        """Delete the request for this topic.

        A request for another topic of that name stays, even if it replaces this one meanwhile. Nothing happens if
        another controller has been elected.
        """
        path = paths.delete_topic(name)
        async with self._dropping:
            try:
                node = await self.session.get(path)
                request = self._read(path, node, codecs.DeletionRequest)
                if request is not None and request.topic_id == topic_id:
                    fence = Check(paths.CONTROLLER_EPOCH, self._epoch_version)
                    await self.session.multi([fence, Delete(path, node.version)])
            except ZkNoNode:
                return
            except ZkMultiFailed as error:
                if not isinstance(error.cause, (ZkNoNode, ZkBadVersion)):
                    raise

    async def trust_broker(self, broker_id: int, incarnation: int) -> None:
        """Delete an untrusted broker's mark, unless another incarnation has registered since."""
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
    # The error is unknown: the write may have been performed.
    return FateUnknown(sent=True)


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ZkMultiFailed) and isinstance(error.cause, ZkNoNode)


def _has_other_children(error: BaseException) -> bool:
    return isinstance(error, ZkMultiFailed) and isinstance(error.cause, ZkNotEmpty)


def _raise_other_than(results: Sequence[object], allowed: type[ClusterError]) -> None:
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
