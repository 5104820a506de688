"""The handoff of a producer's event loop between its I/O thread and a caller that would only wait for that thread.

A caller that sends single records and waits for each costs two thread switches per record: to the I/O thread, which
sends the record, and back with the outcome. At each switch one thread waits for the interpreter lock of the other. So
during such a sequence the loop is *lent*: no thread runs it, and a thread that has entered does the work of the loop's
callbacks, one thread at a time. Timers, new connections and other threads need a running loop, so they recall it. The
I/O thread also takes the loop back shortly after its last use, without a recall.
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

#: The time without an entry after which the I/O thread takes the loop back: there may be unread input.
_IDLE_S = 0.01
#: The maximum time that the loop is lent, and so that its other work is delayed.
_LONGEST_S = 0.1
#: How long a thread waits for the loop. It gets the loop within one turn unless it is refused.
_GRANT_S = 0.05

#: The number of forks between this process and the first one that loaded this module. Reading the process id instead is
#: a system call.
_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


class LoopHandoff:
    """The handoff state. Owner: the I/O thread. Any thread may call a method unless its docstring restricts it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: True while no thread runs the loop, so that a caller may enter.
        self.lent = False
        #: The identity of the thread that acts for the loop now.
        self.thread: int | None = None
        self._home: int | None = None
        #: The fork count at creation. A forked child has a copy of this object, with the connections of its parent.
        self._process = _generation
        #: The lock of the thread that has entered. It is reentrant, so that a thread can find out whether it holds it.
        self._guard = threading.RLock()
        self._entered = 0
        self._lending = False
        self._stopped = False
        self._settled = threading.Event()
        self._recalled = threading.Event()
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    # --- the I/O thread ---

    def run(self) -> None:
        """Run the loop until it is stopped, with pauses while it is lent."""
        self.thread = self._home = get_ident()
        while True:
            self._loop.run_forever()
            if not self._lending or self._stopped:
                return
            self._lending = False
            self._lend()

    def stop(self) -> None:
        """Make ``run`` return. The thread that acts for the loop calls it."""
        self._stopped = True
        self._loop.stop()

    def _lend(self) -> None:
        self.lent = True
        # Checked after that: ``post`` checks ``lent`` after it has posted, so one of the two threads sees the other.
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
        """Make the loop call ``work`` soon. Raises RuntimeError if the loop is closed."""
        self._posts.append((work, arguments))
        self._loop.call_soon_threadsafe(self._run_posts)
        if self.lent:
            self._recalled.set()

    def _run_posts(self) -> None:
        while self._posts:
            work, arguments = self._posts.popleft()
            work(*arguments)

    def recall(self) -> None:
        """Make the I/O thread run a lent loop again, because work needs a running loop."""
        if self.lent:
            self._recalled.set()

    def borrow(self, allowed: Callable[[], bool]) -> None:
        """Ask for the loop, and return after the decision.

        The I/O thread lends it if ``allowed`` returns True there and no other work was posted.
        """
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
        """Act for the loop until ``leave``. Return False if the loop is not lent or another thread has entered.

        The state of the loop belongs to this thread in the meantime. But the loop is not this thread's running loop:
        the thread may have no running loop, or another one.
        """
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
        """Give the loop back if this thread has entered it, even after an interrupt inside ``enter`` or ``leave``.

        Otherwise the I/O thread would wait forever for the interrupted thread.
        """
        if not self._guard.acquire(blocking=False):
            return  # another thread has entered
        self.thread = self._home
        with contextlib.suppress(RuntimeError):  # released completely
            while True:
                self._guard.release()
