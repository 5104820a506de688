"""The decoding of completed fetches with the schemas of their topics.

A batch that cannot be decoded is never skipped: the partition's cursor moves back to this batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.fetched_batches import FetchedBatch, decode_partition
from sparklog.client.consumer.partition_cursor import CompletedFetch, LogPosition
from sparklog.client.consumer.projection import ColumnsOf
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.header import BatchHeader
from sparklog.record.schema import parse_schema


class FetchDecoder:
    """A decoder of fetched batches. Not thread-safe: use it only in the thread of its consumer or reader."""

    def __init__(self, cluster: BlockingCluster, *, columns: ColumnsOf, counters: ReadCounters) -> None:
        self._cluster = cluster
        self._columns = columns
        self._counters = counters
        self._schemas: dict[str, _TopicSchemas] = {}

    def decode(
        self, fetch: CompletedFetch, *, end: int | None = None, keep: Callable[[BatchHeader], bool] | None = None
    ) -> Iterator[FetchedBatch]:
        """Yield the records between the fetch's start and ``end``. ``keep`` filters batches by their header.

        After an error, the cursor moves back to the first batch that was not yielded. If this batch is damaged, and
        only some of its columns were fetched, end without an error: the next fetch asks the broker to verify the batch.

        Raises:
            BrokerError: CORRUPT_MESSAGE; SCHEMA_MISMATCH for a schema that the topic does not have.
        """
        cursor, start, part = fetch
        columns = self._columns(cursor.tp.topic)
        schemas = self._schemas_of(cursor.tp.topic)
        done = start
        try:
            for found in decode_partition(part, schemas, start=start.offset, end=end, keep=keep, columns=columns):
                self._counters.count_decoded(found, mapped=part.mapped)
                done = LogPosition(found.header.next_offset, found.header.leader_epoch)
                yield found
        except Exception as error:
            cursor.move(*done)
            is_projected = columns is not None and not part.mapped
            if not (is_projected and cursor.request_verification(error, part.next_offset)):
                raise

    def _schemas_of(self, topic: str) -> _TopicSchemas:
        schemas = self._schemas.get(topic)
        if schemas is None:
            schemas = self._schemas[topic] = _TopicSchemas(self._cluster, topic)
        return schemas


class _TopicSchemas:
    """A cache of the Arrow schemas of one topic, by schema id. It refreshes the metadata once for an unknown id."""

    def __init__(self, cluster: BlockingCluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._known: dict[int, pa.Schema] = {}

    def __call__(self, schema_id: int) -> pa.Schema:
        """Return the schema. Raises BrokerError SCHEMA_MISMATCH if the topic does not have it."""
        schema = self._known.get(schema_id)
        if schema is None:
            schema = self._known[schema_id] = self._look_up(schema_id)
        return schema

    def _look_up(self, schema_id: int) -> pa.Schema:
        found = self._cluster.metadata.schema(self._topic, schema_id)
        if found is None:
            self._cluster.topic(self._topic, refresh=True)
            found = self._cluster.metadata.schema(self._topic, schema_id)
        if found is None:
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"topic {self._topic!r} has no schema {schema_id}")
        return parse_schema(found.message)
