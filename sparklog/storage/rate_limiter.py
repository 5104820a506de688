"""A limit of bytes per second, for a thread that another thread may stop while it waits."""

from __future__ import annotations

import threading
import time

#: The time that may be spent ahead: shorter waits do not pay for a switch of threads.
_AHEAD_S = 0.01


class RateLimiter:
    """The limiter of one thread. Any thread may call ``stop``."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._stopped = threading.Event()
        self._paid_until_s = time.monotonic()

    def spend(self, count: int) -> None:
        """Wait until ``count`` more bytes are within the rate. Unused time does not accumulate."""
        now_s = time.monotonic()
        self._paid_until_s = max(self._paid_until_s, now_s) + count / self._rate
        if self._paid_until_s - now_s > _AHEAD_S:
            self._stopped.wait(self._paid_until_s - now_s)

    def stop(self) -> None:
        """Stop all waits, now and later. Any thread may call it."""
        self._stopped.set()
