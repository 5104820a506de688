"""Sealing: a rolled and committed segment becomes an ordinary, durable Arrow file.

``SealJob.run`` runs in a thread. It writes the footer, and fsyncs data and index. Then it writes the snapshot of the
producers at the segment's end and the leader epochs up to the segment's end, and fsyncs the directory. After that
``LogDurability.seal_finished``, on the event loop, moves the recovery point.

The log may be truncated or deleted while the job runs. After ``cancel`` the job opens no file and writes no file of the
log. The job holds no lock during the long fsyncs of data and index, so ``cancel`` does not wait for them.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sparklog.errors import BrokerError, StorageError
from sparklog.record.footer import arrow_footer, blocks_of
from sparklog.record.header import HEADER_BYTES, header_array
from sparklog.storage.disk import Disk, is_full, replace_file, write_all
from sparklog.storage.epochs import EPOCHS_FILE, EpochFile
from sparklog.storage.formats import encode_state
from sparklog.storage.partition_file import PARTITION_FILE
from sparklog.storage.producers import SNAPSHOT_SUFFIX, ProducerState, to_snapshot
from sparklog.storage.segment import RESERVE_FROM_BYTES, Segment, file_stem


def footer_of(headers: npt.NDArray[np.void], data: memoryview, *, schema_message: bytes) -> bytes:
    """Return the Arrow end-of-stream mark and footer of the segment with these ``headers`` and this ``data`` file.

    The result is the same on every replica, because headers and data are the same.
    """
    return arrow_footer(schema_message, blocks_of(headers["position"], headers["length"], data))


class SealJob:
    """A job that seals one segment.

    The event loop creates the job, handles its end and may cancel it. Call ``run`` once, in any thread.
    """

    def __init__(
        self,
        segment: Segment,
        *,
        schema_message: bytes,
        producers: ProducerState | None,
        epochs: EpochFile,
    ) -> None:
        self.segment = segment
        self.end_offset = segment.end_offset
        #: Whether the footer and the fsyncs are complete.
        self.done = False
        self.cancelled = False
        self._disk: Disk = segment.disk
        self._paths = (segment.data_path, segment.index_path)
        self._size = (segment.count, segment.data_size)
        self._schema_message = schema_message
        self._producers = producers
        self._epochs = epochs
        self._by_path = threading.Lock()

    def cancel(self) -> None:
        """Stop the job. After this method returns, the job writes nothing.

        This method may also be called before or after ``run``.
        """
        with self._by_path:
            self.cancelled = True

    def run(self) -> None:
        """Write the footer and make the segment durable.

        If the job is canceled or the disk is full, ``done`` stays False, and the segment needs a new job.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            self._run()
        except OSError as failure:
            # A disk reports a failure only once. So raise it even if the job is cancelled: no other call gets it.
            if not (self.cancelled and isinstance(failure, FileNotFoundError)) and not is_full(failure):
                raise StorageError(f"sealing {self._paths[0]}: {failure}") from failure
        except BrokerError as failure:
            if not self.cancelled:
                raise StorageError(f"sealing {self._paths[0]}: {failure}") from failure

    def _run(self) -> None:
        handles: list[int] = []
        try:
            with self._by_path:
                if self.cancelled:
                    return
                handles.extend(self._disk.open(path) for path in self._paths)
                self._write_footer(*handles)
            for handle in handles:
                _sync(self._disk, handle, self._paths[0])
        finally:
            for handle in handles:
                self._disk.close(handle)
        with self._by_path:
            if not self.cancelled:
                self._write_beside(self._paths[0].parent)
                self.done = True

    def _write_footer(self, data: int, index: int) -> None:
        count, data_size = self._size
        headers = header_array(self._disk.read(index, count * HEADER_BYTES, 0))
        footer = footer_of(headers, self._disk.map(data, data_size), schema_message=self._schema_message)
        try:
            write_all(self._disk, data, [footer], data_size)
            if data_size >= RESERVE_FROM_BYTES:
                self._disk.truncate(data, data_size + len(footer))  # frees the reserved space after the footer
        except OSError:
            self._disk.truncate(data, data_size)
            raise

    def _write_beside(self, directory: Path) -> None:
        disk = self._disk
        if self._producers is not None:
            path = directory / (file_stem(self.end_offset) + SNAPSHOT_SUFFIX)
            replace_file(disk, path, encode_state(to_snapshot(self._producers, self.end_offset)))
        handle = disk.open(directory / PARTITION_FILE)
        try:
            _sync(disk, handle, directory / PARTITION_FILE)
        finally:
            disk.close(handle)
        replace_file(disk, directory / EPOCHS_FILE, encode_state(self._epochs))
        disk.sync_directory(directory.parent)


def _sync(disk: Disk, handle: int, path: Path) -> None:
    """Fsync a file that the log needs.

    Even if the fsync fails because the disk is full, it cannot be tried again: the kernel then counts the pages as
    written.

    Raises:
        StorageError: the log directory must go offline.
    """
    try:
        disk.sync(handle)
    except OSError as failure:
        raise StorageError(f"fsync of {path}: {failure}") from failure
