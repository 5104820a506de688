"""Detection of a replica that was away for longer than its leader keeps tombstones and markers.

This module is pure. Such a replica may have records whose tombstones the leader has already removed.
"""

from __future__ import annotations

from sparklog.errors import BrokerError
from sparklog.record.header import Flag, unpack_headers

#: The shortest time without batches that counts as an absence. The usual time between two fetches is shorter.
_SHORTEST_ABSENCE_US = 10_000_000


class TombstoneWindow:
    """A tracker of how long one replica has received no batches. A part of the replica's ``Log``."""

    __slots__ = ("_was_away", "last_progress_us")

    def __init__(self) -> None:
        #: The time of the last append, by this replica's clock.
        self.last_progress_us = 0
        #: Whether the replica was away for longer than its leader keeps tombstones, and has not caught up since.
        self._was_away = False

    def progressed(self, now_us: int) -> None:
        """Record that the log was appended to at ``now_us``."""
        self.last_progress_us = now_us

    def is_possible(self, now_us: int) -> bool:
        """Return whether the replica may have been away for longer than its leader keeps tombstones.

        If true, the caller must call ``is_shown_by``. The result is False while batches arrive regularly.
        """
        return self._was_away or now_us - self.last_progress_us > _SHORTEST_ABSENCE_US

    def is_shown_by(self, headers: bytes | memoryview, now_us: int, *, delete_retention_ms: int) -> bool:
        """Return whether the leader's batches show that the replica was away for longer than tombstones are kept.

        Only compacted batches show an absence, because a member of the ISR receives batches before they are compacted.
        Compacted batches may arrive after batches of segments that compaction did not change. So the replica counts as
        away until it has caught up.
        """
        kept_us = max(delete_retention_ms * 1000, _SHORTEST_ABSENCE_US)
        self._was_away |= now_us - self.last_progress_us > kept_us
        if not self._was_away:
            return False
        try:
            return any(header.flags & Flag.CLEANED for header in unpack_headers(headers))
        except BrokerError:  # The append will raise the same error.
            return False

    def ended(self) -> None:
        """Record that the replica has caught up: it has all records below its leader's high watermark.

        Batches above the high watermark are never compacted.
        """
        self._was_away = False
