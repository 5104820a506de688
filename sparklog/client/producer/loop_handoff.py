"""The handoff of a producer's event loop between its I/O thread and a caller that would only wait for that thread.

A caller that sends single records and waits for each needs two thread switches per record: to the I/O thread, which
sends the record, and back with the outcome. At each switch one thread waits until the other releases the interpreter
lock. To avoid this, the I/O thread *lends* the event loop: it stops the loop. Then one caller at a time *enters* the
loop, and does the work of the loop's callbacks in its own thread. Timers and new connections need a running loop. For
them, and for other threads' work, the I/O thread is made to run the loop again (``recall``). The I/O thread also runs
the loop again if no caller has entered for a short time.
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

#: The I/O thread takes the loop back if no caller has entered for this time, because there may be unread input.
_IDLE_S = 0.01
#: The maximum time that the loop is lent. Other work of the loop waits at most for this time.
_LONGEST_S = 0.1
#: The maximum time that a thread waits for the decision whether it may borrow the loop. A running loop decides in its
#: next iteration.
_GRANT_S = 0.05

#: The number of forks since the module was loaded, for a check whether this process was forked. ``os.getpid`` would
#: need a system call.
_generation = 0


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


class LoopHandoff:
    """The handoff of one producer's event loop between its I/O thread and its callers; see the module.

    Any thread may call the methods, except ``run`` and ``stop``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: True while the I/O thread has stopped the loop, so that a caller may enter.
        self.lent = False
        #: The thread that runs the loop's callbacks now: the I/O thread, or the caller that has entered.
        self.thread: int | None = None
        self._home: int | None = None
        #: The fork count at creation. A forked child has a copy of this object, with the connections of its parent.
        self._process = _generation
        #: The lock that an entered thread holds. The lock is reentrant, so that a thread can check whether it holds
        #: the lock.
        self._guard = threading.RLock()
        self._entered = 0
        self._lending = False
        self._stopped = False
        self._settled = threading.Event()
        self._recalled = threading.Event()
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    # --- the I/O thread ---

    def run(self) -> None:
        """Run the loop in this thread until ``stop``. While the loop is lent to callers, wait until the loan ends."""
        self.thread = self._home = get_ident()
        while True:
            self._loop.run_forever()
            if not self._lending or self._stopped:
                return
            self._lending = False
            self._lend()

    def stop(self) -> None:
        """Make ``run`` return. Only the thread that runs the loop's callbacks may call this method."""
        self._stopped = True
        self._loop.stop()

    def _lend(self) -> None:
        self.lent = True
        # ``lent`` is set before ``_posts`` is checked. ``post`` appends to ``_posts`` before it checks ``lent``. So at
        # least one of the two threads sees what the other has done.
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
        """If the loop is lent, make the I/O thread run it again, because some work needs a running loop."""
        if self.lent:
            self._recalled.set()

    def borrow(self, allowed: Callable[[], bool]) -> None:
        """Ask the I/O thread to lend the loop, and wait a short time for its decision.

        Afterwards ``lent`` is true if the I/O thread has lent the loop.

        The I/O thread calls ``allowed``, and lends the loop if the result is True and no other work was posted.
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
        """Reserve the loop for the calling thread, which then does the loop's work until ``leave``.

        Return False if the loop is not lent, or if a thread has reserved it already. Until ``leave``, only this
        thread may use the producer's state. ``asyncio.get_running_loop`` does not return the loop, because this thread
        runs no loop, or runs a different loop.
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
        """Leave the loop if this thread has entered it, even after an interrupt inside ``enter`` or ``leave``.

        Otherwise the I/O thread would wait forever for the interrupted thread.
        """
        if not self._guard.acquire(blocking=False):
            return  # another thread has entered
        self.thread = self._home
        with contextlib.suppress(RuntimeError):  # the lock is released completely
            while True:
                self._guard.release()
