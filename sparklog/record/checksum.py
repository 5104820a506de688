"""CRC32C over any buffer, without copying it.

The native function takes only buffers that cannot change, which a memoryview is not in its eyes; an Arrow buffer
around the same memory is.
"""

from __future__ import annotations

from typing import TypeAlias

import google_crc32c
import pyarrow as pa

Buffer: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"


def crc32c(data: Buffer) -> int:
    """CRC32C (Castagnoli) of ``data``."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else pa.py_buffer(data)))
