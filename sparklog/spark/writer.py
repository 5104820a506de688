"""The batch write: every task appends its rows with acks=all, by an idempotent producer of its own.

A producer's retries make no duplicates. A task that Spark runs again does: what its first run had acknowledged stays
in the log, and ``abort`` cannot take it back. Only the transactional sink will change that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from sparklog.client.admin import Admin
from sparklog.client.producer import Producer
from sparklog.client.results import WriteResult
from sparklog.errors import ClusterError, ConfigError
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.options import WriteOptions
from sparklog.spark.routes import TopicRoute, find_topic_column, plan_route, rows_by_value
from sparklog.spark.topics import topic_shape

#: Spark cuts a task's rows into batches of at most 10,000; so many bytes of them are encoded together.
_GATHER_BYTES = 4 * 1024 * 1024
#: How long a batch may wait for its acknowledgement: several elections.
_DELIVERY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task appended: rows, and the offset ranges that hold them, other producers' records between."""

    rows: int
    ranges: tuple[tuple[TopicPartition, OffsetRange], ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Everything a task needs; small, pickled. With ``topic_column`` routes are made as topics appear."""

    options: WriteOptions
    columns: StructType
    routes: Mapping[str, TopicRoute]
    topic_column: str | None


def plan_write(admin: Admin, options: WriteOptions, *, schema: StructType) -> WritePlan:
    """Check the columns of a DataFrame against the topic it goes to, if that is known before the rows are.

    Raises:
        ConfigError: neither an option nor a column names the topic; two columns have one name.
        BrokerError: SCHEMA_MISMATCH naming the columns; UNKNOWN_TOPIC_OR_PARTITION.
    """
    names = schema.fieldNames()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"columns given twice: {', '.join(twice)}")
    if options.topic is None:
        return WritePlan(options, schema, {}, find_topic_column(schema))
    return WritePlan(options, schema, {options.topic: _route(admin, options.topic, schema)}, None)


class BatchWriter(DataSourceArrowWriter):
    """Made on the driver; copies in tasks get ``write`` calls, the driver's own gets ``commit`` or ``abort``."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append all rows; returns once every one of them is committed.

        Raises:
            BrokerError: the first error that retries could not heal; rows before it stay.
        """
        routes = dict(self._plan.routes)
        futures = []
        with Producer(
            self._plan.options.bootstrap,
            acks="all",
            compression=self._plan.options.compression,
            delivery_timeout_s=_DELIVERY_TIMEOUT_S,
            client_id="sparklog-spark",
        ) as producer:
            for rows in _gathered(iterator):
                for topic, part in self._by_topic(rows):
                    if topic not in routes:
                        routes[topic] = self._late_route(topic)
                    for partition, payload in routes[topic].split(part):
                        futures.append(producer.write(topic, payload, partition=partition))
            producer.flush()
        return _written([future.result() for future in futures])

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: the rows were committed as they were written.

        Raises:
            ClusterError: a task gave no message, which would mean that its rows may be missing.
        """
        if missing := sum(not isinstance(message, Written) for message in messages):
            raise ClusterError(f"{missing} of {len(messages)} write tasks reported nothing")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing can be taken back: what the tasks wrote stays in the log."""

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        column = self._plan.topic_column
        if column is None:
            yield str(self._plan.options.topic), rows
            return
        for topic, part in rows_by_value(rows, rows.column(rows.schema.get_field_index(column))):
            if topic is None:
                raise ConfigError(f"column {column} is null in {part.num_rows} rows: every row needs a topic")
            yield topic, part

    def _late_route(self, topic: str) -> TopicRoute:
        with Admin(self._plan.options.bootstrap, client_id="sparklog-spark") as admin:
            return _route(admin, topic, self._plan.columns)


def _route(admin: Admin, topic: str, columns: StructType) -> TopicRoute:
    return plan_route(topic, topic_shape(admin.describe_topic(topic)), columns)


def _written(results: Sequence[WriteResult]) -> Written:
    ranges = [
        (TopicPartition(result.topic, found.partition), found.offsets) for result in results for found in result.ranges
    ]
    return Written(sum(result.record_count for result in results), tuple(sorted(ranges)))


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches, so that rows spread over partitions make fewer, longer stored ones."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        held_bytes += batch.nbytes
        if held_bytes >= _GATHER_BYTES:
            yield pa.concat_batches(held)
            held, held_bytes = [], 0
    if held:
        yield pa.concat_batches(held)
