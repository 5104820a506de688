"""The conversion of records with older schemas to the current columns of their topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from sparklog.client.consumer.log_columns import LOG_COLUMNS
from sparklog.client.consumer.origin import origin
from sparklog.record.schema import fit_table


class NewestColumns:
    """A converter of consumed records to the newest known schemas of their topics. Each command creates its own.

    A topic's schema only gets new nullable columns, so an older record has nulls in the new columns.
    """

    def __init__(self, topics: Iterable[str], schema_of: Callable[[str], pa.Schema], *, places: bool) -> None:
        """Read the schemas of ``topics`` with ``schema_of``.

        With ``places``, batches also have the columns of a record's position (topic, partition, offset) after the
        topic's columns.
        """
        self._schema_of = schema_of
        self._places = places
        self._schemas = {topic: self._asked(topic) for topic in topics}

    @property
    def common(self) -> pa.Schema | None:
        """Return the schema that all topics share, or None if they differ."""
        first, *others = self._schemas.values()
        return first if all(other.equals(first) for other in others) else None

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return ``batch`` with all columns of its topic. If ``batch`` has an unknown column, read the schema again."""
        topic = origin(batch).topic
        schema = self._schemas[topic]
        if batch.schema.equals(schema):
            return batch
        if not set(batch.schema.names).issubset(schema.names):
            schema = self._schemas[topic] = self._asked(topic)
        return fit_table(batch, schema)

    def _asked(self, topic: str) -> pa.Schema:
        schema = self._schema_of(topic)
        return pa.schema([*schema, *LOG_COLUMNS]) if self._places else schema
