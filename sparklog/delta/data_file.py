"""The description of one Parquet file of a Delta table, with the bounds of the rows in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparklog.model import Span

_ALL = Span()


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of a Delta table, with bounds on the rows in it. The object is small and is pickled to tasks.

    The spans ``partitions``, ``offsets`` and ``times`` (us) contain the values of all rows. If the file has no
    statistics for a column, the column's span is unbounded.
    """

    #: The path relative to the table's directory.
    path: str
    #: The size in bytes.
    size: int
    partitions: Span = _ALL
    offsets: Span = _ALL
    times: Span = _ALL
    #: The values of the partition columns, which are equal in all rows.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: The positions of rows that were deleted without rewriting the file, as ascending int64.
    deleted: bytes = b""

    @property
    def single_partition(self) -> int | None:
        """Return the partition to which all rows of the file belong, or None if that is unknown."""
        return self.partitions.low if self.partitions.low + 1 == self.partitions.high else None

    def may_contain(self, partition: int, offsets: Span) -> bool:
        return (
            self.partitions.low <= partition < self.partitions.high
            and self.offsets.low < offsets.high
            and offsets.low < self.offsets.high
        )
