"""All replicas this broker hosts: looked up, created, dropped, and woken when time has passed.

One timer serves them all: a heap of the replicas' deadlines, so that idle partitions cost nothing. An entry may be
stale; it is checked when it comes up, which is cheaper than removing it for every produce.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Iterator

from sparklog.broker.metadata_cache import CachedTopic
from sparklog.broker.replication.crc_cache import CrcCache
from sparklog.broker.replication.maintenance_index import MaintenanceIndex
from sparklog.broker.replication.partition import AppendRules, Partition
from sparklog.broker.replication.partition_effects import PartitionEffects
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.protocol.messages import TopicChange
from sparklog.record.schema import parse_schema
from sparklog.replica.events import FollowerConnectionLost, Ticked
from sparklog.replica.purgatory import NEVER
from sparklog.replica.replica import Replica
from sparklog.replica.view import ReplicaSettings
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory

_log = logging.getLogger(__name__)


class Partitions:
    """Owner: the broker's event loop."""

    def __init__(self, broker: BrokerState, directory: LogDirectory) -> None:
        self._broker = broker
        self.directory = directory
        self._hosted: dict[tuple[str, int], Partition] = {}
        self.due_work = MaintenanceIndex(directory, self._hosted.get)
        #: Those led here, as their replicas said last.
        self._led: set[Partition] = set()
        #: What was found in verifying batches of any of these logs for projections: by it later ones are made.
        self.kept_crcs = CrcCache()
        self._timers: list[tuple[int, int, Partition]] = []
        self._timer_order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        #: Who carries out what takes time; set once before the first partition is hosted.
        self.wiring: PartitionEffects

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._hosted.values()))

    def __len__(self) -> int:
        return len(self._hosted)

    def get(self, tp: tuple[str, int]) -> Partition | None:
        """``tp``: a TopicPartition, or what equals one."""
        return self._hosted.get(tp)

    def require(self, tp: tuple[str, int], topic_id: str = "") -> Partition:
        """The hosted replica of ``tp`` (as in ``get``); ``topic_id`` empty is not checked.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER when it lives on other brokers,
                INCONSISTENT_TOPIC_ID, or KAFKA_STORAGE_ERROR when its log directory is offline.
        """
        partition = self._hosted.get(tp)
        if partition is None:
            raise self._absent(TopicPartition(*tp))
        if topic_id and topic_id != partition.topic_id:
            detail = f"{partition.tp}: topic id {topic_id} asked for, {partition.topic_id} is here"
            raise BrokerError(ErrorCode.INCONSISTENT_TOPIC_ID, detail)
        if partition.offline is not None:
            partition.check_usable()
        return partition

    def _absent(self, tp: TopicPartition) -> BrokerError:
        if self._broker.cache.controller_epoch == NO_EPOCH:
            detail = f"{tp}: broker {self._broker.broker_id} has started and was not told yet what it hosts"
            return BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER, detail)
        known = self._broker.cache.partition(tp)
        if known is not None:
            return BrokerError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"{tp} is on brokers {list(known.replicas)}, not on broker {self._broker.broker_id}",
            )
        topic = self._broker.cache.topic(tp.topic)
        what = f"topic {tp.topic!r} has {len(topic.partitions)} partitions" if topic else f"no topic {tp.topic!r}"
        return BrokerError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{what}: broker {self._broker.broker_id} does not know {tp}"
        )

    # --- hosting ---

    def host(self, tp: TopicPartition, topic: CachedTopic) -> Partition:
        """The replica of ``tp``, created if need be: with the log of this topic id that was set aside, or an empty one.
        The log of another topic id is set aside: nothing has named it as deleted.

        Raises:
            StorageError: the log cannot be made.
        """
        topic_id = topic.change.topic_id
        partition = self._hosted.get(tp)
        if partition is not None and partition.topic_id != topic_id:
            self.drop(partition, keep=f"the topic has id {topic_id} now")
            partition = None
        if partition is None:
            partition = self._create(tp, topic)
            self._hosted[tp] = partition
        else:
            self.retune(partition, topic)
        return partition

    def _create(self, tp: TopicPartition, topic: CachedTopic) -> Partition:
        rules = _append_rules(topic)  # before anything is made: what cannot be appended to needs no directory
        log = self.directory.get(tp)
        if log is not None and log.topic_id != topic.change.topic_id:
            self._let_go(tp, keep=f"the topic has id {topic.change.topic_id} now")
            log = None
        if log is None:
            log = self.directory.put_back(tp, topic.change.topic_id)
        if log is None:
            log = self.directory.create(tp, topic.change.topic_id, schemas=topic.change.schemas, config=topic.config)
        replica = Replica(
            self._broker.broker_id, log, high_watermark=log.high_watermark, settings=_replica_settings(topic)
        )
        partition = Partition(
            tp,
            topic.change.topic_id,
            log=log,
            replica=replica,
            rules=rules,
            surroundings=self.wiring,
        )
        self.retune(partition, topic)
        return partition

    def retune(self, partition: Partition, topic: CachedTopic) -> bool:
        """The topic's schemas or settings may have changed, if it is not the very one that was looked at last. Returns
        whether the settings have."""
        if partition.tuned_for is topic:
            return False
        _add_schemas(partition.log, topic.change)
        changed = partition.log.config != topic.config
        partition.log.config = topic.config
        self.due_work.look_at(partition)
        if partition.log.durability.awaits_flush:  # of records that nobody wanted fsynced when they came
            self.directory.flush_later(partition.tp)
        partition.replica.settings = _replica_settings(topic)
        partition.rules = _append_rules(topic)
        partition.tuned_for = topic
        return changed

    def drop(self, partition: Partition, *, keep: str = "") -> None:
        """Forget the replica. Its data is set aside where ``keep`` gives a reason, and deleted otherwise."""
        _log.info("%s: dropped the replica of topic id %s", partition.tp, partition.topic_id)
        partition.stop()
        del self._hosted[partition.tp]
        self._led.discard(partition)
        self.due_work.forget(partition)
        self._let_go(partition.tp, keep=keep)

    def drop_log(self, tp: TopicPartition, *, keep: str = "") -> None:
        """Let go of data that was found at start and belongs to no replica of this broker any more; ``keep`` as in
        ``drop``."""
        if not keep:
            _log.warning("%s: deleted the data of a deleted topic", tp)
        self._let_go(tp, keep=keep)

    def _let_go(self, tp: TopicPartition, *, keep: str) -> None:
        try:
            if keep:
                self._broker.counters["logs.set.aside"] += 1
                self.directory.set_aside(tp, reason=keep)
                self._broker.log_set_aside()
            else:
                self.directory.delete(tp)
        except StorageError as error:
            self._broker.log_failed(None, error)

    def follower_lost(self, replica_id: int) -> None:
        """The follower's connection closed; every partition led here that it follows is told."""
        for partition in self.leading():
            partition.step(FollowerConnectionLost(replica_id))

    def role_changed(self, partition: Partition) -> None:
        if not partition.stopped:
            self.due_work.look_at(partition)
        if partition.replica.is_leader:
            self._led.add(partition)
        else:
            self._led.discard(partition)

    @property
    def led(self) -> int:
        """Partitions this broker leads."""
        return len(self._led)

    def leading(self) -> list[Partition]:
        """Partitions this broker leads."""
        return list(self._led)

    def movable(self, partition: Partition) -> bool:
        """It is led here, and another live in-sync replica could lead it."""
        replica = partition.replica
        if partition not in self._led:
            return False
        live, own = self._broker.cache.incarnations, self._broker.broker_id
        return any(member != own and member in live for member in replica.isr)

    def counted_on(self, partition: Partition) -> bool:
        """Its live leader has this broker in the ISR, as far as it was told. A replica whose disk is broken follows no
        decision any more: its own ISR stays as it was."""
        told = self._broker.cache.partition(partition.tp)
        if told is None or told.state.leader not in self._broker.cache.incarnations:
            return False
        return self._broker.broker_id in told.state.isr

    @property
    def in_sync(self) -> int:
        """Partitions that have this broker in the ISR, whoever leads them, as far as it was told."""
        own = self._broker.broker_id
        return sum(own in partition.replica.isr for partition in self._hosted.values())

    @property
    def lagging(self) -> int:
        """Led partitions whose in-sync followers do not have the whole log yet."""
        return sum(
            partition.replica.is_leader and partition.replica.high_watermark < partition.log.log_end_offset
            for partition in self._hosted.values()
        )

    def unclaimed_logs(self) -> list[Log]:
        """Logs that were found on disk and belong to no hosted replica."""
        return [log for log in self.directory.logs() if log.tp not in self._hosted]

    def unclaimed_log(self, tp: TopicPartition) -> Log | None:
        """The one of ``tp``, if there is one."""
        return None if tp in self._hosted else self.directory.get(tp)

    # --- time ---

    def deadline_moved(self, partition: Partition) -> None:
        """Called after every step, so it is cheap when the deadline did not come closer."""
        deadline_ms = partition.replica.deadline_ms
        if deadline_ms >= partition.timer_ms:
            return
        partition.timer_ms = deadline_ms
        heapq.heappush(self._timers, (deadline_ms, next(self._timer_order), partition))
        if self._timer is None or deadline_ms < self._timer_at_ms:
            self._arm(deadline_ms)

    def _arm(self, at_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_ms = at_ms
        delay_s = max(at_ms - self._broker.now_ms(), 0) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._broker.now_ms()
        due = []
        while self._timers and self._timers[0][0] <= now_ms:
            at_ms, _, partition = heapq.heappop(self._timers)
            if partition.timer_ms == at_ms:
                partition.timer_ms = NEVER
                due.append(partition)
        for partition in due:
            if partition.stopped:
                continue
            if partition.replica.deadline_ms <= now_ms:
                partition.step(Ticked())
            else:
                self.deadline_moved(partition)
        self._arm_for_next(now_ms)

    def _arm_for_next(self, now_ms: int) -> None:
        """Whoever was stepped has perhaps armed the timer for a later time than who is next."""
        if self._timers and (self._timer is None or self._timers[0][0] < self._timer_at_ms):
            self._arm(max(self._timers[0][0], now_ms + 1))

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timers.clear()


def _replica_settings(topic: CachedTopic) -> ReplicaSettings:
    return ReplicaSettings(
        lag_time_max_ms=topic.config.replica_lag_time_max_ms, lag_max_messages=topic.config.replica_lag_max_messages
    )


def _append_rules(topic: CachedTopic) -> AppendRules:
    if not topic.change.schemas:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"topic {topic.change.name!r} came without a schema")
    newest = topic.change.schemas[-1]
    return AppendRules(
        parse_schema(newest.message),
        newest.schema_id,
        topic.config.max_message_bytes,
        topic.change.event_time,
        topic.change.key_columns,
        topic.config.compacted,
        topic.config.timestamp_type == "LogAppendTime",
    )


def _add_schemas(log: Log, change: TopicChange) -> None:
    for schema in change.schemas:
        log.add_schema(schema)
