"""Real Delta tables as the archive job writes them, without the job and without a JVM."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake

from sparklog.delta.archive_progress import ArchiveProgress, Mode
from sparklog.spark.offsets import ByOffset
from sparklog.spark.read_options import ReadOptions, Subscribe
from sparklog.spark.reader import BatchReader, plan_read
from sparklog.spark.topics import SourceTopic

_FROM_SOURCE = {"partition": "_partition", "offset": "_offset", "timestamp": "_timestamp"}
_NOT_KEPT = ("topic", "timestampType", "_topic")


class Archive:
    """One topic's table in the directory ``lake``. ``row_group``: rows of a row group in a file."""

    def __init__(self, bootstrap: str, topic: str, lake: str, *, row_group: int | None = None) -> None:
        self.path = str(Path(lake) / topic)
        self._bootstrap = bootstrap
        self._topic = topic
        self._writer = WriterProperties(max_row_group_size=row_group, write_batch_size=row_group)
        self.progress: ArchiveProgress | None = None

    def archive(
        self,
        upto: Mapping[int, int] | None = None,
        *,
        mode: Mode = "append",
        by: tuple[str, ...] = ("_date",),
        begins: Mapping[int, int] | None = None,
    ) -> ArchiveProgress:
        """Commit the unarchived records below the offsets ``upto``, by partition.

        A partition that ``upto`` does not name stays where it is. None means all existing records. Without ``begins``
        the commit does not say where the archive begins, like a commit of an old release.
        """
        before = self.progress.ends if self.progress is not None else {}
        with SourceTopic(self._bootstrap) as view:
            selected = view.select(Subscribe((self._topic,)))
            topic_id = selected.topics[self._topic].topic_id
            log = view.ends(selected.partitions, 1, known={})
            starts = {tp: max(before.get(tp.partition, 0), found.start) for tp, found in log.items()}
            ends = {tp: found.end if upto is None else upto.get(tp.partition, starts[tp]) for tp, found in log.items()}
            options = ReadOptions(
                self._bootstrap, Subscribe((self._topic,)), ByOffset("", starts), ByOffset("", ends), True
            )
            columns = selected.columns(include_headers=True)
            reader = BatchReader(plan_read(view, options, schema=columns))
        batches = [batch for task in reader.partitions() for batch in reader.read(task)]
        self.progress = ArchiveProgress(
            topic=self._topic,
            topic_id=topic_id,
            batch=self.progress.batch + 1 if self.progress is not None else 0,
            ends={tp.partition: end for tp, end in sorted(ends.items())},
            mode=mode,
            begins=dict(begins or {}),
        )
        self._commit(pa.Table.from_batches(batches) if batches else None, by)
        return self.progress

    def _commit(self, rows: pa.Table | None, by: tuple[str, ...]) -> None:
        assert rows is not None, "no record to archive"
        assert self.progress is not None
        rows = rows.drop_columns([name for name in _NOT_KEPT if name in rows.column_names])
        if "value" in rows.column_names and "partition" in rows.column_names:
            rows = rows.rename_columns([_FROM_SOURCE.get(name, name) for name in rows.column_names])
        rows = rows.cast(pa.schema([field.with_nullable(True) for field in rows.schema]))
        dates = pc.cast(rows.column("_timestamp").cast(pa.timestamp("us")), pa.date32(), safe=False)
        write_deltalake(
            self.path,
            rows.append_column("_date", dates),
            mode="append",
            partition_by=list(by),
            schema_mode="merge",
            writer_properties=self._writer,
            commit_properties=CommitProperties(custom_metadata={"userMetadata": self.progress.to_json()}),
        )

    def compact(self) -> None:
        """Merge all files into one, as OPTIMIZE does. The offsets in it are in no order."""
        DeltaTable(self.path).optimize.compact()

    def vacuum(self) -> None:
        """Delete all files that the newest version does not use."""
        DeltaTable(self.path).vacuum(0, dry_run=False, enforce_retention_duration=False)

    def delete(self, predicate: str) -> None:
        DeltaTable(self.path).delete(predicate)


def instant(us: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(0, dt.timezone.utc) + dt.timedelta(microseconds=us)
