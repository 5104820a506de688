"""Before a query begins: the topic's table is there, fits the topic as it is now, and belongs to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from sparklog.client.descriptions import TopicDescription
from sparklog.delta import topic_description
from sparklog.delta.archive_table import ArchiveRefused, ArchiveTable
from sparklog.delta.casting import Casting, holds_local_times, plan_casting
from sparklog.delta.options import ArchiveOptions
from sparklog.delta.quarantine import Quarantine
from sparklog.delta.seam import Seam, app_id
from sparklog.delta.table import (
    DEFAULT_PARTITION_BY,
    OFFSET,
    PARTITION,
    own_columns,
    quarantine_columns,
    quarantine_path,
    table_path,
)
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_SCHEMA

#: Characters that Delta takes in no column name, unless it maps names to others.
_ODD = re.compile(r"[ ,;{}()\n\t=]")
_LOCAL_TIMES = {"delta.feature.timestampNtz": "supported"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """``seam``: what the table holds; of a table without commits of an archive, batch -1 and no ends."""

    table: ArchiveTable
    quarantine: Quarantine
    casting: Casting
    seam: Seam


def prepare(spark: SparkSession, options: ArchiveOptions, topic: TopicDescription, *, columns: StructType) -> Prepared:
    """``columns``: those that the source shows of the topic.

    Raises:
        ArchiveRefused: the table is another topic's, another program's, or not partitioned as asked for.
        ConfigError: columns that do not fit the table, or Delta.
    """
    is_default = bool(topic.schema.equals(DEFAULT_SCHEMA))
    own = own_columns(columns, topic.schema.names, is_default=is_default)
    table = ArchiveTable(spark, table_path(options.to, options.topic))
    found = table.look()
    casting, added = plan_casting(
        own, is_default=is_default, json=options.json, table=table.columns() if table.exists else None
    )
    if table.exists:
        detail = table.detail()
        seam = found or _without_seam(spark, table, topic, properties=detail["properties"])
        _check_same(table, topic, seam)
        _bring_up_to_date(table, topic, added, options=options, detail=detail)
    else:
        _make(table, topic, casting, options=options)
        seam = _no_seam(topic)
    if seam.ends:
        # Partitions that came later begin at 0, whatever their logs begin with by now.
        everywhere = dict.fromkeys((part.partition for part in topic.partitions), 0)
        seam = msgspec.structs.replace(seam, ends={**everywhere, **seam.ends})
    seam = msgspec.structs.replace(seam, topic=topic.name, topic_id=topic.topic_id, mode=options.mode, lost={})
    quarantine = Quarantine(spark, quarantine_path(options.to, options.topic), quarantine_columns(own))
    quarantine.begin(seam.ends)
    return Prepared(table, quarantine, casting, seam)


def _make(table: ArchiveTable, topic: TopicDescription, casting: Casting, *, options: ArchiveOptions) -> None:
    unknown = sorted(set(options.partition_by or ()) - set(casting.table.names))
    if unknown:
        raise ConfigError(f"the table cannot be partitioned by {', '.join(unknown)}: it has no such column")
    properties = {topic_description.PROPERTY: topic_description.to_json(topic)}
    if any(_ODD.search(name) for name in casting.table.names):
        properties["delta.columnMapping.mode"] = "name"
    table.create(
        casting.table,
        partition_by=DEFAULT_PARTITION_BY if options.partition_by is None else options.partition_by,
        properties=properties,
        comment=f"Archive of topic {topic.name}",
    )


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
    wanted = {topic_description.PROPERTY: topic_description.to_json(topic)}
    if holds_local_times(added) and "timestampNtz" not in (detail.get("tableFeatures") or ()):
        wanted |= _LOCAL_TIMES
    if any(_ODD.search(name) for name in added.names):
        wanted["delta.columnMapping.mode"] = "name"
    changed = {name: value for name, value in wanted.items() if detail["properties"].get(name) != value}
    if changed:
        table.set_properties(changed)


def _no_seam(topic: TopicDescription) -> Seam:
    return Seam(topic=topic.name, topic_id=topic.topic_id, batch=-1, ends={}, mode="append")


def _without_seam(
    spark: SparkSession, table: ArchiveTable, topic: TopicDescription, *, properties: dict[str, str]
) -> Seam:
    """The progress of a table none of whose commits that are left says it: made by the user, or before the first batch,
    or others' commits are all that Delta has kept. Raises ArchiveRefused."""
    rows = spark.read.format("delta").load(table.path)
    if rows.isEmpty():
        return _no_seam(topic)
    text = properties.get(topic_description.PROPERTY)
    if text is None:
        raise ArchiveRefused(f"{table.path} has rows, and none of them came from an archive")
    archived = topic_description.from_json(text)
    # Bad rows may lie behind the last good one: they are read again, and found in the quarantine.
    ends = {
        row[PARTITION]: row[OFFSET] + 1 for row in rows.groupBy(PARTITION).agg(sf.max(OFFSET).alias(OFFSET)).collect()
    }
    number = table.transaction(app_id(archived.topic_id))
    return Seam(topic=archived.name, topic_id=archived.topic_id, batch=number, ends=ends, mode="append")


def _check_same(table: ArchiveTable, topic: TopicDescription, seam: Seam) -> None:
    if seam.topic_id != topic.topic_id:
        raise ArchiveRefused(
            f"topic {topic.name} was deleted and made again: {table.path} holds the one with the id {seam.topic_id}, "
            f"now it is {topic.topic_id}; archive it to another path"
        )
