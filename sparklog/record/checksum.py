"""CRC32C of any buffer without a copy, and arithmetic that combines the CRCs of two pieces.

The native function accepts only read-only buffers. The function does not accept a memoryview, but it accepts an Arrow
buffer of the same memory.

A CRC is a polynomial over GF(2). Each byte that is appended multiplies it by x^8. So the CRC of the joined pieces
``AB`` is the CRC of ``A`` times x^(8 |B|), plus the CRC of ``B``. Source: zlib, crc32_combine().
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import google_crc32c
import pyarrow as pa

#: Castagnoli's polynomial, and the polynomial 1. As in a CRC, the highest bit has the lowest power of x.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31

Buffer: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"


def crc32c(data: Buffer) -> int:
    """Return the CRC32C (Castagnoli) of ``data``."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else pa.py_buffer(data)))


def crc32c_extended(found: int, data: Buffer) -> int:
    """Return the CRC32C of some bytes followed by ``data``. ``found`` is the CRC of the bytes before ``data``."""
    return int(google_crc32c.extend(found, data if isinstance(data, bytes) else pa.py_buffer(data)))


class Following(NamedTuple):
    """The factor that combines the CRCs of two adjacent pieces. It depends only on the length of the second piece.

    ``power`` is the number by which the CRC of the first piece is multiplied. Computing it takes about ten
    microseconds, as long as the native CRC of 100 kB, so the numbers are cached.
    """

    power: int

    @classmethod
    def of(cls, length: int) -> Following:
        """Return the factor for a second piece of ``length`` bytes. The length must be below 2^32."""
        assert 0 <= length < 1 << 32, length
        return cls(_power(length))

    def joined(self, first: int, second: int) -> int:
        """Return the CRC of two joined pieces from the CRCs ``first`` and ``second`` of the pieces.

        The second piece must have the ``length`` for which this factor was made.

        Conversely, if ``second`` is the CRC of the joined pieces, the result is the CRC of the second piece alone,
        because addition over GF(2) is its own inverse.
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
    """Return ``a`` times ``b`` modulo Castagnoli's polynomial. The highest bit is the coefficient of x^0."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@cache
def _powers() -> list[list[int]]:
    """Return the power of x^8 for each digit of a length in base 256, at each of its four positions."""
    tables = []
    step = _ONE >> 8  # x^8
    for _ in range(4):
        table = [_ONE]
        for _ in range(256):
            table.append(_product(table[-1], step))
        step = table.pop()
        tables.append(table)
    return tables
