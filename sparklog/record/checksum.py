"""CRC32C over any buffer, without copying it, and arithmetic with CRCs: of two pieces, of the second of two alone.

The native function takes only buffers that cannot change, which a memoryview is not in its eyes; an Arrow buffer
around the same memory is.

A CRC is a polynomial over GF(2), and bytes that follow multiply it by x^8 each. So the CRC of ``AB`` is that of ``A``
times x^(8 |B|), plus that of ``B``. Source: zlib, crc32_combine().
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import google_crc32c
import pyarrow as pa

#: Castagnoli's polynomial and the polynomial 1, with the lowest power in the highest bit, as in the CRCs themselves.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31

Buffer: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"


def crc32c(data: Buffer) -> int:
    """CRC32C (Castagnoli) of ``data``."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else pa.py_buffer(data)))


def crc32c_extended(found: int, data: Buffer) -> int:
    """CRC32C of what had ``found``, with ``data`` behind it."""
    return int(google_crc32c.extend(found, data if isinstance(data, bytes) else pa.py_buffer(data)))


class Following(NamedTuple):
    """What ``length`` bytes do to the CRC of what is in front of them: it is multiplied by ``power``. Making one takes
    some ten microseconds, as long as a native CRC of 100 kB; using it a third of that, as equal lengths are known."""

    power: int

    @classmethod
    def of(cls, length: int) -> Following:
        """Of ``length`` bytes, below 2^32."""
        assert 0 <= length < 1 << 32, length
        return cls(_power(length))

    def joined(self, first: int, second: int) -> int:
        """The CRC of both pieces back to back; ``second`` is that of the bytes that follow. Given the CRC of both for
        ``second``, it is that of the second alone: adding twice is not adding."""
        return _product(self.power, first) ^ second


@lru_cache(maxsize=1024)
def _power(length: int) -> int:
    power = _ONE
    for place, powers in enumerate(_powers()):
        if digit := length >> (8 * place) & 0xFF:
            power = _product(power, powers[digit])
    return power


def _product(a: int, b: int) -> int:
    """``a`` times ``b`` modulo the polynomial; the highest bit is x^0."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@cache
def _powers() -> list[list[int]]:
    """By place and digit of a length in base 256: x to the power of eight times so much."""
    tables = []
    step = _ONE >> 8  # x^8
    for _ in range(4):
        table = [_ONE]
        for _ in range(256):
            table.append(_product(table[-1], step))
        step = table.pop()
        tables.append(table)
    return tables
