"""The lengths and the validity of Arrow columns as numpy arrays.

The functions read the memory of the columns, because ``Array.to_numpy`` would import pandas.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def lengths_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the length of each value of a column of binary, text or lists. The length of a null has no meaning."""
    borders = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    return np.diff(borders).astype(np.int64)


def valid_of(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return an array that is true for each value that is not null."""
    buffer = column.buffers()[0]
    if buffer is None:
        return np.ones(len(column), np.bool_)
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=column.offset + len(column), bitorder="little")
    return bits[column.offset :].view(np.bool_)
