"""Tests of the key bytes of typed columns: permanently fixed, as Kafka's serializers write them."""

from __future__ import annotations

import datetime
import decimal
import math
import struct

import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.keys import encode_keys, partitions_of
from sparklog.record.partitioner import NO_PARTITION, murmur2
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.record.batches import default_batch


def keys(*columns: pa.Array) -> list[bytes | None]:
    names = [f"c{index}" for index in range(len(columns))]
    found = encode_keys(pa.RecordBatch.from_arrays(list(columns), names), names)
    found.validate(full=True)
    return list(found.to_pylist())


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", "", None]), [b"a", b"", None]),
        (pa.array([b"a", None], pa.large_binary()), [b"a", None]),
        (pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        (pa.array([1, -2, None], pa.int64()), [struct.pack(">q", 1), struct.pack(">q", -2), None]),
        (pa.array([1, -2], pa.int32()), [struct.pack(">i", 1), struct.pack(">i", -2)]),
        (pa.array([1], pa.int16()), [struct.pack(">h", 1)]),
        (pa.array([255], pa.uint8()), [b"\xff"]),
        (pa.array([1.5, None]), [struct.pack(">d", 1.5), None]),
        (pa.array([1.5], pa.float32()), [struct.pack(">f", 1.5)]),
        (pa.array([-0.0, 0.0]), [bytes(8), bytes(8)]),
        (pa.array([True, False, None]), [b"\1", b"\0", None]),
        (pa.array([datetime.date(1970, 1, 2)]), [struct.pack(">i", 1)]),
        (pa.array([5], pa.timestamp("us", "UTC")), [struct.pack(">q", 5)]),
        (pa.array([decimal.Decimal("-1.00")], pa.decimal128(5, 2)), [(-100).to_bytes(16, "big", signed=True)]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_one_key_column_gives_kafkas_bytes(column: pa.Array, expected: list[bytes | None]) -> None:
    assert keys(column) == expected
    assert keys(pa.concat_arrays([column, column]).slice(1, len(column))) == (expected * 2)[1 : len(column) + 1]


def test_every_nan_is_the_same_key() -> None:
    other = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    assert math.isnan(other)
    first, second = keys(pa.array([math.nan, other]))
    assert first == second


def test_several_key_columns_give_one_key() -> None:
    numbers = pa.array([1, 2, None, None], pa.int32())
    texts = pa.array(["ab", None, "", None])
    assert keys(numbers, texts) == [
        struct.pack(">iii", 4, 1, 2) + b"ab",
        struct.pack(">iii", 4, 2, -1),
        struct.pack(">ii", -1, 0),
        None,
    ]
    assert (
        keys(pa.array(["a", "ab"]), pa.array(["bc", "c"]))[0] != keys(pa.array(["a", "ab"]), pa.array(["bc", "c"]))[1]
    )


def test_a_batch_is_partitioned_by_its_keys() -> None:
    batch = default_batch(9)
    found = partitions_of(batch, ["key"], 6)
    for key, partition in zip(batch.column("key").to_pylist(), found.tolist(), strict=True):
        assert partition == (NO_PARTITION if key is None else (murmur2(key) & 0x7FFFFFFF) % 6)
    assert partitions_of(batch, [], 6).tolist() == [NO_PARTITION] * 9
    assert partitions_of(batch.slice(0, 0), ["key"], 6).tolist() == []


def test_some_columns_cannot_be_keys() -> None:
    batch = default_batch(1)
    assert batch.schema.equals(DEFAULT_SCHEMA)
    for column, reason in (("nowhere", "not among"), ("headers", "not nested")):
        with pytest.raises(BrokerError, match=reason) as caught:
            encode_keys(batch, [column])
        assert caught.value.code is ErrorCode.SCHEMA_MISMATCH
