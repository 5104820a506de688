"""How many producer ids the logs of one directory remember together: bounded, and no id of a living producer goes.

Anybody can invent producer ids. Each takes some 650 bytes for each log that it wrote to, until it has been idle for
``producer.id.expiration.ms``. At the bound, ids that have been idle for so long are dropped from all logs. If there
is still no room, an id that a log does not know yet is refused with an error that a producer may repeat. What a log
knows stays: an id that was dropped early would make its producer's next retry a new batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sparklog.errors import BrokerError, ErrorCode

#: Between two looks for ids that have been idle for too long: a look goes through all of them.
_PAUSE_S = 60.0


class ProducerCount:
    """Owner: ``LogDirectory``, for the tables of all its logs, on the broker's event loop."""

    def __init__(self, limit: int, expire: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.used = 0
        self._expire = expire
        self._expired_s = -_PAUSE_S

    def require_room(self) -> None:
        """Raises BrokerError THROTTLING_QUOTA_EXCEEDED when there is no room for one id more."""
        if self.used < self.limit:
            return
        now_s = time.monotonic()
        if now_s - self._expired_s >= _PAUSE_S:
            self._expired_s = now_s
            self._expire()
        if self.used >= self.limit:
            detail = f"{self.used} producer ids are remembered here, at most {self.limit} expected (producer.ids.max)"
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, f"{detail}; idle ones expire: try again later")
