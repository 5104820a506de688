"""The reads of a controller in ZooKeeper. Each returns the complete current value, not changes.

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
    """A topic with its partitions' states. ``version`` is the version of the topic's own node."""

    record: TopicRecord
    states: dict[int, VersionedState]
    version: int


class TopicsRead(NamedTuple):
    """All readable topics, and the names of topics with an unreadable record or unreadable states."""

    topics: tuple[StoredTopic, ...]
    unreadable: frozenset[str]


class IsrChangesRead(NamedTuple):
    """The ISR change notifications.

    ``nodes`` has the versions of their nodes. ``reported`` has the reported states. ``named`` has partitions that
    changed without a reported state, or is None if any partition may have changed.
    """

    nodes: dict[str, int]
    reported: tuple[TopicStates, ...]
    named: tuple[TopicPartition, ...] | None


class ControllerLevels:
    """The reads of one controller, for its ``ControllerStore``."""

    def __init__(self, cluster: ClusterStore) -> None:
        self.session = cluster.session
        self.cluster = cluster
        self.unreadable = cluster.unreadable

    async def brokers(self) -> tuple[BrokerRegistration, ...]:
        """Return the live brokers. A broker with a mark in ``/brokers/untrusted`` is untrusted.

        The mark counts, not the registration: a controller deletes the mark when the broker can be trusted again.
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
        """Return the brokers outside ``live`` whose last incarnation is proved dead.

        Call it after the live brokers were read: one multi deletes a registration and creates the mark.
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
        """Return the node's value, or skip it and return None if it is unreadable."""
        try:
            return codecs.decode(path, node.data, kind)
        except codecs.ZkFormatError as error:
            self.unreadable.skip(path, error)
            return None

    async def absent(self, live: Collection[int]) -> tuple[BrokerRegistration, ...]:
        """Return the last registrations, with addresses, of brokers outside ``live``.

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

    async def stopping(self) -> dict[int, int]:
        """Return the brokers that request a controlled shutdown, with the incarnation that requested it."""
        found = await self.read_values(paths.STOPPING, codecs.StoppingNode)
        return {i: found[str(i)].incarnation for i in self.unreadable.numbers(paths.STOPPING, tuple(found))}

    async def deletions(self) -> dict[str, str]:
        """Return the deletion requests: for each topic name the id of the topic to delete."""
        found = await self.read_values(paths.DELETE_TOPICS, codecs.DeletionRequest)
        return {name: request.topic_id for name, request in found.items()}

    async def isr_changes(self) -> IsrChangesRead:
        """Return the ISR changes that leaders report.

        An unreadable notification may mean any partition.
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
        """Return the children of ``/brokers/topics`` with valid topic names; skip the others."""
        names = []
        for name in await self.session.children(paths.TOPICS):
            problem = check_topic_name(name)
            if problem is None:
                names.append(name)
            else:
                self.unreadable.skip(paths.topic(name), problem)
        return names

    async def topic(self, name: str) -> tuple[TopicRecord, int] | None:
        """Return the topic's record and version, or None if the topic is gone.

        The result is not older than the last write through this session.
        """
        await self.session.sync(paths.topic(name))
        return await self.cluster.read_topic(name)

    async def elections(self) -> dict[str, codecs.ElectionRequest]:
        """Return the requests for elections, by the names of their nodes."""
        return await self.read_values(paths.ELECTIONS, codecs.ElectionRequest)

    async def refusals(self) -> tuple[codecs.TruncationRefusal, ...]:
        """Return the truncations that replicas refuse.

        The parent node is created if it is missing, as in a cluster of an earlier release.
        """
        await self.session.ensure(paths.TRUNCATION_REFUSALS)
        return tuple((await self.read_values(paths.TRUNCATION_REFUSALS, codecs.TruncationRefusal)).values())

    async def states(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, VersionedState | None]:
        """Return the states of these partitions, or None for a partition without one. Omit unreadable states.

        The result is not older than the last write through this session.
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
        """Return the values of a node's children, by name. Unreadable ones are skipped."""
        nodes = await self._read_children(path)
        values = {name: self.decode(f"{path}/{name}", node, kind) for name, node in nodes.items()}
        return {name: value for name, value in values.items() if value is not None}

    async def _read_children(self, path: str) -> Mapping[str, Node]:
        names = await self.session.children(path)
        nodes = await asyncio.gather(*(self.session.get(f"{path}/{name}") for name in names), return_exceptions=True)
        raise_other_than(nodes, ZkNoNode)
        return {name: node for name, node in zip(names, nodes, strict=True) if isinstance(node, Node)}
