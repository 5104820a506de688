"""Detection of a replica that was away for longer than tombstones and markers are kept.

Pure. Such a replica may hold records that they deleted.
"""

from __future__ import annotations

from sparklog.errors import BrokerError
from sparklog.record.header import Flag, unpack_headers

#: The minimum of some seconds. With less, the time between two fetches would count as absence.
_SHORTEST_ABSENCE_US = 10_000_000


class TombstoneWindow:
    """The time in which one replica received nothing. Owned by its log."""

    __slots__ = ("_was_away", "last_progress_us")

    def __init__(self) -> None:
        #: The time of the last append, by this replica's clock.
        self.last_progress_us = 0
        #: The replica was away for longer than its leader keeps tombstones, and has not caught up since.
        self._was_away = False

    def progressed(self, now_us: int) -> None:
        """Record an append."""
        self.last_progress_us = now_us

    def is_possible(self, now_us: int) -> bool:
        """Return whether ``is_shown_by`` needs to be called: not while batches arrive."""
        return self._was_away or now_us - self.last_progress_us > _SHORTEST_ABSENCE_US

    def is_shown_by(self, headers: bytes | memoryview, now_us: int, *, delete_retention_ms: int) -> bool:
        """Return whether the leader's batches show that the replica was away too long.

        Only batches of a cleaner show it, because a member of the ISR receives batches before they are cleaned. They
        need not be the first batches: segments that the cleaner did not change may come before. So an absence counts
        until the replica has caught up.
        """
        kept_us = max(delete_retention_ms * 1000, _SHORTEST_ABSENCE_US)
        self._was_away |= now_us - self.last_progress_us > kept_us
        if not self._was_away:
            return False
        try:
            return any(header.flags & Flag.CLEANED for header in unpack_headers(headers))
        except BrokerError:  # the append will raise it
            return False

    def ended(self) -> None:
        """Record that the replica has everything below its leader's high watermark. Nothing above that was cleaned."""
        self._was_away = False
