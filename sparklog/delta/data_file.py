"""One Parquet file of a Delta table, with the bounds of the rows in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparklog.model import Span

_ALL = Span()


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file; small, pickled to tasks. The spans contain its rows; they are unbounded for a column without
    statistics. Times are in us."""

    #: Path relative to the table's directory.
    path: str
    #: Size in bytes.
    size: int
    partitions: Span = _ALL
    offsets: Span = _ALL
    times: Span = _ALL
    #: Values of the partition columns, which are equal in all rows.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: Positions of rows that were deleted without rewriting the file: int64, ascending.
    deleted: bytes = b""

    @property
    def single_partition(self) -> int | None:
        """Return the only partition of all rows, if known."""
        return self.partitions.low if self.partitions.low + 1 == self.partitions.high else None

    def may_contain(self, partition: int, offsets: Span) -> bool:
        return (
            self.partitions.low <= partition < self.partitions.high
            and self.offsets.low < offsets.high
            and offsets.low < self.offsets.high
        )
