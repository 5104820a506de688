"""The batch read: offset ranges fixed on the driver, one task each, read in full or not at all.

A range is bound to the topic's id. If a topic is deleted and made anew, or records of the range are gone, the task
fails: fewer rows than planned are never returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sparklog.client.admin import Admin
from sparklog.client.reader import PartitionReader
from sparklog.model import OffsetRange, TopicPartition
from sparklog.spark.columns import ColumnPlan, offset_run, plan_columns
from sparklog.spark.offsets import asked_offsets, settle_ranges, split_ranges
from sparklog.spark.options import ReadOptions
from sparklog.spark.schema import check_projection
from sparklog.spark.topics import Selected, select_topics


@dataclass(frozen=True)
class TopicRange(InputPartition):
    """What one task reads: offsets ``[start, end)`` of one partition of the topic with this id."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Everything the reader needs after planning; small, pickled to every task."""

    options: ReadOptions
    selected: Selected
    columns: Mapping[str, ColumnPlan]


def plan_read(admin: Admin, options: ReadOptions, *, schema: StructType) -> ReadPlan:
    """Look up the topics and settle where each column of ``schema`` comes from.

    Raises:
        BrokerError: SCHEMA_MISMATCH naming columns that the topics do not have; as ``select_topics``.
    """
    selected = select_topics(admin, options.selection)
    check_projection(schema, selected.columns(include_headers=True))
    columns = {name: plan_columns(schema, topic.shape) for name, topic in selected.topics.items()}
    return ReadPlan(options, selected, columns)


class BatchReader(DataSourceReader):
    """Made on the driver, which calls ``partitions`` once per ``load()``; copies in tasks get ``read`` calls."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    def partitions(self) -> list[InputPartition]:
        """The ranges to read, as the logs are now: ``latest`` means the high watermark of this moment."""
        options, selected = self._plan.options, self._plan.selected
        with Admin(options.bootstrap, client_id="sparklog-spark") as admin:
            earliest = admin.list_offsets(selected.partitions, at="earliest")
            known = asked_offsets(options.starting, options.ending)
            latest = admin.list_offsets(selected.partitions, at="latest", known=known)
        log_ends = {partition: OffsetRange(earliest[partition], latest[partition]) for partition in selected.partitions}
        ranges = settle_ranges(starting=options.starting, ending=options.ending, log_ends=log_ends)
        return [
            TopicRange(tp.topic, selected.topics[tp.topic].topic_id, tp.partition, start=start, end=end)
            for tp, start, end in split_ranges(ranges, options.min_partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The range as batches of the declared columns.

        Raises:
            BrokerError: the range cannot be read in full, or a value does not fit its column.
        """
        if not isinstance(partition, TopicRange):  # Spark's stand-in for an empty list of partitions
            return iter(())
        return self._batches(partition)

    def _batches(self, wanted: TopicRange) -> Iterator[pa.RecordBatch]:
        tp = TopicPartition(wanted.topic, wanted.partition)
        plan = self._plan.columns[wanted.topic]
        with PartitionReader(
            self._plan.options.bootstrap,
            tp,
            wanted.start,
            wanted.end,
            topic_id=wanted.topic_id,
            client_id="sparklog-spark",
        ) as reader:
            for found in reader.fetched():
                if found.offsets is None:
                    offsets = offset_run(found.first_offset, found.batch.num_rows)
                else:
                    offsets = pa.array(found.offsets)
                yield plan.assemble(found.header, found.batch, partition=tp, offsets=offsets)
