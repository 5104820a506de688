"""A Python data source without I/O: each task returns the same batch from memory repeatedly.

Spark's rate with it is the upper limit for any Python data source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from sparklog.spark.schema import DEFAULT_COLUMNS

_SCHEMA = to_arrow_schema(DEFAULT_COLUMNS, timezone="UTC")
#: The bytes of a batch, as in a topic that Spark has written.
_BATCH_BYTES = 4 * 1024 * 1024
#: A worker outlives its tasks: its first task creates the batch.
_made: dict[int, pa.RecordBatch] = {}


def _batch(size: int) -> pa.RecordBatch:
    if size not in _made:
        rows = _BATCH_BYTES // size
        columns: list[list[Any]] = [[None], [b"x" * size], ["at-hand"], [0], [0], [0], [0]]
        _made[size] = pa.RecordBatch.from_arrays(
            [pa.array(values * rows, kind) for values, kind in zip(columns, _SCHEMA.types, strict=True)],
            schema=_SCHEMA,
        )
    return _made[size]


class AtHand(DataSource):
    """A data source with the options ``records``, ``size`` (bytes of each value) and ``partitions``."""

    @classmethod
    def name(cls) -> str:
        return "at_hand"

    def schema(self) -> StructType:
        return DEFAULT_COLUMNS

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return _Reader(*(int(self.options[name]) for name in ("records", "size", "partitions")))


class _Reader(DataSourceStreamReader):
    def __init__(self, records: int, size: int, partitions: int) -> None:
        self._records = records
        self._size = size
        self._partitions = partitions

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"records": 0}

    def latestOffset(self, *_: object) -> dict[str, int]:  # noqa: N802
        return {"records": self._records}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        count = end["records"] - start["records"]
        borders = [count * number // self._partitions for number in range(self._partitions + 1)]
        return [InputPartition(high - low) for low, high in itertools.pairwise(borders)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch, left = _batch(self._size), partition.value
        while left > 0:
            yield batch.slice(0, left)
            left -= batch.num_rows

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the source keeps no state."""
