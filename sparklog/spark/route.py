"""The route of rows into a topic, which ``route_plan`` plans.

This module does not load Arrow: routes are also unpickled, with their writer, in the process that commits. That process
does not need Arrow and would spend most of its time loading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StringType, StructType

from sparklog.errors import BrokerError, ConfigError, ErrorCode

if TYPE_CHECKING:
    import pyarrow as pa

TOPIC_COLUMNS = ("topic", "_topic")


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """A plan for rows that go to one topic: which columns are sent, and which column chooses the partition.

    ``payload`` has the columns to send. ``partition_column`` is the column with the number of the partition, if there
    is one. ``topic_id`` is the topic's id when the topic was looked up.
    """

    topic: str
    payload: tuple[str, ...]
    partition_column: str | None
    topic_id: str = ""
    #: The names that the topic has for the columns in ``payload``, in the same order. Empty if the names are the same.
    stored_as: tuple[str, ...] = ()

    def split(self, batch: pa.RecordBatch) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """Yield each partition with its rows of ``batch``, which have only the columns to send.

        The partition is None for rows whose partition the key or the producer chooses. Raises BrokerError for a
        negative partition.
        """
        rows = batch.select(list(self.payload))
        if self.stored_as:
            rows = rows.rename_columns(list(self.stored_as))
        if self.partition_column is None:
            yield None, rows
            return
        for partition, part in rows_by_value(rows, batch.column(batch.schema.get_field_index(self.partition_column))):
            if partition is not None and partition < 0:
                raise BrokerError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"column {self.partition_column} is {partition} in a row for {self.topic}, expected 0 or more",
                )
            yield partition, part


def find_topic_column(columns: StructType) -> str:
    """Return the name of the column that contains each row's topic. It is used if the option ``topic`` is not set.

    Raises:
        ConfigError: there is no such column, or its type is not string.
    """
    names = columns.fieldNames()
    name = next((name for name in reversed(TOPIC_COLUMNS) if name in names), None)
    if name is None:
        raise ConfigError(
            "no topic to write to: set the option topic, or add a string column topic; CREATE TABLE ... AS SELECT "
            "does not pass options: create the table without columns first, then INSERT INTO t WITH ('topic'='x')"
        )
    if not isinstance(columns[name].dataType, StringType):
        raise ConfigError(
            f"column {name} has type {columns[name].dataType.simpleString()}, expected string to name topics"
        )
    return name


def rows_by_value(rows: pa.RecordBatch, values: pa.Array) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Yield ``rows`` in groups of equal ``values``, in order of first appearance. Nulls form a group."""
    import pyarrow.compute as pc  # Only tasks call this, and have it loaded.

    distinct = values.unique()
    if len(distinct) == 1:
        yield distinct[0].as_py(), rows
        return
    for value in distinct:
        chosen = pc.equal(values, value) if value.is_valid else pc.is_null(values)
        yield value.as_py(), rows.filter(chosen)
