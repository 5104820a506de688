"""The columns that a reader needs of one topic: the request to brokers, and the completion of batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode

#: The function that returns the columns to request of a topic, as ``TopicProjection.wire``.
ColumnsOf = Callable[[str], "tuple[str, ...] | None"]


class TopicProjection:
    """A projection by the topic's newest schema. It applies to batches of older and newer schemas as well."""

    def __init__(self, topic: str, columns: Sequence[str], newest: pa.Schema, *, also: Iterable[str] = ()) -> None:
        """Create the projection. ``also``: columns that are fetched for the reader's own use.

        Raises:
            BrokerError: SCHEMA_MISMATCH with the columns that the topic does not have.
        """
        missing = [name for name in columns if name not in newest.names]
        if missing:
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"columns {missing} not found; topic {topic!r} has {newest.names}"
            )
        fetched = {*columns, *also}
        #: The value for ``FetchPartition.columns``; None: all columns, which are sent as stored.
        self.wire = None if fetched.issuperset(newest.names) else tuple(n for n in newest.names if n in fetched)
        self._schema = pa.schema([newest.field(name) for name in columns])
        self._names = list(columns)

    def complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the chosen columns in the chosen order, with nulls if the batch is older than a column."""
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
