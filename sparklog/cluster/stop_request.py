"""That a signal has asked this process to end: an event that handlers of signals may set, an exception that the first
one raises, and work that no signal gets into."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

_Result = TypeVar("_Result")
#: Between two looks at whether work has ended, or something has asked for the end of it.
_POLL_S = 0.1
#: For so long signals behind the first one do nothing: a cluster takes less to stop.
_PATIENCE_S = 60.0


class StopRequest:
    """Like a ``threading.Event``, of which a handler may not call ``set``: Python runs handlers in the main thread,
    between any two of its instructions, also while it holds the event's lock, as it does in ``wait``; ``set`` would
    then wait for the thread that it runs in. ``SimpleQueue.put`` may be called anywhere. Source: Python's documentation
    of queue.
    """

    def __init__(self) -> None:
        self._asked = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        self._asked = True
        self._told.put(None)

    def is_set(self) -> bool:
        return self._asked

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set, after ``timeout_s`` (0 or more) at the latest."""
        if not self._asked:
            try:
                self._told.get(timeout=timeout_s)
            except Empty:
                return self._asked
            self._told.put(None)  # others may wait as well
        return self._asked


def exit_on_first(*numbers: int, stop: StopRequest | None = None) -> None:
    """From now on the first of these signals ends the main thread, and with it all that it has begun: SystemExit(128 +
    its number); or it sets ``stop``, where that is given. Later ones do nothing for a minute, as they would cut that
    short (``timeout`` sends two), and then raise it, once a minute: an exception may be lost in a finalizer, and what
    it ends may hang. What the caller of this process ignores stays ignored."""
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    raised_at: list[float] = []

    def end(number: int, _frame: FrameType | None) -> None:
        if raised_at and time.monotonic() - raised_at[-1] < _PATIENCE_S:
            return
        raised_at.append(time.monotonic())
        if stop is not None and not stop.is_set():
            stop.set()
        else:
            raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, end)


def unless_asked(stop: StopRequest, work: Callable[[], _Result]) -> _Result:
    """What ``work`` returns or raises. It is done in a thread of its own: an exception that a signal raises between a
    call to the JVM and its answer would leave that answer to the next call, or wait for a JVM thread that is busy.

    Raises:
        SystemExit: 128 + SIGTERM, ``stop`` is set. Work goes on until what it works with, or the process, has ended.
    """
    returned: list[_Result] = []
    raised: list[BaseException] = []

    def do() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=do, name="sparklog-work", daemon=True)
    if not stop.is_set():
        thread.start()
        while thread.is_alive() and not stop.wait(_POLL_S):
            pass
    if stop.is_set():
        raise SystemExit(128 + signal.SIGTERM)
    if raised:
        raise raised[0]
    return returned[0]
