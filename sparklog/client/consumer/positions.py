"""The partitions and positions of a consumer: start positions, end offsets of logs, and the reset of positions."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Literal

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.offsets import OffsetQuery, checked_offset, list_offsets, wire_time
from sparklog.client.cluster.routing_core import no_leader
from sparklog.client.consumer.consumer_projection import ConsumerProjection
from sparklog.client.consumer.fetch_buffer import FetchBuffer
from sparklog.client.consumer.partition_cursor import PartitionCursor
from sparklog.client.consumer.timestamp_seek import TimestampSeek
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition

#: Metadata is refreshed after this fraction of its maximum age, because the response takes time too.
_REFRESH_AFTER = 0.75

#: Where to start: at the earliest or latest offset, at a time, or at given offsets. A partition without a given offset
#: starts at its earliest offset.
Start = Literal["earliest", "latest"] | dt.datetime | Mapping[TopicPartition, int]
#: What to do if a position is outside of the log: raise, or continue from the earliest or latest offset.
OnOutOfRange = Literal["raise", "earliest", "latest"]


class Assignment:
    """A part of a ``Consumer`` without a group: it chooses the partitions to read and their start positions.

    The object adds a cursor for each partition to ``cursors``, which belong to the fetcher.
    """

    def __init__(
        self,
        cluster: BlockingCluster,
        cursors: MutableMapping[TopicPartition, PartitionCursor],
        *,
        columns: ConsumerProjection,
        timestamp_seek: TimestampSeek,
        isolation: int,
        metadata_max_age_s: float,
    ) -> None:
        self._cluster = cluster
        self._refresh_after_s = metadata_max_age_s * _REFRESH_AFTER
        self._cursors = cursors
        self._columns = columns
        self._timestamp_seek = timestamp_seek
        self._isolation = isolation
        #: The topics of which all partitions are read.
        self._topics: list[str] = []
        self._refreshed_at = time.monotonic()
        self._seen_version = 0

    def begin(self, topics: list[str], assigned: Sequence[TopicPartition], start: Start) -> None:
        """Look up the partitions and their start positions. Raises the errors of the ``Consumer``'s constructor."""
        self._topics = topics
        for topic in dict.fromkeys([*topics, *(tp.topic for tp in assigned)]):
            self._cluster.topic(topic)
        partitions = [*assigned, *(tp for topic in topics for tp in self._cluster.metadata.partitions(topic))]
        for tp in partitions:
            if self._cluster.metadata.partition(tp) is None:
                raise no_leader(self._cluster.metadata, tp)
        for name in dict.fromkeys(tp.topic for tp in partitions):
            self._columns.choose(name)
        for tp, position in self._positions(partitions, start).items():
            self._add(tp, position)
        if isinstance(start, dt.datetime):
            self._timestamp_seek.begin(partitions, wire_time(start))

    def _positions(self, partitions: Sequence[TopicPartition], start: Start) -> dict[TopicPartition, int]:
        given: dict[TopicPartition, int] = {}
        default: OffsetQuery = "earliest"
        if isinstance(start, Mapping):
            given = {(tp := TopicPartition(*found)): checked_offset(tp, offset) for found, offset in start.items()}
            unknown = given.keys() - set(partitions)
            if unknown:
                raise ConfigError(f"start has offsets of partitions that are not read: {sorted(map(str, unknown))}")
        else:
            default = start
        asked = {tp: default for tp in partitions if tp not in given}
        found = {**list_offsets(self._cluster, asked, isolation=self._isolation), **given} if asked else given
        return {tp: found[tp] for tp in partitions}

    def add_new_partitions(self) -> None:
        """Begin to read partitions that were added to the topics, from their first record on.

        If the metadata is near its maximum age, this method refreshes the metadata.
        """
        if not self._topics:
            return
        if not self.next_refresh_s():
            self._refreshed_at = time.monotonic()
            for topic in self._topics:
                self._cluster.topic(topic, refresh=True)
        if self._seen_version == self._cluster.metadata.version:
            return
        self._seen_version = self._cluster.metadata.version
        for topic in self._topics:
            for tp in self._cluster.metadata.partitions(topic):
                if tp not in self._cursors:
                    self._add(tp, 0)

    def next_refresh_s(self) -> float:
        """Return the seconds until ``add_new_partitions`` must refresh the metadata, or 0 if it is due now."""
        return max(0.0, self._refreshed_at + self._refresh_after_s - time.monotonic())

    def _add(self, tp: TopicPartition, position: int) -> None:
        topic = self._cluster.metadata.topic(tp.topic)
        assert topic is not None
        self._cursors[tp] = PartitionCursor(tp, topic.topic_id, position)


class LogEnds:
    """A part of ``Consumer`` that requests the earliest and latest offsets of the assigned partitions.

    Methods raise ClientTimeout if a leader does not respond.
    """

    def __init__(
        self,
        cluster: BlockingCluster,
        cursors: Mapping[TopicPartition, PartitionCursor],
        buffer: FetchBuffer,
        *,
        isolation: int,
        on_out_of_range: OnOutOfRange,
    ) -> None:
        self._cluster = cluster
        self._cursors = cursors
        self._buffer = buffer
        self._isolation = isolation
        self.on_out_of_range = on_out_of_range

    def end_offsets(self) -> dict[TopicPartition, int]:
        """Return the end offset of each assigned partition. See ``Consumer.end_offsets``."""
        at: dict[TopicPartition, OffsetQuery] = dict.fromkeys(self._cursors, "latest")
        return list_offsets(self._cluster, at, isolation=self._isolation, known=self._buffer.positions())

    def table_ends(self) -> dict[TopicPartition, int]:
        """For each assigned partition, return the offset at which ``Consumer.to_table`` stops (exclusive).

        A position at the end of the log means that there are no new records. A position beyond the end is out of range.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE if a position is out of range, and ``on_out_of_range`` is "raise".
        """
        ends = self.end_offsets()
        beyond = {tp: position for tp, position in self._buffer.positions().items() if position > ends[tp]}
        if beyond and self._isolation:
            # The position may be above the last stable offset but not above the high watermark. Then the records up to
            # the position are of open transactions, and cannot be read yet.
            ends |= list_offsets(self._cluster, dict.fromkeys(beyond, "latest"))
            ends |= {tp: position for tp, position in beyond.items() if position <= ends[tp]}
        beyond = {tp: position for tp, position in beyond.items() if position > ends[tp]}
        if not beyond:
            return ends
        if self.on_out_of_range == "raise":
            tp, position = next(iter(beyond.items()))
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: position {position} found; the log ends at {ends[tp]}"
            )
        self.reset_positions()
        return ends

    def reset_positions(self) -> None:
        """Move each position outside of its log to the earliest or latest offset, as ``on_out_of_range`` says.

        This method checks all partitions, because an error names only one partition.
        """
        starts = list_offsets(self._cluster, dict.fromkeys(self._cursors, "earliest"), isolation=self._isolation)
        ends = self.end_offsets()
        log_ends = list_offsets(self._cluster, dict.fromkeys(self._cursors, "latest"), known=self._buffer.positions())
        for tp, cursor in self._cursors.items():
            if not starts[tp] <= cursor.position <= log_ends[tp]:
                cursor.move((starts if self.on_out_of_range == "earliest" else ends)[tp])


def topics_and_partitions(
    topics: str | Iterable[str] | Iterable[TopicPartition], *, optional: bool
) -> tuple[list[str], list[TopicPartition]]:
    """Split the argument ``topics`` of a consumer into names of topics and single partitions.

    Raises ConfigError if there are neither, unless ``optional`` is set.
    """
    if isinstance(topics, str):
        return [topics], []
    names: list[str] = []
    partitions: list[TopicPartition] = []
    for item in topics:
        if isinstance(item, str):
            names.append(item)
        else:
            partitions.append(TopicPartition(*item))
    if not names and not partitions and not optional:
        raise ConfigError("a consumer needs a topic or a partition")
    return list(dict.fromkeys(names)), [tp for tp in dict.fromkeys(partitions) if tp.topic not in names]
