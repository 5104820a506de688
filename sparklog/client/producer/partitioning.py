"""A producer's tables into encoded batches, one partition each: by key, as told, or in turn. Pure but for the turn.

Rows are brought together by Arrow's ``take`` over a stable sort of their partitions, so the order of the rows of a
partition is kept and no Python loop sees a row. Bounded: the caller hands in pieces of a table, and each piece is cut
so that no batch is larger than wanted or than the topic allows.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparklog.config import topic_config
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import TopicMetadata
from sparklog.record.arrays import array_of, scalar_of
from sparklog.record.codec import EncodedBatch, decode_batch, encode_batch
from sparklog.record.header import Flag
from sparklog.record.keys import partitions_of
from sparklog.record.message import counted_bytes, read_batch_message
from sparklog.record.partitioner import NO_PARTITION, partition_for_key
from sparklog.record.rows import RowColumns
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_KEY_COLUMNS, DEFAULT_SCHEMA, fit_table, parse_schema
from sparklog.record.small_batch_encoder import SmallBatchRecord, encode_few_records

#: Column of a table that says where its rows go; it is not stored.
PARTITION_COLUMN = "_partition"
#: What a piece of a table may take before it is cut into partitions.
_MAX_PIECE_BYTES = 32 * 1024 * 1024
#: Up to so many records are encoded sooner without Arrow, above all where little else was done just before.
_FEW = 256
#: Up to so many keys are hashed sooner one by one.
_FEW_KEYS = 16

Rows: TypeAlias = "npt.NDArray[np.int64]"
#: One partition for all rows, one for each row, or None: by key, else in turn.
Destination: TypeAlias = "int | npt.NDArray[np.int64] | None"


class EncodedPart(NamedTuple):
    """Rows of one partition, encoded; ``rows`` are their numbers in what was given, in the order they are in."""

    partition: int
    encoded: EncodedBatch
    rows: Rows | Sequence[int]


class ProducerTopic:
    """What a producer has to know of a topic. Immutable but for whose turn it is; used from any thread."""

    def __init__(self, metadata: TopicMetadata) -> None:
        """Raises BrokerError when the topic's newest schema cannot be read here."""
        latest = metadata.schemas[-1]
        self.metadata = metadata
        self.name = metadata.name
        self.topic_id = metadata.topic_id
        self.partition_count = len(metadata.partitions)
        self.schema_id = latest.schema_id
        self.schema = parse_schema(latest.message)
        self.is_default = self.schema.equals(DEFAULT_SCHEMA)
        self.key_columns = tuple(metadata.key_columns) or (DEFAULT_KEY_COLUMNS if self.is_default else ())
        self.event_time = metadata.event_time  # nothing else: the broker compares the header with this very column
        try:
            self.max_message_bytes = topic_config(metadata.config).max_message_bytes
        except ConfigError:  # settings of a newer broker: the broker has the last word on sizes anyway
            self.max_message_bytes = topic_config({}).max_message_bytes
        #: Whether few records of it may be encoded without Arrow, of at most how many bytes.
        self.hand_written = self.is_default and self.event_time in {None, DEFAULT_EVENT_TIME}
        self.hand_written_bytes = self.max_message_bytes * 3 // 4
        #: Asked for every dict row; pyarrow makes the names of a schema each time.
        self.column_names = frozenset(self.schema.names)
        #: The way from dict rows to columns.
        self.rows = RowColumns(self.schema)
        self._turns = itertools.count(random.randrange(1 << 16))

    def next_partition(self) -> int:
        """For rows without a key: each time another one, starting anywhere."""
        return next(self._turns) % self.partition_count

    def continued_by(self, metadata: TopicMetadata) -> ProducerTopic:
        """The same topic by newer metadata; itself when nothing a producer sees has changed."""
        mine = self.metadata
        if (
            metadata.topic_id == mine.topic_id
            and len(metadata.partitions) == len(mine.partitions)
            and metadata.schemas == mine.schemas
            and metadata.config == mine.config
        ):
            return self
        return ProducerTopic(metadata)


# --- tables ---


def fit_to_topic(topic: ProducerTopic, table: pa.Table, now_us: int) -> pa.Table:
    """``table`` with exactly the topic's columns; in default topics a missing timestamp is ``now_us``.

    Raises:
        BrokerError: SCHEMA_MISMATCH naming the columns that do not fit.
    """
    fitted = fit_table(table, topic.schema)
    if topic.is_default:
        index = topic.schema.get_field_index(DEFAULT_EVENT_TIME)
        times = fitted.column(index)
        if times.null_count:
            field = topic.schema.field(index)
            fitted = fitted.set_column(index, field, pc.fill_null(times, scalar_of(now_us, field.type)))
    return fitted


def take_destinations(
    topic: ProducerTopic, table: pa.Table, partition: int | None
) -> tuple[pa.Table, npt.NDArray[np.int64] | int | None]:
    """The table without its ``_partition`` column (unless the topic has one), and where its rows go.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION for a partition the topic does not have, INVALID_RECORD for nulls.
    """
    if partition is not None:
        check_partition(topic, partition)
        return table, partition
    index = table.schema.get_field_index(PARTITION_COLUMN)
    if index < 0 or topic.schema.get_field_index(PARTITION_COLUMN) >= 0:
        return table, None
    column = table.column(index)
    if column.null_count:
        raise BrokerError(ErrorCode.INVALID_RECORD, f"column {PARTITION_COLUMN!r} holds {column.null_count} nulls")
    if not pa.types.is_integer(column.type):
        raise BrokerError(
            ErrorCode.SCHEMA_MISMATCH, f"column {PARTITION_COLUMN!r} is {column.type}, whole numbers expected"
        )
    partitions = np.asarray(column.to_numpy(), dtype=np.int64)
    if len(partitions):
        check_partition(topic, int(partitions.min()))
        check_partition(topic, int(partitions.max()))
    return table.remove_column(index), partitions


def pieces(
    topic: ProducerTopic, table: pa.Table, destination: Destination, *, batch_bytes: int
) -> Iterator[tuple[pa.RecordBatch, Destination]]:
    """A table in pieces to encode one after the other: a batch's worth, times the partitions where rows spread."""
    if not table.num_rows:
        return
    spreads = isinstance(destination, np.ndarray) or (destination is None and bool(topic.key_columns))
    wanted = min(_MAX_PIECE_BYTES, batch_bytes * (topic.partition_count if spreads else 1))
    rows = _even_rows(table, wanted)
    for at in range(0, table.num_rows, rows):
        for batch in table.slice(at, rows).combine_chunks().to_batches():
            yield batch, destination[at : at + batch.num_rows] if isinstance(destination, np.ndarray) else destination
            at += batch.num_rows


def _even_rows(rows: pa.Table | pa.RecordBatch, wanted: int, *, limit: int = sys.maxsize) -> int:
    """How many rows each piece gets where pieces of about ``wanted`` bytes, and of ``limit`` at most, are cut: equal
    ones of up to half as much again. A small one behind each large one would cost as much, and take a turn."""
    size = int(rows.nbytes)
    count = max(1, round(size / wanted), -(-size // limit))
    return -(-int(rows.num_rows) // count)


# --- rows to partitions ---


def encode_parts(
    topic: ProducerTopic, batch: pa.RecordBatch, destination: Destination, *, compression: str | None, batch_bytes: int
) -> Iterator[EncodedPart]:
    """The rows of ``batch``, which has the topic's schema, as batches of one partition each.

    Raises:
        BrokerError: MESSAGE_TOO_LARGE for a single record over the topic's limit.
    """
    assigned = _assign(topic, batch, destination)
    if isinstance(assigned, int):
        rows = np.arange(batch.num_rows, dtype=np.int64)
        yield from _encode_cut(topic, batch, assigned, rows, compression=compression, batch_bytes=batch_bytes)
        return
    order = np.argsort(assigned, kind="stable").astype(np.int64)
    grouped = batch.take(array_of(order, pa.int64()))
    counts = np.bincount(assigned)
    ends = np.cumsum(counts)
    for partition in np.flatnonzero(counts).tolist():
        start, end = int(ends[partition] - counts[partition]), int(ends[partition])
        yield from _encode_cut(
            topic,
            grouped.slice(start, end - start),
            partition,
            order[start:end],
            compression=compression,
            batch_bytes=batch_bytes,
        )


def encode_few(
    topic: ProducerTopic, records: Sequence[SmallBatchRecord], destination: int | None, *, size: int, batch_bytes: int
) -> list[EncodedPart] | None:
    """What ``encode_parts`` gives without compression for records of a default topic, when they are so few that they
    cost less one by one; else None. ``size``: bytes of keys and values, at least."""
    if len(records) > _FEW or not topic.hand_written or size > batch_bytes or size > topic.hand_written_bytes:
        return None
    for record in records:
        if record[2]:  # headers
            return None
    assigned = _assign_few(topic, records, destination)
    if assigned is None:
        return None
    parts = []
    for partition, rows in sorted(assigned.items()):
        chosen = records if len(rows) == len(records) else [records[row] for row in rows]
        encoded = encode_few_records(chosen, schema_id=topic.schema_id, timed=topic.event_time is not None)
        if encoded.header.length > topic.max_message_bytes:
            return None
        parts.append(EncodedPart(partition, encoded, rows))
    return parts


def _assign_few(
    topic: ProducerTopic, records: Sequence[SmallBatchRecord], destination: int | None
) -> Mapping[int, Sequence[int]] | None:
    """As ``_assign``: the numbers of the records that go to each partition; None where these are too many keys to hash
    one by one."""
    every = range(len(records))
    if destination is not None:
        return {destination: every}
    keys = [record[0] for record in records]
    if topic.partition_count == 1 or keys.count(None) == len(keys):
        return {topic.next_partition(): every}
    if len(keys) > _FEW_KEYS:
        return None
    turn: int | None = None
    rows: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        if key is None:
            turn = topic.next_partition() if turn is None else turn
            partition = turn
        else:
            content = key.encode() if isinstance(key, str) else key
            partition = partition_for_key(content, topic.partition_count)
        rows.setdefault(partition, []).append(row)
    return rows


def partition_alone(topic: ProducerTopic, key: bytes | str | None) -> int:
    """Where a record on its own goes; -1: to the partition whose turn it is."""
    if topic.partition_count == 1:
        return 0
    if key is None:
        return -1
    return partition_for_key(key.encode() if isinstance(key, str) else key, topic.partition_count)


def _assign(topic: ProducerTopic, batch: pa.RecordBatch, destination: Destination) -> int | npt.NDArray[np.int64]:
    """One partition when it is the same for all rows, else one for each."""
    if isinstance(destination, int):
        return destination
    if destination is None:
        if topic.partition_count == 1 or not _has_key(batch, topic.key_columns):
            return topic.next_partition()
        destination = partitions_of(batch, topic.key_columns, topic.partition_count).astype(np.int64)
        without_key = destination == NO_PARTITION
        if without_key.any():
            destination[without_key] = topic.next_partition()
    first = int(destination[0])
    return first if (destination == first).all() else destination


def _has_key(batch: pa.RecordBatch, key_columns: Sequence[str]) -> bool:
    """Whether any record has one. Asked first, since hashing a few records costs as much as a thousand."""
    indices = [batch.schema.get_field_index(name) for name in key_columns]
    return any(index < 0 or batch.column(index).null_count < batch.num_rows for index in indices)


def _encode_cut(
    topic: ProducerTopic,
    batch: pa.RecordBatch,
    partition: int,
    rows: Rows,
    *,
    compression: str | None,
    batch_bytes: int,
) -> Iterator[EncodedPart]:
    # A quarter is left for what encoding adds: padding of every buffer and the message's metadata.
    count = _even_rows(batch, batch_bytes, limit=topic.max_message_bytes * 3 // 4)
    if count >= batch.num_rows:
        yield from _encode_one(topic, batch, partition, rows, compression=compression)
        return
    for at in range(0, batch.num_rows, count):
        yield from _encode_one(topic, batch.slice(at, count), partition, rows[at : at + count], compression=compression)


def _encode_one(
    topic: ProducerTopic, batch: pa.RecordBatch, partition: int, rows: Rows, *, compression: str | None
) -> Iterator[EncodedPart]:
    encoded = encode_batch(batch, schema_id=topic.schema_id, compression=compression, event_time=topic.event_time)
    body = memoryview(encoded.body)
    size = len(body) if compression is None else counted_bytes(read_batch_message(body), body)
    if size <= topic.max_message_bytes:
        yield EncodedPart(partition, encoded, rows)
    elif batch.num_rows == 1:
        raise BrokerError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"one record of {topic.name!r} takes {size} bytes, max.message.bytes is {topic.max_message_bytes}",
        )
    else:
        half = batch.num_rows // 2
        yield from _encode_one(topic, batch.slice(0, half), partition, rows[:half], compression=compression)
        yield from _encode_one(topic, batch.slice(half), partition, rows[half:], compression=compression)


def under_newest_schema(encoded: EncodedBatch, topic: ProducerTopic) -> EncodedBatch:
    """The same records under the topic's newest schema; its place in the producer's sequence stays."""
    header = encoded.header
    old = next(schema for schema in topic.metadata.schemas if schema.schema_id == header.schema_id)
    records = decode_batch(header, encoded.body, parse_schema(old.message))
    return encode_batch(
        fit_table(records, topic.schema),
        schema_id=topic.schema_id,
        compression="lz4" if header.flags & Flag.LZ4 else "zstd" if header.flags & Flag.ZSTD else None,
        event_time=topic.event_time,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        first_sequence=header.first_sequence,
        transactional=bool(header.flags & Flag.TRANSACTIONAL),
    )


def check_partition(topic: ProducerTopic, partition: int) -> None:
    """Raises BrokerError UNKNOWN_TOPIC_OR_PARTITION unless the topic has ``partition``."""
    if not 0 <= partition < topic.partition_count:
        raise BrokerError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition {partition}: topic {topic.name!r} has {topic.partition_count} partitions",
        )
