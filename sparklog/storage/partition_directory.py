"""The directory of one log, and the schemas of its batches, which ``partition.json`` keeps there.

Made by the log's first append, so that an empty partition costs nothing on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.record.schema import parse_schema
from sparklog.storage.disk import sync_file
from sparklog.storage.log_services import LogServices
from sparklog.storage.partition_file import PARTITION_FILE, PartitionFile, write_partition_file


class PartitionDirectory:
    """Owned by its log, on the event loop. Methods raise OSError as the disk does."""

    __slots__ = ("_disk", "_services", "_stored", "_topic_id", "_tp", "exists", "path", "schemas")

    def __init__(
        self, path: Path, *, tp: TopicPartition, topic_id: str, schemas: Iterable[TopicSchema], services: LogServices
    ) -> None:
        self.path = path
        #: whether it is on the disk
        self.exists = False
        #: schema messages by schema id
        self.schemas = {schema.schema_id: schema.message for schema in schemas}
        self._tp = tp
        self._topic_id = topic_id
        self._services = services
        self._disk = services.disk
        #: ``partition.json`` has all schemas; where there was no room for one, the next append writes it first
        self._stored = True

    def prepare_for_append(self) -> None:
        """It is there, and knows the schema of whatever is appended."""
        if not self.exists:
            self._disk.make_directory(self.path)
            self.write_partition_file()
            self.exists = True
            self._services.moved.add(self._tp)
        elif not self._stored:
            self.write_partition_file()

    def write_partition_file(self) -> None:
        """Not fsynced before the batches that need it are (``sync``, sealing)."""
        schemas = tuple(TopicSchema(schema_id, message) for schema_id, message in self.schemas.items())
        content = PartitionFile(self._tp.topic, self._tp.partition, self._topic_id, schemas)
        write_partition_file(self._disk, self.path, content, sync=False)
        self._stored = True

    def learn(self, schema: TopicSchema) -> bool:
        """Whether it is a new one: ``partition.json`` is to be written then."""
        if schema.schema_id in self.schemas:
            return False
        self.schemas[schema.schema_id] = schema.message
        self._stored = False
        return True

    def schema_message(self, schema_id: int) -> bytes:
        """Raises BrokerError SCHEMA_OUTDATED for an id that is not known here."""
        message = self.schemas.get(schema_id)
        if message is None:
            raise BrokerError(
                ErrorCode.SCHEMA_OUTDATED,
                f"{self._tp}: schema id {schema_id} found, {sorted(self.schemas)} known here",
            )
        return message

    def schema(self, schema_id: int) -> pa.Schema:
        """Raises as ``schema_message``."""
        return parse_schema(self.schema_message(schema_id))

    def prelude(self, schema_id: int) -> bytes:
        """First bytes of a segment with this schema. Raises as ``schema_message``."""
        return self._services.prelude(self.schema_message(schema_id))

    def prelude_length(self, schema_id: int) -> int:
        return len(self.prelude(schema_id))

    def sync(self) -> None:
        """fsync ``partition.json`` and the names of all files. Blocks."""
        sync_file(self._disk, self.path / PARTITION_FILE)
        self._disk.sync_directory(self.path)
        self._disk.sync_directory(self.path.parent)
