"""Tests that aiokafka's and kafka-python's record codecs write the same bytes and read the same records."""

from __future__ import annotations

import importlib
import struct
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import aiokafka.record.default_records
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.kafka.records import decode, encode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.records.decode import decode_batch
from sparklog.kafka.records.encode import encode_batch
from tests.kafka.records.batches import record_lists
from tests.kafka.records.reference import Record
from tests.kafka.records.test_kafka_round_trip import records_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python reads its own files in an old way
    _kafka_python: Any = importlib.import_module("kafka.record.default_records")
OTHERS = [aiokafka.record.default_records, _kafka_python]
#: Neither library writes times before 1970 or larger than Java's clock ever shows.
TIMES = st.integers(0, 2**42)


def written(other: Any, records: Sequence[Record], *, codec: int = 0, **producer: Any) -> bytes:
    """Return the batch that a library's producer writes."""
    fields = {"is_transactional": 0, "producer_id": -1, "producer_epoch": -1, "base_sequence": -1} | producer
    builder = other.DefaultRecordBatchBuilder(magic=2, compression_type=codec, batch_size=1 << 30, **fields)
    for offset, record in enumerate(records):
        assert builder.append(offset, record.time_ms, record.key, record.value, list(record.headers)) is not None
    return bytes(builder.build())


@given(record_lists(), st.lists(TIMES, min_size=1), st.booleans(), st.sampled_from(OTHERS))
def test_batches_of_other_writers_are_decoded_and_encoded_without_change(
    drawn: list[Record], times: list[int], few: bool, other: Any
) -> None:
    records = [record._replace(time_ms=times[number % len(times)]) for number, record in enumerate(drawn)]
    data = written(other, records, is_transactional=1, producer_id=8, producer_epoch=2, base_sequence=4)
    (leader_epoch,) = struct.unpack_from(">i", data, 12)
    (view,) = read_batches(memoryview(data))
    limit = 10**9 if few else 0
    with patch.object(decode, "FEW_RECORDS", limit), patch.object(encode, "FEW_RECORDS", limit):
        found = decode_batch(view, max_bytes=1 << 30)
        assert records_of(found.rows) == records
        again = encode_batch(
            found.rows,
            base_offset=0,
            leader_epoch=leader_epoch,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            base_sequence=found.base_sequence,
            transactional=found.transactional,
        )
    assert b"".join(again) == data


@given(record_lists(), TIMES, st.booleans(), st.sampled_from(OTHERS), st.one_of(st.none(), TIMES))
def test_other_readers_find_the_records(
    drawn: list[Record], time_ms: int, few: bool, other: Any, append_time_ms: int | None
) -> None:
    records = [record._replace(time_ms=time_ms) for record in drawn]
    (view,) = read_batches(memoryview(written(other, records)))
    rows = decode_batch(view, max_bytes=1 << 30).rows
    with patch.object(encode, "FEW_RECORDS", 10**9 if few else 0):
        data = b"".join(encode_batch(rows, base_offset=77, leader_epoch=1, append_time_ms=append_time_ms))
    batch = other.DefaultRecordBatch(bytearray(data))
    assert batch.validate_crc()
    assert [(found.offset, found.timestamp, found.key, found.value, list(found.headers)) for found in batch] == [
        (
            77 + number,
            record.time_ms if append_time_ms is None else append_time_ms,
            record.key,
            record.value,
            list(record.headers),
        )
        for number, record in enumerate(records)
    ]


@pytest.mark.parametrize("codec", [1, 2, 3, 4], ids=["gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("count", [3, 5000])
def test_aiokafkas_compressed_batches_are_read(codec: int, count: int) -> None:
    records = [Record(None, b"value %d " % number * 5, (), number) for number in range(count)]
    data = written(aiokafka.record.default_records, records, codec=codec)
    (view,) = read_batches(memoryview(data))
    assert view.codec == codec, "the batch is compressed"
    assert records_of(decode_batch(view, max_bytes=1 << 20).rows) == records
