"""Tests of CRC32C, and of arithmetic with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.record.checksum import Following, crc32c, crc32c_extended

LENGTHS = (0, 1, 8, 255, 256, 257, 65_535, 65_536, 65_537, 1 << 20)


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32/ISCSI
    assert crc32c(memoryview(b"123456789")) == crc32c(bytearray(b"123456789")) == 0xE3069283


@given(first=st.binary(), second=st.binary(), filler=st.sampled_from(LENGTHS))
def test_crcs_of_pieces_give_the_crc_of_the_whole(first: bytes, second: bytes, filler: int) -> None:
    second += b"\x5a" * filler
    following = Following.of(len(second))
    both = crc32c(first + second)
    assert crc32c_extended(crc32c(first), second) == both
    assert following.joined(crc32c(first), crc32c(second)) == both
    assert following.joined(crc32c(first), both) == crc32c(second)


def test_the_operator_works_for_lengths_in_all_four_bytes() -> None:
    # Two steps of lengths equal one step of their sum.
    low, high = 0x00FEDCBA, 0x89ABCDEF - 0x00FEDCBA
    for crc in (1, 0x80000000, 0xDEADBEEF):
        twice = Following.of(high).joined(Following.of(low).joined(crc, 0), 0)
        assert Following.of(low + high).joined(crc, 0) == twice
