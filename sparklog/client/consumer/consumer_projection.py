"""The columns that a consumer returns: the chosen columns of each topic, and ``_topic``, ``_partition``, ``_offset``.

The latter three are added only if the user requests them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetched_batches import ConsumedBatch
from sparklog.client.consumer.log_columns import LOG_COLUMNS, with_log_columns
from sparklog.client.consumer.origin import Origin, with_origin
from sparklog.client.consumer.projection import TopicProjection
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.schema import parse_schema


class ConsumerProjection:
    """A part of ``Consumer`` that knows which columns to fetch of each topic, and which of them to return."""

    def __init__(
        self, cluster: BlockingCluster, columns: Sequence[str] | None, *, log_columns: bool, event_times: bool
    ) -> None:
        """Create the projection of one consumer. If ``columns`` is None, all columns are returned.

        With ``log_columns`` the columns ``_topic``, ``_partition`` and ``_offset`` are added. With ``event_times`` the
        event-time columns are fetched even if they are not returned, because the consumer itself needs them.
        """
        self._cluster = cluster
        self._columns = list(columns) if columns is not None else None
        self._log_columns = log_columns
        self._event_times = event_times
        #: The projections by topic. Empty if all columns are requested.
        self._choices: dict[str, TopicProjection] = {}

    def choose(self, name: str) -> None:
        """Choose the columns of a topic, before the topic is fetched.

        Raises BrokerError SCHEMA_MISMATCH if the topic does not have a requested column.
        """
        if self._columns is None:
            return
        topic = self._cluster.topic(name)
        also = [topic.event_time] if self._event_times and topic.event_time else []
        newest = parse_schema(topic.schemas[-1].message)
        self._choices[name] = TopicProjection(name, self._columns, newest, also=also)

    def wire(self, topic: str) -> tuple[str, ...] | None:
        """Return the columns of a topic to request from brokers. None means all columns."""
        choice = self._choices.get(topic)
        return None if choice is None else choice.wire

    def to_user_batch(self, found: ConsumedBatch) -> pa.RecordBatch:
        """Return a batch with the columns that the user requested, and with its origin (see ``sparklog.origin``)."""
        header, batch, first, offsets, _ = found.fetched
        place = Origin(found.tp.topic, found.tp.partition, first, header.leader_epoch)
        if self._columns is not None:
            batch = self._choices[found.tp.topic].complete(batch)
        if self._log_columns:
            batch = with_log_columns(batch, place, offsets)
        return with_origin(batch, place)

    def schema(self, partitions: Iterable[TopicPartition]) -> pa.Schema:
        """Return the schema of a table with the records of these partitions, by the newest schemas of their topics.

        Raises BrokerError SCHEMA_MISMATCH if the topics have different columns.
        """
        found: dict[str, pa.Schema] = {}
        for name in dict.fromkeys(tp.topic for tp in partitions):
            schema = parse_schema(self._cluster.topic(name).schemas[-1].message)
            if self._columns is not None:
                schema = pa.schema([schema.field(column) for column in self._columns])
            found[name] = pa.schema([*schema, *LOG_COLUMNS]) if self._log_columns else schema
        schemas = list(found.values())
        if any(not schema.equals(schemas[0]) for schema in schemas):
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"topics {list(found)} have different columns: read each topic separately"
            )
        return schemas[0] if schemas else pa.schema([])
