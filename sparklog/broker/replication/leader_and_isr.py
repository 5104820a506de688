"""The controller's updates: checked against epochs and incarnation, then applied, one after the other.

The broker refuses an update of an older controller and an update for an earlier incarnation of this broker. It also
refuses an update that arrives after a later one of the same controller, which had given it up and sent it again. Within
an update the broker first applies the state of the cluster, so that it can reach each leader that a decision names;
then leaderships; then deletions.

A small update takes one turn of the event loop. A large one is applied in slices, and clients are served between
slices: a hundred thousand new logs take longer than a broker may be silent. Other events between two slices do no harm,
because each decision is complete in itself and fenced by its version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from sparklog.broker.metadata_cache import CachedTopic
from sparklog.broker.replication.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ConfigError, ErrorCode, StorageError
from sparklog.model import NO_EPOCH, TopicPartition, check_topic_name
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import ControlUpdate, ControlUpdateReply, ErrorReply, PartitionDecision
from sparklog.replica.events import BrokersChanged, Decided

_log = logging.getLogger(__name__)

Failure = tuple[str, int, int, str]
_T = TypeVar("_T")


#: The longest wait for this broker's registration: the controller may see the registration before ZooKeeper's response
#: reaches the broker.
_REGISTRATION_S = 2.0


#: Decisions that are applied in one turn of the event loop.
_SLICE = 100
#: The time for which one turn of the loop drops replicas and logs.
_DROPS_S = 0.01


def handle_control_update(
    broker: BrokerState, connection: ServerConnection, request: ControlUpdate, body: memoryview
) -> None:
    broker.access.require_controller(connection, request.controller_epoch)
    early = request.incarnation > broker.incarnation
    # Every replica processes a changed list of brokers. A changed or deleted topic may have most of the partitions.
    all_concerned = request.brokers is not None or request.topics or request.deleted
    concerned = max(len(request.partitions), len(broker.partitions) if all_concerned else 0)
    if request.full:
        concerned = max(concerned, len(broker.partitions.unclaimed_logs()))
    if early or broker.control_turn.locked() or concerned > _SLICE:
        broker.spawn(_in_turn(broker, connection, request), "control update")
    else:
        for _ in _carry_out(broker, connection, request):
            pass


async def _in_turn(broker: BrokerState, connection: ServerConnection, request: ControlUpdate) -> None:
    """Apply an update once this broker is registered and the update before it is done."""
    await broker.registered(request.incarnation, timeout_s=_REGISTRATION_S)
    try:
        async with broker.control_turn:
            for _ in _carry_out(broker, connection, request):
                await asyncio.sleep(0)
    except Exception as error:
        # No caller would respond here, and a controller that waits for the response could send this broker no further
        # update.
        detail = f"{type(error).__name__}: {error}"
        connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
        raise


def _carry_out(broker: BrokerState, connection: ServerConnection, request: ControlUpdate) -> Iterator[None]:
    """Apply an update and send the response; yield where other work may run."""
    refusal = _refusal(broker, request)
    if refusal is not None:
        broker.counters["control.refused"] += 1
        _log.warning("control update of %s refused: %s", request.controller_id, refusal)
        connection.reply(ControlUpdateReply(request.cid, refusal.code, (), refusal.detail))
        return
    if broker.cache.is_overtaken(request):
        broker.counters["control.overtaken"] += 1
        detail = f"update {request.sequence} of controller epoch {request.controller_epoch} came after a later one"
        _log.info("control update of %s: %s", request.controller_id, detail)
        # The code is not NONE: a sender that still waits would take its update for applied. Only another sender of the
        # same epoch can have sent the later update, because each sender waits for a response, or gives it up, before
        # the next update.
        connection.reply(ControlUpdateReply(request.cid, ErrorCode.STALE_CONTROLLER_EPOCH, (), detail))
        return
    broker.counters["control.updates"] += 1
    broker.registry.vouch()
    before = broker.cache.incarnations
    try:
        broker.cache.apply(request)
    except ConfigError as error:
        connection.reply(ControlUpdateReply(request.cid, ErrorCode.INVALID_CONFIG, (), str(error)))
        return
    broker.on_update(request)
    if broker.cache.incarnations != before:
        yield from _notify_brokers(broker)
    failed: list[Failure] = []
    for first in range(0, len(request.partitions), _SLICE):
        failed += _decide(broker, request.partitions[first : first + _SLICE])
        broker.counters["control.slices"] += 1
        yield
    yield from _apply_topic_configs(broker, request)
    yield from _delete(broker, request)
    if request.full:
        yield from _drop_stale(broker, request)
    broker.metadata_changed()
    connection.reply(ControlUpdateReply(request.cid, ErrorCode.NONE, tuple(failed)))


def _refusal(broker: BrokerState, update: ControlUpdate) -> BrokerError | None:
    known = broker.cache.controller_epoch
    if update.controller_epoch < known:
        return BrokerError(
            ErrorCode.STALE_CONTROLLER_EPOCH, f"controller epoch {update.controller_epoch} found, {known} was seen"
        )
    if update.incarnation != broker.incarnation:
        return BrokerError(
            ErrorCode.STALE_BROKER_EPOCH,
            f"broker {broker.broker_id}: expected incarnation {broker.incarnation}, found {update.incarnation}",
        )
    for change in update.topics:
        # A topic's name becomes a directory's.
        bad_name = check_topic_name(change.name)
        if bad_name:
            return BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad_name)
    return None


def _notify_brokers(broker: BrokerState) -> Iterator[None]:
    """Give every replica the new list of live brokers.

    Partitions led here come first: their leaders may shrink thousands of ISRs now, and ZooKeeper writes while the other
    replicas process the list.
    """
    event = BrokersChanged(broker.cache.incarnations)
    leading = dict.fromkeys(broker.partitions.leading())
    leading.update(dict.fromkeys(broker.partitions))
    for number, partition in enumerate(leading, 1):
        partition.step(event)
        if number % _SLICE == 0:
            yield


def _decide(broker: BrokerState, decisions: Sequence[PartitionDecision]) -> list[Failure]:
    failed: list[Failure] = []
    for decision in decisions:
        # A topic just created may have partitions without a state in ZooKeeper.
        if decision.version < 0:
            continue
        if broker.broker_id not in decision.replicas:
            _drop_replica(broker, decision)
            continue
        try:
            _decide_one(broker, decision)
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


def _decide_one(broker: BrokerState, decision: PartitionDecision) -> None:
    topic = broker.cache.topic(decision.topic)
    if topic is None or topic.change.topic_id != decision.topic_id:
        raise BrokerError(
            ErrorCode.UNKNOWN_TOPIC_ID, f"{decision.topic}: no update has named the topic of id {decision.topic_id}"
        )
    partition = broker.partitions.host(TopicPartition(decision.topic, decision.partition), topic)
    partition.check_usable()
    _check_epoch(broker, partition, decision)
    partition.step(_decided(broker, decision, topic))


def _check_epoch(broker: BrokerState, partition: Partition, decision: PartitionDecision) -> None:
    """Refuse a leader epoch that an earlier leader had, as the records in this replica's log prove.

    Records of both leaders would have the same epoch, and no broker could tell them apart. Such an epoch comes from a
    ZooKeeper that was restored from an older copy. The controller responds with a higher one. Only a replica without a
    decision so far can judge by its log alone.

    Raises:
        BrokerError: FENCED_LEADER_EPOCH.
    """
    epoch, last_epoch = decision.state.leader_epoch, partition.log.last_epoch
    given_before = last_epoch > epoch or (last_epoch == epoch and decision.state.leader == broker.broker_id)
    if partition.replica.version == NO_EPOCH and given_before:
        raise BrokerError(
            ErrorCode.FENCED_LEADER_EPOCH,
            f"leader epoch {epoch} found, the log has records of leader epoch {last_epoch}: ZooKeeper is older",
        )


def _decided(broker: BrokerState, decision: PartitionDecision, topic: CachedTopic) -> Decided:
    return Decided(
        state=decision.state,
        version=decision.version,
        replicas=decision.replicas,
        incarnations=broker.cache.incarnations,
        min_isr=topic.config.min_insync_replicas,
        leaving=frozenset(decision.leaving),
        factor=min(len(decision.original), len(decision.target)),
    )


def _drop_replica(broker: BrokerState, decision: PartitionDecision) -> None:
    """Drop a replica that the decision assigns to other brokers, and delete its data.

    The replica stays if the decision is older than the replica's state, or if this broker is in the ISR.
    """
    tp = TopicPartition(decision.topic, decision.partition)
    topic = broker.cache.topic(decision.topic)
    partition = broker.partitions.get(tp)
    if topic is None or topic.change.topic_id != decision.topic_id:
        return
    if partition is None:
        _set_aside_unclaimed(broker, tp)
        return
    if partition.topic_id != decision.topic_id:
        return
    partition.step(_decided(broker, decision, topic))
    if partition.replica.dismissed:
        broker.partitions.drop(partition)


def _set_aside_unclaimed(broker: BrokerState, tp: TopicPartition) -> None:
    """Set aside a log found at the start, if the newest state has this broker neither as a replica nor in the ISR.

    The log is not deleted: if ZooKeeper was restored from an older copy, the brokers that it names may have no copy.
    """
    known = broker.cache.partition(tp)
    if known is None or broker.broker_id in (*known.replicas, *known.state.isr):
        return
    if broker.partitions.unclaimed_log(tp) is not None:
        detail = f"its replicas are on brokers {list(known.replicas)}"
        broker.partitions.drop_log(tp, keep=detail)


def _apply_topic_configs(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    """Apply changed schemas and settings to replicas without a decision in the update."""
    changed: dict[str, CachedTopic] = {}
    for change in update.topics:
        topic = broker.cache.topic(change.name)
        if topic is not None:
            changed[change.name] = topic
    if not changed:
        return
    retuned = 0
    for partition in broker.partitions:
        topic = changed.get(partition.tp.topic)
        if topic is None or topic.change.topic_id != partition.topic_id:
            continue
        retuned += 1
        if retuned % _SLICE == 0:
            yield
        if partition.stopped:
            continue
        try:
            settings_changed = broker.partitions.apply_topic_config(partition, topic)
        except BrokerError as error:
            _log.error("%s: could not apply a new schema or settings: %s", partition.tp, error)
            continue
        known = broker.cache.partition(partition.tp)
        if settings_changed and known is not None and broker.broker_id in known.replicas:
            partition.step(_decided(broker, known, topic))  # min.insync.replicas may have changed


def _delete(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    if not update.deleted:
        return
    gone = set(update.deleted)
    replicas = [p for p in broker.partitions if (p.tp.topic, p.topic_id) in gone and not p.stopped]
    yield from _in_parts(replicas, broker.partitions.drop)
    logs = [log.tp for log in broker.partitions.unclaimed_logs() if (log.tp.topic, log.topic_id) in gone]
    yield from _in_parts(logs, broker.partitions.drop_log)


def _drop_stale(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    """Set aside the replicas and logs that a full update does not name.

    A full update names every replica of this broker. The others are not deleted, because the controller's ZooKeeper may
    have lost a topic.
    """
    own = {
        (TopicPartition(decision.topic, decision.partition), decision.topic_id)
        for decision in update.partitions
        if broker.broker_id in decision.replicas or broker.broker_id in decision.state.isr
    }
    why = f"the controller, in epoch {update.controller_epoch}, names no such replica of this broker"
    replicas = [p for p in broker.partitions if (p.tp, p.topic_id) not in own]
    yield from _in_parts(replicas, partial(broker.partitions.drop, keep=why))
    logs = [log.tp for log in broker.partitions.unclaimed_logs() if (log.tp, log.topic_id) not in own]
    yield from _in_parts(logs, partial(broker.partitions.drop_log, keep=why))


def _in_parts(items: Iterable[_T], drop: Callable[[_T], None]) -> Iterator[None]:
    """Drop each item; yield after a hundred of them, or when this turn has used its time.

    The next update waits until the last item is dropped. If each item needed a separate turn, clients that keep the
    turns long could delay decisions about other partitions for minutes.
    """
    ends_s = time.monotonic() + _DROPS_S
    for number, item in enumerate(items, 1):
        drop(item)
        if number % _SLICE == 0 or time.monotonic() >= ends_s:
            yield
            ends_s = time.monotonic() + _DROPS_S
