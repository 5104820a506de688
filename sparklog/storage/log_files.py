"""The objects that all parts of one log use: its directory, its segments with their seals, and the topic's settings.

These objects belong to the ``Log``, and only the event loop uses them. The parts of the log (``LogTail``,
``LogDurability``, ``LogTruncation``, ``LogRetention``, ``LogCleaning``) read the settings and call the methods of these
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from sparklog.config import TopicConfig
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition, TopicSchema
from sparklog.storage.disk import is_full
from sparklog.storage.log_context import LogContext
from sparklog.storage.partition_directory import PartitionDirectory
from sparklog.storage.recovery import RecoveredLog
from sparklog.storage.seal_queue import SealQueue
from sparklog.storage.segment_chain import SegmentChain


class LogFiles:
    """The directory, segments and settings of one log, which all parts of the ``Log`` use.

    The log has no segments until recovery or the first append.
    """

    __slots__ = ("chain", "closed", "config", "directory", "disk", "seals", "services", "topic_id", "tp")

    def __init__(
        self,
        tp: TopicPartition,
        topic_id: str,
        *,
        directory: Path,
        schemas: Iterable[TopicSchema],
        config: TopicConfig,
        services: LogContext,
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        #: The topic's settings. ``configure`` replaces them when they change.
        self.config = config
        self.services = services
        self.disk = services.disk
        self.directory = PartitionDirectory(directory, tp=tp, topic_id=topic_id, schemas=schemas, services=services)
        self.chain = SegmentChain(services.disk, directory, files=services.files)
        self.seals = SealQueue(services.disk, directory, remove_later=services.remove_later)
        self.closed = False

    def recovered(self, found: RecoveredLog) -> None:
        """Set the segments, the snapshots and the schemas that recovery found in the directory."""
        self.directory.found(found.schemas)
        self.chain.found(found.segments)
        self.seals.found(found.snapshots)

    def configure(self, config: TopicConfig) -> None:
        """Set the topic's new settings."""
        self.config = config

    def close(self) -> None:
        """Cancel the seal jobs and close the files. Readers may still use their memory maps of the files."""
        self.seals.cancel(self.chain.segments)
        self.chain.close()
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: the log is closed")

    def write_if_room(self, doing: str, write: Callable[[], None]) -> bool:
        """Run ``write``. Return False if it fails because the disk is full.

        The caller may try again when there is room.
        """
        with self.offline_on_error(doing):
            try:
                write()
            except OSError as failure:
                if not is_full(failure):
                    raise
                return False
        return True

    def offline_on_error(self, doing: str) -> AbstractContextManager[None]:
        """Take the log directory offline and raise StorageError if the ``with`` block raises OSError or StorageError.

        This is too slow for code that runs in every request.
        """
        return self.services.offline_on_error(f"{doing} {self.tp}")
