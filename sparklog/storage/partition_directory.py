"""The directory of one log, and the schemas of its batches.

The log's first append makes the directory, so an empty partition costs nothing on disk. ``partition.json`` has the
schemas that are known by then. A later schema also costs nothing before it is used. Its segments begin with it, and
once such a segment exists, a thread writes the schema to the file (``PartitionFileJob``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.record.schema import parse_schema
from sparklog.storage.disk import sync_file
from sparklog.storage.log_context import LogContext
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, PartitionFileJob, write_partition_file


class PartitionDirectory:
    """The directory of one log, which owns this object, on the event loop. Methods raise OSError like the disk."""

    __slots__ = ("_disk", "_services", "_topic_id", "_tp", "exists", "path", "schemas", "unstored")

    def __init__(
        self, path: Path, *, tp: TopicPartition, topic_id: str, schemas: Iterable[TopicSchema], services: LogContext
    ) -> None:
        self.path = path
        #: The directory exists on disk.
        self.exists = False
        #: Schema messages by schema id.
        self.schemas = {schema.schema_id: schema.message for schema in schemas}
        #: The schema ids that ``partition.json`` lacks.
        self.unstored: set[int] = set()
        self._tp = tp
        self._topic_id = topic_id
        self._services = services
        self._disk = services.disk

    def found(self, schemas: Mapping[int, bytes]) -> None:
        """Record that the directory exists, and add the schemas that recovery found, by schema id."""
        self.exists = True
        for schema_id, message in schemas.items():
            self.learn(TopicSchema(schema_id, message))

    def prepare_for_append(self) -> None:
        """Make the directory if it does not exist.

        ``partition.json`` is fsynced only together with the first batches (``sync``, sealing). A power cut that loses
        the file loses no fsynced batch.
        """
        if not self.exists:
            self._disk.make_directory(self.path)
            write_partition_file(self._disk, self.path, self._content(), sync=False)
            self.unstored.clear()
            self.exists = True
            self._services.moved.add(self._tp)
            self._services.created(self._tp)

    def _content(self) -> PartitionFile:
        schemas = tuple(TopicSchema(schema_id, message) for schema_id, message in self.schemas.items())
        return PartitionFile(self._tp.topic, self._tp.partition, self._topic_id, schemas)

    def learn(self, schema: TopicSchema) -> None:
        """Add a schema. A known id keeps its schema."""
        if schema.schema_id not in self.schemas:
            self.schemas[schema.schema_id] = schema.message
            self.unstored.add(schema.schema_id)

    def store_job(self) -> PartitionFileJob:
        """Return a job for a thread. Call ``stored`` after it."""
        return PartitionFileJob(self._disk, self.path, self._content())

    def stored(self, content: PartitionFile) -> None:
        """Record that ``partition.json`` has these schemas, durably."""
        self.unstored.difference_update(schema.schema_id for schema in content.schemas)

    def restore_partition_file(self) -> None:
        """Write ``partition.json`` again, for example because it is unreadable. Block."""
        content = self._content()
        write_partition_file(self._disk, self.path, content, sync=True)
        self.stored(content)

    def schema_message(self, schema_id: int) -> bytes:
        """Return the schema message. Raises BrokerError SCHEMA_OUTDATED for an unknown id."""
        message = self.schemas.get(schema_id)
        if message is None:
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED,
                f"{self._tp}: schema id {schema_id} found, {sorted(self.schemas)} known here",
            )
        return message

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the schema. Raises as ``schema_message``."""
        return parse_schema(self.schema_message(schema_id))

    def prelude(self, schema_id: int) -> bytes:
        """Return the first bytes of a segment with this schema. Raises as ``schema_message``."""
        return self._services.prelude(self.schema_message(schema_id))

    def prelude_length(self, schema_id: int) -> int:
        return len(self.prelude(schema_id))

    def sync(self) -> None:
        """fsync ``partition.json`` and the names of all files. Block."""
        sync_file(self._disk, self.path / PARTITION_FILE)
        self._disk.sync_directory(self.path)
        self._disk.sync_directory(self.path.parent)
