"""CRC32C over any buffer, without copying it.

The native function takes only buffers that cannot change, which a memoryview is not in its eyes; an Arrow buffer
around the same memory is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import google_crc32c
import pyarrow as pa

Buffer: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"


def crc32c(data: Buffer) -> int:
    """CRC32C (Castagnoli) of ``data``."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else pa.py_buffer(data)))


def crc32c_of(parts: Iterable[Buffer]) -> int:
    """CRC32C of ``parts`` back to back."""
    found = 0
    for part in parts:
        found = int(google_crc32c.extend(found, part if isinstance(part, bytes) else pa.py_buffer(part)))
    return found
