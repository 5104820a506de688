"""Who acts for a producer's event loop: its I/O thread, or a caller who would only wait for that thread.

A caller who sends one record after the other, and waits for each, costs two changes of threads a record: to the I/O
thread, which sends it, and back with the outcome; and each time one waits for the other to let go of the interpreter.
So while a caller does that, the loop is *lent*: nobody runs it, and whoever has entered does what the loop's callbacks
would do, one thread at a time. Whatever needs a loop that turns (timers, new connections, other threads) recalls it,
and it is recalled by itself soon after it was last used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

#: Nobody has entered for so long: then something may have come that nobody has read.
_IDLE_S = 0.01
#: What else the loop has to do is put off for so long at most.
_LONGEST_S = 0.1
#: Who asks for the loop waits for so long; it is there within a turn, if it is not refused.
_GRANT_S = 0.05

#: How many forks are between this process and the first one that had this module: asking for the process's id is a
#: system call.
_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


class LoopHandoff:
    """Owner: the I/O thread. Methods are for any thread, except where they say otherwise."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: Nobody runs the loop: it may be entered.
        self.lent = False
        #: Identity of the thread that acts for the loop now.
        self.thread: int | None = None
        self._home: int | None = None
        #: A forked child has a copy of this, and the very connections of its parent.
        self._process = _generation
        #: Held by who is in. One that can be held twice: then a thread can find out whether it holds it.
        self._guard = threading.RLock()
        self._entered = 0
        self._lending = False
        self._stopped = False
        self._settled = threading.Event()
        self._recalled = threading.Event()
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    # --- the I/O thread ---

    def run(self) -> None:
        """Run the loop until it is stopped, but for the times when it is lent."""
        self.thread = self._home = get_ident()
        while True:
            self._loop.run_forever()
            if not self._lending or self._stopped:
                return
            self._lending = False
            self._lend()

    def stop(self) -> None:
        """Called by whoever acts for the loop: ``run`` returns."""
        self._stopped = True
        self._loop.stop()

    def _lend(self) -> None:
        self.lent = True
        # Looked at behind that: who posts looks whether the loop is lent when it has posted, so one of both is seen.
        if not self._posts:
            self._settled.set()
            self._wait_for_the_end()
        with self._guard:
            self.lent = False
        self._recalled.clear()
        self._settled.set()

    def _wait_for_the_end(self) -> None:
        latest = time.monotonic() + _LONGEST_S
        seen = -1
        while self._entered != seen and time.monotonic() < latest:
            seen = self._entered
            if self._recalled.wait(_IDLE_S):
                return

    # --- any thread ---

    def post(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have the loop call ``work`` soon. Raises RuntimeError when the loop is closed."""
        self._posts.append((work, arguments))
        self._loop.call_soon_threadsafe(self._take_posts)
        if self.lent:
            self._recalled.set()

    def _take_posts(self) -> None:
        while self._posts:
            work, arguments = self._posts.popleft()
            work(*arguments)

    def recall(self) -> None:
        """The loop has to turn."""
        if self.lent:
            self._recalled.set()

    def borrow(self, allowed: Callable[[], bool]) -> None:
        """Ask for the loop to be lent, which it is if ``allowed`` says so in its thread and nothing else was posted.
        Returns when that is decided."""
        self._settled.clear()
        self.post(self._prepare, allowed)
        self._settled.wait(_GRANT_S)

    def _prepare(self, allowed: Callable[[], bool]) -> None:
        if self._posts or not allowed():
            self._settled.set()
            return
        self._lending = True
        self._loop.stop()

    def enter(self) -> bool:
        """Act for the loop until ``leave``: what belongs to it is this thread's. It is not the loop that runs in this
        thread: none may, or another one. False: it is not lent, or somebody else is in."""
        thread = get_ident()
        if self.thread == thread or self._process != _generation or not self._guard.acquire(False):
            return False
        if not self.lent:
            self._guard.release()
            return False
        self._entered += 1
        self.thread = thread
        return True

    def leave(self) -> None:
        self.thread = self._home
        self._guard.release()

    def leave_interrupted(self) -> None:
        """Leave if this thread is in, also where an interrupt came in the middle of ``enter`` or ``leave``: the I/O
        thread would wait for ever for one that has gone without."""
        if not self._guard.acquire(blocking=False):
            return  # somebody else is in
        self.thread = self._home
        with contextlib.suppress(RuntimeError):  # when it is held no more
            while True:
                self._guard.release()
