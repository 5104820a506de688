"""``sparklog.read``: a DataFrame of a topic, narrowed before it is planned.

On pyspark 4.2.0 a Python source cannot take filters over from Spark without losing rows elsewhere, so what a read
leaves out is said here: columns, and ranges of partitions, offsets and times.
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
    """The records of ``topic`` (one, several separated by commas, or a list) as a DataFrame of its own: each call
    loads afresh, so it ends where the logs end now.

    Args:
        columns: only these, in this order; other columns are not read.
        where: conditions on partition, offset and timestamp, as in ``"offset >= 5 and timestamp <
            '2024-05-01T00:00:00Z'"``; see ``sparklog.spark.read_filter``. Only what may match is read.
        options: further options of ``format("sparklog")``.

    Raises:
        ConfigError: ``where`` is not understood, a column is not there.
    """
    given = option_texts(options)
    given["subscribe"] = topic if isinstance(topic, str) else ",".join(topic)
    if where is not None:
        parse_where(where)  # refused here, and not in a process of Spark's
        given["where"] = where
    reader = spark.read.format("sparklog")
    if columns is None:
        return reader.options(**given).load()
    offered = reader.options(**{**given, "includeHeaders": "true"}).load().schema
    return spark.read.format("sparklog").options(**given).schema(chosen_columns(offered, columns)).load()


def option_texts(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    """Options as Spark takes them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def chosen_columns(offered: StructType, columns: Iterable[str]) -> StructType:
    """These of the ``offered`` columns. Raises ConfigError naming one that is not there, or where there are none."""
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: a list of names is expected")
    chosen = StructType()
    for name in columns:
        if name not in offered.fieldNames():
            near = difflib.get_close_matches(name, offered.fieldNames(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(offered.fieldNames())}"
            raise ConfigError(f"columns: {name!r} is not a column of the topic; {hint}")
        chosen.add(offered[name])
    if not chosen.fields:
        raise ConfigError("columns names no column; leave it out for all")
    return chosen
