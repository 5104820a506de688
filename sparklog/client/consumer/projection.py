"""The columns of a topic that a reader needs: which columns to request, and how to complete the received batches.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode

#: A function that returns the columns of a topic to request, as in ``TopicProjection.wire``.
ColumnsOf = Callable[[str], "tuple[str, ...] | None"]


class TopicProjection:
    """The projection of a topic's batches to some columns of the topic's newest schema.

    Batches of older and later schemas can be projected too.
    """

    def __init__(self, topic: str, columns: Sequence[str], newest: pa.Schema, *, also: Iterable[str] = ()) -> None:
        """Create the projection. The columns in ``also`` are fetched too, but not returned.

        Raises:
            BrokerError: SCHEMA_MISMATCH with the columns that the topic does not have.
        """
        missing = [name for name in columns if name not in newest.names]
        if missing:
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"columns {missing} not found; topic {topic!r} has {newest.names}"
            )
        fetched = {*columns, *also}
        #: The value for ``FetchPartition.columns``. None: batches are sent as they are stored, with all columns.
        self.wire = None if fetched.issuperset(newest.names) else tuple(n for n in newest.names if n in fetched)
        self._schema = pa.schema([newest.field(name) for name in columns])
        self._names = list(columns)

    def complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the chosen columns of a batch, in the chosen order. A column that the batch does not have is null."""
        found = batch.schema.names
        if found == self._names:
            return batch
        if set(found).issuperset(self._names):
            return batch.select([found.index(name) for name in self._names])
        arrays = [
            batch.column(field.name) if field.name in found else pa.nulls(batch.num_rows, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
