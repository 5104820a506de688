"""Tests that a batch with a fault is refused with Kafka's error code, and that the error names the records."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from sparklog.errors import ErrorCode
from sparklog.kafka.records import decode
from sparklog.kafka.records.batch_view import read_batches
from sparklog.kafka.records.decode import decode_batch
from sparklog.kafka.records.invalid import MOST_RECORD_ERRORS, InvalidRecords
from tests.kafka.records.batches import GREATEST_MS, LEAST_MS, produced
from tests.kafka.records.reference import Batch, Record, sized, write_batch, write_record, zigzag

RECORDS = [Record(b"k%d" % n, b"value", (), 1000 + n) for n in range(40)]


@pytest.fixture(params=["few", "many"], autouse=True)
def decoder(request: pytest.FixtureRequest) -> Any:
    with patch.object(decode, "FEW_RECORDS", 10**9 if request.param == "few" else 0):
        yield


def refusal(batch: Batch, records: bytes | None = None, *, max_bytes: int = 1 << 20, keyed: bool = False) -> Any:
    (view,) = read_batches(memoryview(write_batch(batch, records)))
    with pytest.raises(InvalidRecords) as refused:
        decode_batch(view, max_bytes=max_bytes, keyed=keyed)
    return refused.value


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"attributes": 0x08}, ErrorCode.INVALID_TIMESTAMP),
        ({"attributes": 0x20}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x10}, ErrorCode.INVALID_RECORD),
        ({"attributes": 0x05}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"last_offset_delta": 40}, ErrorCode.INVALID_RECORD),
        ({"last_offset_delta": -1, "records": (), "offsets": ()}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "producer_epoch": 0}, ErrorCode.INVALID_RECORD),
        ({"producer_id": 5, "base_sequence": 0}, ErrorCode.INVALID_RECORD),
    ],
)
def test_a_header_that_a_producer_cannot_send_is_refused(changes: dict[str, Any], code: ErrorCode) -> None:
    assert refusal(produced(RECORDS)._replace(**changes)).code is code


def test_more_records_than_bytes_are_refused() -> None:
    batch = produced(RECORDS * 1000)
    error = refusal(batch, write_record(RECORDS[0], time_delta=0, offset_delta=0))
    assert error.code is ErrorCode.INVALID_RECORD and "40000 records declared" in error.detail


def test_records_above_the_limit_are_refused() -> None:
    assert refusal(produced(RECORDS), max_bytes=100).code is ErrorCode.MESSAGE_TOO_LARGE


def test_times_outside_microseconds_name_their_records() -> None:
    records = list(RECORDS)
    records[3] = records[3]._replace(time_ms=GREATEST_MS + 1)
    records[7] = records[7]._replace(time_ms=LEAST_MS - 1)
    error = refusal(produced(records))
    assert error.code is ErrorCode.INVALID_TIMESTAMP
    assert [record.batch_index for record in error.record_errors] == [3, 7]


@pytest.mark.parametrize("base", [2**63 - 1, -(2**63)])
def test_times_of_more_than_64_bits_are_refused(base: int) -> None:
    batch = produced(RECORDS, base_timestamp=base)
    data = b"".join(
        write_record(record, time_delta=n if base > 0 else -n, offset_delta=n) for n, record in enumerate(RECORDS)
    )
    error = refusal(batch, data)
    assert error.code is ErrorCode.INVALID_TIMESTAMP and len(error.record_errors) == MOST_RECORD_ERRORS


def test_records_without_key_are_named_in_a_compacted_topic() -> None:
    records = list(RECORDS)
    records[5] = records[5]._replace(key=None)
    error = refusal(produced(records), keyed=True)
    assert error.code is ErrorCode.INVALID_RECORD
    assert [record.batch_index for record in error.record_errors] == [5]


def body(*, time: bytes = zigzag(0), offset: int, key: bytes = sized(b"k"), rest: bytes = sized(b"v") + b"\0") -> bytes:
    content = b"\0" + time + zigzag(offset) + key + rest
    return zigzag(len(content)) + content


@pytest.mark.parametrize(
    "bad",
    [
        {"offset": 8},
        {"time": b"\xff" * 9 + b"\x02"},
        {"time": b"\x80" * 10 + b"\x00"},
        {"key": zigzag(-2)},
        {"key": zigzag(2**31 - 1)},
        {"key": b"\xff" * 4 + b"\x1f"},
        {"key": b"\x80" * 5 + b"\x00"},
        {"rest": zigzag(-3) + b"\0"},
        {"rest": zigzag(100) + b"v\0"},
        {"rest": sized(b"v") + b"\0\0"},
        {"rest": sized(b"v")},
        {"rest": sized(b"v") + zigzag(-1)},
        {"rest": sized(b"v") + zigzag(1)},
        {"rest": sized(b"v") + zigzag(2**31 - 1)},
        {"rest": sized(b"v") + zigzag(1) + sized(None) + sized(b"")},
        {"rest": sized(b"v") + zigzag(1) + sized(b"\xff") + sized(b"")},
        {"rest": sized(b"v") + zigzag(1) + sized(b"\xed\xa0\x80") + sized(b"")},
        {"rest": sized(b"v") + zigzag(1) + sized(b"h") + zigzag(-2)},
        {"rest": sized(b"v") + zigzag(1) + sized(b"h") + zigzag(50) + b"x"},
        {"rest": sized(b"v") + zigzag(1) + zigzag(50) + b"x"},
    ],
    ids=lambda bad: next(iter(bad)) + next(iter(bad.values())).hex() if "offset" not in bad else "offset",
)
@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_broken_record_is_named(bad: dict[str, Any], place: int) -> None:
    parts = [body(offset=n) for n in range(40)]
    parts[place] = body(**({"offset": place} | bad))
    error = refusal(produced(RECORDS), b"".join(parts))
    assert error.code is ErrorCode.INVALID_RECORD
    assert [record.batch_index for record in error.record_errors] == [place]


def test_bytes_after_the_records_are_refused() -> None:
    data = b"".join(body(offset=n) for n in range(40))
    assert refusal(produced(RECORDS), data + b"\0").code is ErrorCode.INVALID_RECORD
    assert refusal(produced(RECORDS), data[:-1]).code is ErrorCode.INVALID_RECORD


def test_overlong_varints_of_allowed_width_are_read() -> None:
    data = b"".join(body(offset=n, time=b"\x82\x80\x80\x00", key=b"\x82\x00k") for n in range(40))
    (view,) = read_batches(memoryview(write_batch(produced(RECORDS), data)))
    rows = decode_batch(view, max_bytes=1 << 20).rows
    assert rows.column(0).to_pylist() == [b"k"] * 40


def test_records_with_an_overlong_zero_of_headers_have_none() -> None:
    data = b"".join(body(offset=n, rest=sized(b"v") + b"\x80\x00") for n in range(40))
    (view,) = read_batches(memoryview(write_batch(produced(RECORDS), data)))
    assert not any(decode_batch(view, max_bytes=1 << 20).rows.column(2).to_pylist())


def test_a_record_with_very_many_headers_is_read() -> None:
    headers = (("h", b"v"),) * 4096
    records = [*RECORDS, Record(None, b"v", headers, 5)]
    (view,) = read_batches(memoryview(write_batch(produced(records))))
    found = decode_batch(view, max_bytes=1 << 20).rows.column(2)
    assert len(found.flatten()) == 4096 and len(found[40]) == 4096


def test_a_record_with_too_many_headers_is_refused() -> None:
    count = 4097
    bad = body(offset=1, rest=sized(b"v") + zigzag(count) + b"\0\1" * count)
    error = refusal(produced(RECORDS[:2]), body(offset=0) + bad)
    assert error.code is ErrorCode.INVALID_RECORD
    assert [record.batch_index for record in error.record_errors] == [1]


def headed(records: int, headers: int, value: bytes = b"v") -> bytes:
    """Return records with empty headers, of two bytes each."""
    rest = sized(value) + zigzag(headers) + b"\0\1" * headers
    return b"".join(body(offset=number, rest=rest) for number in range(records))


def test_a_batch_with_too_many_headers_is_refused() -> None:
    records = headed(40, 1000)
    error = refusal(produced(RECORDS), records)
    assert error.code is ErrorCode.INVALID_RECORD
    assert f"40000 headers found in {len(records)} bytes" in error.detail and not error.record_errors


def test_larger_records_may_have_more_headers() -> None:
    (view,) = read_batches(memoryview(write_batch(produced(RECORDS), headed(40, 1000, b"v" * 5000))))
    found = decode_batch(view, max_bytes=1 << 20).rows.column(2)
    assert len(found) == 40 and {len(headers) for headers in found} == {1000}
