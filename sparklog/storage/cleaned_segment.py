"""Writer of the new segment of a compaction.

The new files are in the same directory as the old segments that the new segment will replace. The new segment is
sealed: it is never appended to after the compaction.
"""

from __future__ import annotations

from pathlib import Path

from sparklog.record.compacted_batch import CompactedBatch
from sparklog.record.footer import arrow_footer, arrow_prelude, block_of
from sparklog.record.header import HEADER_BYTES, BatchHeader, Flag
from sparklog.storage.append_plan import NO_MAXIMUM
from sparklog.storage.disk import Buffer, Disk, write_all
from sparklog.storage.segment_swap import cleaned_paths

_WRITE_BYTES = 4 << 20


class CleanedSegmentWriter:
    """A writer of the new segment that a compaction produces.

    Call ``add`` for each batch, then ``complete``. Always call ``close`` at the end. One thread makes all calls. The
    methods raise OSError if the disk fails.
    """

    def __init__(self, disk: Disk, directory: Path, base_offset: int, schema_message: bytes) -> None:
        self.count = 0
        self.first: BatchHeader | None = None
        self.last: BatchHeader | None = None
        self._disk = disk
        self._schema_message = schema_message
        self._blocks: list[tuple[int, int, int]] = []
        self._running_max = NO_MAXIMUM
        self._waiting: list[Buffer] = [arrow_prelude(schema_message)]
        self._waiting_headers: list[Buffer] = []
        #: The size of the data file with all added batches, and the number of bytes of the file that are written.
        self._position = len(self._waiting[0])
        self._written = 0
        self._handles: list[int] = []
        try:
            for path in cleaned_paths(directory, base_offset):
                self._handles.append(disk.open(path, create=True))
                disk.truncate(self._handles[-1], 0)
        except OSError:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Return the size of the new segment in bytes: the data without the footer, and the index."""
        return self._position + self.count * HEADER_BYTES

    def add(self, batch: CompactedBatch) -> None:
        header = batch.header
        self._running_max = max(self._running_max, header.max_timestamp)
        flags = header.flags if self.count else header.flags | Flag.FIRST_OF_SEGMENT
        final = header._replace(position=self._position, running_max=self._running_max, flags=int(flags))
        assert len(memoryview(batch.body)) == final.stored_bytes, header
        self._blocks.append(block_of(self._position, memoryview(batch.body)[: final.length]))
        self._waiting.append(batch.body)
        self._waiting_headers.append(final.pack())
        self._position += final.stored_bytes
        self.first, self.last = self.first or final, final
        self.count += 1
        if self._position - self._written >= _WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        data, index = self._handles
        write_all(self._disk, data, self._waiting, self._written)
        self._written = self._position
        at = self.count - len(self._waiting_headers)
        write_all(self._disk, index, self._waiting_headers, at * HEADER_BYTES)
        self._waiting, self._waiting_headers = [], []

    def complete(self) -> None:
        """Write the footer, and fsync both files. The content of the files is then durable, but their names are not."""
        self._write()
        write_all(self._disk, self._handles[0], [arrow_footer(self._schema_message, self._blocks)], self._position)
        for handle in self._handles:
            self._disk.sync(handle)

    def close(self) -> None:
        while self._handles:
            self._disk.close(self._handles.pop())
