"""The broker's dealings with ZooKeeper: its registration, the ISR writes of its leaders, topics and producer ids.

Nothing here decides. Results of ISR writes go back to the partition as events, on the loop, whenever they come; a
partition that was dropped meanwhile gets none.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from sparklog.broker.logs import Lines
from sparklog.broker.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.errors import ClusterError
from sparklog.model import (
    BrokerRegistration,
    LeaderAndIsr,
    TopicPartition,
    TopicRecord,
    TopicStates,
    VersionedState,
    check_topic_name,
)
from sparklog.replica.effects import WriteIsr
from sparklog.replica.events import IsrRefused, IsrWriteFailed, IsrWritten
from sparklog.zk import paths
from sparklog.zk.broker_registry import BrokerRegistry
from sparklog.zk.cluster_store import BarrierJob, ClusterStore, FateUnknown, NodeGone, Refused
from sparklog.zk.codecs import ElectionRequest
from sparklog.zk.errors import BrokerIdTaken, ZkError, ZkNoNode, ZkUnreachable
from sparklog.zk.session import PAUSE_S, ZkSession

_log = logging.getLogger(__name__)

#: ISR changes are gathered for so long before the controller is told, and longer for each of them while more are being
#: written: it tells all brokers while thousands of elections and ISRs are still to come. No write of a client waits for
#: the controller to know; a broker that stops does.
_NOTIFY_DELAY_MS = 20
_NOTIFY_PARTITION_MS = 0.2
_NOTIFY_LATEST_MS = 200


class Registry:
    """Owner: the broker process' event loop, from ``open`` to ``close``."""

    def __init__(self, broker: BrokerState, session: ZkSession, registration: BrokerRegistration) -> None:
        self._broker = broker
        self._session = session
        self._store = ClusterStore(session)
        self._registration = BrokerRegistry(
            session,
            registration,
            directory=broker.partitions.directory,
            on_registered=self._registered_again,
            on_failed=self._registration_failed,
        )
        #: What this broker wrote and the controller has not been told: by topic, its id, and partition.
        self._changed: dict[tuple[str, str], dict[int, VersionedState]] = {}
        self._changes = 0
        #: ISR writes whose answer has not come.
        self._writing = 0
        #: What a partition is being told that its node holds.
        self._known: VersionedState | None = None
        self._isr_lines = Lines(_log)
        self._producer_ids = iter(range(0))
        self._producer_ids_lock = asyncio.Lock()
        self.announced = False

    @classmethod
    async def open(cls, broker: BrokerState, zookeeper: str, registration: BrokerRegistration) -> Registry:
        """Connect and register; sets ``broker.incarnation``.

        Raises:
            ClusterError: no ZooKeeper, another cluster's, or a broker elsewhere holds the id (BrokerIdTaken).
        """
        config = broker.config
        session = await ZkSession.open(
            zookeeper,
            session_timeout_ms=config.session_timeout_ms,
            connect_timeout_ms=config.zk_connection_timeout_ms,
        )
        registry = cls(broker, session, registration)
        try:
            found = await registry._store.cluster_id(create=False)
            if found != broker.cluster_id:
                raise ClusterError(f"ZooKeeper at {zookeeper} is of cluster {found!r}, expected {broker.cluster_id!r}")
            await registry._look_for_missing(broker.partitions.directory.missing)
            broker.incarnation = await registry._registration.start(timeout_ms=config.zk_connection_timeout_ms)
        except BaseException:
            await registry.close()
            raise
        return registry

    async def _look_for_missing(self, missing: Mapping[TopicPartition, str]) -> None:
        """Logs that were here and are not, of topics that still have them here, are lost, and with them what this
        broker acknowledged: its registration is untrusted."""
        for tp, topic_id in missing.items():
            found = await self._read_topic(tp.topic)
            if found is None or found.topic_id != topic_id:
                continue
            if self._broker.broker_id in found.assignment[tp.partition]:
                _log.error("%s: the log is gone, and this broker still hosts it", tp)
                self._registration.distrust()

    async def _read_topic(self, name: str) -> TopicRecord | None:
        while True:
            await self._session.connected()
            with suppress(ZkUnreachable):
                found = await self._store.read_topic(name)
                return found[0] if found is not None else None

    async def close(self) -> None:
        await self._registration.close()
        await self._session.close()

    def _registered_again(self, incarnation: int) -> None:
        """A session expired; this is the same process with its log intact, under a new incarnation."""
        self._broker.incarnation = incarnation
        self._broker.counters["zookeeper.registrations"] += 1

    def _registration_failed(self, error: Exception) -> None:
        self._broker.counters["zookeeper.registrations.failed"] += 1
        if isinstance(error, BrokerIdTaken):
            self._broker.id_taken(error)

    # --- in-sync sets -----------------------------------------------------------------------------------------------

    def write_isr(self, partition: Partition, effect: WriteIsr) -> None:
        self._broker.counters["isr.writes"] += 1
        state = LeaderAndIsr(effect.leader, effect.leader_epoch, effect.isr, effect.controller_epoch)
        wanted = VersionedState(state, effect.expected_version + 1, self._broker.incarnation)
        sent = self._store.send_isr(
            partition.tp,
            state,
            expected_version=effect.expected_version,
            leader_incarnation=wanted.leader_incarnation,
            added=effect.added,
            topic_id=partition.topic_id,
        )
        self._writing += 1
        sent.add_done_callback(partial(self._isr_answered, partition, effect, wanted))

    def _isr_answered(
        self, partition: Partition, effect: WriteIsr, wanted: VersionedState, sent: asyncio.Future[tuple[int, ...]]
    ) -> None:
        """A write that is done takes no task of its own: thousands are, when a broker goes."""
        self._writing -= 1
        if sent.cancelled():
            return
        if sent.exception() is not None:
            if not partition.stopped:
                self._broker.spawn(self._settle(partition, effect, sent), f"ISR of {partition.tp}")
        elif not partition.stopped:
            assert sent.result()[-1] == wanted.version
            self._isr_lines.info("%s: ISR is now %s (version %d)", partition.tp, effect.isr, wanted.version)
            self._tell(partition, wanted, IsrWritten(effect.isr, wanted.version))

    async def _settle(self, partition: Partition, effect: WriteIsr, sent: asyncio.Future[tuple[int, ...]]) -> None:
        """Hand on what became of a write that failed."""
        expected = effect.expected_version
        outcome = await self._store.isr_outcome(sent, partition.tp, expected_version=expected, added=effect.added)
        if partition.stopped:
            return
        if isinstance(outcome, Refused):
            self._broker.counters["isr.writes.refused"] += 1
            _log.info("%s: ISR %s refused: %s", partition.tp, list(effect.isr), outcome.reason)
            await self._refused(partition, outcome.found, expected)
        elif isinstance(outcome, FateUnknown):
            self._broker.counters["isr.writes.lost"] += 1
            partition.step(IsrWriteFailed(expected))
            if outcome.why:
                _log.warning("%s: ISR %s: %s; looking again", partition.tp, list(effect.isr), outcome.why)
                await asyncio.sleep(PAUSE_S)
            found = await self._store.read_state_again(partition.tp)
            if found is not None:
                await self._refused(partition, found, expected)
        else:
            assert isinstance(outcome, NodeGone)
            _log.info("%s: ISR %s not written: the topic is gone", partition.tp, list(effect.isr))

    async def _refused(self, partition: Partition, found: VersionedState, expected: int) -> None:
        """Hand over what the node holds, unless it is by now the node of another topic of this name."""
        lives = await self._session.patiently(lambda: self._session.exists(paths.topic_id(partition.topic_id)))
        if not lives or partition.stopped:
            return
        self._tell(partition, found, IsrRefused(found.state, found.version, expected))

    def _tell(self, partition: Partition, stored: VersionedState, event: IsrWritten | IsrRefused) -> None:
        """The partition's node is known to hold this. Whether that is news to the controller the partition says."""
        state, version = stored.state, stored.version
        self._broker.cache.state_written(partition.tp, state, version=version, topic_id=partition.topic_id)
        self._known = stored
        partition.step(event)

    def isr_changed(self, partition: Partition) -> None:
        """Tell the controller, together with whatever else changes in the next moment."""
        assert self._known is not None and self._known.version == partition.replica.version
        if not self._changed:
            self._broker.spawn(self._notify(), "ISR change notification")
        tp = partition.tp
        self._changed.setdefault((tp.topic, partition.topic_id), {})[tp.partition] = self._known
        self._changes += 1

    async def _notify(self) -> None:
        begun = self._broker.now_ms()
        while True:
            # What is not being written will not come: nobody waits for more than there is.
            more = self._changes * _NOTIFY_PARTITION_MS if self._writing else 0
            left_ms = min(_NOTIFY_LATEST_MS, _NOTIFY_DELAY_MS + more) - (self._broker.now_ms() - begun)
            if left_ms <= 0:
                break
            await asyncio.sleep(min(left_ms, _NOTIFY_DELAY_MS) / 1000)
        told = tuple(TopicStates(topic, topic_id, states) for (topic, topic_id), states in self._changed.items())
        self._changed, self._changes = {}, 0
        await self._session.patiently(lambda: self._store.notify_isr_change(self._broker.broker_id, told))

    # --- topics and producers ---------------------------------------------------------------------------------------

    async def create_topic(self, record: TopicRecord) -> None:
        """Raises BrokerError as ``ClusterStore.create_topic``; ZkUnreachable when it is not there afterwards."""
        try:
            await self._store.create_topic(record)
        except ZkUnreachable as error:
            if not error.sent:
                raise
            await self._session.connected(timeout_ms=self._broker.config.session_timeout_ms)
            found = await self._store.read_topic(record.name)
            if found is None or found[0].topic_id != record.topic_id:
                raise

    async def topic_lives(self, name: str, topic_id: str) -> bool:
        """Whether ZooKeeper has this topic; with an empty id, any of this name. What was written before it was asked
        counts. What can be no topic's name or id is none's: clients say them, and ZooKeeper is not bothered with a path
        of a megabyte. Raises ZkUnreachable."""
        if check_topic_name(name) or (topic_id and check_topic_name(topic_id)):
            return False
        path = paths.topic_id(topic_id) if topic_id else paths.topic(name)
        await self._session.sync(path)
        return await self._session.exists(path)

    async def request_delete(self, name: str, topic_id: str) -> None:
        await self._store.request_delete_topic(name, topic_id)

    async def change_topic(self, name: str, change: Callable[[TopicRecord], TopicRecord]) -> TopicRecord | None:
        """Write what ``change`` makes of the topic's record, as often as another writer was faster; what it makes is
        looked at again after a lost answer, too, so it must leave alone what it has changed before.

        Returns the record as it is then; None: there is no such topic.

        Raises:
            BrokerError: what ``change`` raises; INVALID_PARTITIONS when the record is too large for one node.
            ZkUnreachable: not connected for a session timeout.
        """
        while True:
            with suppress(ZkUnreachable):
                found = await self._store.read_topic(name)
                if found is None:
                    return None
                wanted = change(found[0])
                if wanted == found[0] or await self._store.update_topic(wanted, found[1]) is not None:
                    return wanted
                continue
            await self._session.connected(timeout_ms=self._broker.config.session_timeout_ms)

    async def request_election(self, request: ElectionRequest) -> str:
        """Ask the controller to elect leaders anew; the path of the request's node, which lives until that is done."""
        path = paths.election(uuid.uuid4().hex)
        try:
            await self._store.request_election(path, request)
        except ZkUnreachable:  # it may be there all the same
            self.withdraw_request(path)
            raise
        return path

    async def request_done(self, path: str) -> None:
        """Wait, as long as it takes, until the node of a request is gone."""
        while True:
            await self._session.connected()
            changed = asyncio.Event()
            try:
                # Not exists: for a node that is gone that would leave a watch, and this name never comes again.
                await self._session.get(path, on_change=changed.set)
            except ZkNoNode:
                return
            except ZkUnreachable:
                continue
            await changed.wait()

    def withdraw_request(self, path: str) -> None:
        """Nobody waits for this any more: it must not be carried out later, however long ZooKeeper is away."""
        self._broker.spawn(self._withdraw(path), "withdraw a request")

    async def _withdraw(self, path: str) -> None:
        while True:
            await self._session.connected()
            with suppress(ZkUnreachable):
                with suppress(ZkNoNode):
                    await self._session.delete(path)
                return

    async def read_states(self, partitions: Iterable[TopicPartition]) -> list[VersionedState | None]:
        """What ZooKeeper has on these partitions now; None where a topic is gone. Raises ZkUnreachable."""
        return list(await asyncio.gather(*map(self._store.read_state, partitions)))

    async def next_producer_id(self) -> int:
        """A producer id never given out before; one ZooKeeper write for a thousand of them."""
        async with self._producer_ids_lock:
            try:
                return next(self._producer_ids)
            except StopIteration:
                self._producer_ids = iter(await self._store.next_producer_ids())
                return next(self._producer_ids)

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def announce_stopping(self) -> None:
        """Ask the controller to move this broker's leaderships away."""
        self.announced = True
        await self._registration.announce_stopping()

    async def withdraw_stopping(self) -> None:
        """A supervisor has come back: this broker stays."""
        self.announced = False
        self._broker.cache.relieved = False  # from now on others may count on it again
        await self._registration.withdraw_stopping()

    def vouch(self) -> None:
        """A controller has told this incarnation what it is, so it has taken note if its logs were untrusted."""
        self._registration.vouch()

    async def barrier_job(self) -> BarrierJob:
        """What the driver has a broker without a supervisor expect. A generation is awaited while ZooKeeper is away, as
        nobody knows."""
        try:
            return await self._store.barrier_job()
        except ZkUnreachable:
            return BarrierJob(awaited=True)

    async def controller_lives(self) -> bool:
        """Whether somebody is there to move leaderships."""
        try:
            return await self._session.exists(paths.CONTROLLER)
        except ZkError:
            return False
