"""CRC32C of any buffer without a copy, and arithmetic with CRCs: of two joined pieces, or of the second one alone.

The native function accepts only read-only buffers. It refuses a memoryview, but accepts an Arrow buffer of the same
memory.

A CRC is a polynomial over GF(2). Each byte that follows multiplies it by x^8. So the CRC of ``AB`` is that of ``A``
times x^(8 |B|), plus that of ``B``. Source: zlib, crc32_combine().
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import google_crc32c
import pyarrow as pa

#: Castagnoli's polynomial and the polynomial 1, with the lowest power in the highest bit, as in the CRCs.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31

Buffer: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"


def crc32c(data: Buffer) -> int:
    """Return the CRC32C (Castagnoli) of ``data``."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else pa.py_buffer(data)))


def crc32c_extended(found: int, data: Buffer) -> int:
    """Return the CRC32C of bytes with the CRC ``found``, followed by ``data``."""
    return int(google_crc32c.extend(found, data if isinstance(data, bytes) else pa.py_buffer(data)))


class Following(NamedTuple):
    """The effect of ``length`` more bytes on the CRC of the bytes before them: a multiplication by ``power``.

    The power of a new length takes about ten microseconds, as long as a native CRC of 100 kB. Powers are cached by
    length.
    """

    power: int

    @classmethod
    def of(cls, length: int) -> Following:
        """Return the effect of ``length`` bytes, which must be below 2^32."""
        assert 0 <= length < 1 << 32, length
        return cls(_power(length))

    def joined(self, first: int, second: int) -> int:
        """Return the CRC of two joined pieces from ``first`` and ``second``, the CRCs of the pieces.

        The second piece is the one with ``length`` bytes.

        If ``second`` is the CRC of the joined pieces instead, the result is the CRC of the second piece alone, because
        addition is its own inverse.
        """
        return _product(self.power, first) ^ second


@lru_cache(maxsize=1024)
def _power(length: int) -> int:
    power = _ONE
    for place, powers in enumerate(_powers()):
        if digit := length >> (8 * place) & 0xFF:
            power = _product(power, powers[digit])
    return power


def _product(a: int, b: int) -> int:
    """Return ``a`` times ``b`` modulo the polynomial. The highest bit is x^0."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@cache
def _powers() -> list[list[int]]:
    """Return the powers of x for each position and digit of a length in base 256."""
    tables = []
    step = _ONE >> 8  # x^8
    for _ in range(4):
        table = [_ONE]
        for _ in range(256):
            table.append(_product(table[-1], step))
        step = table.pop()
        tables.append(table)
    return tables
