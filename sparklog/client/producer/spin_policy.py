"""A policy that decides whether a thread spins or sleeps while it waits for a response.

To spin is to check for the response again and again without giving up the processor. A sleeping processor takes 0.05 ms
to wake up, so a spinning thread gets a quick response 0.05 ms earlier. But if other processes need the processor,
perhaps the brokers themselves, the spinning delays them. Then responses take longer, and this class counts the spins as
wasted.
"""

from __future__ import annotations

import os

#: The maximum duration of a spin: twice the response time of a leader on the same host with acks=1.
SOON_S = 0.000_25
#: After this number of spins in a row that each ended with a response, the next phase without spins is halved. If more
#: than one in 24 spins is wasted, the thread mostly sleeps.
_IN_A_ROW = 16
#: The maximum length of a phase without spins, as a number of quick responses.
_LONGEST_SLEEP = 1024


class SpinPolicy:
    """A pure policy that decides how long a thread spins for the next response before it sleeps; see the module."""

    def __init__(self, *, processors: int) -> None:
        #: The time to spin for the next response, in seconds; 0 means to sleep at once.
        self.spin_s = 0.0
        # On a single processor, a spin would keep a broker on this host from responding.
        self._soon_s = SOON_S if processors > 1 else 0.0
        #: The length of the next phase without spins, as a number of quick responses. Each wasted spin doubles it.
        self._sleep = 1
        self._left = 1
        self._in_a_row = 0

    def on_response(self, took_s: float) -> None:
        """Record that the wait for a response ended after ``took_s``, with or without a response."""
        if took_s >= self._soon_s:
            if self.spin_s:
                self.spin_s = 0.0
                self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)
            self._left = self._sleep
            self._in_a_row = 0
        elif self.spin_s:
            self._in_a_row += 1
            if self._in_a_row == _IN_A_ROW:
                self._in_a_row = 0
                self._sleep = max(1, self._sleep // 2)
        else:
            self._left -= 1
            if self._left <= 0:  # an interrupt may have left it below zero
                self.spin_s = self._soon_s


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
