"""The lookup of a read's topics in the cluster: ids, columns, partitions, and the ends of logs.

Every planning step repeats the lookup, because Spark runs each step in a new process. Only a stream keeps its
``SourceTopic``, and so its connections, from one micro-batch to the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.offsets import listed_offsets
from sparklog.delta.origin import ArchiveOrigin
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import OffsetRange, TopicPartition
from sparklog.net.client_security import Security
from sparklog.protocol.messages import MetadataReply, TopicMetadata
from sparklog.spark.columns import offset_run, plan_timestamps
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.read_options import Assign, Subscribe, SubscribePattern, TopicSelection
from sparklog.spark.schema import TopicShape, one_shape, topic_columns, topic_shape

#: The prefix of internal topics, which no pattern matches.
_INTERNAL = "__"
#: The maximum wait of a planning step for an election.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SelectedTopic:
    """One topic of a read, as the cluster described it.

    ``topic_id`` distinguishes it from a later topic with the same name. ``restored_from`` is the value of the topic's
    setting ``restored.from``.
    """

    topic_id: str
    shape: TopicShape
    restored_from: str = ""

    @property
    def origin(self) -> ArchiveOrigin:
        return ArchiveOrigin(self.topic_id, self.restored_from)


@dataclass(frozen=True, slots=True)
class Selected:
    """The topics and partitions of a read. ``topics`` has the topics by name; ``partitions`` is in ascending order."""

    topics: Mapping[str, SelectedTopic]
    partitions: tuple[TopicPartition, ...]

    def columns(self, *, include_headers: bool, include_cast_errors: bool = False) -> StructType:
        """Return the columns of the read. Raises BrokerError SCHEMA_MISMATCH if its topics have different columns."""
        shape = one_shape({name: topic.shape for name, topic in self.topics.items()})
        return topic_columns(shape, include_headers=include_headers, include_cast_errors=include_cast_errors)


class TopicLogEnds(NamedTuple):
    """The earliest offset and readable end of one partition's log, and the epoch of the leader that returned them."""

    start: int
    end: int
    epoch: int

    @property
    def range(self) -> OffsetRange:
        return OffsetRange(self.start, self.end)


class SourceTopic:
    """A client with which a planning process queries topics and the ends of their logs.

    Not thread-safe. Use it in a ``with`` block, or call ``close``.
    """

    def __init__(self, bootstrap: str, security: Security = None) -> None:
        """Create the object without connecting."""
        self.link = BlockingCluster(bootstrap, client_id=CLIENT_ID, timeout_s=_TIMEOUT_S, security=security)

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> SourceTopic:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def select(self, selection: TopicSelection, *, known: Collection[str] | None = None) -> Selected:
        """Look up the topics of ``selection``.

        ``known`` are topics that an earlier lookup found. If it is given, the result omits topics that no longer exist.
        If it is None, a missing topic is an error.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION with the missing topics or partitions.
            ConfigError: the pattern matches no topic, so the columns are unknown.
        """
        match selection:
            case Subscribe(topics):
                described = self._describe(topics, lenient=known is not None)
            case SubscribePattern(pattern):
                described = self._matching(pattern, known=known)
            case Assign(partitions):
                names = sorted({partition.topic for partition in partitions})
                described = self._describe(names, lenient=known is not None)
        existing = [TopicPartition(topic.name, part.partition) for topic in described for part in topic.partitions]
        if isinstance(selection, Assign):
            there = set(existing)
            unknown = [str(partition) for partition in selection.partitions if partition not in there]
            if unknown and known is None:
                raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"option assign: {', '.join(unknown)}")
            existing = [partition for partition in selection.partitions if partition in there]
        return Selected(
            {
                topic.name: SelectedTopic(topic.topic_id, topic_shape(topic), topic.config.get("restored.from", ""))
                for topic in described
            },
            tuple(sorted(existing)),
        )

    def ends(
        self, partitions: Iterable[TopicPartition], isolation: int, *, known: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, TopicLogEnds]:
        """Return the earliest offsets and readable ends of the logs of ``partitions``.

        ``known`` has offsets that the logs should reach. If a leader returns a lower end, another broker may be the
        leader now, and the lookup is repeated.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION.
            ClientTimeout: a leader did not respond.
        """
        wanted = list(partitions)
        latest = listed_offsets(self.link, dict.fromkeys(wanted, "latest"), isolation=isolation, known=known)
        earliest = listed_offsets(self.link, dict.fromkeys(wanted, "earliest"))
        # If retention deletes records between the two queries, the end could be lower than the start.
        return {
            tp: TopicLogEnds(earliest[tp].offset, max(earliest[tp].offset, latest[tp].offset), latest[tp].leader_epoch)
            for tp in wanted
        }

    def starts(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the earliest offsets of the logs of ``partitions``. Raises the same errors as ``ends``."""
        found = listed_offsets(self.link, dict.fromkeys(partitions, "earliest"))
        return {tp: answer.offset for tp, answer in found.items()}

    def batches_at(self, times: Mapping[TopicPartition, int], isolation: int) -> dict[TopicPartition, int | None]:
        """Return, for each partition, an offset at or shortly before the first record at or after the partition's time.

        ``times`` are in microseconds. The offset is None if all records are older.
        """
        found = listed_offsets(self.link, dict(times), isolation=isolation)
        return {tp: None if answer.offset < 0 else answer.offset for tp, answer in found.items()}

    def records_at(
        self,
        times: Mapping[TopicPartition, int],
        selected: Selected,
        *,
        ends: Mapping[TopicPartition, TopicLogEnds],
        isolation: int,
    ) -> dict[TopicPartition, int | None]:
        """Return, for each partition, the offset of the first record at or after the partition's time, or None.

        ``times`` are in microseconds. Brokers find only the batch that contains the record, so this reads one batch per
        partition.
        """
        found = self.batches_at(times, isolation)
        return {
            tp: None
            if offset is None
            else self._first_record(tp, selected.topics[tp.topic], offset, end=ends[tp].end, time_us=times[tp])
            for tp, offset in found.items()
        }

    def _first_record(
        self, tp: TopicPartition, topic: SelectedTopic, offset: int, *, end: int, time_us: int
    ) -> int | None:
        from sparklog.client.consumer.partition_reader import PartitionReader

        plan = plan_timestamps(topic.shape)
        if not plan.stored_columns:
            return offset  # All records of the batch have the same time.
        with PartitionReader(
            self.link,
            tp,
            min(offset, end),
            end,
            columns=plan.stored_columns,
            keep=lambda header: header.max_timestamp >= time_us,
            topic_id=topic.topic_id,
            isolation=0,  # Only times matter here. The broker's lookup ignores transactions as well.
            max_bytes=1,
        ) as reader:
            for found in reader.fetched():
                rows = found.batch.num_rows
                offsets = offset_run(found.first_offset, rows) if found.offsets is None else pa.array(found.offsets)
                made = plan.assemble(found.header, found.batch, partition=tp, offsets=offsets)
                young = np.flatnonzero(made.column(0).cast(pa.int64()).to_numpy() >= time_us)
                if len(young):
                    return int(offsets[int(young[0])].as_py())
        return None

    def _describe(self, names: Iterable[str], *, lenient: bool) -> list[TopicMetadata]:
        """Look up all topics in one request; look up those that the broker does not know again, one by one.

        The metadata of the broker may be outdated.
        """
        wanted = list(names)
        reply = self.link.retrying("metadata", lambda: self.link.refresh(wanted))
        listed = {topic.name: topic for topic in reply.topics if not topic.code}
        found = []
        for name in wanted:
            try:
                found.append(listed.get(name) or self.link.topic(name, refresh=True))
            except BrokerError as error:  # noqa: PERF203 - each topic has its own error
                if not lenient or error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
        return found

    def _matching(self, pattern: str, *, known: Collection[str] | None) -> list[TopicMetadata]:
        matches = re.compile(pattern).fullmatch
        reply = self.link.retrying("metadata", self._all_topics)
        found = [
            topic
            for topic in reply.topics
            if not topic.code and matches(topic.name) and not topic.name.startswith(_INTERNAL)
        ]
        if not found and known is None:
            raise ConfigError(f"option subscribePattern={pattern!r} matches no topic")
        # A topic that is missing from the list is not necessarily deleted.
        missing = set(known or ()) - {topic.name for topic in found}
        return found + self._describe(sorted(name for name in missing if matches(name)), lenient=True)

    def _all_topics(self) -> MetadataReply:
        reply = self.link.refresh(None)
        if self.link.metadata.is_stale(reply):
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker has no metadata from the controller yet")
        return reply
