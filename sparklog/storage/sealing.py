"""Sealing: a rolled and committed segment becomes an ordinary, durable Arrow file.

``SealJob.run`` works in a thread. It writes the footer and fsyncs data and index. Then it writes the producers'
snapshot at the segment's end and the leader epochs up to there, and fsyncs the directory. The log handles the end on
the event loop (``LogDurability.seal_finished``) and only then moves its recovery point.

The log may be truncated or deleted in the meantime. After ``cancel`` the job writes nothing by path. The long fsyncs,
of data and index, hold no lock, so ``cancel`` does not wait for them.
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
    """Return end-of-stream mark and footer of the segment with these batch ``headers`` and this ``data`` file.

    They are the same on every replica, because the bytes that they depend on are.
    """
    return arrow_footer(schema_message, blocks_of(headers["position"], headers["length"], data))


class SealJob:
    """The sealing of one segment. Made and finished on the event loop; run once in any thread."""

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
        #: The footer and the fsyncs are complete.
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
        """Stop the job: after the return it writes nothing. Harmless if it has run or never runs."""
        with self._by_path:
            self.cancelled = True

    def run(self) -> None:
        """Write the footer and make the segment durable.

        Return without ``done`` if cancelled or if the disk is full; the job is then due again.

        Raises:
            StorageError: the log directory must go offline.
        """
        try:
            self._run()
        except OSError as failure:
            # A disk reports a failure once. Even if cancelled, raise it: no other call would see it.
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
                self._disk.truncate(data, data_size + len(footer))  # free the reserved space after it
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
    """fsync a file that the log needs.

    A full disk is no reason to try again: the pages count as written from then on.

    Raises:
        StorageError: the log directory must go offline.
    """
    try:
        disk.sync(handle)
    except OSError as failure:
        raise StorageError(f"fsync of {path}: {failure}") from failure
