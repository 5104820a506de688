"""One controller term: it passes facts from ZooKeeper and brokers to the core, and performs the core's effects.

This module decides nothing. Everything runs on one loop: the term steps the core synchronously, and the results of
effects return to the core as events. The term ends when the core resigns, the session expires, or ``/controller``
belongs to another controller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sparklog.cluster.broker_connections import BrokerConnections
from sparklog.cluster.required_proofs import RequiredProofs
from sparklog.cluster.retry_pauses import growing_pauses
from sparklog.cluster.topic_watcher import TopicWatcher
from sparklog.controller.controller import Controller
from sparklog.controller.effects import (
    AskLogEnds,
    DeleteTopic,
    DropDeletionRequest,
    DropElection,
    Effect,
    RaiseCounters,
    ReadStates,
    ReadTopic,
    Report,
    Resign,
    SendUpdate,
    StateWrite,
    TrustBroker,
    WriteStates,
    WriteTopic,
)
from sparklog.controller.events import (
    BrokersRead,
    CutRefused,
    DeletionsRead,
    Disconnected,
    ElectionAsked,
    ElectionsRead,
    Event,
    Fenced,
    Loaded,
    LogEndsRead,
    Reconnected,
    RefusalsRead,
    StatesRead,
    StatesRefused,
    StatesTold,
    StatesUnknown,
    StatesWritten,
    StoppingRead,
    Ticked,
    TopicDeleted,
    TopicGone,
    TopicNotWritten,
    TopicRead,
    TopicSnapshot,
    TopicWritten,
    UpdateAnswered,
    UpdateLost,
)
from sparklog.errors import BrokerError
from sparklog.model import (
    BrokerRegistration,
    TopicPartition,
    TopicRecord,
    VersionedState,
    assert_never,
    believed_producer_ids,
)
from sparklog.net.greeting import Credentials
from sparklog.protocol.messages import ControlUpdateReply, DescribeBroker, DescribeBrokerReply
from sparklog.protocol.proof import Identity, KeyRing
from sparklog.protocol.senders import Sender
from sparklog.zk import codecs, paths
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.controller_store import (
    ControllerStore,
    EpochLost,
    FateUnknown,
    NodeGone,
    StateChange,
    StateOutcome,
    Superseded,
    Written,
)
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import PAUSE_S, Node, SessionState

log = logging.getLogger(__name__)

#: Maximum time for which one turn of the loop writes states, and maximum number of outcomes in one step of the core.
_TURN_S = 0.03
_OUTCOMES_AT_ONCE = 2000


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class ControllerTerm:
    """One term of the controller. Owner: ``ControllerLoop``. Life cycle: ``run`` returns when the term is over."""

    def __init__(
        self,
        store: ControllerStore,
        core: Controller,
        *,
        cluster_id: str,
        session_timeout_ms: int,
        on_change: Callable[[], None],
        keys: KeyRing | None = None,
    ) -> None:
        self.core = core
        #: Whether the term ended with an unexpected error.
        self.failed = False
        self.counters: Counter[str] = Counter()
        self._store = store
        self._session = store.session
        self._generation = store.session.generation
        self._on_change = on_change
        self._connections = BrokerConnections(
            client_id=f"controller-{core.controller_epoch}",
            cluster_id=cluster_id,
            connect_timeout_s=max(1.0, session_timeout_ms / 1000),
            credentials=Credentials(
                KeyRing() if keys is None else keys, lambda: Identity(Sender.CONTROLLER, -1, core.controller_epoch)
            ),
        )
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[str] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unwatch: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._to_write: deque[StateWrite] = deque()
        #: Outcomes that the core has not received yet, each with its write.
        self._outcomes: dict[TopicPartition, tuple[StateWrite, StateOutcome | None]] = {}
        self._deleting: dict[str, str] = {}  # names by topic id: a recreated topic of the same name may be deleted too
        self._reading_brokers = asyncio.Lock()
        self._proofs = RequiredProofs(self._session, enabled=bool(keys))
        #: Partitions whose states cannot be read; the term reads them again with pauses.
        self._unread: dict[TopicPartition, None] = {}

    async def run(self, *, cautious: bool) -> str:
        """Read the cluster's state, then follow its changes until the term is over. Return the reason for the end.

        Raises:
            ZkUnreachable: the connection to ZooKeeper was lost before everything was read.
            ZkError: a node that every cluster has is missing, or ZooKeeper refused a request.
        """
        try:
            self._advance(await self._load(cautious=cautious))
            self._unwatch.append(self._session.add_listener(self._session_moved))
            if self._session.state is not SessionState.CONNECTED or self._session.generation != self._generation:
                raise ZkUnreachable("the connection to ZooKeeper was lost while reading the cluster's state")
            self._follow()
            return await self._over
        finally:
            await self._end()

    async def _load(self, *, cautious: bool) -> Loaded:
        # Read brokers first. Then every state is newer than the registrations, so the core sees each claim of an
        # untrusted broker.
        await self._proofs.load()
        brokers, retired = await self._brokers()
        absent = self._proofs.admitted(await self._store.read_absent({found.broker_id for found in brokers}))
        stopping = await self._store.read_stopping()
        topics, unreadable = await self._store.read_topics()
        deletions = await self._store.read_deletions()
        snapshots = tuple(TopicSnapshot(topic.record, topic.states, topic.version) for topic in topics)
        elections = await self._elections()
        refusals = await self._refusals()
        return Loaded(
            brokers, stopping, snapshots, deletions, cautious, retired, elections, absent, unreadable, refusals
        )

    async def _brokers(self) -> tuple[tuple[BrokerRegistration, ...], frozenset[int]]:
        brokers = self._proofs.admitted(await self._store.read_brokers())
        return brokers, await self._store.read_retired({found.broker_id for found in brokers})

    async def _elections(self) -> dict[str, ElectionAsked]:
        found = await self._store.read_elections()
        return {
            name: ElectionAsked(
                request.kind,
                None if request.partitions is None else tuple(TopicPartition(*tp) for tp in request.partitions),
            )
            for name, request in found.items()
        }

    async def _refusals(self) -> tuple[CutRefused, ...]:
        return tuple(
            CutRefused(
                TopicPartition(found.topic, found.partition),
                found.topic_id,
                found.broker_id,
                found.incarnation,
                found.leader_epoch,
                found.offset,
                found.high_watermark,
            )
            for found in await self._store.read_refusals()
        )

    async def _end(self) -> None:
        if not self._over.done():
            self._over.set_result("cancelled")
        for unwatch in self._unwatch:
            unwatch()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connections.close()

    # --- facts in --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._unwatch.append(self._session.watch_data(paths.CONTROLLER, self._controller_node))
        self._unwatch.append(TopicWatcher(self._session, found=self._topic_found, gone=self._topic_unlisted).close)
        self._start(self._level(paths.BROKER_IDS, self._read_brokers), "live brokers")
        # A registration may already be gone when its process is proved dead. Then only the mark of retirement changes.
        self._start(self._level(paths.RETIRED, self._read_brokers), "retired brokers")
        self._start(self._level(paths.STOPPING, self._read_stopping), "stopping brokers")
        self._start(self._level(paths.DELETE_TOPICS, self._read_deletions), "topic deletions")
        self._start(self._level(paths.ELECTIONS, self._read_elections), "elections")
        self._start(self._level(paths.CUT_REFUSALS, self._read_refusals), "refused cuts")
        self._start(self._level(paths.ISR_CHANGES, self._read_isr_changes), "ISR changes")

    async def _level(self, path: str, read: Callable[[], Awaitable[None]]) -> None:
        """Call ``read`` first, then whenever a node's children change and after every reconnection."""
        while True:
            changed = asyncio.Event()
            try:
                await self._session.connected()
                await self._session.children(path, on_change=changed.set)
                await read()
            except ZkUnreachable as error:
                if self._session.state is SessionState.CLOSED:
                    return
                log.info("reading %s again after %s", path, error)
                # Without the pause, a cause that breaks every connection, such as a response that is too large, would
                # break connections in a tight loop.
                await asyncio.sleep(PAUSE_S)
                continue
            await changed.wait()

    async def _read_brokers(self) -> None:
        async with self._reading_brokers:  # otherwise an older, slower read could overwrite a newer one
            brokers, retired = await self._brokers()
            self._step(BrokersRead(brokers, retired))
            await self._proofs.settle(brokers, retired=retired, hosting=self._hosting)

    def _hosting(self) -> set[int]:
        return {broker for partition in self.core.state.partitions() for broker in partition.replicas}

    async def _read_stopping(self) -> None:
        stopping = await self._store.read_stopping()
        if not self.core.brokers.stopping <= stopping.keys():
            # A broker that no longer stops may have ended. Read the registrations first: otherwise the core would treat
            # the ended broker as live for a moment, and carry out what it postponed during the stop.
            await self._read_brokers()
        self._step(StoppingRead(stopping))

    async def _read_deletions(self) -> None:
        self._step(DeletionsRead(await self._store.read_deletions()))

    async def _read_elections(self) -> None:
        self._step(ElectionsRead(await self._elections()))

    async def _read_refusals(self) -> None:
        self._step(RefusalsRead(await self._refusals()))

    async def _read_isr_changes(self) -> None:
        """Read notifications of ISR changes until none is left: an addition to a node fires no watch on its parent."""
        while True:
            nodes, told, named = await self._store.read_isr_changes()
            if not nodes:
                return
            if told:
                self._step(StatesTold(told))
            if named is None:
                named = tuple(partition.tp for partition in self.core.state.partitions())
            if named:
                found = await self._store.read_states(named)
                self._step(StatesRead(found))
                self._read_later([tp for tp in named if tp not in found])
            if await self._store.delete_isr_changes(nodes):
                return

    def _topic_unlisted(self, name: str) -> None:
        self._start(self._look_for_topic(name), f"look for topic {name}")

    async def _look_for_topic(self, name: str) -> None:
        """Read a topic that is no longer listed, and report it as gone if it has no node.

        Brokers drop the logs of a topic that is reported as gone, and the topic may have been recreated in the
        meantime. If this term deletes the topic, the deleting task reports it.
        """
        found: tuple[TopicRecord, int] | None = None

        async def look() -> None:
            nonlocal found
            found = await self._store.cluster.read_topic(name)

        if name not in self._deleting.values():
            await self._patiently(look)
            if found is None and name not in self._deleting.values():
                await self._topic_gone(name)

    async def _topic_gone(self, name: str) -> None:
        """Report the topic as gone, and whether ZooKeeper lists it as deleted: only then may brokers delete its
        logs."""
        known = self.core.state.topics.get(name)
        topic_ids = () if known is None else (known.record.topic_id,)
        deleted = False

        async def ask() -> None:
            nonlocal deleted
            deleted = bool(await self._store.cluster.deleted_topics(topic_ids))

        if topic_ids:
            await self._patiently(ask)
        self._step(TopicGone(name, deleted, topic_ids[0] if topic_ids else ""))

    def _topic_found(self, name: str, node: Node) -> None:
        # The snapshot has no states, because partitions of a topic that is new to the core usually have none. If an
        # earlier controller has written some, ZooKeeper refuses the core's write, and the refusal returns them.
        path = paths.topic(name)
        try:
            record = codecs.decode_topic(path, node.data, name)
        except ZkFormatError as error:
            # The core keeps the earlier record. The watcher calls this method again when the node changes.
            self._store.unreadable.skip(path, error)
            self._report_unreadable()
            return
        self._step(TopicRead(TopicSnapshot(record, {}, node.version)))

    def _controller_node(self, node: Node | None) -> None:
        if not self._store.owns(node):
            self._step(Fenced("/controller is not this controller's any more"))

    def _session_moved(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._session.generation == self._generation:
            self._step(Reconnected())
        elif state is SessionState.DISCONNECTED:
            self._step(Disconnected())
        elif state is not SessionState.CONNECTING:
            self._finish(f"the ZooKeeper session is {state.value}")

    def _step(self, event: Event) -> None:
        """Step the core with ``event``; end the term if that fails.

        Timers and watches also call this method and cannot handle an error. A new term is safer than one that continues
        with part of the state.
        """
        if self._over.done():
            return
        try:
            self._advance(event)
        except Exception as error:
            self._fail(type(event).__name__, error)

    def _fail(self, what: str, error: BaseException) -> None:
        log.error("%s failed", what, exc_info=error)
        self.failed = True
        self._finish(f"{what}: {type(error).__name__}: {error}")

    def _advance(self, event: Event) -> None:
        for effect in self.core.step(event, _now_ms()):
            self._perform(effect)
        self._set_timer()
        self._report_unreadable()

    def _report_unreadable(self) -> None:
        if self._store.unreadable.count:
            self.counters["controller.zookeeper.unreadable"] = self._store.unreadable.count
        self._on_change()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.deadline_ms
        if deadline is not None and not self._over.done():
            self._timer = self._loop.call_later(max(0, deadline - _now_ms()) / 1000, self._step, Ticked())

    def _finish(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    # --- orders out ------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case WriteStates():
                self._write(effect)
            case ReadStates():
                self._start(self._read_states(effect.partitions), "read states")
            case WriteTopic():
                self._start(self._write_topic(effect), f"write topic {effect.record.name}")
            case ReadTopic():
                self._start(self._read_topic(effect.name), f"read topic {effect.name}")
            case DropElection():
                self._start(self._patiently(lambda: self._store.drop_election(effect.name)), "drop election")
            case SendUpdate():
                self._start(self._send_update(effect), f"update broker {effect.broker.broker_id}")
            case DeleteTopic():
                if effect.topic_id not in self._deleting:
                    self._deleting[effect.topic_id] = effect.name
                    self._start(self._delete_topic(effect.name, effect.topic_id), f"delete topic {effect.name}")
            case DropDeletionRequest(name, topic_id):
                self._start(self._patiently(lambda: self._store.drop_deletion_request(name, topic_id)), "drop request")
            case TrustBroker():
                self._start(
                    self._patiently(lambda: self._store.trust_broker(effect.broker_id, effect.incarnation)), "trust"
                )
            case AskLogEnds():
                self._start(self._ask_log_ends(effect), f"ask broker {effect.broker.broker_id}")
            case Report():
                self.counters[effect.kind] += effect.count
                log.log(logging.WARNING if effect.grave else logging.INFO, "%s: %s", effect.kind, effect.detail)
            case RaiseCounters():
                self._start(self._raise_counters(effect), "raise counters")
            case Resign():
                self._finish(effect.detail)
            case _:
                assert_never(effect)

    def _write(self, effect: WriteStates) -> None:
        is_new = not self._to_write
        self._to_write.extend(effect.writes)
        if is_new:
            self._write_more()

    def _write_more(self) -> None:
        """Write states for a part of this turn of the loop: a new topic may have thousands of partitions. Skip writes
        of topics that have been deleted, or whose deletion has begun, since the core ordered these writes. Otherwise
        they would put nodes into a topic whose nodes are being deleted."""
        ends_s = time.monotonic() + _TURN_S
        while self._to_write and not self._over.done():
            write = self._to_write.popleft()
            if not self._is_pending(write) or self.core.state.topics[write.tp.topic].deleting:
                continue
            try:
                self._store.write_state(
                    write.tp,
                    write.state,
                    topic_id=write.topic_id,
                    leader_incarnation=write.leader_incarnation,
                    expected_version=write.expected_version,
                    on_outcome=partial(self._state_outcome, write),
                )
            except Exception as error:
                # The loop calls this method and would only log the error. The other writes would wait forever.
                self._fail(f"write of {write.tp}", error)
                return
            if self._to_write and time.monotonic() >= ends_s:
                self._loop.call_soon(self._write_more)
                return

    def _is_pending(self, write: StateWrite) -> bool:
        """Return whether the core waits for the outcome of this write. It does not wait if the topic was deleted, even
        if the same partition of a new topic with this name waits for another write."""
        partition = self.core.state.partition(write.tp)
        return partition is not None and partition.pending is write

    def _state_outcome(self, write: StateWrite, tp: TopicPartition, outcome: StateOutcome | None) -> None:
        """Collect an outcome. Many arrive in one turn of the loop, and the core receives all of a turn together."""
        if not self._outcomes:
            self._loop.call_soon(self._report_outcomes)
        self._outcomes[tp] = (write, outcome)

    def _report_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, {}
        if len(outcomes) > _OUTCOMES_AT_ONCE:
            found = list(outcomes.items())
            outcomes, self._outcomes = dict(found[:_OUTCOMES_AT_ONCE]), dict(found[_OUTCOMES_AT_ONCE:])
            self._loop.call_soon(self._report_outcomes)
        written: dict[TopicPartition, int] = {}
        gone: dict[TopicPartition, VersionedState | None] = {}
        unknown: list[TopicPartition] = []
        lost: list[StateWrite] = []
        for tp, (write, outcome) in outcomes.items():
            if isinstance(outcome, EpochLost):
                self._step(Fenced("another controller has a higher epoch"))
                return
            if not self._is_pending(write):
                continue
            if isinstance(outcome, Written):
                written[tp] = outcome.version
            elif outcome is None:
                lost.append(write)
            elif isinstance(outcome, NodeGone):
                gone[tp] = None
            else:
                assert isinstance(outcome, FateUnknown)
                unknown.append(tp)
        if written:
            self._step(StatesWritten(written))
        if gone:
            self._step(StatesRefused(gone))
        if unknown:
            self._step(StatesUnknown(tuple(unknown)))
        if lost:
            self._start(self._read_refused(lost), "read refused states")

    async def _read_refused(self, writes: Sequence[StateWrite]) -> None:
        found: dict[TopicPartition, VersionedState | None] = {}
        with suppress(ZkUnreachable):
            found = await self._store.read_states([write.tp for write in writes])
        tps = [write.tp for write in writes if self._is_pending(write)]
        read = {tp: found[tp] for tp in tps if tp in found}
        if read:
            self._step(StatesRefused(read))
        unread = tuple(tp for tp in tps if tp not in found)
        if unread:
            self._step(StatesUnknown(unread))

    async def _read_states(self, tps: Sequence[TopicPartition]) -> None:
        """Read states for the core. Retry unreadable ones with pauses; the core decides nothing about them until
        then."""
        try:
            await self._session.connected()
            found = await self._store.read_states(tps)
        except ZkUnreachable:
            self._step(StatesUnknown(tuple(tps)))
            return
        if found:
            self._step(StatesRead(found))
        self._read_later([tp for tp in tps if tp not in found])

    def _read_later(self, unread: Sequence[TopicPartition]) -> None:
        if unread and not self._unread:
            self._start(self._read_unread(), "read states that could not be read")
        self._unread.update(dict.fromkeys(unread))
        self._report_unreadable()

    async def _read_unread(self) -> None:
        for pause_s in growing_pauses():
            await asyncio.sleep(pause_s)
            found: dict[TopicPartition, VersionedState | None] = {}
            with suppress(ZkUnreachable):
                await self._session.connected()
                found = await self._store.read_states(tuple(self._unread))
            for tp in found:
                del self._unread[tp]
            if found:
                self._step(StatesRead(found))
            if not self._unread:
                return

    async def _write_topic(self, effect: WriteTopic) -> None:
        record = effect.record
        changes = [StateChange(w.tp, w.state, w.leader_incarnation, w.expected_version) for w in effect.writes]
        try:
            outcome = await self._store.write_topic(record, effect.expected_version, changes)
        except BrokerError as error:
            outcome = Superseded(str(error))
        if isinstance(outcome, Written):
            self._step(TopicWritten(record.name, record.topic_id))
        elif isinstance(outcome, EpochLost):
            self._step(Fenced("another controller has a higher epoch"))
        else:
            detail = outcome.reason if isinstance(outcome, Superseded) else "the connection to ZooKeeper broke"
            self._step(TopicNotWritten(record.name, record.topic_id, detail))

    async def _read_topic(self, name: str) -> None:
        """Read a topic for the core. Retry until the connection lasts long enough, because no other code retries."""
        found: tuple[TopicRecord, int] | None = None

        async def read() -> None:
            nonlocal found
            found = await self._store.read_topic_again(name)

        await self._patiently(read)
        if found is None:
            if name not in self._deleting.values():
                await self._topic_gone(name)
        elif found[0].topic_id not in self._deleting:
            self._step(TopicRead(TopicSnapshot(found[0], {}, found[1])))

    async def _send_update(self, effect: SendUpdate) -> None:
        broker_id = effect.broker.broker_id
        try:
            reply = await self._connections.request(effect.broker, effect.update)
        except BrokerError as error:
            log.info("could not notify broker %d: %s", broker_id, error)
            self._step(UpdateLost(broker_id, effect.update_id))
            return
        assert isinstance(reply, ControlUpdateReply)
        self._step(UpdateAnswered(broker_id, effect.update_id, reply.code, reply.failed, reply.detail))

    async def _ask_log_ends(self, effect: AskLogEnds) -> None:
        try:
            reply = await self._connections.request(effect.broker, DescribeBroker(0))
        except BrokerError as error:
            log.info("could not query broker %d for its log end offsets: %s", effect.broker.broker_id, error)
            return
        assert isinstance(reply, DescribeBrokerReply)
        wanted = set(effect.partitions)
        ends = {
            TopicPartition(found.topic, found.partition): (found.last_epoch, found.log_end_offset)
            for found in reply.replicas
            if (found.topic, found.partition) in wanted
        }
        self._step(LogEndsRead(effect.broker.broker_id, reply.incarnation, ends))

    async def _delete_topic(self, name: str, topic_id: str) -> None:
        deleted = False

        async def delete() -> None:
            nonlocal deleted
            deleted = await self._store.delete_topic(name, topic_id)

        try:
            await self._patiently(delete)
        finally:
            del self._deleting[topic_id]
        if deleted:
            self._step(TopicDeleted(name, topic_id))
        else:
            self._step(Fenced("another controller has a higher epoch"))

    async def _raise_counters(self, effect: RaiseCounters) -> None:
        await self._patiently(
            lambda: self._store.raise_counters(
                effect.controller_epoch, producer_ids=believed_producer_ids(effect.producer_ids, time.time())
            )
        )
        self._finish(effect.detail)

    async def _patiently(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Carry out an idempotent operation: retry until it succeeds, after a lost connection, a refusal or an
        unreadable node."""
        for pause_s in growing_pauses(PAUSE_S):
            await self._session.connected()
            try:
                await operation()
                return
            except ZkUnreachable as error:
                log.info("retrying after %s", error)
                pause_s = PAUSE_S
            except (ZkError, ZkFormatError) as error:
                log.warning("retrying after %s", error)
                self.counters["controller.requests.repeated"] += 1
            await asyncio.sleep(pause_s)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._over.done():
            work.close()
            return
        task = self._loop.create_task(work, name=f"controller: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._over.done():
            # An unexpected error ends the term, as in ``_step``.
            self._fail(task.get_name(), error)
