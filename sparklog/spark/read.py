"""``sparklog.read``, which returns a DataFrame of a topic with selected columns and ranges.

In pyspark 4.2.0 a Python source cannot accept filters from Spark without losing rows in other scans. So the arguments
of this function select columns, and ranges of partitions, offsets and times.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from sparklog.errors import ConfigError
from sparklog.spark.read_filter import parse_where

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    topic: str | Iterable[str],
    *,
    columns: Iterable[str] | None = None,
    where: str | None = None,
    **options: str | int | bool,
) -> DataFrame:
    """Return the records of ``topic`` (one topic, several separated by commas, or a list) as a new DataFrame.

    Each call plans a new read, which ends at the current end of the logs.

    Args:
        columns: the columns to read, in this order; other columns are not read.
        where: conditions on partition, offset and timestamp, such as ``"offset >= 5 and timestamp <
            '2024-05-01T00:00:00Z'"``; see ``sparklog.spark.read_filter``. Only batches that can match are read.
        options: further options of ``format("sparklog")``.

    Raises:
        ConfigError: ``where`` is not valid, or a column does not exist.
    """
    given = option_texts(options)
    given["subscribe"] = topic if isinstance(topic, str) else ",".join(topic)
    if where is not None:
        parse_where(where)  # Raise the error here rather than in a process of Spark.
        given["where"] = where
    reader = spark.read.format("sparklog")
    if columns is None:
        return reader.options(**given).load()
    offered = reader.options(**{**given, "includeHeaders": "true"}).load().schema
    return spark.read.format("sparklog").options(**given).schema(chosen_columns(offered, columns)).load()


def option_texts(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """Return the options in the form that Spark accepts."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def chosen_columns(offered: StructType, columns: Iterable[str]) -> StructType:
    """Return the fields of ``offered`` that ``columns`` names.

    Raises ConfigError for an unknown column or an empty list.
    """
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: expected a list of names")
    chosen = StructType()
    for name in columns:
        if name not in offered.fieldNames():
            near = difflib.get_close_matches(name, offered.fieldNames(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(offered.fieldNames())}"
            raise ConfigError(f"columns: {name!r} is not a column of the topic; {hint}")
        chosen.add(offered[name])
    if not chosen.fields:
        raise ConfigError("columns is empty; omit it to read all columns")
    return chosen
