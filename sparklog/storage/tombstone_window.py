"""Whether a replica was away for longer than tombstones and markers are kept: it may hold what they deleted. Pure."""

from __future__ import annotations

from sparklog.errors import BrokerError
from sparklog.record.header import Flag, unpack_headers

#: Below a floor of some seconds the time between two fetches would count as absence.
_SHORTEST_ABSENCE_US = 10_000_000


class TombstoneWindow:
    """How long one replica got nothing. Owned by its log."""

    __slots__ = ("_was_away", "last_progress_us")

    def __init__(self) -> None:
        #: when the last batch was appended, by this replica's clock
        self.last_progress_us = 0
        #: for longer than its leader keeps tombstones, and not caught up since
        self._was_away = False

    def is_possible(self, now_us: int) -> bool:
        """Whether ``is_shown_by`` need be asked at all: not as long as batches come."""
        return self._was_away or now_us - self.last_progress_us > _SHORTEST_ABSENCE_US

    def is_shown_by(self, headers: bytes | memoryview, now_us: int, *, delete_retention_ms: int) -> bool:
        """Whether it was too long for what its leader sends now.

        Only what a cleaner wrote shows it: those that a member of the in-sync set is sent were not cleaned before it
        had them. It need not be the first thing that is sent: segments in which a cleaner changed nothing may lie
        before, so an absence counts until the replica has caught up.
        """
        kept_us = max(delete_retention_ms * 1000, _SHORTEST_ABSENCE_US)
        self._was_away |= now_us - self.last_progress_us > kept_us
        if not self._was_away:
            return False
        try:
            return any(header.flags & Flag.CLEANED for header in unpack_headers(headers))
        except BrokerError:  # the append will say so
            return False

    def ended(self) -> None:
        """The replica has all that its leader's high watermark covers: from there on nothing was cleaned."""
        self._was_away = False
