"""The reads of a controller in ZooKeeper. Each read returns the complete current value, not changes.

Reads do not depend on the controller epoch. A node that cannot be read is skipped and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from sparklog.model import (
    BrokerRegistration,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    check_topic_name,
)
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNoNode, raise_other_than
from sparklog.zk.session import Node

_T = TypeVar("_T")


class StoredTopic(NamedTuple):
    """A topic with the states of its partitions. ``version`` is the version of the node with the topic's metadata."""

    record: TopicRecord
    states: dict[int, VersionedState]
    version: int


class TopicsRead(NamedTuple):
    """The result of reading all topics.

    The result has the readable topics, and the names of topics with an unreadable record or an unreadable partition
    state.
    """

    topics: tuple[StoredTopic, ...]
    unreadable: frozenset[str]


class IsrChangesRead(NamedTuple):
    """The content of all ISR change notifications that the controller has read.

    ``nodes`` has the version of each notification's node, by its name. ``reported`` has the new states that leaders
    report. ``named`` has partitions that have changed, but whose state the controller must read itself. ``named`` is
    None if any partition may have changed.
    """

    nodes: dict[str, int]
    reported: tuple[TopicStates, ...]
    named: tuple[TopicPartition, ...] | None


class ControllerLevels:
    """The part of ``ControllerStore`` that reads from ZooKeeper. Each method returns the complete current value."""

    def __init__(self, cluster: ClusterStore) -> None:
        self.session = cluster.session
        self.cluster = cluster
        self.unreadable = cluster.unreadable

    async def brokers(self) -> tuple[BrokerRegistration, ...]:
        """Return the registrations of the live brokers.

        A broker is untrusted if the node ``/brokers/untrusted/<id>`` exists. The field ``trusted`` of its registration
        is ignored, because a controller that trusts the broker again deletes only that node.
        """
        live = await self.cluster.live_brokers()
        marks = await self._read_children(paths.UNTRUSTED)
        return tuple(self._marked(found, marks.get(str(found.broker_id))) for found in live)

    def _marked(self, registration: BrokerRegistration, mark: Node | None) -> BrokerRegistration:
        """Return the registration with the doubtful partitions of its mark.

        If the mark is unreadable, all logs are untrusted.
        """
        if mark is None:
            return msgspec.structs.replace(registration, trusted=True, doubted=())
        found = self.decode(paths.untrusted(registration.broker_id), mark, codecs.UntrustedNode)
        doubted = tuple(TopicPartition(*pair) for pair in found.partitions) if found is not None else ()
        return msgspec.structs.replace(registration, trusted=False, doubted=doubted)

    async def retired(self, live: Collection[int]) -> frozenset[int]:
        """Return the ids of the brokers that are not in ``live``, and whose last process is certainly dead.

        Each of these brokers has a node in ``/brokers/retired``, which a supervisor created. Read the live brokers
        before this call, because one multi (ZooKeeper transaction) deletes a registration and creates this node.
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
            and (retired := self.decode(paths.retired(broker_id), mark, codecs.CounterNode)) is not None
            and retired.value == counter.version
        )

    async def _ids(self, path: str) -> list[int]:
        return self.unreadable.numbers(path, await self.session.children(path))

    async def _nodes(self, found: Sequence[str]) -> list[Node | None]:
        """Read these nodes; the result has None for each that does not exist."""
        nodes = await asyncio.gather(*map(self.session.get, found), return_exceptions=True)
        raise_other_than(nodes, ZkNoNode)
        return [node if isinstance(node, Node) else None for node in nodes]

    def decode(self, path: str, node: Node, kind: type[_T]) -> _T | None:
        """Decode the node's value. If the value is unreadable, count the node as skipped and return None."""
        try:
            return codecs.decode(path, node.data, kind)
        except codecs.ZkFormatError as error:
            self.unreadable.skip(path, error)
            return None

    async def absent(self, live: Collection[int]) -> tuple[BrokerRegistration, ...]:
        """Return the last registrations of the brokers that are not in ``live``.

        A registration has the addresses of its broker. Omit brokers with untrusted logs.
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

    async def stopping(self) -> dict[int, int]:
        """Return the ids of the brokers that request a controlled shutdown, with their incarnations."""
        found = await self.read_values(paths.STOPPING, codecs.StoppingNode)
        return {i: found[str(i)].incarnation for i in self.unreadable.numbers(paths.STOPPING, tuple(found))}

    async def deletions(self) -> dict[str, str]:
        """Return the requests to delete topics: the id of the topic to delete, by the name of the topic."""
        found = await self.read_values(paths.DELETE_TOPICS, codecs.DeletionRequest)
        return {name: request.topic_id for name, request in found.items()}

    async def isr_changes(self) -> IsrChangesRead:
        """Read the notifications of leaders about changed ISRs.

        An unreadable notification counts as a notification that any partition may have changed.
        """
        nodes = await self._read_children(paths.ISR_CHANGES)
        reported: list[TopicStates] = []
        named: dict[TopicPartition, None] | None = {}
        for name, node in nodes.items():
            path = f"{paths.ISR_CHANGES}/{name}"
            try:
                notice = codecs.decode_isr_changes(path, node.data)
            except codecs.ZkFormatError as error:
                self.unreadable.skip(path, error)
                notice = codecs.IsrChanges()
            reported += notice.reported
            if not any(notice):
                named = None
            elif named is not None:
                named.update(dict.fromkeys(notice.named))
        versions = {name: node.version for name, node in nodes.items()}
        return IsrChangesRead(versions, tuple(reported), None if named is None else tuple(named))

    async def topics(self) -> TopicsRead:
        """Read all topics with the states of their partitions. Nodes with invalid topic names are skipped."""
        names = await self.topic_names()
        found = await asyncio.gather(*(self.cluster.read_topic(name) for name in names), return_exceptions=True)
        raise_other_than(found, codecs.ZkFormatError)
        for name, read in zip(names, found, strict=True):
            if isinstance(read, codecs.ZkFormatError):
                self.unreadable.skip(paths.topic(name), read)
        topics = [read for read in found if isinstance(read, tuple)]
        tps = [TopicPartition(record.name, p) for record, _ in topics for p in range(len(record.assignment))]
        states = await self.states(tps)
        by_topic: dict[str, dict[int, VersionedState]] = {record.name: {} for record, _ in topics}
        for tp, stored in states.items():
            if stored is not None:
                by_topic[tp.topic][tp.partition] = stored
        unread = {n for n, read in zip(names, found, strict=True) if isinstance(read, codecs.ZkFormatError)}
        unread.update(tp.topic for tp in tps if tp not in states)
        read_whole = tuple(StoredTopic(record, by_topic[record.name], version) for record, version in topics)
        return TopicsRead(read_whole, frozenset(unread))

    async def topic_names(self) -> list[str]:
        """Return the names of all topics. Skip children of ``/brokers/topics`` whose name is not a valid topic name."""
        names = []
        for name in await self.session.children(paths.TOPICS):
            problem = check_topic_name(name)
            if problem is None:
                names.append(name)
            else:
                self.unreadable.skip(paths.topic(name), problem)
        return names

    async def topic(self, name: str) -> tuple[TopicRecord, int] | None:
        """Return the topic's metadata and the version of its node, or None if the topic does not exist.

        The result includes all writes that completed before the call.
        """
        await self.session.sync(paths.topic(name))
        return await self.cluster.read_topic(name)

    async def elections(self) -> dict[str, codecs.ElectionRequest]:
        """Return the requests to elect leaders, by the names of their nodes."""
        return await self.read_values(paths.ELECTIONS, codecs.ElectionRequest)

    async def refusals(self) -> tuple[codecs.TruncationRefusal, ...]:
        """Return the refusals of replicas to truncate committed records.

        Create the parent node if it is missing, because an earlier release does not create it.
        """
        await self.session.ensure(paths.TRUNCATION_REFUSALS)
        return tuple((await self.read_values(paths.TRUNCATION_REFUSALS, codecs.TruncationRefusal)).values())

    async def states(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        """Return the states of these partitions, and None for a partition without a state. Omit unreadable states.

        The result includes all writes that completed before the call.
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

    async def read_values(self, path: str, kind: type[_T]) -> dict[str, _T]:
        """Return the values of the children of ``path``, by the child's name. Skip unreadable values."""
        nodes = await self._read_children(path)
        values = {name: self.decode(f"{path}/{name}", node, kind) for name, node in nodes.items()}
        return {name: value for name, value in values.items() if value is not None}

    async def _read_children(self, path: str) -> Mapping[str, Node]:
        names = await self.session.children(path)
        nodes = await asyncio.gather(*(self.session.get(f"{path}/{name}") for name in names), return_exceptions=True)
        raise_other_than(nodes, ZkNoNode)
        return {name: node for name, node in zip(names, nodes, strict=True) if isinstance(node, Node)}
