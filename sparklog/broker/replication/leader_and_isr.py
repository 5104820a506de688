"""The handling of the controller's updates: epochs and incarnation are checked, then each update is applied.

The broker refuses an update of an older controller and an update for an earlier incarnation of this broker. It also
refuses an update that arrives after a later one of the same controller: the controller has given up the late update and
included its content in a later one. Within an update the broker first applies the list of brokers, so that it can reach
the new leaders. Then it applies the leaderships, and then the deletions of topics.

A small update is applied at once. A large one is applied in slices, and the event loop serves clients between slices:
to create a hundred thousand new logs takes longer than a broker may be unresponsive. Other events between two slices
are harmless, because each decision is complete in itself and fenced by its version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import CachedTopic
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.replication.replica_hosting import ReplicaHosting
from sparklog.broker.requests.access import Access
from sparklog.errors import BrokerError, ConfigError, ErrorCode, StorageError
from sparklog.model import NO_EPOCH, TopicPartition, check_topic_name
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ControlUpdate, ControlUpdateReply, ErrorReply, PartitionDecision
from sparklog.replica.events import BrokersChanged, Decided

_log = logging.getLogger(__name__)

Failure = tuple[str, int, int, str]
_T = TypeVar("_T")


#: The maximum wait for this broker's registration. The controller may see the registration and send an update before
#: ZooKeeper's response reaches this broker.
_REGISTRATION_S = 2.0


#: The maximum number of decisions that are applied before the event loop runs other work.
_SLICE = 100
#: The maximum time for which replicas and logs are dropped before the event loop runs other work.
_DROPS_S = 0.01


class ControlUpdates:
    """The handler of the controller's updates, which checks and applies them.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        access: Access,
        partitions: Partitions,
        *,
        hosting: ReplicaHosting,
        registry: ZkRegistration,
        on_update: Callable[[ControlUpdate], None],
    ) -> None:
        self._context = context
        self._access = access
        self._partitions = partitions
        self._hosting = hosting
        self._registry = registry
        #: Called with each applied update.
        self._on_update = on_update
        #: Held while an update is applied, so that updates are applied one after the other.
        self._turn = asyncio.Lock()

    def handle(self, connection: ServerConnection, request: ControlUpdate, body: memoryview) -> None:
        self._access.require_controller(connection, request.controller_epoch)
        early = request.incarnation > self._context.incarnation
        # If the list of brokers has changed, every replica processes the change. If a topic has changed or was deleted,
        # it may have most of the partitions.
        all_concerned = request.brokers is not None or request.topics or request.deleted
        concerned = max(len(request.partitions), len(self._partitions) if all_concerned else 0)
        if request.full:
            concerned = max(concerned, len(self._partitions.unclaimed_logs()))
        if early or self._turn.locked() or concerned > _SLICE:
            self._context.spawn(self._in_turn(connection, request), "control update")
        else:
            for _ in self._carry_out(connection, request):
                pass

    async def _in_turn(self, connection: ServerConnection, request: ControlUpdate) -> None:
        """Wait until this broker is registered and the previous update is complete; then apply the update."""
        await self._context.registered(request.incarnation, timeout_s=_REGISTRATION_S)
        try:
            async with self._turn:
                for _ in self._carry_out(connection, request):
                    await asyncio.sleep(0)
        except Exception as error:
            # In this task no caller responds to the error. Without a response the controller would send this broker no
            # further update.
            detail = f"{type(error).__name__}: {error}"
            connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
            raise

    def _carry_out(self, connection: ServerConnection, request: ControlUpdate) -> Iterator[None]:
        """Apply an update and send the response. Yield whenever the event loop may run other work."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._context.counters["control.refused"] += 1
            _log.warning("control update of %s refused: %s", request.controller_id, refusal)
            connection.reply(ControlUpdateReply(request.cid, refusal.code, (), refusal.detail))
            return
        if self._context.cache.is_overtaken(request):
            self._context.counters["control.overtaken"] += 1
            detail = f"update {request.sequence} of controller epoch {request.controller_epoch} came after a later one"
            _log.info("control update of %s: %s", request.controller_id, detail)
            # The code is not NONE, because a sender that still waits for the response would think that its update was
            # applied. Each sender waits for a response, or gives up, before it sends the next update. So another sender
            # of the same epoch sent the later update.
            connection.reply(ControlUpdateReply(request.cid, ErrorCode.STALE_CONTROLLER_EPOCH, (), detail))
            return
        self._context.counters["control.updates"] += 1
        self._registry.mark_trusted()
        before = self._context.cache.incarnations
        try:
            self._context.cache.apply(request)
        except ConfigError as error:
            connection.reply(ControlUpdateReply(request.cid, ErrorCode.INVALID_CONFIG, (), str(error)))
            return
        self._on_update(request)
        if self._context.cache.incarnations != before:
            yield from self._notify_brokers()
        failed: list[Failure] = []
        for first in range(0, len(request.partitions), _SLICE):
            failed += self._decide(request.partitions[first : first + _SLICE])
            self._context.counters["control.slices"] += 1
            yield
        yield from self._apply_topic_configs(request)
        yield from self._delete(request)
        if request.full:
            yield from self._drop_stale(request)
        self._context.metadata_changed()
        connection.reply(ControlUpdateReply(request.cid, ErrorCode.NONE, tuple(failed)))

    def _refusal(self, update: ControlUpdate) -> BrokerError | None:
        context = self._context
        known = context.cache.controller_epoch
        if update.controller_epoch < known:
            return BrokerError(
                ErrorCode.STALE_CONTROLLER_EPOCH, f"controller epoch {update.controller_epoch} found, {known} was seen"
            )
        if update.incarnation != context.incarnation:
            return BrokerError(
                ErrorCode.STALE_BROKER_EPOCH,
                f"broker {context.broker_id}: expected incarnation {context.incarnation}, found {update.incarnation}",
            )
        for change in update.topics:
            # The topic's name becomes part of a directory name.
            bad_name = check_topic_name(change.name)
            if bad_name:
                return BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad_name)
        return None

    def _notify_brokers(self) -> Iterator[None]:
        """Give every replica the new list of live brokers.

        The partitions that this broker leads come first. They may shrink thousands of ISRs now, and ZooKeeper can store
        the new ISRs while the other replicas process the list.
        """
        event = BrokersChanged(self._context.cache.incarnations)
        leading = dict.fromkeys(self._partitions.leading())
        leading.update(dict.fromkeys(self._partitions))
        for number, partition in enumerate(leading, 1):
            partition.step(event)
            if number % _SLICE == 0:
                yield

    def _decide(self, decisions: Sequence[PartitionDecision]) -> list[Failure]:
        failed: list[Failure] = []
        for decision in decisions:
            # The partitions of a topic that was just created may have no state in ZooKeeper yet.
            if decision.version < 0:
                continue
            if self._context.broker_id not in decision.replicas:
                self._drop_replica(decision)
                continue
            try:
                self._decide_one(decision)
            except (BrokerError, StorageError) as error:
                code = error.code if isinstance(error, BrokerError) else ErrorCode.KAFKA_STORAGE_ERROR
                _log.error(
                    "%s-%d: could not apply a decision of the controller: %s", decision.topic, decision.partition, error
                )
                failed.append((decision.topic, decision.partition, code, str(error)))
            except Exception as error:
                # One malformed decision must not keep the broker from applying the others.
                _log.exception("%s-%d: invalid decision of the controller", decision.topic, decision.partition)
                detail = f"{type(error).__name__}: {error}"
                failed.append((decision.topic, decision.partition, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
        return failed

    def _decide_one(self, decision: PartitionDecision) -> None:
        topic = self._context.cache.topic(decision.topic)
        if topic is None or topic.change.topic_id != decision.topic_id:
            raise BrokerError(
                ErrorCode.UNKNOWN_TOPIC_ID, f"{decision.topic}: no update has named the topic of id {decision.topic_id}"
            )
        partition = self._hosting.host(TopicPartition(decision.topic, decision.partition), topic)
        partition.check_usable()
        self._check_epoch(partition, decision)
        partition.step(self._decided(decision, topic))

    def _check_epoch(self, partition: Partition, decision: PartitionDecision) -> None:
        """Refuse a leader epoch that an earlier leader already had, which the records in this replica's log prove.

        Otherwise records of two leaders would have the same epoch, and no broker could tell them apart. Such an epoch
        occurs after ZooKeeper was restored from an older copy. After the refusal the controller chooses a higher epoch.
        Only a replica that has received no decision yet is checked in this way.

        Raises:
            BrokerError: FENCED_LEADER_EPOCH.
        """
        epoch, last_epoch = decision.state.leader_epoch, partition.log.last_epoch
        given_before = last_epoch > epoch or (last_epoch == epoch and decision.state.leader == self._context.broker_id)
        if partition.replica.version == NO_EPOCH and given_before:
            raise BrokerError(
                ErrorCode.FENCED_LEADER_EPOCH,
                f"leader epoch {epoch} found, the log has records of leader epoch {last_epoch}: ZooKeeper is older",
            )

    def _decided(self, decision: PartitionDecision, topic: CachedTopic) -> Decided:
        return Decided(
            state=decision.state,
            version=decision.version,
            replicas=decision.replicas,
            incarnations=self._context.cache.incarnations,
            min_isr=topic.config.min_insync_replicas,
            leaving=frozenset(decision.leaving),
            factor=min(len(decision.original), len(decision.target)),
        )

    def _drop_replica(self, decision: PartitionDecision) -> None:
        """Drop a replica that the decision assigns to other brokers, and delete its data.

        The replica stays if the decision is older than the replica's state, or if this broker is in the ISR.
        """
        tp = TopicPartition(decision.topic, decision.partition)
        topic = self._context.cache.topic(decision.topic)
        partition = self._partitions.get(tp)
        if topic is None or topic.change.topic_id != decision.topic_id:
            return
        if partition is None:
            self._set_aside_unclaimed(tp)
            return
        if partition.topic_id != decision.topic_id:
            return
        partition.step(self._decided(decision, topic))
        if partition.replica.dismissed:
            self._hosting.drop(partition)

    def _set_aside_unclaimed(self, tp: TopicPartition) -> None:
        """Set aside a log found at the start if, by the newest state, this broker is not a replica and not in the ISR.

        The log is not deleted: if ZooKeeper was restored from an older copy, the brokers that it names may have no
        copy.
        """
        known = self._context.cache.partition(tp)
        if known is None or self._context.broker_id in (*known.replicas, *known.state.isr):
            return
        if self._partitions.unclaimed_log(tp) is not None:
            detail = f"its replicas are on brokers {list(known.replicas)}"
            self._hosting.drop_log(tp, keep=detail)

    def _apply_topic_configs(self, update: ControlUpdate) -> Iterator[None]:
        """Apply changed schemas and settings to all replicas of the update's topics."""
        changed: dict[str, CachedTopic] = {}
        for change in update.topics:
            topic = self._context.cache.topic(change.name)
            if topic is not None:
                changed[change.name] = topic
        if not changed:
            return
        retuned = 0
        for partition in self._partitions:
            topic = changed.get(partition.tp.topic)
            if topic is None or topic.change.topic_id != partition.topic_id:
                continue
            retuned += 1
            if retuned % _SLICE == 0:
                yield
            if partition.stopped:
                continue
            try:
                settings_changed = self._hosting.apply_topic_config(partition, topic)
            except BrokerError as error:
                _log.error("%s: could not apply a new schema or settings: %s", partition.tp, error)
                continue
            known = self._context.cache.partition(partition.tp)
            if settings_changed and known is not None and self._context.broker_id in known.replicas:
                partition.step(self._decided(known, topic))  # min.insync.replicas may have changed

    def _delete(self, update: ControlUpdate) -> Iterator[None]:
        if not update.deleted:
            return
        gone = set(update.deleted)
        replicas = [p for p in self._partitions if (p.tp.topic, p.topic_id) in gone and not p.stopped]
        yield from _in_parts(replicas, self._hosting.drop)
        logs = [log.tp for log in self._partitions.unclaimed_logs() if (log.tp.topic, log.topic_id) in gone]
        yield from _in_parts(logs, self._hosting.drop_log)

    def _drop_stale(self, update: ControlUpdate) -> Iterator[None]:
        """Set aside the replicas and logs that a full update does not name.

        A full update names every replica of this broker. The data of other replicas is not deleted, because ZooKeeper
        may have lost a topic.
        """
        own = {
            (TopicPartition(decision.topic, decision.partition), decision.topic_id)
            for decision in update.partitions
            if self._context.broker_id in decision.replicas or self._context.broker_id in decision.state.isr
        }
        why = f"the controller, in epoch {update.controller_epoch}, names no such replica of this broker"
        replicas = [p for p in self._partitions if (p.tp, p.topic_id) not in own]
        yield from _in_parts(replicas, partial(self._hosting.drop, keep=why))
        logs = [log.tp for log in self._partitions.unclaimed_logs() if (log.tp, log.topic_id) not in own]
        yield from _in_parts(logs, partial(self._hosting.drop_log, keep=why))


def _in_parts(items: Iterable[_T], drop: Callable[[_T], None]) -> Iterator[None]:
    """Drop each item; yield after a hundred items, or after ``_DROPS_S``.

    The next update waits until the last item is dropped. If the function yielded after each item, clients that keep the
    event loop busy could delay the decisions of the next update for minutes.
    """
    ends_s = time.monotonic() + _DROPS_S
    for number, item in enumerate(items, 1):
        drop(item)
        if number % _SLICE == 0 or time.monotonic() >= ends_s:
            yield
            ends_s = time.monotonic() + _DROPS_S
