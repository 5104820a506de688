"""The truncations of a log at its end, and its restart at another offset.

A truncation removes records that the leader does not have. First the checkpoint on disk is lowered to the offsets that
will remain. Then segments are deleted or truncated, newest first. Then the derived state is truncated.
"""

from __future__ import annotations

from sparklog.storage.log_cleaning import LogCleaning
from sparklog.storage.log_durability import LogDurability
from sparklog.storage.log_files import LogFiles
from sparklog.storage.log_offsets import LogOffsets
from sparklog.storage.log_tail import LogTail
from sparklog.storage.truncation_job import TruncationJob


class LogTruncation:
    """The part of a ``Log`` that truncates the log's end or empties the log.

    See ``Log.truncate`` and ``Log.restart_at``. The methods raise StorageError if the log directory must go offline.
    """

    __slots__ = ("_cleaning", "_durability", "_files", "_job", "_offsets", "_tail")

    def __init__(
        self, files: LogFiles, offsets: LogOffsets, tail: LogTail, durability: LogDurability, cleaning: LogCleaning
    ) -> None:
        self._files = files
        self._offsets = offsets
        self._tail = tail
        self._durability = durability
        self._cleaning = cleaning
        #: The job of the next truncation.
        self._job: TruncationJob | None = None

    def begin(self, offset: int) -> TruncationJob | None:
        """Return a job that copies, in a thread, the part of a segment that a truncation to ``offset`` keeps.

        Return None if the truncation needs no copy.

        The log does not change until ``truncate`` is called. Until then its high watermark must be at or below
        ``offset``. If the log start offset is above ``offset``, the high watermark must be equal to the log start
        offset.

        Raises:
            StorageError: the log directory must go offline.
        """
        files, offsets = self._files, self._offsets
        files.check_open()
        self.cancel()
        first = files.chain.first_offset(offsets.log_end)
        if offset >= offsets.log_end or offset <= first:
            return None
        with files.offline_on_error("truncating"):
            end = files.chain.boundary(offset)
            if end > first:
                copied = files.chain.copied_by_truncation(end, served_end=offsets.served_end)
                if copied is not None:
                    self._cleaning.hold()  # A cleaning may have begun when the high watermark was higher.
                    self._job = TruncationJob(*copied, frees_segments=copied[0] is not files.chain.last)
        return self._job

    def cancel(self) -> None:
        """Cancel the job of ``begin``, because its copies are no longer needed. Allow compactions again."""
        job, self._job = self._job, None
        self._cleaning.resume()
        if job is not None:
            self._files.services.remove_later(job.cancel())

    def truncate(self, offset: int, job: TruncationJob | None = None) -> int:
        self._files.check_open()
        try:
            return self._truncate(offset, job if job is self._job else None)
        finally:
            self.cancel()  # drop the unused part of the job

    def _truncate(self, offset: int, job: TruncationJob | None) -> int:
        files, offsets = self._files, self._offsets
        if offset >= offsets.log_end:
            return offsets.log_end
        with files.offline_on_error("truncating"):
            first = files.chain.first_offset(offsets.log_end)
            end = files.chain.boundary(offset) if offset > first else offset
            if end <= first:
                self.restart_at(end)
                return end
            served_end = offsets.served_end
            self._prepare(end)
            # The segment that ends at the new end becomes the last one, and may be appended to.
            files.seals.cancel(segment for segment in files.chain.segments if segment.end_offset >= end)
            files.chain.truncate(end, served_end=served_end, job=job)
            self._durability.truncated()
            self._tail.truncated(end)
        return end

    def restart_at(self, offset: int) -> None:
        files = self._files
        files.check_open()
        self.cancel()
        with files.offline_on_error("restarting"):
            self._prepare(0)
            files.seals.cancel(files.chain.segments)
            if files.directory.exists:
                files.chain.clear()
            self._durability.truncated()
            self._tail.restarted(offset)

    def _prepare(self, end: int) -> None:
        """Lower the offsets of the checkpoint on disk to what remains after a truncation to ``end``.

        Otherwise the checkpoint would claim that later appends at these offsets are fsynced. A start would also report
        a damaged log, because the log is shorter than its checkpoint says. And it would remove the segments below the
        checkpoint's log start offset.
        """
        if self._files.directory.exists:
            self._cleaning.before_truncation(end)
        self._durability.cancel_flush()
        if self._offsets.lower_claims(end):
            self._files.services.checkpoint_now()
            self._offsets.claims_lowered()
