"""The conversion of a producer's tables into encoded batches of one partition each.

The caller or the record's key determines the partition of a record. Without either, the partitions take turns. All
functions are pure, except that each topic counts the turns. Arrow's ``take`` groups the rows after a stable sort by
partition, so the rows of a partition keep their order, and no Python loop visits a row. Memory is bounded: the caller
splits a table into pieces, and each piece is encoded as batches of about the wanted size, none above the topic's limit.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
from sparklog.record.small_batch_encoder import SmallBatchRecord, encode_small_batch

#: The column of a table that names the partition of each row. The column is not stored.
PARTITION_COLUMN = "_partition"
#: The maximum size of a piece of a table before it is grouped by partition.
_MAX_PIECE_BYTES = 32 * 1024 * 1024
#: The number of records up to which encoding without Arrow is faster, above all on a cold cache.
_SMALL_RECORDS = 256
#: The number of keys up to which it is faster to hash them one by one.
_SMALL_KEYS = 16

Rows: TypeAlias = "npt.NDArray[np.int64]"
#: An int: one partition for all rows. An array: the partition of each row. None: by key, or in turn without a key.
Destination: TypeAlias = "int | npt.NDArray[np.int64] | None"


class EncodedPart(NamedTuple):
    """An encoded batch of one partition. Row ``i`` of the batch is row ``rows[i]`` of the input."""

    partition: int
    encoded: EncodedBatch
    rows: Rows | Sequence[int]


class ProducerTopic:
    """A topic as a producer needs it: its id, partitions, schema, key columns and size limit.

    The object is immutable, except for the counter of ``next_partition``, and thread-safe.
    """

    def __init__(self, metadata: TopicMetadata) -> None:
        """Parse the metadata. Raises BrokerError if this client cannot read the topic's newest schema."""
        latest = metadata.schemas[-1]
        self.metadata = metadata
        self.name = metadata.name
        self.topic_id = metadata.topic_id
        self.partition_count = len(metadata.partitions)
        self.schema_id = latest.schema_id
        self.schema = parse_schema(latest.message)
        self.is_default = self.schema.equals(DEFAULT_SCHEMA)
        self.key_columns = tuple(metadata.key_columns) or (DEFAULT_KEY_COLUMNS if self.is_default else ())
        self.event_time = metadata.event_time  # the broker compares the header's times with exactly this column
        try:
            self.max_message_bytes = topic_config(metadata.config).max_message_bytes
        except ConfigError:  # settings of a newer broker: the broker validates sizes anyway
            self.max_message_bytes = topic_config({}).max_message_bytes
        #: Whether small batches may be encoded without Arrow.
        self.allows_small_batches = self.is_default and self.event_time in {None, DEFAULT_EVENT_TIME}
        self.small_batch_max_bytes = self.max_message_bytes * 3 // 4
        #: The column names, cached because every dict row needs them and pyarrow builds them again at each access.
        self.column_names = frozenset(self.schema.names)
        #: The conversion of dict rows to columns.
        self.rows = RowColumns(self.schema)
        self._turns = itertools.count(random.randrange(1 << 16))

    def next_partition(self) -> int:
        """Return a partition for rows without a key. The calls return all partitions in turn, from a random start."""
        return next(self._turns) % self.partition_count

    def continued_by(self, metadata: TopicMetadata) -> ProducerTopic:
        """Return a new object for newer ``metadata``, or this object if nothing that a producer uses has changed."""
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
    """Return ``table`` with exactly the topic's columns.

    In a topic with Kafka's columns, ``now_us`` replaces missing timestamps.

    Raises:
        BrokerError: SCHEMA_MISMATCH; the message names the columns that do not fit.
    """
    fitted = fit_table(table, topic.schema)
    if topic.is_default:
        index = topic.schema.get_field_index(DEFAULT_EVENT_TIME)
        times = fitted.column(index)
        if times.null_count:
            field = topic.schema.field(index)
            fitted = fitted.set_column(index, field, pc.fill_null(times, scalar_of(now_us, field.type)))
    return fitted


def split_destinations(
    topic: ProducerTopic, table: pa.Table, partition: int | None
) -> tuple[pa.Table, npt.NDArray[np.int64] | int | None]:
    """Return the table without its ``_partition`` column, and the partitions that the caller chose for the rows.

    The partitions are ``partition`` for all rows, or the values of the column. The partitions are None if the caller
    chose none. If the topic itself has a column ``_partition``, the column is data and remains in the table.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION for a partition that the topic does not have, INVALID_RECORD for nulls.
    """
    if partition is not None:
        check_partition(topic, partition)
        return table, partition
    index = table.schema.get_field_index(PARTITION_COLUMN)
    if index < 0 or topic.schema.get_field_index(PARTITION_COLUMN) >= 0:
        return table, None
    column = table.column(index)
    if column.null_count:
        raise BrokerError(
            ErrorCode.INVALID_RECORD, f"column {PARTITION_COLUMN!r} has {column.null_count} nulls; expected none"
        )
    if not pa.types.is_integer(column.type):
        raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"column {PARTITION_COLUMN!r} is {column.type}; expected integers")
    partitions = np.asarray(column.to_numpy(), dtype=np.int64)
    if len(partitions):
        check_partition(topic, int(partitions.min()))
        check_partition(topic, int(partitions.max()))
    return table.remove_column(index), partitions


def pieces(
    topic: ProducerTopic, table: pa.Table, destination: Destination, *, batch_bytes: int
) -> Iterator[tuple[pa.RecordBatch, Destination]]:
    """Yield the table in pieces, to be encoded one after another, each with the ``Destination`` of its rows.

    A piece has about ``batch_bytes``. If its rows go to several partitions, it has about ``batch_bytes`` for each
    partition of the topic, and in total about ``_MAX_PIECE_BYTES`` or less.
    """
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
    """Return the number of rows per piece, for pieces of equal size: about ``wanted`` and at most ``limit`` bytes.

    A piece may exceed ``wanted`` by half. Otherwise there could be a small last piece, which would cost as much as a
    large one and use a partition's turn.
    """
    size = int(rows.nbytes)
    count = max(1, round(size / wanted), -(-size // limit))
    return -(-int(rows.num_rows) // count)


# --- the partition of each row ---


def encode_parts(
    topic: ProducerTopic,
    batch: pa.RecordBatch,
    destination: Destination,
    *,
    compression: str | None,
    batch_bytes: int,
    newest_limit: Callable[[], int] | None = None,
) -> Iterator[EncodedPart]:
    """Encode the rows of ``batch``, which has the topic's schema. Yield encoded batches of one partition each.

    ``newest_limit`` asks for the topic's current limit in bytes, before a record over the known limit is refused.

    Raises:
        BrokerError: MESSAGE_TOO_LARGE for a single record over the topic's limit.
    """
    assigned = _assign(topic, batch, destination)
    if isinstance(assigned, int):
        rows = np.arange(batch.num_rows, dtype=np.int64)
        yield from _encode_cut(
            topic,
            batch,
            assigned,
            rows,
            compression=compression,
            batch_bytes=batch_bytes,
            newest_limit=newest_limit,
        )
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
            newest_limit=newest_limit,
        )


def encode_small_parts(
    topic: ProducerTopic, records: Sequence[SmallBatchRecord], destination: int | None, *, size: int, batch_bytes: int
) -> list[EncodedPart] | None:
    """Encode a few records of a topic with Kafka's columns, without compression. Return the batches by partition.

    The result is the same as that of ``encode_parts``, but takes less time. Return None if only ``encode_parts`` can
    encode the records: there are too many or they are too large, or a record has headers. ``size`` is the approximate
    size of all records in bytes.
    """
    if (
        len(records) > _SMALL_RECORDS
        or not topic.allows_small_batches
        or size > batch_bytes
        or size > topic.small_batch_max_bytes
    ):
        return None
    for record in records:
        if record[2]:  # headers
            return None
    assigned = _assign_small(topic, records, destination)
    if assigned is None:
        return None
    parts = []
    for partition, rows in sorted(assigned.items()):
        chosen = records if len(rows) == len(records) else [records[row] for row in rows]
        encoded = encode_small_batch(chosen, schema_id=topic.schema_id, timed=topic.event_time is not None)
        if encoded.header.length > topic.max_message_bytes:
            return None
        parts.append(EncodedPart(partition, encoded, rows))
    return parts


def _assign_small(
    topic: ProducerTopic, records: Sequence[SmallBatchRecord], destination: int | None
) -> Mapping[int, Sequence[int]] | None:
    """Return the indexes of the records by partition, by the rules of ``_assign``.

    Return None if there are too many keys to hash one by one.
    """
    every = range(len(records))
    if destination is not None:
        return {destination: every}
    keys = [record[0] for record in records]
    if topic.partition_count == 1 or keys.count(None) == len(keys):
        return {topic.next_partition(): every}
    if len(keys) > _SMALL_KEYS:
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


def partition_of_record(topic: ProducerTopic, key: bytes | str | None) -> int:
    """Return the partition of a single record, or -1 if it has no key and goes to the next partition in turn."""
    if topic.partition_count == 1:
        return 0
    if key is None:
        return -1
    return partition_for_key(key.encode() if isinstance(key, str) else key, topic.partition_count)


def _assign(topic: ProducerTopic, batch: pa.RecordBatch, destination: Destination) -> int | npt.NDArray[np.int64]:
    """Return one partition for all rows, or an array with the partition of each row."""
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
    """Return whether any record has a key.

    Without a key, no hashing is needed. To hash a few keys costs as much as to hash a thousand.
    """
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
    newest_limit: Callable[[], int] | None,
) -> Iterator[EncodedPart]:
    # Encoding adds the padding of each buffer and the message's metadata. A quarter of the limit is left for them.
    count = _even_rows(batch, batch_bytes, limit=topic.max_message_bytes * 3 // 4)
    encode = partial(_encode_one, topic, compression=compression, newest_limit=newest_limit)
    if count >= batch.num_rows:
        yield from encode(batch, partition, rows)
        return
    for at in range(0, batch.num_rows, count):
        yield from encode(batch.slice(at, count), partition, rows[at : at + count])


def _encode_one(
    topic: ProducerTopic,
    batch: pa.RecordBatch,
    partition: int,
    rows: Rows,
    *,
    compression: str | None,
    newest_limit: Callable[[], int] | None = None,
) -> Iterator[EncodedPart]:
    encoded = encode_batch(batch, schema_id=topic.schema_id, compression=compression, event_time=topic.event_time)
    body = memoryview(encoded.body)
    size = len(body) if compression is None else counted_bytes(read_batch_message(body), body)
    if size <= topic.max_message_bytes:
        yield EncodedPart(partition, encoded, rows)
    elif batch.num_rows == 1:
        limit = topic.max_message_bytes if newest_limit is None else newest_limit()
        if size > limit:
            raise BrokerError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"one record of {topic.name!r} has {size} bytes; max.message.bytes is {limit}",
            )
        yield EncodedPart(partition, encoded, rows)
    else:
        half = batch.num_rows // 2
        encode = partial(_encode_one, topic, compression=compression, newest_limit=newest_limit)
        yield from encode(batch.slice(0, half), partition, rows[:half])
        yield from encode(batch.slice(half), partition, rows[half:])


def under_newest_schema(encoded: EncodedBatch, topic: ProducerTopic) -> EncodedBatch:
    """Encode a batch again under the topic's newest schema, with the same producer id, epoch and sequence."""
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
    """Raise BrokerError UNKNOWN_TOPIC_OR_PARTITION unless the topic has ``partition``."""
    if not 0 <= partition < topic.partition_count:
        raise BrokerError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"partition {partition}: topic {topic.name!r} has {topic.partition_count} partitions",
        )
