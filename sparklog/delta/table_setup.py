"""The preparation of a query: it ensures that the topic's table exists, belongs to the topic and fits its columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from sparklog.client.admin.descriptions import TopicDescription
from sparklog.delta import topic_description, upsert
from sparklog.delta.archive_progress import ArchiveProgress, Mode, app_id
from sparklog.delta.archive_table import ArchiveRefused, ArchiveTable
from sparklog.delta.casting import Casting, plan_casting
from sparklog.delta.options import ArchiveOptions
from sparklog.delta.quarantine import Quarantine
from sparklog.delta.table import (
    DEFAULT_PARTITION_BY,
    MODE_PROPERTY,
    OFFSET,
    PARTITION,
    needed_properties,
    own_columns,
    quarantine_columns,
    quarantine_path,
    statistics,
    table_path,
)
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA


@dataclass(frozen=True, slots=True)
class Prepared:
    """The table, the quarantine and the casting plan of an archive, prepared for a query.

    ``progress`` is the table's progress. If the table has no archive commits, the progress has batch -1 and no ends.
    Call ``finish`` before the first batch: this call does the rest of the preparation, which takes seconds and can run
    while the query starts.
    """

    table: ArchiveTable
    quarantine: Quarantine
    casting: Casting
    progress: ArchiveProgress
    finish: Callable[[], None]


def prepare(spark: SparkSession, options: ArchiveOptions, topic: TopicDescription, *, columns: StructType) -> Prepared:
    """Check the table of ``topic``, and prepare it for a query.

    ``columns`` are the topic's columns as the source returns them.

    Raises:
        ArchiveRefused: the table belongs to another topic or program, or has other partition columns than requested.
        ConfigError: columns do not match the table, or Delta does not support them.
    """
    is_default = bool(topic.schema.equals(DEFAULT_SCHEMA))
    own = own_columns(columns, topic.schema.names, is_default=is_default)
    keys = _keys(topic, own, is_default=is_default) if options.mode == "upsert" else ()
    table = ArchiveTable(spark, table_path(options.to, options.topic))
    found = table.refresh()
    detail = table.detail() if table.exists else None
    casting, added = plan_casting(
        own,
        is_default=is_default,
        json=options.json,
        table=table.columns() if table.exists else None,
        keys=keys,
        partition_by=_partition_by(options) if detail is None else tuple(detail["partitionColumns"]),
        properties=detail["properties"] if detail is not None else None,
    )
    if detail is not None:
        progress = found or _without_progress(spark, table, topic, properties=detail["properties"], asked=options.mode)
        _check_same(table, topic, progress, table_id=detail["id"])
        _check_mode(table, progress, options)
        _bring_up_to_date(table, topic, added, options=options, detail=detail)
    else:
        progress = _no_progress(topic, options.mode)
    make = _making(table, topic, casting, options=options) if detail is None else None
    if progress.ends:
        # Partitions that were added later begin at 0, even if their logs now begin at a higher offset.
        everywhere = dict.fromkeys((part.partition for part in topic.partitions), 0)
        progress = msgspec.structs.replace(progress, ends={**everywhere, **progress.ends})
    progress = msgspec.structs.replace(progress, topic=topic.name, topic_id=topic.topic_id, mode=options.mode, lost={})
    quarantine = Quarantine(spark, quarantine_path(options.to, options.topic), quarantine_columns(own))
    quarantine.begin(progress.ends)
    if not progress.ends:
        quarantine.check_topic(topic_description.origin(topic).ids)

    def finish() -> None:
        if make is not None:
            make()
        # Delta computes this once per version, and the commit of the first batch needs it.
        table.transaction(progress.app_id)

    return Prepared(table, quarantine, casting, progress, finish)


def _making(
    table: ArchiveTable, topic: TopicDescription, casting: Casting, *, options: ArchiveOptions
) -> Callable[[], None]:
    """Return a function that creates the table.

    Raises ConfigError if the table cannot have the requested partition columns.
    """
    unknown = sorted(set(casting.partition_by) - set(casting.table.names))
    if unknown:
        raise ConfigError(f"the table cannot be partitioned by {', '.join(unknown)}: it has no such column")
    return partial(
        table.create,
        casting.table,
        partition_by=casting.partition_by,
        properties=_properties(topic, options) | statistics(casting.table) | needed_properties(casting.table),
        comment=f"{'Archive' if options.mode == 'append' else 'State'} of topic {topic.name}",
    )


def _partition_by(options: ArchiveOptions) -> tuple[str, ...]:
    """Return the partition columns of a new table."""
    if options.partition_by is not None:
        return options.partition_by
    # In a table of the current state the dates of rows change, so a merge would move rows between directories.
    return DEFAULT_PARTITION_BY if options.mode == "append" else ()


def _properties(topic: TopicDescription, options: ArchiveOptions) -> dict[str, str]:
    properties = {topic_description.PROPERTY: topic_description.to_json(topic), MODE_PROPERTY: options.mode}
    return properties | (upsert.PROPERTIES if options.mode == "upsert" else {})


def _bring_up_to_date(
    table: ArchiveTable, topic: TopicDescription, added: StructType, *, options: ArchiveOptions, detail: dict[str, Any]
) -> None:
    """Update the table's properties. The columns themselves are added with the first rows that have them."""
    partitioned = tuple(detail["partitionColumns"])
    if options.partition_by is not None and options.partition_by != partitioned:
        raise ArchiveRefused(
            f"{table.path} is partitioned by {', '.join(partitioned) or 'nothing'}, but "
            f"{', '.join(options.partition_by) or 'nothing'} is requested: an existing table cannot be changed"
        )
    table.bring_properties(_properties(topic, options), added, detail)


def _keys(topic: TopicDescription, own: StructType, *, is_default: bool) -> tuple[str, ...]:
    """Return the key columns for a table of the topic's current state."""
    if not is_default and not topic.key:
        raise ArchiveRefused(
            f"topic {topic.name} has no key columns: mode upsert keeps one row for each key; archive it in mode append"
        )
    if taken := sorted(set(upsert.RESERVED) & {name.lower() for name in own.names}):
        raise ConfigError(
            f"column {taken[0]} cannot be archived in mode upsert: Delta's change data feed uses this name"
        )
    return ("key",) if is_default else topic.key


def _no_progress(topic: TopicDescription, mode: Mode) -> ArchiveProgress:
    return ArchiveProgress(topic=topic.name, topic_id=topic.topic_id, batch=-1, ends={}, mode=mode)


def _without_progress(
    spark: SparkSession, table: ArchiveTable, topic: TopicDescription, *, properties: dict[str, str], asked: Mode
) -> ArchiveProgress:
    """Return the progress of a table without archive commits. Raises ArchiveRefused.

    The user may have created the table, no batch may have been committed yet, or Delta may have kept only other
    commits. ``asked`` is the mode if the table does not record it.
    """
    rows = spark.read.format("delta").load(table.path)
    text = properties.get(topic_description.PROPERTY)
    mode: Mode = "upsert" if properties.get(MODE_PROPERTY, asked) == "upsert" else "append"
    if rows.isEmpty() and (text is None or table.transaction(app_id(topic.topic_id)) < 0):
        return _no_progress(topic, mode)
    if text is None:
        raise ArchiveRefused(f"{table.path} has rows that were not written by an archive")
    archived = topic_description.from_json(text)
    # After the last good row there may be bad rows; they are read again and then found in the quarantine. There may
    # also be tombstones and replaced records; merging them again in the same order results in the same state.
    ends = {
        row[PARTITION]: row[OFFSET] + 1 for row in rows.groupBy(PARTITION).agg(sf.max(OFFSET).alias(OFFSET)).collect()
    }
    number = table.transaction(app_id(archived.topic_id))
    return ArchiveProgress(topic=archived.name, topic_id=archived.topic_id, batch=number, ends=ends, mode=mode)


def _check_mode(table: ArchiveTable, progress: ArchiveProgress, options: ArchiveOptions) -> None:
    if progress.mode != options.mode:
        raise ArchiveRefused(
            f"{table.path} was archived in mode {progress.mode}, but mode {options.mode} is requested: append keeps "
            "all records, upsert the newest of each key; archive the topic to another path"
        )


def _check_same(table: ArchiveTable, topic: TopicDescription, progress: ArchiveProgress, *, table_id: str) -> None:
    """Raise ArchiveRefused if the table's rows do not belong to this topic, or if the topic is being restored."""
    if topic.config.get("restoring") == "true":
        raise ArchiveRefused(f"topic {topic.name} is being restored; archive it after the restore")
    if topic_description.origin(topic).is_in(
        progress.topic_id, table_id=table_id, progress_version=table.progress_version
    ):
        return
    raise ArchiveRefused(
        f"topic {topic.name} was deleted and created again: {table.path} has the topic with id {progress.topic_id}, "
        f"the current id is {topic.topic_id}; archive it to another path"
    )
