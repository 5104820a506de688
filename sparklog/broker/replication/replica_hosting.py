"""The creation, settings and removal of the replicas that this broker hosts.

A new replica uses the existing log of its topic id, or an empty log. The data of a removed replica is deleted only if
an update of the controller says that the topic is deleted, or assigns the partition to other brokers. Otherwise the
data is set aside: it is kept in ``set-aside/``, but not served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.broker.metadata_cache import CachedTopic
from sparklog.broker.replication.partition import AppendRules, OnLogFailed, Partition, PartitionHost
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import TopicChange
from sparklog.record.schema import parse_schema
from sparklog.replica.replica import Replica
from sparklog.replica.view import ReplicaSettings
from sparklog.storage.log import Log

_log = logging.getLogger(__name__)


class ReplicaHosting:
    """The component that creates and removes replicas.

    ``effects`` performs the effects of all replicas. ``on_log_set_aside`` is called after a log was set aside. Not
    thread-safe: use it only on the broker's event loop.
    """

    def __init__(
        self,
        context: BrokerContext,
        partitions: Partitions,
        *,
        effects: PartitionHost,
        on_log_set_aside: Callable[[], None],
        log_failed: OnLogFailed,
    ) -> None:
        self._context = context
        self._partitions = partitions
        self._directory = partitions.directory
        self._effects = effects
        self._on_log_set_aside = on_log_set_aside
        self._log_failed = log_failed

    def host(self, tp: TopicPartition, topic: CachedTopic) -> Partition:
        """Return the replica of ``tp``. If there is none, create it with the log of this topic id or an empty log.

        The log of this topic id may also be a set-aside log. If ``tp`` has a log of another topic id, set this log
        aside, because no update has said that the topic with the other id is deleted.

        Raises:
            StorageError: the log cannot be created.
        """
        topic_id = topic.change.topic_id
        partition = self._partitions.get(tp)
        if partition is not None and partition.topic_id != topic_id:
            self.drop(partition, keep=f"the topic has id {topic_id} now")
            partition = None
        if partition is None:
            partition = self._create(tp, topic)
            self._partitions.add(partition)
        else:
            self.apply_topic_config(partition, topic)
        return partition

    def _create(self, tp: TopicPartition, topic: CachedTopic) -> Partition:
        rules = _append_rules(topic)  # first, because this may raise, and then no directory is needed
        log = self._directory.get(tp)
        if log is not None and log.topic_id != topic.change.topic_id:
            self._remove_log(tp, keep=f"the topic has id {topic.change.topic_id} now")
            log = None
        if log is None:
            log = self._directory.put_back(tp, topic.change.topic_id)
        if log is None:
            log = self._directory.create(tp, topic.change.topic_id, schemas=topic.change.schemas, config=topic.config)
        replica = Replica(
            self._context.broker_id, log, high_watermark=log.high_watermark, settings=_replica_settings(topic)
        )
        partition = Partition(
            tp,
            topic.change.topic_id,
            log=log,
            replica=replica,
            rules=rules,
            host=self._effects,
        )
        self.apply_topic_config(partition, topic)
        return partition

    def apply_topic_config(self, partition: Partition, topic: CachedTopic) -> bool:
        """Apply the topic's schemas and settings to a replica, unless this ``CachedTopic`` was already applied.

        Return whether the log's settings have changed.
        """
        if partition.configured_for is topic:
            return False
        _add_schemas(partition.log, topic.change)
        changed = partition.log.config != topic.config
        partition.log.config = topic.config
        self._partitions.maintenance_index.mark_changed(partition)
        if partition.log.durability.awaits_flush:  # the log has records that needed no flush when they were appended
            self._directory.flush_later(partition.tp)
        partition.replica.settings = _replica_settings(topic)
        partition.rules = _append_rules(topic)
        partition.configured_for = topic
        return changed

    def drop(self, partition: Partition, *, keep: str = "") -> None:
        """Remove the replica. If ``keep`` gives a reason to keep its data, set the data aside; otherwise delete it."""
        _log.info("%s: dropped the replica of topic id %s", partition.tp, partition.topic_id)
        partition.stop()
        self._partitions.remove(partition)
        self._remove_log(partition.tp, keep=keep)

    def drop_log(self, tp: TopicPartition, *, keep: str = "") -> None:
        """Remove a log that was found at the start of the broker and belongs to no hosted replica.

        If ``keep`` gives a reason to keep its data, set the data aside; otherwise delete it.
        """
        if not keep:
            _log.warning("%s: deleted the data of a deleted topic", tp)
        self._remove_log(tp, keep=keep)

    def _remove_log(self, tp: TopicPartition, *, keep: str) -> None:
        try:
            if keep:
                self._context.counters["logs.set.aside"] += 1
                self._directory.set_aside(tp, reason=keep)
                self._on_log_set_aside()
            else:
                self._directory.delete(tp)
        except StorageError as error:
            self._log_failed(None, error)


def _replica_settings(topic: CachedTopic) -> ReplicaSettings:
    return ReplicaSettings(
        lag_time_max_ms=topic.config.replica_lag_time_max_ms, lag_max_messages=topic.config.replica_lag_max_messages
    )


def _append_rules(topic: CachedTopic) -> AppendRules:
    if not topic.change.schemas:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"topic {topic.change.name!r} has no schema in the update")
    newest = topic.change.schemas[-1]
    return AppendRules(
        parse_schema(newest.message),
        newest.schema_id,
        topic.config.max_message_bytes,
        topic.change.event_time,
        topic.change.key_columns,
        topic.config.compacted,
        topic.config.timestamp_type == "LogAppendTime",
        topic.config.kafka_value_format == "json",
        topic.config.restoring,
    )


def _add_schemas(log: Log, change: TopicChange) -> None:
    for schema in change.schemas:
        log.add_schema(schema)
