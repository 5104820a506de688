"""So many bytes a second, for a thread that may be told to stop while it waits."""

from __future__ import annotations

import threading
import time

#: What may be spent ahead: waits shorter than this are not worth the switch of threads.
_AHEAD_S = 0.01


class RateLimiter:
    """Used by one thread, but for ``stop``."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._stopped = threading.Event()
        self._paid_until_s = time.monotonic()

    def spend(self, count: int) -> None:
        """Wait until ``count`` more bytes are within the rate. Time that was not used is not saved up."""
        now_s = time.monotonic()
        self._paid_until_s = max(self._paid_until_s, now_s) + count / self._rate
        if self._paid_until_s - now_s > _AHEAD_S:
            self._stopped.wait(self._paid_until_s - now_s)

    def stop(self) -> None:
        """Nobody waits any more. From any thread."""
        self._stopped.set()
