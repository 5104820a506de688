"""What the logs of one log directory share, and how a log reports that its disk is broken."""

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

#: Of schemas, each some kilobytes.
_PRELUDES_KEPT = 1024


@dataclass(slots=True)
class LogContext:
    """Owned by ``LogDirectory``."""

    disk: Disk
    files: OpenFiles
    hot: BatchCache
    #: Removes files that were renamed out of the way, in a thread.
    remove_later: Callable[[Sequence[Path]], None]
    #: Takes a partition directory out of sight and removes it.
    remove_directory: Callable[[Path], None]
    #: Writes the checkpoint; returns when it is durable.
    checkpoint_now: Callable[[], None]
    #: The directory is broken and must go offline.
    failed: Callable[[str], None]
    #: The log of this partition is to be fsynced by time and has something that is not.
    flush_later: Callable[[TopicPartition], None]
    #: The log of this partition has got its directory, and no checkpoint names it yet.
    created: Callable[[TopicPartition], None]
    producer_id_expiration_ms: int = 86_400_000
    #: Of all logs together.
    producer_count: ProducerCount | None = None
    #: Logs whose marks in the checkpoint have moved since it was taken, or of which something else has changed that
    #: ``LogDirectory.take_changed`` tells; and logs with segments that wait for the checkpoint to go: of thousands of
    #: logs most have not, every few seconds.
    moved: set[TopicPartition] = field(default_factory=set)
    retired: set[TopicPartition] = field(default_factory=set)
    _preludes: dict[bytes, bytes] = field(default_factory=dict)

    def prelude(self, schema_message: bytes) -> bytes:
        """First bytes of a segment with this schema; one object for all logs."""
        if schema_message not in self._preludes:
            if len(self._preludes) >= _PRELUDES_KEPT:  # of topics that may be gone by now
                self._preludes.clear()
            self._preludes[schema_message] = arrow_prelude(schema_message)
        return self._preludes[schema_message]

    def offline(self, detail: str) -> StorageError:
        """Report ``detail``; the error is to be raised."""
        self.failed(detail)
        return StorageError(detail)

    @contextmanager
    def offline_on_error(self, doing: str) -> Iterator[None]:
        """Whatever the disk refuses inside takes the directory offline. For the rare paths."""
        try:
            yield
        except (OSError, StorageError) as error:
            raise self.offline(f"{doing}: {error}") from error
