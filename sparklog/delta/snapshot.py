"""A topic's Delta table at one version: its progress, and every data file with its statistics. It needs no JVM.

A snapshot is immutable: later commits, OPTIMIZE and deletes do not change it. Only VACUUM deletes its files, after the
table's retention time. The module ``rows`` reads the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from sparklog.delta.archive_progress import ArchiveProgress, Mode, read_progress
from sparklog.delta.data_file import DataFile
from sparklog.delta.origin import ArchiveOrigin
from sparklog.delta.table import MODE_PROPERTY, OFFSET, PARTITION, TIMESTAMP, table_path
from sparklog.delta.topic_description import PROPERTY, from_json
from sparklog.errors import ConfigError
from sparklog.model import Span

if TYPE_CHECKING:
    from deltalake import DeltaTable

#: The table features that change the meaning of files and are supported here.
_UNDERSTOOD = frozenset(
    {"timestampNtz", "deletionVectors", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping", "domainMetadata"}
    # deltalake 1.6 reports it with timestamps without a time zone; no topic has columns of that type
    | {"variantType"}
)
#: Statistics truncate the maximum time of a file to milliseconds. Source: Delta's protocol, per-file statistics.
_TIME_STEP_US = 1000
#: Spark writes the times of statistics with the session's offset from UTC in whole minutes. It omits the seconds that
#: offsets of some time zones had until 1972, so such times are inexact. Source: Spark's JSON format of timestamps
#: (XXX), the tz database.
_ODD_OFFSETS_US, _LAST_ODD_US = 60_000_000, 2 * 366 * 86_400_000_000
_ALL = Span()


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One version of a topic's table: its progress, and its data files, ordered by their minimum offsets.

    ``columns`` has the names of the table's columns.
    """

    table: str
    version: int
    progress: ArchiveProgress
    columns: frozenset[str]
    files: tuple[DataFile, ...]


def find_table(path: str, topic: str) -> str:
    """Return the path of the table of ``topic``.

    The table is at ``path`` itself or, if ``path`` is the directory of all archives, below ``path``.

    Raises:
        ConfigError: there is no Delta table at either path, or deltalake is not installed.
    """
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ConfigError(
            "Delta tables need deltalake, which is not installed here: pip install 'sparklog[delta]'"
        ) from None

    within = table_path(path, topic)
    for table in (path.rstrip("/"), within):
        if DeltaTable.is_deltatable(table):
            return table
    raise ConfigError(f"there is no Delta table at {path} or {within}")


def take_snapshot(table: str, topic: str, origin: ArchiveOrigin) -> TableSnapshot:
    """Return a snapshot of the newest version of ``table``, which must be the archive of ``topic``.

    If the topic was restored, ``table`` may also be the archive from which it was restored. ``origin`` distinguishes
    these two archives from archives of other topics.

    Raises:
        ConfigError: the table is the archive of another topic, has only the topic's current state, or has unsupported
            features.
        ArchiveProgressError: the table's progress cannot be read.
    """
    from deltalake import DeltaTable

    found = DeltaTable(table)
    check_kind(table, found)
    version = found.version()
    said = read_progress(table, version)
    files = data_files(table, found)
    progress = said.progress if said is not None else _progress_of_rows(table, found, files)
    at = said.version if said is not None else -1
    _check_progress(
        table,
        progress,
        topic,
        origin,
        is_own=origin.is_in(progress.topic_id, table_id=str(found.metadata().id), progress_version=at),
    )
    return TableSnapshot(table, version, progress, frozenset(field.name for field in found.schema().fields), files)


def _progress_of_rows(table: str, found: DeltaTable, files: tuple[DataFile, ...]) -> ArchiveProgress:
    """Return progress computed from the rows of a new table, or of a table whose archive commits Delta has deleted."""
    from sparklog.delta.rows import ends_of_rows

    described = found.metadata().configuration.get(PROPERTY)
    if not described:
        raise ConfigError(f"history: {table} was not written by an archive: it does not name its topic")
    topic = from_json(described)
    mode: Mode = "upsert" if found.metadata().configuration.get(MODE_PROPERTY) == "upsert" else "append"
    return ArchiveProgress(
        topic=topic.name, topic_id=topic.topic_id, batch=-1, ends=ends_of_rows(table, files), mode=mode
    )


def check_kind(table: str, found: DeltaTable) -> None:
    """Raise ConfigError if the table uses a Delta feature that this package does not support."""
    features = set(found.protocol().reader_features or ())
    mapping = found.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise ConfigError(f"{table} has column mapping ({mapping}), which is not supported")
    if strange := features - _UNDERSTOOD:
        raise ConfigError(f"{table} has unsupported features: {', '.join(sorted(strange))}")


def _check_progress(table: str, progress: ArchiveProgress, topic: str, origin: ArchiveOrigin, *, is_own: bool) -> None:
    if progress.mode != "append":
        raise ConfigError(
            f"history: {table} was archived in mode {progress.mode}: it has the topic's current state, not its "
            "history; read it as a Delta table, or archive the topic in mode append to another path"
        )
    if not is_own:
        whose = f"an earlier topic {topic}" if progress.topic == topic else f"topic {progress.topic}"
        raise ConfigError(
            f"history: {table} is the archive of {whose} (id {progress.topic_id}), not of topic {topic} "
            f"(id {origin.topic_id}{f', restored from {origin.restored_from}' if origin.restored_from else ''})"
        )


def data_files(table: str, found: DeltaTable) -> tuple[DataFile, ...]:
    """Return the data files of a table's version, ordered by minimum offset.

    Raises ConfigError if the table references files of another table, or has deletion vectors of unknown files.
    """
    actions = pa.table(found.get_add_actions(flatten=True))
    paths = [unquote(path) for path in actions.column("path").to_pylist()]
    if outside := [path for path in paths if "://" in path or path.startswith("/")]:
        raise ConfigError(f"{table} references files of another table, like a shallow clone: {outside[0]}")
    deleted = _deleted(found)
    columns = {name: actions.column(name).to_pylist() for name in actions.column_names if name.startswith("partition.")}
    spans = {name: _spans(actions, name) for name in (PARTITION, OFFSET, TIMESTAMP)}
    files = [
        DataFile(
            path,
            size,
            partitions=spans[PARTITION][at],
            offsets=spans[OFFSET][at],
            times=spans[TIMESTAMP][at],
            constants={name.removeprefix("partition."): values[at] for name, values in columns.items()},
            deleted=deleted.pop(_decoded(path), b"") if deleted else b"",
        )
        for at, (path, size) in enumerate(zip(paths, actions.column("size_bytes").to_pylist(), strict=True))
    ]
    if deleted:
        raise ConfigError(f"{table} has deletion vectors of unknown files: {', '.join(deleted)}")
    return tuple(sorted(files, key=lambda file: (file.offsets.low, file.path)))


def _spans(actions: pa.Table, name: str) -> list[Span]:
    """Return for each file the span of an integer or time column."""
    lows, highs = _bounds(actions, f"min.{name}"), _bounds(actions, f"max.{name}")
    if f"partition.{name}" in actions.column_names:
        lows = highs = _bounds(actions, f"partition.{name}")
    if name == TIMESTAMP:
        return [_time_span(low, high) for low, high in zip(lows, highs, strict=True)]
    return [
        Span(_ALL.low if low is None else low, _ALL.high if high is None else high + 1)
        for low, high in zip(lows, highs, strict=True)
    ]


def _time_span(low: int | None, high: int | None) -> Span:
    """Return the span of times whose statistics are ``low`` and ``high`` (us)."""
    below, above = (_ODD_OFFSETS_US if stated is not None and stated < _LAST_ODD_US else 0 for stated in (low, high))
    return Span(_ALL.low if low is None else low - below, _ALL.high if high is None else high + _TIME_STEP_US + above)


def _bounds(actions: pa.Table, name: str) -> list[int | None]:
    if name not in actions.column_names:
        return [None] * actions.num_rows
    column = actions.column(name)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz="UTC"))
    return list(column.cast(pa.int64()).to_pylist())


def _deleted(found: DeltaTable) -> dict[str, bytes]:
    """Return the positions of deleted rows, by decoded path of the file."""
    if "deletionVectors" not in (found.protocol().reader_features or ()):
        return {}
    vectors = pa.table(found.deletion_vectors())
    deleted = {}
    for path, kept in zip(vectors.column(0).to_pylist(), vectors.column(1), strict=True):
        positions = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False))
        deleted[_decoded(path.removeprefix(found.table_uri))] = positions.astype(np.int64).tobytes()
    return deleted


def _decoded(path: str) -> str:
    """Decode a path completely, because deltalake 1.6 encodes the same path once or twice."""
    while (plain := unquote(path)) != path:
        path = plain
    return path
