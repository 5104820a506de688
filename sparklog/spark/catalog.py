"""Tables in Spark's catalog: ``CREATE TABLE t USING sparklog OPTIONS (subscribe 'flights')``, without columns.

Spark passes the options of such a table once, to ``schema()`` at its creation, and never again (pyspark 4.2.0).
Therefore the metadata of the table's first column stores the options. All columns of a table are nullable, so that an
INSERT can omit the columns that only reads fill, such as the offset.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql.types import StructField, StructType

from sparklog.spark.options import BOOTSTRAP_OPTIONS, SELECTIONS, known_options

_KEY = "sparklog.options"
#: An option that Spark passes only while a table is created.
_CREATING = "provider"


def is_creation(options: Mapping[str, str]) -> bool:
    return _CREATING in options


def table_columns(columns: StructType, options: Mapping[str, str]) -> StructType:
    """Return the columns of a catalog table that is created with ``options``. Their metadata stores the options."""
    kept = msgspec.json.encode(known_options(options)).decode()
    fields = [StructField(column.name, column.dataType, nullable=True) for column in columns.fields]
    fields[0] = StructField(fields[0].name, fields[0].dataType, nullable=True, metadata={_KEY: kept})
    return StructType(fields)


def read_options_of(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """Return the options of a read.

    If ``options`` select no topic, the read is of a catalog table. Then the result also has the options that the
    metadata of ``schema`` stores, unless ``options`` override them.
    """
    if any(name.lower() in options for name in SELECTIONS):
        return options
    return _over(_kept(schema), options)


def write_options_of(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """Return the options of a write.

    For a write to a catalog table, the result includes the brokers that the table stores, but not the table's topic.
    Otherwise a write without the option ``topic`` would write rows back to the topic that they were read from.
    """
    kept = {name: text for name, text in _kept(schema).items() if name in BOOTSTRAP_OPTIONS}
    return options if any(name in options for name in BOOTSTRAP_OPTIONS) else _over(kept, options)


def _over(kept: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    return {**{name.lower(): text for name, text in kept.items()}, **options}


def _kept(schema: StructType) -> dict[str, str]:
    for column in schema.fields:
        if _KEY in column.metadata:
            return msgspec.json.decode(column.metadata[_KEY], type=dict[str, str])
    return {}
