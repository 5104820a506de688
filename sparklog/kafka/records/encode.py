"""Encoding of rows of the log as a batch that Kafka's consumers read."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Buffer: TypeAlias = "bytes | memoryview"


def encode_batch(
    rows: pa.RecordBatch,
    *,
    base_offset: int,
    leader_epoch: int,
    offsets: npt.NDArray[np.int64] | None = None,
    last_offset: int | None = None,
    append_time_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> list[Buffer]:
    """Encode ``rows``, which are at least one row of ``DEFAULT_SCHEMA``, as a batch without compression.

    ``offsets`` are the offsets of the rows, ascending and at least ``base_offset``; None means one after the other from
    ``base_offset`` on. ``last_offset`` is the last offset that the batch covers, if it is later than the last row's.
    With ``append_time_ms`` the batch has timestamp type LogAppendTime and this time for all records. Otherwise a
    record's time is the timestamp column, floored to ms; a null becomes -1.

    The result is the batch as buffers to be sent one after the other.
    """
    raise NotImplementedError


def rows_that_fit(rows: pa.RecordBatch, max_bytes: int) -> int:
    """Return the number of first rows whose encoded batch has at most ``max_bytes``, but at least 1."""
    raise NotImplementedError
