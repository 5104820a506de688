"""The broker's reads and writes in ZooKeeper, such as its registration and the ISR writes of its leaders.

This module makes no decisions. It passes the result of an ISR write to the partition as an event, on the event loop,
unless the partition has been dropped meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.logging_setup import Lines
from sparklog.broker.replication.partition import Partition
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import (
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    check_topic_name,
)
from sparklog.replica.effects import RefuseTruncation, WriteIsr
from sparklog.replica.events import IsrRefused, IsrWriteFailed, IsrWritten
from sparklog.storage.log_directory import LogDirectory
from sparklog.zk import paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import BarrierJob, ClusterStore
from sparklog.zk.codecs import ElectionRequest, TruncationRefusal, ZkFormatError, encode
from sparklog.zk.errors import BrokerIdTaken, ZkError, ZkNodeExists, ZkNoNode, ZkUnreachable
from sparklog.zk.security import zookeeper_security
from sparklog.zk.session import PAUSE_S, ZkSession
from sparklog.zk.state_store import FateUnknown, NodeGone, WriteRefused

_log = logging.getLogger(__name__)

#: The time for which ISR changes are gathered before the controller is notified. While more ISR writes are in flight,
#: each change makes the time longer. Otherwise the controller would update all brokers while thousands of elections and
#: ISR changes are still to come. No client's write waits for this notification, but a stopping broker does.
_NOTIFY_DELAY_MS = 20
_NOTIFY_PARTITION_MS = 0.2
_NOTIFY_LATEST_MS = 200


class _Session(NamedTuple):
    """A ZooKeeper session, and the objects that use it."""

    session: ZkSession
    store: ClusterStore
    registration: BrokerRegistry

    async def close(self) -> None:
        await self.registration.close()
        await self.session.close()


class ZkRegistration:
    """A broker's connection to ZooKeeper: its session, its registration, and its reads and writes.

    Until ``open`` has returned, all methods that need ZooKeeper raise BrokerError BROKER_NOT_AVAILABLE. ``on_id_taken``
    is called when another live broker is registered with this broker's id. Not thread-safe: use it on the broker's
    event loop, until ``close``.
    """

    def __init__(
        self, context: BrokerContext, directory: LogDirectory, on_id_taken: Callable[[Exception], None]
    ) -> None:
        self._context = context
        self._directory = directory
        self._on_id_taken = on_id_taken
        self._opened: _Session | None = None
        #: Called with the session once it is open, before the broker registers.
        self.session_listeners: list[Callable[[ZkSession], None]] = []
        #: The partition states that this broker wrote and has not reported to the controller yet: by (topic, topic id),
        #: then by partition.
        self._changed: dict[tuple[str, str], dict[int, VersionedState]] = {}
        self._changes = 0
        #: ISR writes without a response so far.
        self._writing = 0
        #: The state in ZooKeeper of the partition that is handling an event; ``isr_changed`` reports this state.
        self._known: VersionedState | None = None
        self._isr_lines = Lines(_log)
        #: The nodes (path, content) that report refused truncations to the controller.
        self._refusals: dict[Partition, tuple[str, RefuseTruncation]] = {}
        self._producer_ids = iter(range(0))
        self._producer_ids_lock = asyncio.Lock()
        self.announced = False

    @property
    def is_open(self) -> bool:
        """Return whether ``open`` has registered this broker."""
        return self._opened is not None

    async def open(self, zookeeper: str, registration: BrokerRegistration) -> None:
        """Connect to ZooKeeper and register this broker. Set ``context.incarnation``.

        Raises:
            ClusterError: ZooKeeper is unreachable or belongs to another cluster, or another live broker is registered
                with this id (BrokerIdTaken).
        """
        context, config = self._context, self._context.config
        session = await ZkSession.open(
            zookeeper,
            session_timeout_ms=config.session_timeout_ms,
            connect_timeout_ms=config.zk_connection_timeout_ms,
            keys=context.keys,
            security=zookeeper_security(config),
        )
        opened = self._use(session, registration)
        try:
            found = await opened.store.cluster_id(create=False)
            if found != context.cluster_id:
                raise ClusterError(
                    f"ZooKeeper at {zookeeper} belongs to cluster {found!r}, expected {context.cluster_id!r}"
                )
            for listener in self.session_listeners:
                listener(session)
            opened.registration.doubt(await self._lost(opened, self._directory.doubted))
            incarnation = await opened.registration.start(timeout_ms=config.zk_connection_timeout_ms)
        except BaseException:
            await opened.close()
            raise
        self._opened = opened
        context.incarnation = incarnation

    def _use(self, session: ZkSession, registration: BrokerRegistration) -> _Session:
        node = BrokerRegistry(
            session,
            registration,
            directory=self._directory,
            on_registered=self._registered_again,
            on_failed=self._registration_failed,
        )
        return _Session(session, ClusterStore(session), node)

    def _require(self) -> _Session:
        if self._opened is None:
            detail = f"broker {self._context.broker_id} is still starting"
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, detail)
        return self._opened

    @property
    def _session(self) -> ZkSession:
        return self._require().session

    @property
    def _store(self) -> ClusterStore:
        return self._require().store

    @property
    def _registration(self) -> BrokerRegistry:
        return self._require().registration

    async def _lost(self, opened: _Session, doubted: Mapping[TopicPartition, str]) -> list[TopicPartition]:
        """Return the missing or unreadable logs whose topics still assign a replica to this broker.

        The registration reports them, because this broker has lost acknowledged records of these partitions.
        """
        topics = {name: await _read_topic(opened, name) for name in {tp.topic for tp in doubted}}
        lost = []
        for tp, topic_id in doubted.items():
            topic = topics[tp.topic]
            if isinstance(topic, ZkFormatError):
                _log.error("%s: the log is lost or damaged, and its topic cannot be read: %s", tp, topic)
                lost.append(tp)
                continue
            if topic is None or topic_id not in {"", topic.topic_id} or tp.partition >= len(topic.assignment):
                continue
            if self._context.broker_id in topic.assignment[tp.partition]:
                _log.error("%s: the log is lost or damaged: copying it from other replicas", tp)
                lost.append(tp)
        return lost

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def doubt_directory(self) -> None:
        """Ensure that the next process on this log directory registers as untrusted, whatever the disk contains.

        Raises:
            ZkUnreachable: the session was closed.
        """
        await self._registration.doubt_directory()

    def _registered_again(self, incarnation: int) -> None:
        """Record the new incarnation after a session expired, and report refused truncations again.

        This process and its logs have not changed.
        """
        self._context.incarnation = incarnation
        self._context.counters["zookeeper.registrations"] += 1
        for partition, (_, effect) in list(self._refusals.items()):  # the expired session's nodes are gone
            self.refuse_truncation(partition, effect)

    def _registration_failed(self, error: Exception) -> None:
        self._context.counters["zookeeper.registrations.failed"] += 1
        if isinstance(error, BrokerIdTaken):
            self._on_id_taken(error)

    # --- in-sync sets -----------------------------------------------------------------------------------------------

    def write_isr(self, partition: Partition, effect: WriteIsr) -> None:
        self._context.counters["isr.writes"] += 1
        state = LeaderAndIsr(
            effect.leader, effect.leader_epoch, effect.isr, effect.controller_epoch, lossy_epoch=effect.lossy_epoch
        )
        wanted = VersionedState(state, effect.expected_version + 1, self._context.incarnation)
        sent = self._store.states.send_isr(
            partition.tp,
            state,
            expected_version=effect.expected_version,
            leader_incarnation=wanted.leader_incarnation,
            added=effect.added,
            topic_id=partition.topic_id,
        )
        self._writing += 1
        sent.add_done_callback(partial(self._on_isr_response, partition, effect, wanted))

    def _on_isr_response(
        self, partition: Partition, effect: WriteIsr, wanted: VersionedState, sent: asyncio.Future[tuple[int, ...]]
    ) -> None:
        """Handle the result of an ISR write.

        A successful write is handled without a task, because the stop of one broker causes thousands of ISR writes.
        """
        self._writing -= 1
        if sent.cancelled():
            return
        if sent.exception() is not None:
            if not partition.stopped:
                self._context.spawn(self._settle(partition, effect, sent), f"ISR of {partition.tp}")
        elif not partition.stopped:
            assert sent.result()[-1] == wanted.version
            self._isr_lines.info("%s: ISR is now %s (version %d)", partition.tp, effect.isr, wanted.version)
            self._give_state(partition, wanted, IsrWritten(effect.isr, wanted.version))

    async def _settle(self, partition: Partition, effect: WriteIsr, sent: asyncio.Future[tuple[int, ...]]) -> None:
        """Find out whether a failed ISR write has been applied, and notify the partition."""
        expected = effect.expected_version
        outcome = await self._store.states.isr_outcome(
            sent, partition.tp, expected_version=expected, added=effect.added
        )
        if partition.stopped:
            return
        if isinstance(outcome, WriteRefused):
            self._context.counters["isr.writes.refused"] += 1
            _log.info("%s: ISR %s refused: %s", partition.tp, list(effect.isr), outcome.reason)
            await self._refused(partition, outcome.found, expected)
        elif isinstance(outcome, FateUnknown):
            self._context.counters["isr.writes.lost"] += 1
            partition.step(IsrWriteFailed(expected))
            if outcome.why:
                _log.warning("%s: ISR %s: %s; reading it again", partition.tp, list(effect.isr), outcome.why)
                await asyncio.sleep(PAUSE_S)
            found = await self._store.states.read_again(partition.tp)
            if found is not None:
                await self._refused(partition, found, expected)
        else:
            assert isinstance(outcome, NodeGone)
            _log.info("%s: ISR %s not written: the topic was deleted", partition.tp, list(effect.isr))

    async def _refused(self, partition: Partition, found: VersionedState, expected: int) -> None:
        """Give the partition the state found in its node, unless the node belongs to a new topic with the same name."""
        lives = await self._session.patiently(lambda: self._session.exists(paths.topic_id(partition.topic_id)))
        if not lives or partition.stopped:
            return
        self._give_state(partition, found, IsrRefused(found.state, found.version, expected))

    def _give_state(self, partition: Partition, stored: VersionedState, event: IsrWritten | IsrRefused) -> None:
        """Give the partition the state of its node, as an event.

        The partition decides whether to notify the controller.
        """
        state, version = stored.state, stored.version
        self._context.cache.state_written(partition.tp, state, version=version, topic_id=partition.topic_id)
        self._known = stored
        partition.step(event)

    def isr_changed(self, partition: Partition) -> None:
        """Schedule a notification to the controller about the partition's new ISR.

        The notification includes all ISR changes until the time at which it is sent.
        """
        assert self._known is not None and self._known.version == partition.replica.version
        if not self._changed:
            self._context.spawn(self._notify(), "ISR change notification")
        tp = partition.tp
        self._changed.setdefault((tp.topic, partition.topic_id), {})[tp.partition] = self._known
        self._changes += 1

    async def _notify(self) -> None:
        begun = self._context.now_ms()
        while True:
            # Without writes in flight there is nothing to wait for.
            more = self._changes * _NOTIFY_PARTITION_MS if self._writing else 0
            left_ms = min(_NOTIFY_LATEST_MS, _NOTIFY_DELAY_MS + more) - (self._context.now_ms() - begun)
            if left_ms <= 0:
                break
            await asyncio.sleep(min(left_ms, _NOTIFY_DELAY_MS) / 1000)
        told = tuple(TopicStates(topic, topic_id, states) for (topic, topic_id), states in self._changed.items())
        self._changed, self._changes = {}, 0
        await self._session.patiently(lambda: self._store.states.notify_isr_change(self._context.broker_id, told))

    # --- refused truncations ----------------------------------------------------------------------------------------

    def refuse_truncation(self, partition: Partition, effect: RefuseTruncation) -> None:
        """Report to the controller that the leader lacks committed records, which this replica refuses to truncate.

        The report stays until ``accept_truncation`` is called.
        """
        path = paths.truncation_refusal(f"{self._context.broker_id}-{uuid.uuid4().hex}")
        self._refusals[partition] = path, effect
        self._context.spawn(self._refuse_truncation(partition, path, effect), f"refused cut of {partition.tp}")

    async def _refuse_truncation(self, partition: Partition, path: str, effect: RefuseTruncation) -> None:
        await self._session.patiently(lambda: self._session.ensure(paths.TRUNCATION_REFUSALS))
        refusal = TruncationRefusal(
            partition.tp.topic,
            partition.tp.partition,
            partition.topic_id,
            self._context.broker_id,
            self._context.incarnation,
            effect.leader_epoch,
            effect.offset,
            effect.high_watermark,
        )
        with suppress(ZkNodeExists):  # an earlier attempt created it, and its response was lost
            await self._session.patiently(lambda: self._session.create(path, encode(refusal), ephemeral=True))
        if self._refusals.get(partition, ("",))[0] != path:
            self.withdraw_request(path)

    def accept_truncation(self, partition: Partition) -> None:
        """Withdraw the report of a refused truncation."""
        path, _ = self._refusals.pop(partition, ("", None))
        if path:
            self.withdraw_request(path)

    # --- topics and producers ---------------------------------------------------------------------------------------

    async def create_topic(self, record: TopicRecord) -> None:
        """Write a new topic to ZooKeeper. A retry after a lost response does not fail.

        Raises:
            BrokerError: the same errors as ``ClusterStore.create_topic``.
            ZkUnreachable: the connection broke, and the topic was not created.
        """
        try:
            await self._store.create_topic(record)
        except ZkUnreachable as error:
            if not error.sent:
                raise
            await self._session.connected(timeout_ms=self._context.config.session_timeout_ms)
            found = await self._store.read_topic(record.name)
            if found is None or found[0].topic_id != record.topic_id:
                raise

    async def topic_lives(self, name: str, topic_id: str) -> bool:
        """Return whether a topic with this name and id exists in ZooKeeper. An empty id matches any topic of the name.

        The result includes all writes before the call. For an invalid name or id the result is False without a request
        to ZooKeeper, because a client could send a name of a megabyte. Raises ZkUnreachable.
        """
        if check_topic_name(name) or (topic_id and check_topic_name(topic_id)):
            return False
        path = paths.topic_id(topic_id) if topic_id else paths.topic(name)
        await self._session.sync(path)
        return await self._session.exists(path)

    async def restore_topic(self, record: TopicRecord, states: Mapping[int, LeaderAndIsr]) -> None:
        """Recreate a topic with its old id. Raises the same errors as ``create_topic``."""
        try:
            await self._store.restore_topic(record, states)
        except ZkUnreachable as error:
            if not error.sent:
                raise
            await self._session.connected(timeout_ms=self._context.config.session_timeout_ms)
            found = await self._store.read_topic(record.name)
            if found is None or found[0].topic_id != record.topic_id:
                raise

    async def deleted_topics(self, topic_ids: Iterable[str]) -> set[str]:
        """Return the topic ids that ZooKeeper lists as deleted, out of the given ones. Raises ZkUnreachable."""
        return await self._store.deleted_topics(topic_ids)

    async def request_delete(self, name: str, topic_id: str) -> None:
        await self._store.request_delete_topic(name, topic_id)

    async def change_topic(
        self, name: str, change: Callable[[TopicRecord], TopicRecord], *, in_thread: bool = False
    ) -> TopicRecord | None:
        """Replace a topic's metadata by the result of ``change``. Retry if another writer has changed the metadata.

        ``change`` must be idempotent, because it also runs again after a lost response. With ``in_thread`` it runs in a
        thread, for changes that take long.

        Return the new metadata, or None if the topic does not exist.

        Raises:
            BrokerError: errors of ``change``; INVALID_PARTITIONS if the metadata is too large for one node.
            ZkUnreachable: there was no connection for a session timeout.
        """
        if check_topic_name(name):
            return None  # its path would be that of another node
        while True:
            with suppress(ZkUnreachable):
                found = await self._store.read_topic(name)
                if found is None:
                    return None
                if in_thread:
                    wanted = await asyncio.get_running_loop().run_in_executor(None, change, found[0])
                else:
                    wanted = change(found[0])
                if wanted == found[0] or await self._store.update_topic(wanted, found[1]) is not None:
                    return wanted
                continue
            await self._session.connected(timeout_ms=self._context.config.session_timeout_ms)

    async def request_election(self, request: ElectionRequest) -> str:
        """Create a ZooKeeper node that requests an election, and return the path of the node.

        The controller deletes the node after the election.
        """
        path = paths.election(uuid.uuid4().hex)
        try:
            await self._store.request_election(path, request)
        except ZkUnreachable:  # the node may exist nevertheless
            self.withdraw_request(path)
            raise
        return path

    async def request_done(self, path: str) -> None:
        """Wait until ``path``, the ZooKeeper node of a request, is deleted. There is no time limit."""
        while True:
            await self._session.connected()
            changed = asyncio.Event()
            try:
                # ``exists`` would leave a watch on a deleted node, and no node gets this name again.
                await self._session.get(path, on_change=changed.set)
            except ZkNoNode:
                return
            except ZkUnreachable:
                continue
            await changed.wait()

    # --- security ---

    async def connected(self) -> None:
        """Wait for a connection to ZooKeeper. Raises ZkUnreachable if there is none for a session timeout."""
        await self._session.connected(timeout_ms=self._context.config.session_timeout_ms)

    def withdraw_request(self, path: str) -> None:
        """Delete ``path``, the ZooKeeper node of a request, so that the controller does not carry out the request.

        The deletion runs in the background.
        """
        self._context.spawn(self._withdraw(path), "withdraw a request")

    async def _withdraw(self, path: str) -> None:
        while True:
            await self._session.connected()
            with suppress(ZkUnreachable):
                with suppress(ZkNoNode):
                    await self._session.delete(path)
                return

    async def read_states(self, partitions: Iterable[TopicPartition]) -> list[VersionedState | None]:
        """Return the states of these partitions in ZooKeeper; None for a partition of a deleted topic.

        Raises ZkUnreachable.
        """
        return list(await asyncio.gather(*map(self._store.states.read, partitions)))

    async def next_producer_id(self) -> int:
        """Return a new producer id. One write to ZooKeeper reserves a thousand ids."""
        async with self._producer_ids_lock:
            try:
                return next(self._producer_ids)
            except StopIteration:
                block = await self._next_block()
                self._producer_ids = iter(block)
                return next(self._producer_ids)

    async def _next_block(self) -> range:
        """Reserve a block of producer ids above all earlier blocks of this broker.

        The end of the block is stored in the log directory.
        """
        seen = self._directory.seen_file
        block = await self._store.next_producer_ids(now_s=time.time(), above=seen.seen.producer_ids)
        try:
            await asyncio.to_thread(seen.note_producer_ids, block.stop)
        except OSError as error:  # a full disk: blocks still differ, because they also depend on the wall clock
            _log.warning("could not record a block of producer ids up to %d: %s", block.stop, error)
        return block

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def announce_stopping(self) -> None:
        """Ask the controller to move this broker's leaderships to other brokers."""
        self.announced = True
        await self._registration.announce_stopping()

    async def withdraw_stopping(self) -> None:
        """Withdraw the request of ``announce_stopping``, because this broker continues to serve."""
        self.announced = False
        self._context.cache.relieved = False  # ISRs may contain this broker again from now on
        await self._registration.withdraw_stopping()

    def mark_trusted(self) -> None:
        """Mark the registration as trusted.

        Call this when an update of the controller shows that the controller knows which logs are untrusted.
        """
        self._registration.mark_trusted()

    async def barrier_job(self) -> BarrierJob:
        """Return the state of the driver's barrier job from ZooKeeper.

        If ZooKeeper is unreachable, the result says that a new run of the job is expected.
        """
        try:
            return await self._store.barrier_job()
        except ZkUnreachable:
            return BarrierJob(awaited=True)

    async def controller_lives(self) -> bool:
        """Return whether there is a controller that can move leaderships."""
        try:
            return await self._session.exists(paths.CONTROLLER)
        except ZkError:
            return False


async def _read_topic(opened: _Session, name: str) -> TopicRecord | ZkFormatError | None:
    while True:
        await opened.session.connected()
        with suppress(ZkUnreachable):
            await opened.session.sync(paths.topic(name))
            try:
                found = await opened.store.read_topic(name)
            except ZkFormatError as error:
                return error
            return found[0] if found is not None else None
