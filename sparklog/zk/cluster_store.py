"""Typed reads and writes in ZooKeeper for brokers, administration and supervisors.

Each operation defines its outcome if the connection breaks. State is written only by compare-and-set. The module makes
no decisions. ``state_store`` has the operations of leaders on partition states, and ``controller_store`` has the
operations of the controller.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import (
    NO_EPOCH,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    believed_producer_ids,
    check_topic_name,
    producer_id_floor,
)
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkMultiFailed, ZkNodeExists, ZkNoNode
from sparklog.zk.session import Check, Create, Delete, Node, Op, SetData, ZkSession
from sparklog.zk.state_store import StateStore
from sparklog.zk.unreadable import Unreadable

#: The number of producer ids in a block.
PRODUCER_ID_BLOCK = 1000
#: ZooKeeper drops the connection on requests of 1 MB; a topic record stays well below that.
MAX_TOPIC_BYTES = 900_000


class BarrierJob(NamedTuple):
    """The state of the live driver's barrier job, the Spark job whose tasks supervise the brokers.

    A generation is one run of the barrier job. ``awaited`` means that the newest generation has not yet written its
    report to ZooKeeper. A task of this generation may then be about to become the supervisor of a broker without a
    supervisor. ``at_work`` is the newest generation, if its report is in ZooKeeper. Without a live driver, the fields
    are False and None.
    """

    awaited: bool = False
    at_work: codecs.GenerationName | None = None


class ClusterStore:
    """A store of the cluster's data in ZooKeeper (brokers, topics, driver), over one session.

    Any number of operations may be in flight, because the store keeps no copy of the data.
    """

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self.unreadable = Unreadable()
        #: The leaders' operations on partition states.
        self.states = StateStore(session, self.unreadable)

    async def prepare(self) -> None:
        """Create the persistent nodes that every cluster has, if they are missing."""
        empty = codecs.encode(codecs.CounterNode())
        for path in paths.BASE:
            counter = path in {paths.CONTROLLER_EPOCH, paths.DRIVER_EPOCH, paths.PRODUCER_IDS}
            try:
                await self.session.create(path, empty if counter else b"")
            except ZkNodeExists:
                continue

    async def cluster_id(self, *, create: bool = True) -> str:
        """Return the cluster's id. If the cluster has no id yet, generate and store one.

        Raises:
          ClusterError: the cluster has no id and ``create`` is false.
        """
        while True:
            try:
                return (await self.session.get(paths.CLUSTER_ID)).data.decode()
            except UnicodeDecodeError as error:
                raise codecs.ZkFormatError(f"ZooKeeper node {paths.CLUSTER_ID}: {error}") from None
            except ZkNoNode:
                if not create:
                    raise ClusterError(
                        f"there is no sparklog cluster in ZooKeeper at {self.session.connect_string}"
                    ) from None
            try:
                await self.session.create(paths.CLUSTER_ID, uuid.uuid4().hex.encode())
            except ZkNodeExists:
                continue  # Another process has created the id first.

    async def allocate_broker_id(self) -> int:
        """Return a new broker id, which no earlier call has returned.

        If the response of ZooKeeper is lost, one id is never used. Ids with an earlier registration are skipped,
        because a ZooKeeper that was restored from an older copy has a lower counter.
        """
        while True:
            broker_id = await self.session.set(paths.BROKER_ID_SEQUENCE, b"") - 1
            if not await self.session.exists(paths.incarnation(broker_id)):
                return broker_id

    async def next_producer_ids(self, *, now_s: float, above: int = 0) -> range:
        """Allocate a block of producer ids. No other caller receives the same ids.

        If the response of ZooKeeper is lost, one block is never used.

        The block starts at the greatest of three numbers: the counter in ZooKeeper, ``above``, and a minimum that grows
        with ``now_s``, the wall-clock time in seconds. ``above`` is the end of the highest block that the caller has
        received, and is ignored if it is implausibly high for this time. If ZooKeeper was restored from an older copy,
        the counter alone would allocate ids a second time.
        """
        while True:
            node = await self.session.get(paths.PRODUCER_IDS)
            counter = codecs.decode(paths.PRODUCER_IDS, node.data, codecs.CounterNode).value
            start = max(counter, believed_producer_ids(above, now_s), producer_id_floor(now_s))
            end = start + PRODUCER_ID_BLOCK
            try:
                await self.session.set(paths.PRODUCER_IDS, codecs.encode(codecs.CounterNode(end)), node.version)
            except ZkBadVersion:
                continue
            return range(start, end)

    # --- brokers -------------------------------------------------------------------------------------------------

    async def live_brokers(self) -> tuple[BrokerRegistration, ...]:
        """Return the registrations of all live brokers, sorted by broker id. Skip unreadable registrations."""
        ids = self.unreadable.numbers(paths.BROKER_IDS, await self.session.children(paths.BROKER_IDS))
        found = await asyncio.gather(*(self.session.get(paths.broker(i)) for i in ids), return_exceptions=True)
        live = []
        for broker_id, node in zip(ids, found, strict=True):
            if isinstance(node, ZkNoNode):
                continue
            if isinstance(node, BaseException):
                raise node
            registration = await self._registration(broker_id, node)
            if registration is not None:
                live.append(registration)
        return tuple(live)

    async def _registration(self, broker_id: int, node: Node) -> BrokerRegistration | None:
        """Return the registration in a node of ``/brokers/ids``, or None.

        If the node was overwritten but the broker's session still holds it, the registration is read from
        ``/brokers/incarnations``. So an overwritten node alone does not make the broker count as dead.
        """
        path = paths.broker(broker_id)
        try:
            if not node.ephemeral_owner:
                raise codecs.ZkFormatError("it is not ephemeral, so no broker's session holds it")
            return codecs.decode_broker(path, node.data, broker_id)
        except codecs.ZkFormatError as error:
            self.unreadable.skip(path, error)
            if error.newer or not node.ephemeral_owner:
                return None
        path = paths.incarnation(broker_id)
        try:
            last = await self.session.get(path)
            if not last.data:
                return None
            registration = codecs.decode_broker(path, last.data, broker_id)
        except ZkNoNode:
            return None
        except codecs.ZkFormatError as error:
            self.unreadable.skip(path, error)
            return None
        return msgspec.structs.replace(registration, incarnation=last.version)

    async def retire_broker(self, broker_id: int, *, pid: int, boot_id: str) -> bool:
        """Delete the registration of a broker process that is certainly dead, and mark the broker as retired.

        Return False if another process has registered since. The call may be repeated.

        The mark, the node ``/brokers/retired/<id>`` with the dead incarnation, shows a controller that the process is
        dead. A missing registration alone does not show that, because a registration also disappears when a broker
        cannot reach ZooKeeper. An existing mark is deleted and created again, because watches on the children of the
        parent node do not fire for a changed value.
        """
        ids, counter, mark = paths.broker(broker_id), paths.incarnation(broker_id), paths.retired(broker_id)
        while True:
            counted, held, marked = [await self._node(path) for path in (counter, ids, mark)]
            if counted is None:
                return False
            ops: list[Op] = [Check(counter, counted.version)]
            if held is not None:
                registered = codecs.decode_broker(ids, held.data, broker_id)
                if (registered.pid, registered.boot_id) != (pid, boot_id):
                    return False
                ops.append(Delete(ids, held.version))
            said = codecs.encode(codecs.CounterNode(counted.version))
            if held is None and marked is not None and marked.data == said:
                return True
            if marked is not None:
                ops.append(Delete(mark, marked.version))
            try:
                await self.session.multi([*ops, Create(mark, said)])
            except ZkMultiFailed:
                continue
            return True

    async def _node(self, path: str) -> Node | None:
        try:
            return await self.session.get(path)
        except ZkNoNode:
            return None

    # --- topics --------------------------------------------------------------------------------------------------

    async def topic_names(self) -> tuple[str, ...]:
        return await self.session.children(paths.TOPICS)

    async def read_topic(self, name: str) -> tuple[TopicRecord, int] | None:
        """Return the topic's metadata and the version of its node, or None if the topic does not exist."""
        path = paths.topic(name)
        try:
            node = await self.session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode_topic(path, node.data, name), node.version

    async def create_topic(self, record: TopicRecord) -> None:
        """Create the topic's nodes. The controller then creates the states of the partitions.

        Raises:
          BrokerError: TOPIC_ALREADY_EXISTS; INVALID_PARTITIONS if the metadata is too large for one node.
          ZkUnreachable: if its ``sent`` is true, the topic may exist. Its topic id shows whether this call has created
              it.
        """
        value = encode_record(record)
        try:
            await self.session.multi(
                [
                    Create(paths.topic(record.name), value),
                    Create(paths.partitions(record.name), b""),
                    Create(paths.topic_id(record.topic_id), record.name.encode()),
                ]
            )
        except ZkMultiFailed as error:
            if isinstance(error.cause, ZkNodeExists):
                raise BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {record.name} exists already") from None
            raise

    async def restore_topic(self, record: TopicRecord, states: Mapping[int, LeaderAndIsr]) -> None:
        """Create a topic with the states of the partitions that have records, in one multi (ZooKeeper transaction).

        Without these states the controller could choose a leader that does not have the partition's records. The
        topic's id is also removed from the list of deleted topics.

        Raises:
          BrokerError: TOPIC_ALREADY_EXISTS; INVALID_PARTITIONS if the topic is too large for one request.
          ZkUnreachable: if its ``sent`` is true, the topic may exist.
        """
        ops: list[Op] = [
            Create(paths.topic(record.name), encode_record(record)),
            Create(paths.partitions(record.name), b""),
            Create(paths.topic_id(record.topic_id), record.name.encode()),
        ]
        for number, state in states.items():
            tp = TopicPartition(record.name, number)
            value = codecs.encode_state(state, NO_EPOCH)
            ops += [Create(paths.partition(tp), b""), Create(paths.state(tp), value)]
        size = sum(len(op.data) + len(op.path) for op in ops if isinstance(op, Create))
        if size > MAX_TOPIC_BYTES:
            raise BrokerError(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {record.name} with {len(states)} partitions that have records takes {size} bytes in one request"
                f" to ZooKeeper; at most {MAX_TOPIC_BYTES} fit: stop the cluster and run `sparklog zookeeper rebuild`",
            )
        if await self.session.exists(paths.deleted_topic(record.topic_id)):
            ops.append(Delete(paths.deleted_topic(record.topic_id)))
        try:
            await self.session.multi(ops)
        except ZkMultiFailed as error:
            if isinstance(error.cause, ZkNodeExists):
                raise BrokerError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {record.name} exists already") from None
            raise

    async def update_topic(self, record: TopicRecord, expected_version: int) -> int | None:
        """Replace a topic's metadata, for example with new schemas, settings or replicas. Return the new version.

        Return None if the topic's node does not have ``expected_version``, or if the topic was deleted and perhaps
        recreated.

        Raises:
          BrokerError: INVALID_PARTITIONS if the metadata is too large for one node.
        """
        ops: list[Op] = [
            Check(paths.topic_id(record.topic_id), -1),
            SetData(paths.topic(record.name), encode_record(record), expected_version),
        ]
        try:
            return int((await self.session.multi(ops))[-1])
        except ZkMultiFailed as error:
            if isinstance(error.cause, (ZkBadVersion, ZkNoNode)):
                return None
            raise

    async def deleted_topics(self, topic_ids: Iterable[str]) -> set[str]:
        """Return which of ``topic_ids`` are in ZooKeeper's list of deleted topics. Raises ZkUnreachable."""
        await self.session.sync(paths.DELETED_TOPICS)
        wanted = [topic_id for topic_id in topic_ids if not check_topic_name(topic_id)]
        found = await asyncio.gather(*(self.session.exists(paths.deleted_topic(i)) for i in wanted))
        return {topic_id for topic_id, named in zip(wanted, found, strict=True) if named}

    async def request_delete_topic(self, name: str, topic_id: str) -> None:
        """Request that the controller delete this topic. Idempotent.

        If the topic no longer exists, nothing is written. If there is a request to delete an earlier topic of the same
        name, this request replaces it, because the controller would ignore the earlier one.
        """
        path, request = paths.delete_topic(name), codecs.encode(codecs.DeletionRequest(topic_id))
        lives = Check(paths.topic_id(topic_id), -1)
        ops: list[Op] = [lives, Create(path, request)]
        while True:
            try:
                await self.session.multi(ops)
                return
            except ZkMultiFailed as error:
                if error.index == 0 and isinstance(error.cause, ZkNoNode):
                    return
                if not isinstance(error.cause, (ZkNodeExists, ZkNoNode, ZkBadVersion)):
                    raise
            ops = [lives, Create(path, request)]
            with suppress(ZkNoNode):
                node = await self.session.get(path)
                with suppress(codecs.ZkFormatError):  # Replace an unreadable request as well.
                    if codecs.decode(path, node.data, codecs.DeletionRequest).topic_id == topic_id:
                        return
                # Do not only set the node: the controller watches the names of the requests, not their content. The new
                # node also has another version than the old one, so a controller that is about to drop the old request
                # does not delete the new one.
                again = (SetData(path, request, version) for version in range(node.version + 1))
                ops = [lives, Delete(path, node.version), Create(path, request), *again]

    async def request_election(self, path: str, request: codecs.ElectionRequest) -> None:
        """Request that the controller elect leaders.

        ``path`` is the path of the request's node, a result of ``paths.election``. The controller deletes this node
        after the elections. The node is ephemeral, because an unclean election must not happen long after the process
        that requested it has ended.
        """
        await self.session.create(path, codecs.encode(request), ephemeral=True)

    # --- drivers -------------------------------------------------------------------------------------------------

    async def claim_driver(
        self, host: str, pid: int, *, start_time: int = 0, boot_id: str = "", pid_namespace: int = 0
    ) -> int:
        """Register this process as the cluster's only driver, for as long as this session exists.

        Return the driver epoch, which is higher than the epoch of every earlier driver. The arguments describe this
        process and are stored in a ``DriverNode``.

        Raises:
          ClusterError: another driver is registered. The error names its host and pid.
        """
        while True:
            node = await self.session.get(paths.DRIVER_EPOCH)
            epoch = codecs.decode(paths.DRIVER_EPOCH, node.data, codecs.CounterNode).value + 1
            own = codecs.DriverNode(
                epoch, host, pid, start_time=start_time, boot_id=boot_id, pid_namespace=pid_namespace
            )
            try:
                await self.session.multi(
                    [
                        Create(paths.DRIVER, codecs.encode(own), ephemeral=True),
                        SetData(paths.DRIVER_EPOCH, codecs.encode(codecs.CounterNode(epoch)), node.version),
                    ]
                )
                return epoch
            except ZkMultiFailed as error:
                if error.index != 0:
                    continue  # Another driver has changed the counter. Try again, because that driver may have ended.
            try:
                holder = await self.session.get(paths.DRIVER)
            except ZkNoNode:
                continue
            found = codecs.decode(paths.DRIVER, holder.data, codecs.DriverNode)
            if holder.ephemeral_owner == self.session.session_id:
                return found.driver_epoch  # This is the node of this call: the response of an earlier attempt was lost.
            raise ClusterError(
                f"another driver runs this cluster: {found.host} pid {found.pid}, driver epoch {found.driver_epoch}"
            )

    async def barrier_job(self) -> BarrierJob:
        """Return the state of the live driver's barrier job. Raises ZkUnreachable."""
        try:
            node = await self.session.get(paths.DRIVER)
        except ZkNoNode:
            return BarrierJob()
        driver = codecs.decode(paths.DRIVER, node.data, codecs.DriverNode)
        called = await self._generation(paths.DIRECTIVE)
        formed = await self._generation(paths.GENERATION)
        if called is None or called.driver_epoch < driver.driver_epoch or formed is None or formed < called:
            return BarrierJob(awaited=True)
        return BarrierJob(at_work=formed)

    async def _generation(self, path: str) -> codecs.GenerationName | None:
        try:
            node = await self.session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode(path, node.data, codecs.GenerationName)


def encode_record(record: TopicRecord) -> bytes:
    """Encode a topic's metadata for its node. Raises BrokerError INVALID_PARTITIONS if it is too large for one node."""
    value = codecs.encode_topic(record)
    if len(value) > MAX_TOPIC_BYTES:
        raise BrokerError(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {record.name} with {len(record.assignment)} partitions takes {len(value)} bytes in "
            f"ZooKeeper; at most {MAX_TOPIC_BYTES} fit",
        )
    return value
