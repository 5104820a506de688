"""Tests of murmur2 over columns against Kafka's known values and a plain implementation for single keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.record.partitioner import NO_PARTITION, murmur2, murmur2_column, partition_for_key, partitions_for_keys

# Source: org.apache.kafka.common.utils.UtilsTest.testMurmur2
KAFKA_VALUES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
M = 0x5BD1E995
MASK = 0xFFFFFFFF


def plain_murmur2(key: bytes) -> int:
    """Hash one key byte by byte: slow, and easy to compare with the Java source."""
    h = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * M & MASK
        k = (k ^ k >> 24) * M & MASK
        h = h * M & MASK ^ k
    for place, byte in enumerate(key[whole:]):
        h ^= byte << 8 * place
    if len(key) > whole:
        h = h * M & MASK
    h = (h ^ h >> 13) * M & MASK
    return h ^ h >> 15


@pytest.mark.parametrize(("key", "expected"), KAFKA_VALUES.items())
def test_a_single_key_hashes_as_in_kafka(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected


def test_a_column_hashes_as_its_keys_do() -> None:
    column = pa.array(list(KAFKA_VALUES), pa.binary())
    assert murmur2_column(column).view(np.int32).tolist() == list(KAFKA_VALUES.values())


@given(st.lists(st.binary(max_size=90), max_size=60))
def test_columns_may_have_keys_of_any_lengths(keys: list[bytes]) -> None:
    assert murmur2_column(pa.array(keys, pa.binary())).tolist() == [plain_murmur2(key) for key in keys]


@given(st.lists(st.one_of(st.none(), st.text(max_size=20)), max_size=40), st.integers(0, 50), st.integers(1, 2**31 - 1))
def test_slices_with_nulls_have_the_right_partitions(keys: list[str | None], skip: int, n: int) -> None:
    column = pa.array(keys, pa.string()).slice(min(skip, len(keys)))
    expected = [
        NO_PARTITION if key is None else (plain_murmur2(key.encode()) & 0x7FFFFFFF) % n for key in column.to_pylist()
    ]
    found = partitions_for_keys(column, n)
    assert found.dtype == np.int32
    assert found.tolist() == expected


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20), st.integers(1, 1000))
def test_a_single_key_and_a_column_choose_the_same_partition(keys: list[bytes], n: int) -> None:
    """Coordinators are found by one key. Earlier releases used a column of one key, and its coordinators must not
    change."""
    assert [partition_for_key(key, n) for key in keys] == partitions_for_keys(pa.array(keys, pa.binary()), n).tolist()


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.string_view(), pa.binary_view()],
    ids=str,
)
def test_every_kind_of_bytes_has_the_same_hash(kind: pa.DataType) -> None:
    keys = ["a", "", "abcd", "a longer key than twelve bytes", None, "abcde"]
    expected = partitions_for_keys(pa.array(keys, pa.string()), 7)
    assert partitions_for_keys(pa.array(keys, pa.string()).cast(kind), 7).tolist() == expected.tolist()


def test_fixed_size_dictionary_and_chunked_keys_are_hashed() -> None:
    keys = pa.array([b"abcd", b"efgh", b"abcd"], pa.binary())
    expected = partitions_for_keys(keys, 11).tolist()
    assert partitions_for_keys(keys.cast(pa.binary(4)), 11).tolist() == expected
    assert partitions_for_keys(keys.dictionary_encode(), 11).tolist() == expected
    views = pa.DictionaryArray.from_arrays([1, 0, 1], pa.array(["efgh", "abcd"], pa.string_view()))
    assert partitions_for_keys(views, 11).tolist() == expected
    assert partitions_for_keys(pa.chunked_array([keys.slice(0, 1), keys.slice(1)]), 11).tolist() == expected
    assert partitions_for_keys(pa.chunked_array([], pa.binary()), 11).tolist() == []


def test_nulls_with_bytes_are_null() -> None:
    # A null may have bytes in the buffer: they are not a key.
    hidden = pa.Array.from_buffers(
        pa.binary(),
        2,
        [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0, 3, 4], "<i4").tobytes()), pa.py_buffer(b"abcd")],
    )
    assert partitions_for_keys(hidden, 1000).tolist() == [NO_PARTITION, (plain_murmur2(b"d") & 0x7FFFFFFF) % 1000]


def test_one_very_long_key_is_hashed_among_many_short_ones() -> None:
    keys = [b"k%d" % index for index in range(1000)] + [bytes(range(256)) * 2000]
    assert murmur2_column(pa.array(keys, pa.binary())).tolist() == [plain_murmur2(key) for key in keys]


def test_key_columns_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        partitions_for_keys(pa.array([1]), 3)
