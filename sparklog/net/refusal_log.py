"""A log of refused connections, with a limited number of lines.

A client that is refused connects again soon, and thousands of clients may have the same wrong address.
"""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)

#: The minimum time between two lines.
_INTERVAL_S = 1.0


class RefusalLog:
    """A log of refused connections that writes at most one line in a second.

    Each line also has the number of refusals that were not logged since the previous line.

    Not thread-safe: use it only on the server's event loop.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._unlogged = 0

    def warn(self, text: str) -> None:
        """Log ``text``. If the last line is less than a second old, only count the refusal."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last message)" if self._unlogged else ""
        _log.warning("%s%s", text, more)
        self._next_s, self._unlogged = now_s + _INTERVAL_S, 0
