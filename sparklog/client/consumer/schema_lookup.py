"""The Arrow schemas of a topic by schema id, from the metadata, with a refresh for an unknown id."""

from __future__ import annotations

import pyarrow as pa

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.schema import parse_schema


class SchemaLookup:
    """The schemas of one topic. The cluster client's thread uses it."""

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
