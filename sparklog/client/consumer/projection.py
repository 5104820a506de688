"""The columns a reader wants of one topic: what brokers are asked for, and batches completed to exactly these. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode


class TopicProjection:
    """Made from the topic's newest schema; batches of older and of newer ones fit as well."""

    def __init__(self, topic: str, columns: Sequence[str], newest: pa.Schema, *, also: Iterable[str] = ()) -> None:
        """``also``: columns that are fetched for the reader's own use.

        Raises:
            BrokerError: SCHEMA_MISMATCH naming columns that the topic does not have.
        """
        missing = [name for name in columns if name not in newest.names]
        if missing:
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"columns {missing} are not among those of {topic!r}: {newest.names}"
            )
        fetched = {*columns, *also}
        #: For ``FetchPartition.columns``; None: all, which are sent as they are stored.
        self.wire = None if fetched.issuperset(newest.names) else tuple(n for n in newest.names if n in fetched)
        self._schema = pa.schema([newest.field(name) for name in columns])
        self._names = list(columns)

    def complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The chosen columns in the chosen order; nulls where the batch is older than the column."""
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
