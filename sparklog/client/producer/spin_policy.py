"""Whether who waits for an answer stays awake for it: where that pays, and as long as it does.

A processor that sleeps takes 0.05 ms to be awake again. On one that has nothing else to do, who stays awake gets a
quick answer that much sooner. Where others want the processor, perhaps those who are to answer, he keeps it from them:
then answers take longer, and he is found to have stayed awake for nothing.
"""

from __future__ import annotations

import os

#: Answers that take longer are slept for: twice what a leader takes on the same host that waits for no follower.
SOON_S = 0.000_25
#: So many in a row that were stayed awake for make up for one in vain. Where more than one in 24 are, sleep prevails.
_IN_A_ROW = 16
#: In answers that come soon.
_LONGEST_SLEEP = 1024


class SpinPolicy:
    """Pure. Owner: who waits, for one answer after the other."""

    def __init__(self, *, processors: int) -> None:
        #: How long to stay awake for the next answer; 0: sleep at once.
        self.awake_s = 0.0
        # On the only processor nobody else would get to answer.
        self._soon_s = SOON_S if processors > 1 else 0.0
        #: So many answers that come soon are slept for after one that did not; twice as many the next time.
        self._sleep = 1
        self._left = 1
        self._in_a_row = 0

    def answered(self, took_s: float) -> None:
        """An answer came, or has not come in so long."""
        if took_s >= self._soon_s:
            if self.awake_s:
                self.awake_s = 0.0
                self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)
            self._left = self._sleep
            self._in_a_row = 0
        elif self.awake_s:
            self._in_a_row += 1
            if self._in_a_row == _IN_A_ROW:
                self._in_a_row = 0
                self._sleep = max(1, self._sleep // 2)
        else:
            self._left -= 1
            if self._left <= 0:  # below where an interrupt came in between
                self.awake_s = self._soon_s


def processors() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
