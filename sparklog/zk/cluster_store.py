"""What brokers, administration and supervisors read and write in ZooKeeper, as typed operations.

Each operation says what becomes of it when the connection breaks under way. State is written by compare-and-set
only; nothing here decides anything. The controller's own operations are in ``controller_store``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import (
    NO_EPOCH,
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    believed_producer_ids,
    check_topic_name,
    producer_id_floor,
)
from sparklog.zk import codecs, paths
from sparklog.zk.errors import ZkBadVersion, ZkError, ZkMultiFailed, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.session import Check, Create, Delete, Node, Op, SetData, ZkSession
from sparklog.zk.unreadable import Unreadable

#: Producer ids are handed to brokers in blocks of this many.
PRODUCER_ID_BLOCK = 1000
#: ZooKeeper drops the connection on requests of 1 MB; a topic record stays clear of that.
MAX_TOPIC_BYTES = 900_000
#: States that a broker has written and no controller has acted on, some 40 bytes each; read by every controller that
#: takes over.
MAX_NOTIFICATION_BYTES = 500_000


@dataclass(frozen=True, slots=True)
class Written:
    """The write is durable; the node has this ``version`` now."""

    version: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The write lost and nothing was done; ``found`` is what the node holds now. When only an added broker's
    incarnation was wrong, that is still the version the write was bound to."""

    found: VersionedState
    reason: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The partition has no state any more: its topic was deleted."""


@dataclass(frozen=True, slots=True)
class FateUnknown:
    """The connection broke. ``sent`` false: certainly not written. Then read the state with
    ``read_state_again`` and treat what it says as what was decided.

    ``why``: the connection stands, and this is what was answered, which is not understood: pause before the next
    attempt."""

    sent: bool
    why: str = ""


class BarrierJob(NamedTuple):
    """The barrier job of the living driver; neither: no driver lives. ``awaited``: its next generation has not
    reported yet, so one of its tasks may be about to take hold of a broker that nobody supervises. ``at_work``: it
    has."""

    awaited: bool = False
    at_work: codecs.GenerationName | None = None


WriteOutcome = Written | Refused | NodeGone | FateUnknown


class ClusterStore:
    """Stateless operations over one session; any number of them may be under way."""

    def __init__(self, session: ZkSession) -> None:
        self.session = session
        self.unreadable = Unreadable()

    async def prepare(self) -> None:
        """Create the persistent nodes every cluster has, where they are missing."""
        empty = codecs.encode(codecs.CounterNode())
        for path in paths.BASE:
            counter = path in {paths.CONTROLLER_EPOCH, paths.DRIVER_EPOCH, paths.PRODUCER_IDS}
            try:
                await self.session.create(path, empty if counter else b"")
            except ZkNodeExists:
                continue

    async def cluster_id(self, *, create: bool = True) -> str:
        """The cluster's id, made up on the first call ever.

        Raises:
            ClusterError: there is none and ``create`` is false.
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
                continue  # another process was faster: its id counts

    async def allocate_broker_id(self) -> int:
        """Return a broker id that was never given out before. A lost answer wastes one. An id that a broker has
        registered under is passed over: a counter that was put back from an older copy would give it again."""
        while True:
            broker_id = await self.session.set(paths.BROKER_ID_SEQUENCE, b"") - 1
            if not await self.session.exists(paths.incarnation(broker_id)):
                return broker_id

    async def next_producer_ids(self, *, now_s: float, above: int = 0) -> range:
        """Take a block of producer ids for this caller alone. A lost answer wastes one block.

        The block starts at the counter, and no lower than ``above`` nor than the floor of ``now_s``, the wall clock's
        seconds: where ZooKeeper was put back from an older copy the counter alone would give ids a second time.
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
        """Return the registrations of all live brokers, by id; skip what is no registration."""
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
        """Return what a node of ``/brokers/ids`` says. One that is overwritten is still held by its broker's session,
        and ``/brokers/incarnations`` has the same registration: the broker does not count as dead for that."""
        path = paths.broker(broker_id)
        try:
            if not node.ephemeral_owner:
                raise codecs.ZkFormatError("it is not ephemeral: no broker's session holds it")
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
        """Delete the registration of a process proved dead, if it is still there, and leave a mark that says so:
        registrations also vanish when it is ZooKeeper that cannot be reached. Bound to the incarnation counted last,
        which is that process's, whichever its session has come to: False when another process has registered since.

        The mark is made anew, not set, so that whoever watches the marks hears of it. May be repeated.
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

    # --- partition state -----------------------------------------------------------------------------------------

    async def read_state(self, tp: TopicPartition) -> VersionedState | None:
        """The partition's state, None if there is none (yet, or any more)."""
        path = paths.state(tp)
        try:
            node = await self.session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode_state(path, node.data, node.version)

    async def read_state_again(self, tp: TopicPartition) -> VersionedState | None:
        """After FateUnknown: wait for the connection as long as it takes, let the server catch up, read.

        The read comes after whatever became of the write: a session's requests through an earlier connection are
        refused by the ensemble once it has moved on to a new one.

        Raises:
            ZkUnreachable: the session was closed.
        """

        async def read() -> VersionedState | None:
            await self.session.sync(paths.state(tp))
            try:
                return await self.read_state(tp)
            except codecs.ZkFormatError as error:
                raise ZkError(str(error)) from None  # asked again after a pause

        return await self.session.patiently(read)

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
        """The leader's compare-and-set of the ISR from ``expected_version``, bound to the ``added`` incarnations.

        ``leader_incarnation`` is the writer's current one: it says which process this leader epoch belongs to. With
        ``topic_id`` the write cannot hit a topic that was deleted and created again under this name.

        Returns at once: thousands come together, and a task for each would cost more than the write. The node's new
        version is the last of the results; of a future that fails, ``isr_outcome`` says what that means.
        """
        path = paths.state(tp)
        ops: list[Op] = [Check(paths.incarnation(broker_id), found) for broker_id, found in added]
        if topic_id:
            ops.append(Check(paths.topic_id(topic_id), -1))
        ops.append(SetData(path, codecs.encode_state(state, leader_incarnation), expected_version))
        return self.session.multi_in_company(ops)

    async def isr_outcome(
        self,
        sent: asyncio.Future[tuple[int, ...]],
        tp: TopicPartition,
        *,
        expected_version: int,
        added: Sequence[tuple[int, int]] = (),
    ) -> WriteOutcome:
        """What became of a write that was sent with these."""
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
            found = await self.read_state(tp)
        except ZkUnreachable:
            return FateUnknown(sent=False)
        except (ZkError, codecs.ZkFormatError) as error:
            return FateUnknown(sent=False, why=str(error))
        return NodeGone() if found is None else Refused(found, reason)

    async def notify_isr_change(self, broker_id: int, told: Sequence[TopicStates]) -> None:
        """Tell the controller what this broker wrote as the leader of these partitions. May be repeated.

        The states come along: the controller need not read thousands of nodes while brokers wait for its word. One node
        a broker, which collects what no controller has acted on: while there is none they must not pile up until
        nobody can list them. It is written even when it says all of it already, since it may have been read before
        these writes: the new version keeps it from being deleted on the strength of that.
        """
        path = paths.isr_change(broker_id)
        while True:
            with suppress(ZkNodeExists):
                await self.session.create(path, _notification(told))
                return
            with suppress(ZkNoNode, ZkBadVersion):
                node = await self.session.get(path)
                try:
                    noted = codecs.decode_isr_changes(path, node.data).told
                except codecs.ZkFormatError as error:
                    self.unreadable.skip(path, error)
                    noted = ()  # what it said is unknown: any partition may be meant
                value = _notification(_merged((*noted, *told)) if noted else ())
                await self.session.set(path, value, node.version)
                return

    # --- topics --------------------------------------------------------------------------------------------------

    async def topic_names(self) -> tuple[str, ...]:
        return await self.session.children(paths.TOPICS)

    async def read_topic(self, name: str) -> tuple[TopicRecord, int] | None:
        """The topic's record and its node's version."""
        path = paths.topic(name)
        try:
            node = await self.session.get(path)
        except ZkNoNode:
            return None
        return codecs.decode_topic(path, node.data, name), node.version

    async def create_topic(self, record: TopicRecord) -> None:
        """Write the topic; the controller does the rest.

        Raises:
            BrokerError: TOPIC_ALREADY_EXISTS; INVALID_PARTITIONS when the record is too large for one node.
            ZkUnreachable: with ``sent`` the topic may exist: its topic id tells whose it is.
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
        """Write a topic with the states of partitions that have records, all of it or nothing: the controller would
        give a partition without a state to a broker that has none of them. Its id is not named as deleted any more.

        Raises:
            BrokerError: TOPIC_ALREADY_EXISTS; INVALID_PARTITIONS when it is too large for one request.
            ZkUnreachable: with ``sent`` the topic may exist.
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
        """Replace a topic's record (schemas, config, more partitions, moves). None: it was changed meanwhile, or the
        topic was deleted and perhaps made anew.

        Raises:
            BrokerError: INVALID_PARTITIONS when the record is too large for one node.
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
        """Return which of these ids belong to topics that are named as deleted. Raises ZkUnreachable."""
        await self.session.sync(paths.DELETED_TOPICS)
        wanted = [topic_id for topic_id in topic_ids if not check_topic_name(topic_id)]
        found = await asyncio.gather(*(self.session.exists(paths.deleted_topic(i)) for i in wanted))
        return {topic_id for topic_id, named in zip(wanted, found, strict=True) if named}

    async def request_delete_topic(self, name: str, topic_id: str) -> None:
        """Ask the controller to delete this topic; asking twice is the same as once. Of a topic that is no more nothing
        is left to ask for. As long as it lives, a request that means another topic of that name is void, and gives way:
        the controller would drop it, and this one with it."""
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
                with suppress(codecs.ZkFormatError):  # what cannot be read means no topic, and gives way, too
                    if codecs.decode(path, node.data, codecs.DeletionRequest).topic_id == topic_id:
                        return
                # Not set alone: the controller watches which requests there are, not what is in them. And with another
                # version than it had: whoever is about to drop what he has read there must not hit this one.
                again = (SetData(path, request, version) for version in range(node.version + 1))
                ops = [lives, Delete(path, node.version), Create(path, request), *again]

    async def request_election(self, path: str, request: codecs.ElectionRequest) -> None:
        """Ask the controller to elect leaders anew; it deletes the request's node, ``paths.election(...)``, when that
        is done. The node ends with this session as well: an unclean election must not come when its reasons, and who
        asked for it, are long gone."""
        await self.session.create(path, codecs.encode(request), ephemeral=True)

    # --- drivers -------------------------------------------------------------------------------------------------

    async def claim_driver(
        self, host: str, pid: int, *, start_time: int = 0, boot_id: str = "", pid_namespace: int = 0
    ) -> int:
        """Become the cluster's one driver for as long as this session lives. Returns the driver epoch, a number
        higher than any driver before had. The arguments are kept as they are, see ``DriverNode``.

        Raises:
            ClusterError: another driver's node lives (names its host and pid).
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
                    continue  # the counter moved; whoever moved it may be gone again
            try:
                holder = await self.session.get(paths.DRIVER)
            except ZkNoNode:
                continue
            found = codecs.decode(paths.DRIVER, holder.data, codecs.DriverNode)
            if holder.ephemeral_owner == self.session.session_id:
                return found.driver_epoch  # our own claim, whose answer was lost
            raise ClusterError(
                f"another driver runs this cluster: {found.host} pid {found.pid}, driver epoch {found.driver_epoch}"
            )

    async def barrier_job(self) -> BarrierJob:
        """How far the living driver has come with its generations. Raises ZkUnreachable."""
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


def _notification(told: Iterable[TopicStates]) -> bytes:
    """Of too many for one node it says none, which means any."""
    value = codecs.encode_isr_changes(told)
    return value if len(value) <= MAX_NOTIFICATION_BYTES else codecs.encode_isr_changes(())


def _merged(told: Iterable[TopicStates]) -> Iterable[TopicStates]:
    """The newest state of each partition."""
    topics: dict[tuple[str, str], dict[int, VersionedState]] = {}
    for said in told:
        newest = topics.setdefault((said.topic, said.topic_id), {})
        for partition, stored in said.states.items():
            known = newest.get(partition)
            if known is None or known.version < stored.version:
                newest[partition] = stored
    return [TopicStates(topic, topic_id, newest) for (topic, topic_id), newest in topics.items()]


def encode_record(record: TopicRecord) -> bytes:
    """Raises BrokerError: INVALID_PARTITIONS when the record is too large for one node."""
    value = codecs.encode_topic(record)
    if len(value) > MAX_TOPIC_BYTES:
        raise BrokerError(
            ErrorCode.INVALID_PARTITIONS,
            f"topic {record.name} with {len(record.assignment)} partitions takes {len(value)} bytes in "
            f"ZooKeeper; at most {MAX_TOPIC_BYTES} fit",
        )
    return value
