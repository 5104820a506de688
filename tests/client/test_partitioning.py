"""Tests of tables that become batches of one partition: no row is lost or reordered, and keys choose Kafka's
partitions."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.client.producer.data_frames import to_table
from sparklog.client.producer.partitioning import (
    EncodedPart,
    ProducerTopic,
    _encode_one,
    encode_parts,
    encode_small_parts,
    fit_to_topic,
    pieces,
    split_destinations,
)
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicSchema
from sparklog.protocol.messages import PartitionMetadata, TopicMetadata
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.partitioner import murmur2
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.record.validate import validate_batch

TYPED = pa.schema([("carrier", pa.string()), ("delay", pa.float64())])


def topic(
    schema: pa.Schema = DEFAULT_SCHEMA, *, partitions: int = 4, key: tuple[str, ...] = (), **config: str
) -> ProducerTopic:
    parts = tuple(PartitionMetadata(index, 0, 0, (0,), (0,)) for index in range(partitions))
    event_time = "timestamp" if schema is DEFAULT_SCHEMA else None
    settings = {name.replace("_", "."): value for name, value in config.items()}
    return ProducerTopic(
        TopicMetadata(0, "t", "id", parts, (TopicSchema(0, schema_message(schema)),), key, event_time, settings)
    )


def encode(known: ProducerTopic, table: pa.Table, *, batch_bytes: int = 1 << 20, **where: int) -> list[EncodedPart]:
    table, destination = split_destinations(known, table, where.get("partition"))
    fitted = fit_to_topic(known, table, 1_000)
    parts: list[EncodedPart] = []
    for piece, target in pieces(known, fitted, destination, batch_bytes=batch_bytes):
        parts += encode_parts(known, piece, target, compression=None, batch_bytes=batch_bytes)
    return parts


def rows(known: ProducerTopic, part: EncodedPart) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = decode_batch(part.encoded.header, part.encoded.body, known.schema).to_pylist()
    return found


@settings(max_examples=50, deadline=None)
@given(
    keys=st.lists(st.one_of(st.none(), st.binary(max_size=6)), min_size=1, max_size=60),
    partitions=st.integers(1, 7),
    batch_bytes=st.sampled_from([200, 2000, 1 << 20]),
)
def test_rows_keep_their_order_within_a_partition(keys: list[bytes | None], partitions: int, batch_bytes: int) -> None:
    known = topic(partitions=partitions)
    values = [b"%d" % index for index in range(len(keys))]
    parts = encode(known, pa.table({"key": pa.array(keys, pa.binary()), "value": values}), batch_bytes=batch_bytes)
    by_partition: dict[int, list[dict[str, Any]]] = {}
    for part in parts:
        by_partition.setdefault(part.partition, []).extend(rows(known, part))
    seen = [row["value"] for found in by_partition.values() for row in found]
    assert sorted(seen) == sorted(values)
    for partition, found in by_partition.items():
        order = [int(row["value"]) for row in found]
        assert order == sorted(order)
        for row in found:
            if row["key"] is not None:
                assert (murmur2(row["key"]) & 0x7FFFFFFF) % partitions == partition


def test_row_numbers_give_the_partition_of_each_row() -> None:
    known = topic()
    batch = fit_to_topic(known, pa.table({"key": [b"a", b"b", b"a", b"c"], "value": [b"0", b"1", b"2", b"3"]}), 0)
    for part in encode_parts(known, batch.to_batches()[0], None, compression=None, batch_bytes=1 << 20):
        assert [b"%d" % index for index in part.rows] == [row["value"] for row in rows(known, part)]


def test_typed_topics_hash_their_key_column() -> None:
    known = topic(TYPED, key=("carrier",))
    parts = encode(known, pa.table({"delay": [1.0, 2.0, 3.0], "carrier": ["UA", "AA", "UA"]}))
    for part in parts:
        for row in rows(known, part):
            assert (murmur2(str(row["carrier"]).encode()) & 0x7FFFFFFF) % 4 == part.partition


def test_without_keys_partitions_take_turns() -> None:
    known = topic(TYPED, partitions=3)
    seen = [encode(known, pa.table({"carrier": ["x"]}))[0].partition for _ in range(6)]
    assert sorted(seen[:3]) == [0, 1, 2]
    assert seen[:3] == seen[3:]


def test_a_partition_is_given_by_argument_or_column() -> None:
    known = topic(TYPED)
    assert {part.partition for part in encode(known, pa.table({"delay": [1.0, 2.0]}), partition=3)} == {3}
    parts = encode(known, pa.table({"delay": [1.0, 2.0, 3.0], "_partition": [2, 0, 2]}))
    assert {part.partition: [row["delay"] for row in rows(known, part)] for part in parts} == {0: [2.0], 2: [1.0, 3.0]}


@pytest.mark.parametrize(
    ("column", "code"),
    [
        ([0, 9], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([-1, 0], ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ([None, 0], ErrorCode.INVALID_RECORD),
        (["a", "b"], ErrorCode.SCHEMA_MISMATCH),
    ],
)
def test_bad_partition_columns_are_refused(column: list[object], code: ErrorCode) -> None:
    with pytest.raises(BrokerError) as caught:
        encode(topic(TYPED), pa.table({"delay": [1.0, 2.0], "_partition": column}))
    assert caught.value.code == code


def test_a_missing_timestamp_is_the_present_and_a_given_one_stays() -> None:
    known = topic()
    (part,) = encode(known, pa.table({"value": ["a"]}), partition=0)
    assert (part.encoded.header.min_timestamp, part.encoded.header.max_timestamp) == (1_000, 1_000)
    times = pa.array([5, None], pa.timestamp("us", "UTC"))
    (part,) = encode(known, pa.table({"value": ["a", "b"], "timestamp": times}), partition=0)
    assert (part.encoded.header.min_timestamp, part.encoded.header.max_timestamp) == (5, 1_000)


def test_batches_stay_below_the_topics_limit() -> None:
    known = topic(max_message_bytes="4096")
    values = [b"x" * (50 if index % 100 else 2000) for index in range(1000)]
    parts = encode(known, pa.table({"value": values}), partition=0)
    assert max(part.encoded.header.length for part in parts) <= 4096
    assert [row["value"] for part in parts for row in rows(known, part)] == values


def test_a_record_over_the_limit_is_refused() -> None:
    with pytest.raises(BrokerError, match=r"one record of 't' has \d+ bytes; max.message.bytes is 4096") as caught:
        encode(topic(max_message_bytes="4096"), pa.table({"value": [b"x" * 5000]}))
    assert caught.value.code == ErrorCode.MESSAGE_TOO_LARGE


def one_record(value: bytes) -> pa.RecordBatch:
    row: dict[str, object] = {"key": None, "value": value, "headers": [], "timestamp": 0}
    return pa.RecordBatch.from_pylist([row], DEFAULT_SCHEMA)


NOISE = random.Random(1).randbytes(5000)
MANY = pa.RecordBatch.from_pylist(
    [{"carrier": f"{i % 7}" * 9 if i % 3 else None, "delay": None if i % 2 else i / 7} for i in range(400)], TYPED
)


@pytest.mark.parametrize("compression", [None, "none", "lz4", "zstd"])
@pytest.mark.parametrize(
    "batch",
    [one_record(NOISE), one_record(b"x" * 5000), MANY, MANY.slice(111, 200)],
    ids=["one record that cannot be compressed", "one that can", "many", "a slice of them"],
)
def test_producer_and_leader_count_the_same_bytes(batch: pa.RecordBatch, compression: str | None) -> None:
    """Producer and leader agree to the byte: the producer sends no batch that is a byte too large for the leader,
    and sends the largest allowed one."""
    event_time = "timestamp" if batch.schema is DEFAULT_SCHEMA else None
    encoded = encode_batch(batch, schema_id=0, compression=compression, event_time=event_time)

    def sent(limit: int) -> bool:
        known = topic(batch.schema, max_message_bytes=str(limit))
        try:
            return len(list(_encode_one(known, batch, 0, np.arange(len(batch)), compression=compression))) == 1
        except BrokerError as error:
            assert error.code == ErrorCode.MESSAGE_TOO_LARGE and len(batch) == 1
            return False

    def taken(limit: int) -> bool:
        try:
            validate_batch(
                encoded.header,
                encoded.body,
                schema=batch.schema,
                schema_id=0,
                max_message_bytes=limit,
                event_time=event_time,
            )
        except BrokerError as error:
            assert error.code == ErrorCode.MESSAGE_TOO_LARGE
            return False
        return True

    edge = bisect_left(range(1 << 14), True, lo=1024, key=taken)
    assert not taken(edge - 1) and taken(edge)
    assert [sent(limit) for limit in range(edge - 9, edge + 9)] == [
        limit >= edge for limit in range(edge - 9, edge + 9)
    ]


def test_columns_that_do_not_fit_are_named() -> None:
    with pytest.raises(BrokerError, match="'speed'") as caught:
        encode(topic(TYPED), pa.table({"speed": [1]}))
    assert caught.value.code == ErrorCode.SCHEMA_MISMATCH


def test_frames_of_all_kinds_become_the_same_table() -> None:
    expected = pa.table({"carrier": ["UA", "AA"], "delay": [1.0, None]}).cast(TYPED)
    frame = pd.DataFrame({"carrier": ["UA", "AA"], "delay": [1.0, None]}, index=[7, 9])
    known = topic(TYPED)
    for data in (
        expected,
        expected.to_batches()[0],
        expected.to_reader(),
        frame,
        frame.astype({"carrier": "category"}),
        pl.DataFrame({"carrier": ["UA", "AA"], "delay": [1.0, None]}),
        pl.DataFrame({"carrier": ["UA", "AA"], "delay": [1.0, None]}).with_columns(
            pl.col("carrier").cast(pl.Categorical)
        ),
    ):
        assert fit_to_topic(known, to_table(data, TYPED), 0).equals(expected), type(data)


def test_an_input_that_is_not_a_table_is_named() -> None:
    with pytest.raises(TypeError, match="list found"):
        to_table([1, 2], TYPED)


def test_an_empty_table_makes_no_batch() -> None:
    assert encode(topic(TYPED), pa.table({"delay": pa.array([], pa.float64())})) == []


def test_a_table_in_many_chunks_does_not_make_many_batches() -> None:
    known = topic(TYPED, partitions=1)
    table = pa.concat_tables([pa.table({"delay": [float(index)]}) for index in range(500)])
    parts = encode(known, table)
    assert len(parts) == 1
    assert [row["delay"] for row in rows(known, parts[0])] == list(np.arange(500.0))


@pytest.mark.parametrize(("rows_given", "batches"), [(1100, 1), (1400, 1), (1600, 2), (2900, 3)])
def test_a_table_is_cut_into_batches_of_equal_size(rows_given: int, batches: int) -> None:
    """A thousand rows are about a batch. The remainder is spread over the others."""
    known = topic(partitions=7)
    table = pa.table({"value": [b"x" * 100] * rows_given})
    size = int(fit_to_topic(known, table, 0).slice(0, 1000).nbytes)
    parts = encode(known, table, batch_bytes=size)
    counts = [part.encoded.header.record_count for part in parts]
    assert len(counts) == batches and sum(counts) == rows_given and max(counts) - min(counts) < batches


def test_omitted_columns_cost_only_their_rows_share() -> None:
    known = topic(partitions=1)
    table = pa.table({"value": [b"x" * 10] * 100_000})
    parts = encode(known, table, batch_bytes=64 * 1024)
    assert len(parts) > 20
    assert sum(part.encoded.header.length for part in parts) < 6_000_000, (
        "about 40 bytes a record in addition to headers"
    )


@settings(max_examples=100, deadline=None)
@given(
    keys=st.lists(st.none() | st.binary(max_size=9) | st.text(max_size=4), min_size=1, max_size=16),
    partitions=st.integers(1, 5),
    destination=st.sampled_from([None, 0]),
)
def test_few_records_choose_the_same_partitions_as_many(
    keys: list[bytes | str | None], partitions: int, destination: int | None
) -> None:
    known = topic(partitions=partitions)
    records = [(key, b"%d" % row, None, row) for row, key in enumerate(keys)]
    columns = [
        pa.array(found, field.type) for found, field in zip(zip(*records, strict=True), DEFAULT_SCHEMA, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)
    few = encode_small_parts(known, records, destination, size=100, batch_bytes=1000)
    assert few is not None
    if destination is None:  # the partition in turn depends on the caller
        keyed = [key is not None for key in keys]
        places = {part.partition: [row for row in part.rows if keyed[row]] for part in few}
        parts = encode_parts(known, batch, destination, compression=None, batch_bytes=1000)
        wanted = {part.partition: [row for row in part.rows if keyed[row]] for part in parts}
        assert {at: found for at, found in places.items() if found} == {
            at: found for at, found in wanted.items() if found
        }
        assert len({part.partition for part in few for row in part.rows if not keyed[row]}) <= 1
    for part in few:
        assert [row["value"] for row in rows(known, part)] == [b"%d" % row for row in part.rows]
    assert sorted(row for part in few for row in part.rows) == list(range(len(keys)))


def test_records_unfit_for_the_small_path_go_to_arrow() -> None:
    known, record = topic(), (None, b"v", None, 1)
    assert encode_small_parts(known, [record], 0, size=1, batch_bytes=100) is not None
    assert encode_small_parts(known, [record] * 256, 0, size=100, batch_bytes=100) is not None
    assert encode_small_parts(known, [record] * 257, 0, size=100, batch_bytes=100) is None
    keyed = (b"k", b"v", None, 1)
    assert encode_small_parts(known, [keyed] * 16, None, size=100, batch_bytes=100) is not None
    assert encode_small_parts(known, [keyed] * 17, None, size=100, batch_bytes=100) is None
    assert encode_small_parts(known, [record], 0, size=101, batch_bytes=100) is None
    assert encode_small_parts(topic(TYPED), [record], 0, size=1, batch_bytes=100) is None
    assert (
        encode_small_parts(known, [(None, b"v", [{"key": "k", "value": b"v"}], 1)], 0, size=1, batch_bytes=100) is None
    )
    large = (None, b"v" * 1000, None, 1)
    assert encode_small_parts(topic(max_message_bytes="1400"), [large], 0, size=1000, batch_bytes=2000) is None
