"""The number of producer ids that all logs of one directory remember, and its limit (``producer.ids.max``).

Any client can invent producer ids. Each id takes some 650 bytes in each log that it wrote to, until it has been idle
for ``producer.id.expiration.ms``. At the limit, all logs drop the ids that have been idle for that long. If that frees
no room, an id that is new to a log is refused with a retriable error. An id that is not idle is never dropped: without
it, a retry of its producer would count as a new batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sparklog.errors import BrokerError, ErrorCode

#: The pause between two searches for idle ids, because each search reads all of them.
_PAUSE_S = 60.0


class ProducerCount:
    """A counter of the producer ids that all logs of a directory remember, with a limit.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, limit: int, expire: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.used = 0
        self._expire = expire
        self._expired_s = -_PAUSE_S

    def add(self, count: int) -> None:
        """Add ``count`` to the number of producer ids. ``count`` may be negative."""
        self.used += count

    def require_room(self) -> None:
        """Raise BrokerError THROTTLING_QUOTA_EXCEEDED if there is no room for one more id.

        At the limit, first let the logs drop the ids that have expired, but at most once a minute.
        """
        if self.used < self.limit:
            return
        now_s = time.monotonic()
        if now_s - self._expired_s >= _PAUSE_S:
            self._expired_s = now_s
            self._expire()
        if self.used >= self.limit:
            detail = f"{self.used} producer ids are remembered here, at most {self.limit} expected (producer.ids.max)"
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"{detail}; idle ones expire: try again later")
