"""Tests of the 96-byte batch header: golden bytes, round trips, and refusal of damaged or newer headers."""

from __future__ import annotations

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import (
    HEADER_BYTES,
    HEADER_DTYPE,
    BatchHeader,
    Flag,
    header_array,
    unpack_header,
    unpack_headers,
)
from tests.record.goldens import golden_bytes

I64 = st.integers(-(2**63), 2**63 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    BatchHeader,
    *([I64] * 7),
    *([U32] * 4),
    *([I32] * 3),
    U32,
    st.integers(-(2**15), 2**15 - 1),
    st.integers(0, 2**12 - 1),
)
EXAMPLE = BatchHeader(
    base_offset=1000,
    position=4096,
    max_timestamp=1_700_000_000_000_002,
    running_max=1_700_000_000_000_003,
    append_time=1_700_000_000_000_004,
    producer_id=7,
    min_timestamp=1_700_000_000_000_001,
    offset_span=10,
    record_count=9,
    length=800,
    body_crc=0xDEADBEEF,
    leader_epoch=3,
    schema_id=1,
    first_sequence=40,
    offset_array_length=36,
    producer_epoch=2,
    flags=int(Flag.LZ4 | Flag.FIRST_OF_SEGMENT),
)


def test_the_bytes_of_a_header_are_fixed(golden: bytes) -> None:
    assert EXAMPLE.pack() == golden
    assert unpack_header(golden) == EXAMPLE


@given(HEADERS)
def test_a_header_survives_encoding(header: BatchHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack_header(b"front" + packed, 5) == header
    row = header_array(packed)[0]
    assert all(row[name] == getattr(header, name) for name in BatchHeader._fields if name != "flags")


@given(HEADERS, st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(header: BatchHeader, bit: int) -> None:
    damaged = bytearray(header.pack())
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BrokerError, match="CRC32C") as caught:
        unpack_header(damaged)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@given(st.binary(max_size=300))
def test_bytes_that_are_not_a_header_are_refused(source: bytes) -> None:
    if source:
        with pytest.raises(BrokerError):
            unpack_headers(source)
    else:
        assert unpack_headers(source) == []


def test_a_newer_format_is_refused_with_its_number() -> None:
    packed = bytearray(EXAMPLE.pack())
    packed[91] = 2 << 4 | packed[91] & 0x0F
    packed[92:] = int(google_crc32c.value(bytes(packed[:92]))).to_bytes(4, "little")
    with pytest.raises(BrokerError, match="format version 2 found, 1 expected"):
        unpack_header(packed)


def test_several_headers_are_read_as_a_view() -> None:
    second = EXAMPLE._replace(base_offset=EXAMPLE.next_offset)
    packed = EXAMPLE.pack() + second.pack()
    assert unpack_headers(packed) == [EXAMPLE, second]
    assert header_array(packed)["base_offset"].tolist() == [1000, 1010]
    assert HEADER_DTYPE.itemsize == HEADER_BYTES
    with pytest.raises(BrokerError, match="not a multiple of 96"):
        unpack_headers(packed[:-1])


def test_stored_bytes_count_the_padded_offset_array() -> None:
    assert EXAMPLE.stored_bytes == 800 + 40
    assert EXAMPLE._replace(offset_array_length=0).stored_bytes == 800


@pytest.fixture
def golden() -> bytes:
    return golden_bytes("batch_header.hex")
