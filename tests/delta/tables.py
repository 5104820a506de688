"""Tables as an archive leaves them, written without Spark: columns, properties, and the progress in each commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, write_deltalake

from sparklog.client.admin.descriptions import PartitionDescription, TopicDescription
from sparklog.delta.archive_progress import ArchiveProgress, Mode
from sparklog.delta.table import quarantine_path, table_path
from sparklog.delta.topic_description import PROPERTY, to_json

UTC_US = pa.timestamp("us", tz="UTC")


def described(
    name: str,
    schema: pa.Schema,
    *,
    partitions: int,
    topic_id: str = "0123456789abcdef0123456789abcdef",
    key: tuple[str, ...] = (),
    event_time: str | None = None,
    config: Mapping[str, str] | None = None,
) -> TopicDescription:
    """Return the description of a topic that no longer exists."""
    parts = tuple(PartitionDescription(number, 0, 0, (0, 1, 2), (0, 1, 2)) for number in range(partitions))
    return TopicDescription(name, topic_id, parts, schema, 0, key, event_time, config or {})


def placed(own: pa.Table, partitions: list[int], offsets: list[int], times: list[int]) -> pa.Table:
    """Return rows of a table: their own columns, then partition, offset and time in us."""
    stamps = pa.array(times, pa.int64()).cast(UTC_US)
    return (
        own.append_column("_partition", pa.array(partitions, pa.int32()))
        .append_column("_offset", pa.array(offsets, pa.int64()))
        .append_column("_timestamp", stamps)
        .append_column("_date", pc.cast(stamps, pa.date32()))
    )


class Archived:
    """The table of one topic in the directory ``to``."""

    def __init__(self, to: Path | str, topic: TopicDescription, *, mode: Mode = "append") -> None:
        self.topic = topic
        self.table = table_path(str(to), topic.name)
        self.quarantine = quarantine_path(str(to), topic.name)
        self._mode: Mode = mode
        self._batch = 0

    def append(self, rows: pa.Table, ends: Mapping[int, int]) -> None:
        """Commit rows as the archive does."""
        progress = ArchiveProgress(
            topic=self.topic.name, topic_id=self.topic.topic_id, batch=self._batch, ends=dict(ends), mode=self._mode
        )
        is_new = self._batch == 0
        self._batch += 1
        write_deltalake(
            self.table,
            rows,
            mode="append",
            partition_by=["_date"],
            commit_properties=CommitProperties(custom_metadata={"userMetadata": progress.to_json()}),
        )
        if is_new:  # a separate commit, which contains no progress
            properties = {PROPERTY: to_json(self.topic)}
            DeltaTable(self.table).alter.set_table_properties(properties, raise_if_not_exists=False)

    def set_aside(self, rows: pa.Table, reason: str) -> None:
        """Append bad rows to the quarantine, with ``rows`` as for ``append``."""
        own = [name for name in rows.column_names if not name.startswith("_")]
        record = pa.StructArray.from_arrays([rows.column(name).combine_chunks() for name in own], names=own)
        bad = rows.select(["_partition", "_offset", "_timestamp"])
        bad = bad.append_column("reason", pa.array([reason] * len(rows))).append_column("record", record)
        write_deltalake(self.quarantine, bad, mode="append")
