"""Which Arrow schema a fetched batch has: by topic and schema id, out of the metadata, asked for when not known yet."""

from __future__ import annotations

import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.schema import parse_schema


class SchemaLookup:
    """Schemas of one topic, by id. Used by the link's thread."""

    def __init__(self, link: BlockingCluster, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._known: dict[int, pa.Schema] = {}

    def __call__(self, schema_id: int) -> pa.Schema:
        """Raises BrokerError: SCHEMA_MISMATCH when the topic has no such schema."""
        schema = self._known.get(schema_id)
        if schema is None:
            schema = self._known[schema_id] = self._look_up(schema_id)
        return schema

    def _look_up(self, schema_id: int) -> pa.Schema:
        found = self._link.metadata.schema(self._topic, schema_id)
        if found is None:
            self._link.topic(self._topic, refresh=True)
            found = self._link.metadata.schema(self._topic, schema_id)
        if found is None:
            raise BrokerError(ErrorCode.SCHEMA_MISMATCH, f"topic {self._topic!r} has no schema {schema_id}")
        return parse_schema(found.message)
