"""Records of older schemas with the columns that their topic has now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from sparklog.client.consumer.batch_slicing import LOG_COLUMNS
from sparklog.client.consumer.origin import origin
from sparklog.record.schema import fit_table


class NewestColumns:
    """The newest schema of each topic that is read. Owner: one command.

    A topic's schema only gets more columns, all nullable, so an older record has nulls for them.
    """

    def __init__(self, topics: Iterable[str], schema_of: Callable[[str], pa.Schema], *, places: bool) -> None:
        """``schema_of`` asks the cluster; ``places``: batches have the log's own columns behind the topic's."""
        self._schema_of = schema_of
        self._places = places
        self._schemas = {topic: self._asked(topic) for topic in topics}

    @property
    def common(self) -> pa.Schema | None:
        """The schema that all topics have; None when they differ."""
        first, *others = self._schemas.values()
        return first if all(other.equals(first) for other in others) else None

    def fit(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return ``batch`` with all columns of its topic; it asks again when the batch has one that is not known."""
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
