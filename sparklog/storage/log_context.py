"""The context that the logs of one log directory share, and the report of a failed disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparklog.errors import StorageError
from sparklog.model import TopicPartition
from sparklog.record.footer import arrow_prelude
from sparklog.storage.batch_cache import BatchCache
from sparklog.storage.disk import Disk
from sparklog.storage.open_files import OpenFiles
from sparklog.storage.producer_count import ProducerCount

#: The number of schemas whose preludes are cached, each of some kilobytes.
_PRELUDES_KEPT = 1024


@dataclass(slots=True)
class LogContext:
    """The shared context of all logs of one ``LogDirectory``, which owns it."""

    disk: Disk
    files: OpenFiles
    hot: BatchCache
    #: Removes files that were renamed out of the log, in a thread.
    remove_later: Callable[[Sequence[Path]], None]
    #: Renames a partition directory away and removes it.
    remove_directory: Callable[[Path], None]
    #: Writes the checkpoint, and returns when it is durable.
    checkpoint_now: Callable[[], None]
    #: Takes the directory offline, because its disk failed.
    failed: Callable[[str], None]
    #: Called when the log of this partition has data that need an fsync because of their age.
    flush_later: Callable[[TopicPartition], None]
    #: Called when the log of this partition has made its directory, which no checkpoint names yet.
    created: Callable[[TopicPartition], None]
    producer_id_expiration_ms: int = 86_400_000
    #: The count of producer ids in all logs together.
    producer_count: ProducerCount | None = None
    #: ``moved``: logs whose checkpoint entry has changed since the last checkpoint, or that changed otherwise as
    #: ``LogDirectory.consume_changed`` defines. ``retired``: logs with segments whose deletion waits for the
    #: checkpoint. Of thousands of logs most are in neither, every few seconds.
    moved: set[TopicPartition] = field(default_factory=set)
    retired: set[TopicPartition] = field(default_factory=set)
    _preludes: dict[bytes, bytes] = field(default_factory=dict)

    def consume_moved(self) -> set[TopicPartition]:
        """Return the logs that moved since the last call."""
        moved, self.moved = self.moved, set()
        return moved

    def prelude(self, schema_message: bytes) -> bytes:
        """Return the first bytes of a segment with this schema: one object for all logs."""
        if schema_message not in self._preludes:
            if len(self._preludes) >= _PRELUDES_KEPT:  # some may belong to deleted topics
                self._preludes.clear()
            self._preludes[schema_message] = arrow_prelude(schema_message)
        return self._preludes[schema_message]

    def offline(self, detail: str) -> StorageError:
        """Take the directory offline and return the error to raise."""
        self.failed(detail)
        return StorageError(detail)

    @contextmanager
    def offline_on_error(self, doing: str) -> Iterator[None]:
        """Take the directory offline if the block fails. For the rare paths."""
        try:
            yield
        except (OSError, StorageError) as error:
            raise self.offline(f"{doing}: {error}") from error
