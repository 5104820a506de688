"""A watchdog that ends the process when its event loop hangs.

A broker whose disk hangs must not seem alive: kazoo's thread would keep the ZooKeeper session, and all the broker's
leaderships, forever. So the event loop increments a counter, and a thread watches the counter. If the counter does not
change for one session timeout, the thread ends the process at once, because an orderly shutdown might hang too. If the
session timeout is short, the thread waits longer (ADR 7).
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time

_log = logging.getLogger(__name__)

EXIT_STALLED = 70


class Watchdog:
    """A watchdog that ends the broker process when its event loop hangs.

    Call ``start`` and ``stop`` on the event loop. A daemon thread watches the loop.
    """

    def __init__(self, limit_ms: int) -> None:
        self._limit_s = limit_ms / 1000
        self._tick_s = max(self._limit_s / 10, 0.02)
        self._beat = 0
        self._stopped = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._turn()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._handle is not None:
            self._handle.cancel()

    def _turn(self) -> None:
        self._beat += 1
        self._handle = asyncio.get_running_loop().call_later(self._tick_s, self._turn)

    def _watch(self) -> None:
        seen = self._beat
        stalled_s = 0.0
        while True:
            before = time.monotonic()
            if self._stopped.wait(self._tick_s):
                return
            slept = time.monotonic() - before
            if self._beat != seen:
                seen, stalled_s = self._beat, 0.0
                continue
            # If this thread did not run either (SIGSTOP, a suspended machine), the time says nothing about the loop.
            stalled_s += min(slept, 2 * self._tick_s)
            if stalled_s >= self._limit_s:
                self._end(stalled_s)

    def _end(self, stalled_s: float) -> None:
        _log.critical("the event loop has not run for %.1f s: ending the process", stalled_s)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_STALLED)
