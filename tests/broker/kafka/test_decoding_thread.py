"""Tests of which produced batches the event loop decodes itself, and which it leaves to a thread."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from unittest.mock import patch

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sparklog.broker.kafka import produce
from sparklog.broker.kafka.produce import _decoded_on_loop, _stored
from sparklog.broker.kafka.stored_batches import LOOP_BYTES
from sparklog.broker.replication.partition import AppendRules
from sparklog.errors import ErrorCode
from sparklog.kafka.records.batch_view import BatchView, read_batches
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.kafka.records.batches import produced
from tests.kafka.records.reference import Record, write_batch, write_record

RULES = AppendRules(DEFAULT_SCHEMA, 0, 16 * 1024 * 1024, "timestamp")
COMPRESS: dict[int, Callable[[bytes], bytes]] = {
    0: bytes,
    1: gzip.compress,
    2: lambda data: pa.compress(data, "snappy", asbytes=True),
    3: lambda data: pa.compress(data, "lz4", asbytes=True),
    4: lambda data: pa.compress(data, "zstd", asbytes=True),
}


def batch(size: int, codec: int, *, cut: int = 0) -> BatchView:
    """Return a batch with one record of about ``size`` bytes. ``cut`` is the number of bytes that its end lacks."""
    record = Record(b"k", b"value" * (size // 5), (), 1000)
    data = write_record(record, time_delta=0, offset_delta=0)
    data = COMPRESS[codec](data[: len(data) - cut])
    return read_batches(memoryview(write_batch(produced([record], attributes=codec), data)))[0]


@pytest.mark.parametrize("codec", COMPRESS)
def test_a_thread_decodes_large_batches(codec: int) -> None:
    assert len(batch(2 * LOOP_BYTES, codec).records) < LOOP_BYTES // 10 or codec == 0
    for size in (LOOP_BYTES + 1, 3 * LOOP_BYTES):
        large = batch(size, codec)
        assert _decoded_on_loop(large, RULES) is None
        assert _stored(large, RULES).header.record_count == 1


@pytest.mark.parametrize("codec", COMPRESS)
def test_the_event_loop_decodes_small_batches(codec: int) -> None:
    for size in (10, LOOP_BYTES - 100):
        found = _decoded_on_loop(batch(size, codec), RULES)
        assert found is not None and found.count == 1


@pytest.mark.parametrize("codec", COMPRESS)
def test_json_documents_have_a_lower_limit(codec: int) -> None:
    rules = replace(RULES, kafka_json=True)
    assert _decoded_on_loop(batch(1000, codec), rules) is not None
    assert _decoded_on_loop(batch(100_000, codec), rules) is None


@pytest.mark.parametrize("codec", COMPRESS)
def test_the_topic_refuses_what_is_above_its_own_limit(codec: int) -> None:
    with pytest.raises(InvalidRecords) as refused:
        _decoded_on_loop(batch(5000, codec), replace(RULES, max_message_bytes=4096))
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("codec", COMPRESS)
def test_invalid_records_are_refused(codec: int) -> None:
    invalid = batch(1000, codec, cut=10)
    with pytest.raises(InvalidRecords) as refused:
        if _decoded_on_loop(invalid, RULES) is None:
            _stored(invalid, RULES)
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_the_limit_of_the_event_loop_refuses_no_valid_batch() -> None:
    """Check many zstd frames, whose number of blocks has a limit that depends on the limit of the bytes."""
    record = Record(b"k", b"v" * 160_000, (), 1000)
    data = write_record(record, time_delta=0, offset_delta=0)
    frames = b"".join(COMPRESS[4](data[at : at + 64]) for at in range(0, len(data), 64))
    (view,) = read_batches(memoryview(write_batch(produced([record], attributes=4), frames)))
    rules = replace(RULES, max_message_bytes=1024 * 1024 * 1024)
    with patch.object(produce, "LOOP_BYTES", 64 * 1024):
        assert _decoded_on_loop(view, rules) is None
    assert _stored(view, rules).header.record_count == 1
