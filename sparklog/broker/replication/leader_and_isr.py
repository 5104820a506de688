"""What the controller says: checked against epochs and incarnation, then carried out, one update after the other.

A request of an older controller, or meant for an earlier incarnation of this broker, changes nothing; nor does one
that the same controller has given up and told again, when it comes after its repetition: each is refused. Within one
update the picture of the cluster comes first, so that a leader named by a decision can be reached, then leadership,
then deletions. A small update takes one turn of the loop. A large one is carried out in slices, between which clients
are served: a hundred thousand new logs take longer than a broker may be silent. What happens in between is in order,
for each decision stands for itself and is fenced by its version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

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


#: The controller sees a registration before the broker has ZooKeeper's answer to it; for so long it is waited for.
_REGISTRATION_S = 2.0


#: Decisions carried out in one turn of the loop.
_SLICE = 100


def handle_control_update(
    broker: BrokerState, connection: ServerConnection, request: ControlUpdate, body: memoryview
) -> None:
    broker.access.require_controller(connection, request.controller_epoch)
    early = request.incarnation > broker.incarnation
    # A changed list of brokers is every replica's concern. A changed or deleted topic may have most of the partitions.
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
    """Once this broker is registered and the update before this one is done."""
    await broker.registered(request.incarnation, timeout_s=_REGISTRATION_S)
    try:
        async with broker.control_turn:
            for _ in _carry_out(broker, connection, request):
                await asyncio.sleep(0)
    except Exception as error:
        # Here nobody above would answer; a controller that waits for one cannot tell this broker anything more.
        detail = f"{type(error).__name__}: {error}"
        connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
        raise


def _carry_out(broker: BrokerState, connection: ServerConnection, request: ControlUpdate) -> Iterator[None]:
    """Yields where others may have a turn."""
    refusal = _refusal(broker, request)
    if refusal is not None:
        broker.counters["control.refused"] += 1
        _log.warning("control update of %s refused: %s", request.controller_id, refusal)
        connection.reply(ControlUpdateReply(request.cid, refusal.code, (), refusal.detail))
        return
    if broker.cache.overtaken(request):
        broker.counters["control.overtaken"] += 1
        detail = f"update {request.sequence} of controller epoch {request.controller_epoch} came after a later one"
        _log.info("control update of %s: %s", request.controller_id, detail)
        # Not NONE: who still waits for this answer would take it for told. Only another sender of its epoch can have
        # sent the later one, for each waits for an answer, or gives it up, before it goes on.
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
    broker.update_taken(request)
    if broker.cache.incarnations != before:
        yield from _tell_brokers(broker)
    failed: list[Failure] = []
    for first in range(0, len(request.partitions), _SLICE):
        failed += _decide(broker, request.partitions[first : first + _SLICE])
        broker.counters["control.slices"] += 1
        yield
    yield from _retune(broker, request)
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


def _tell_brokers(broker: BrokerState) -> Iterator[None]:
    """Leaders shrink thousands of in-sync sets at this, while others are to be written to. They come first: ZooKeeper
    writes while the rest take note."""
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
        # A topic just created may have partitions whose first state is not written yet.
        if decision.version < 0:
            continue
        if broker.broker_id not in decision.replicas:
            _dismiss(broker, decision)
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
            # One decision that cannot be understood must not keep the others from being followed.
            _log.exception("%s-%d: invalid decision of the controller", decision.topic, decision.partition)
            detail = f"{type(error).__name__}: {error}"
            failed.append((decision.topic, decision.partition, ErrorCode.UNKNOWN_SERVER_ERROR, detail))
    return failed


def _decide_one(broker: BrokerState, decision: PartitionDecision) -> None:
    topic = broker.cache.topic(decision.topic)
    if topic is None or topic.change.topic_id != decision.topic_id:
        raise BrokerError(
            ErrorCode.UNKNOWN_TOPIC_ID, f"{decision.topic}: topic id {decision.topic_id} came without its topic"
        )
    partition = broker.partitions.host(TopicPartition(decision.topic, decision.partition), topic)
    partition.check_usable()
    _check_epoch(broker, partition, decision)
    partition.step(_decided(broker, decision, topic))


def _check_epoch(broker: BrokerState, partition: Partition, decision: PartitionDecision) -> None:
    """Refuse a leader epoch that this replica's log proves to have been given before, to another leader. Its records
    would mix with those of that leader, and nobody could tell them apart. Such an epoch comes from a ZooKeeper that was
    put back from an older copy; the controller answers with a higher one.

    Only a replica that was told nothing yet can judge by its log alone.

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


def _dismiss(broker: BrokerState, decision: PartitionDecision) -> None:
    """The partition goes on without this broker, whose data is deleted, if it has any and the decision is not older
    than what it knows. A member of the ISR keeps what it has, whatever it is told."""
    tp = TopicPartition(decision.topic, decision.partition)
    topic = broker.cache.topic(decision.topic)
    partition = broker.partitions.get(tp)
    if topic is None or topic.change.topic_id != decision.topic_id:
        return
    if partition is None:
        _let_go(broker, tp)
        return
    if partition.topic_id != decision.topic_id:
        return
    partition.step(_decided(broker, decision, topic))
    if partition.replica.dismissed:
        broker.partitions.drop(partition)


def _let_go(broker: BrokerState, tp: TopicPartition) -> None:
    """Set data aside that was found at start, once this broker is neither a replica nor in the ISR by the newest state.
    It is not deleted: where ZooKeeper was put back from an older copy, the brokers that it names may have no copy."""
    known = broker.cache.partition(tp)
    if known is None or broker.broker_id in (*known.replicas, *known.state.isr):
        return
    if broker.partitions.unclaimed_log(tp) is not None:
        detail = f"its replicas are on brokers {list(known.replicas)}"
        broker.partitions.drop_log(tp, keep=detail)


def _retune(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    """Hand changed schemas and settings to replicas that no decision named."""
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
        if topic is not None and topic.change.topic_id == partition.topic_id and not partition.stopped:
            retuned += 1
            if retuned % _SLICE == 0:
                yield
            try:
                settings_changed = broker.partitions.retune(partition, topic)
            except BrokerError as error:
                _log.error("%s: could not apply a new schema or settings: %s", partition.tp, error)
                continue
            known = broker.cache.partition(partition.tp)
            if settings_changed and known is not None and broker.broker_id in known.replicas:
                partition.step(_decided(broker, known, topic))  # min.insync.replicas may be another one


def _delete(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    if not update.deleted:
        return
    gone = set(update.deleted)
    for partition in broker.partitions:
        if (partition.tp.topic, partition.topic_id) in gone and not partition.stopped:
            broker.partitions.drop(partition)
            yield
    for log in broker.partitions.unclaimed_logs():
        if (log.tp.topic, log.topic_id) in gone:
            broker.partitions.drop_log(log.tp)
            yield


def _drop_stale(broker: BrokerState, update: ControlUpdate) -> Iterator[None]:
    """A full update names every replica of this broker. What it does not name is set aside, not deleted: the controller
    may have been told by a ZooKeeper that lacks a topic."""
    own = {
        (TopicPartition(decision.topic, decision.partition), decision.topic_id)
        for decision in update.partitions
        if broker.broker_id in decision.replicas or broker.broker_id in decision.state.isr
    }
    why = f"the controller, in epoch {update.controller_epoch}, names no such replica of this broker"
    for partition in broker.partitions:
        if (partition.tp, partition.topic_id) not in own:
            broker.partitions.drop(partition, keep=why)
            yield
    for log in broker.partitions.unclaimed_logs():
        if (log.tp, log.topic_id) not in own:
            broker.partitions.drop_log(log.tp, keep=why)
            yield
