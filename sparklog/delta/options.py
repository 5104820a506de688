"""What the archive of one topic was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.types import StructType

from sparklog.delta.seam import Mode


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """What one topic's archive was asked for."""

    bootstrap: str
    topic: str
    to: str
    group: str
    #: None: a new table by ``_date``, one that is there as it is.
    partition_by: tuple[str, ...] | None = None
    #: Spark's text for an interval; None: what is there when it begins, and then the end.
    interval: str | None = "30 seconds"
    max_offsets: int = 5_000_000
    fail_on_data_loss: bool = True
    #: Columns in the values of a topic without a schema, which are JSON.
    json: StructType | None = None
    mode: Mode = "append"
