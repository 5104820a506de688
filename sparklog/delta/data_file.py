"""One Parquet file of a Delta table, with the bounds of the rows in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparklog.model import Span

_ALL = Span()


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file; small, pickled to tasks. The spans are what its rows lie in, wider where the table keeps no
    statistics of a column; times are in us."""

    #: Below the table's directory.
    path: str
    #: In bytes.
    size: int
    partitions: Span = _ALL
    offsets: Span = _ALL
    times: Span = _ALL
    #: Values of the columns that the table is partitioned by, which are the same in all rows.
    constants: Mapping[str, Any] = field(default_factory=dict)
    #: Positions of rows that were deleted without writing the file anew: int64, ascending.
    deleted: bytes = b""

    @property
    def single_partition(self) -> int | None:
        """The one partition of all rows, where that is known."""
        return self.partitions.low if self.partitions.low + 1 == self.partitions.high else None

    def may_hold(self, partition: int, offsets: Span) -> bool:
        return (
            self.partitions.low <= partition < self.partitions.high
            and self.offsets.low < offsets.high
            and offsets.low < self.offsets.high
        )
