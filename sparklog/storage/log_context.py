"""The objects that all logs of one log directory share, and the way in which a log takes the directory offline."""

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

#: The number of preludes that are cached. Each has some kilobytes. A prelude is the bytes before a segment's batches.
_PRELUDES_KEPT = 1024


@dataclass(slots=True)
class LogContext:
    """A container of the objects and functions of a ``LogDirectory`` that all its logs use."""

    disk: Disk
    files: OpenFiles
    hot: BatchCache
    #: A callback that removes files in a thread. The log has already given these files names that are not part of the
    #: log.
    remove_later: Callable[[Sequence[Path]], None]
    #: A callback that moves a partition directory away, and removes the directory in a thread.
    remove_directory: Callable[[Path], None]
    #: A callback that writes the checkpoint, and returns when the checkpoint is durable.
    checkpoint_now: Callable[[], None]
    #: A callback that takes the directory offline, because its disk failed.
    failed: Callable[[str], None]
    #: A callback, called when the log of a partition has data that need an fsync because of their age.
    flush_later: Callable[[TopicPartition], None]
    #: A callback, called when the log of a partition has created its directory. No checkpoint names the log yet.
    created: Callable[[TopicPartition], None]
    producer_id_expiration_ms: int = 86_400_000
    #: The count of producer ids in all logs together.
    producer_count: ProducerCount | None = None
    #: The logs whose checkpoint entry has changed since the last checkpoint, or that have changed in another way that
    #: ``LogDirectory.consume_changed`` must report. At most checkpoints, only a few of thousands of logs are in this
    #: set.
    moved: set[TopicPartition] = field(default_factory=set)
    #: The logs with segments that are deleted after the next checkpoint.
    retired: set[TopicPartition] = field(default_factory=set)
    _preludes: dict[bytes, bytes] = field(default_factory=dict)

    def consume_moved(self) -> set[TopicPartition]:
        """Return the partitions whose logs have changed since the last checkpoint, and forget them.

        These are the partitions in ``moved``, which is empty after this call.
        """
        moved, self.moved = self.moved, set()
        return moved

    def prelude(self, schema_message: bytes) -> bytes:
        """Return the bytes that precede the first batch in the data file of a segment with this schema.

        Logs with the same schema share one bytes object.
        """
        if schema_message not in self._preludes:
            if len(self._preludes) >= _PRELUDES_KEPT:  # some may belong to deleted topics
                self._preludes.clear()
            self._preludes[schema_message] = arrow_prelude(schema_message)
        return self._preludes[schema_message]

    def offline(self, detail: str) -> StorageError:
        """Take the directory offline and return a StorageError, which the caller must raise."""
        self.failed(detail)
        return StorageError(detail)

    @contextmanager
    def offline_on_error(self, doing: str) -> Iterator[None]:
        """Take the directory offline and raise StorageError if the ``with`` block raises OSError or StorageError.

        This is too slow for code that runs in every request.
        """
        try:
            yield
        except (OSError, StorageError) as error:
            raise self.offline(f"{doing}: {error}") from error
