"""Before a query begins: the topic's table is there, fits the topic as it is now, and belongs to it."""

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
    """``seam``: what the table holds; of a table without commits of an archive, batch -1 and no ends. ``finish``: what
    is left to be done before a batch; it takes Spark seconds, which a query needs to begin as well."""

    table: ArchiveTable
    quarantine: Quarantine
    casting: Casting
    seam: ArchiveProgress
    finish: Callable[[], None]


def prepare(spark: SparkSession, options: ArchiveOptions, topic: TopicDescription, *, columns: StructType) -> Prepared:
    """``columns``: those that the source shows of the topic.

    Raises:
        ArchiveRefused: the table is another topic's, another program's, or not partitioned as asked for.
        ConfigError: columns that do not fit the table, or Delta.
    """
    is_default = bool(topic.schema.equals(DEFAULT_SCHEMA))
    own = own_columns(columns, topic.schema.names, is_default=is_default)
    keys = _keys(topic, own, is_default=is_default) if options.mode == "upsert" else ()
    table = ArchiveTable(spark, table_path(options.to, options.topic))
    found = table.look()
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
        seam = found or _without_seam(spark, table, topic, properties=detail["properties"], asked=options.mode)
        _check_same(table, topic, seam, table_id=detail["id"])
        _check_mode(table, seam, options)
        _bring_up_to_date(table, topic, added, options=options, detail=detail)
    else:
        seam = _no_seam(topic, options.mode)
    make = _making(table, topic, casting, options=options) if detail is None else None
    if seam.ends:
        # Partitions that came later begin at 0, whatever their logs begin with by now.
        everywhere = dict.fromkeys((part.partition for part in topic.partitions), 0)
        seam = msgspec.structs.replace(seam, ends={**everywhere, **seam.ends})
    seam = msgspec.structs.replace(seam, topic=topic.name, topic_id=topic.topic_id, mode=options.mode, lost={})
    quarantine = Quarantine(spark, quarantine_path(options.to, options.topic), quarantine_columns(own))
    quarantine.begin(seam.ends)
    if not seam.ends:
        quarantine.check_topic(topic_description.origin(topic).ids)

    def finish() -> None:
        if make is not None:
            make()
        # Delta finds out once for each version, and the first batch's commit will ask.
        table.transaction(seam.app_id)

    return Prepared(table, quarantine, casting, seam, finish)


def _making(
    table: ArchiveTable, topic: TopicDescription, casting: Casting, *, options: ArchiveOptions
) -> Callable[[], None]:
    """What makes the table. Raises ConfigError: it cannot be partitioned as asked for."""
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
    """Of a new table."""
    if options.partition_by is not None:
        return options.partition_by
    # Rows of a state change, and with them their dates: a merge would move them between directories.
    return DEFAULT_PARTITION_BY if options.mode == "append" else ()


def _properties(topic: TopicDescription, options: ArchiveOptions) -> dict[str, str]:
    properties = {topic_description.PROPERTY: topic_description.to_json(topic), MODE_PROPERTY: options.mode}
    return properties | (upsert.PROPERTIES if options.mode == "upsert" else {})


def _bring_up_to_date(
    table: ArchiveTable, topic: TopicDescription, added: StructType, *, options: ArchiveOptions, detail: dict[str, Any]
) -> None:
    """Properties alone: columns come into the table with the first rows that have them."""
    partitioned = tuple(detail["partitionColumns"])
    if options.partition_by is not None and options.partition_by != partitioned:
        raise ArchiveRefused(
            f"{table.path} is partitioned by {', '.join(partitioned) or 'nothing'}, asked for is "
            f"{', '.join(options.partition_by) or 'nothing'}: this cannot be changed where the table stands"
        )
    table.bring_properties(_properties(topic, options), added, detail)


def _keys(topic: TopicDescription, own: StructType, *, is_default: bool) -> tuple[str, ...]:
    """The columns that a table of the topic's state is kept by."""
    if not is_default and not topic.key:
        raise ArchiveRefused(
            f"topic {topic.name} has no key columns: mode upsert keeps one row for each key; archive it in mode append"
        )
    if taken := sorted(set(upsert.RESERVED) & {name.lower() for name in own.names}):
        raise ConfigError(f"column {taken[0]} cannot be kept in mode upsert: Delta's change data feed has one like it")
    return ("key",) if is_default else topic.key


def _no_seam(topic: TopicDescription, mode: Mode) -> ArchiveProgress:
    return ArchiveProgress(topic=topic.name, topic_id=topic.topic_id, batch=-1, ends={}, mode=mode)


def _without_seam(
    spark: SparkSession, table: ArchiveTable, topic: TopicDescription, *, properties: dict[str, str], asked: Mode
) -> ArchiveProgress:
    """The progress of a table none of whose commits that are left says it: made by the user, or before the first batch,
    or others' commits are all that Delta has kept. ``asked``: the mode, where it does not say that either. Raises
    ArchiveRefused."""
    rows = spark.read.format("delta").load(table.path)
    text = properties.get(topic_description.PROPERTY)
    mode: Mode = "upsert" if properties.get(MODE_PROPERTY, asked) == "upsert" else "append"
    if rows.isEmpty() and (text is None or table.transaction(app_id(topic.topic_id)) < 0):
        return _no_seam(topic, mode)
    if text is None:
        raise ArchiveRefused(f"{table.path} has rows, and none of them came from an archive")
    archived = topic_description.from_json(text)
    # Bad rows may lie behind the last good one: they are read again, and found in the quarantine. So may tombstones and
    # records that newer ones replaced: what is merged again in the same order comes to the same state.
    ends = {
        row[PARTITION]: row[OFFSET] + 1 for row in rows.groupBy(PARTITION).agg(sf.max(OFFSET).alias(OFFSET)).collect()
    }
    number = table.transaction(app_id(archived.topic_id))
    return ArchiveProgress(topic=archived.name, topic_id=archived.topic_id, batch=number, ends=ends, mode=mode)


def _check_mode(table: ArchiveTable, seam: ArchiveProgress, options: ArchiveOptions) -> None:
    if seam.mode != options.mode:
        raise ArchiveRefused(
            f"{table.path} is kept in mode {seam.mode}, asked for is {options.mode}: the one holds all records, the "
            "other the newest of each key; archive the topic to another path"
        )


def _check_same(table: ArchiveTable, topic: TopicDescription, seam: ArchiveProgress, *, table_id: str) -> None:
    """Raises ArchiveRefused: the topic is not the one in the table, nor one that was made from the table as it is."""
    if topic.config.get("restoring") == "true":
        raise ArchiveRefused(f"topic {topic.name} is being restored; archive it when that is done")
    if topic_description.origin(topic).is_in(seam.topic_id, table_id=table_id, seam_version=table.seam_version):
        return
    raise ArchiveRefused(
        f"topic {topic.name} was deleted and made again: {table.path} holds the one with the id {seam.topic_id}, "
        f"now it is {topic.topic_id}; archive it to another path"
    )
