"""The waits that brokers demand from a client that has exceeded a quota.

A reply contains ``throttle_time_ms``: the broker delays the next request of the connection by this time. The client
waits before it sends this request. If it sent the request earlier, the delay would count towards the request's timeout.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

#: The maximum time that a client waits before it sends. If a broker demands more, the broker delays the request.
MAX_WAIT_MS = 3_600_000
#: The minimum time between two log lines of one client.
_LOG_INTERVAL_S = 60.0


@dataclass(slots=True)
class QuotaWaits:
    """Counters of one client: the number of replies that demand a wait, and the sum of the waits in milliseconds."""

    waits: int = 0
    waited_ms: int = 0
    #: The monotonic time before which no line is logged, and the number of waits at the last line.
    _log_at_s: float = field(default=float("-inf"), repr=False)
    _logged: int = field(default=0, repr=False)

    def add(self, broker: str, throttle_time_ms: int, now_s: float) -> int:
        """Count the wait that a reply of ``broker`` demands.

        Return the time in milliseconds for which the client must not send to this broker.
        """
        wait_ms = max(0, min(throttle_time_ms, MAX_WAIT_MS))
        self.waits += 1
        self.waited_ms += wait_ms
        if now_s >= self._log_at_s:
            _log.info(
                "waiting %d ms before the next request to %s: a quota is exceeded (%d waits since the last message)",
                wait_ms,
                broker,
                self.waits - self._logged,
            )
            self._log_at_s, self._logged = now_s + _LOG_INTERVAL_S, self.waits
        return wait_ms
