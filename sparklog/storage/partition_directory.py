"""The directory of one log, and the schemas of its batches.

The log's first append creates the directory, so an empty partition uses no disk space. ``partition.json`` has the
schemas that are known at that time. A later schema is written only with the first append that uses it. It is at the
beginning of the new segment, and then a thread also writes it to ``partition.json`` (``PartitionFileJob``).
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
    """The directory of one log, and the schemas of the log's batches. A part of ``Log``.

    Not thread-safe: use it only on the broker's event loop. The methods raise OSError if the disk fails.
    """

    __slots__ = ("_disk", "_services", "_topic_id", "_tp", "exists", "path", "schemas", "unstored")

    def __init__(
        self, path: Path, *, tp: TopicPartition, topic_id: str, schemas: Iterable[TopicSchema], services: LogContext
    ) -> None:
        self.path = path
        #: Whether the directory exists on disk.
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
        """Create the directory and ``partition.json`` if they do not exist.

        ``partition.json`` is fsynced only together with the first batches, by ``sync`` or when a segment is sealed. So
        if a power failure destroys the file, the log has no fsynced batch.
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
        """Add a schema. A schema id that is already known keeps its schema."""
        if schema.schema_id not in self.schemas:
            self.schemas[schema.schema_id] = schema.message
            self.unstored.add(schema.schema_id)

    def store_job(self) -> PartitionFileJob:
        """Return a job that writes ``partition.json`` in a thread. Call ``stored`` when the job is done."""
        return PartitionFileJob(self._disk, self.path, self._content())

    def stored(self, content: PartitionFile) -> None:
        """Record that ``partition.json`` on disk has the schemas of ``content``."""
        self.unstored.difference_update(schema.schema_id for schema in content.schemas)

    def restore_partition_file(self) -> None:
        """Write ``partition.json`` again, for example because it is unreadable. Block for the fsync."""
        content = self._content()
        write_partition_file(self._disk, self.path, content, sync=True)
        self.stored(content)

    def schema_message(self, schema_id: int) -> bytes:
        """Return the Arrow schema message with this id. Raises BrokerError SCHEMA_OUTDATED if the id is unknown."""
        message = self.schemas.get(schema_id)
        if message is None:
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED,
                f"{self._tp}: schema id {schema_id} found, {sorted(self.schemas)} known here",
            )
        return message

    def schema(self, schema_id: int) -> pa.Schema:
        """Return the Arrow schema with this id. Raises BrokerError SCHEMA_OUTDATED if the id is unknown."""
        return parse_schema(self.schema_message(schema_id))

    def prelude(self, schema_id: int) -> bytes:
        """Return the bytes that precede the first batch in the data file of a segment with this schema.

        Raises BrokerError SCHEMA_OUTDATED if the id is unknown.
        """
        return self._services.prelude(self.schema_message(schema_id))

    def prelude_length(self, schema_id: int) -> int:
        return len(self.prelude(schema_id))

    def sync(self) -> None:
        """Fsync ``partition.json``, the log's directory and its parent directory. Block until this is done."""
        sync_file(self._disk, self.path / PARTITION_FILE)
        self._disk.sync_directory(self.path)
        self._disk.sync_directory(self.path.parent)
