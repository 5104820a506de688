"""That a signal has asked this process to end: an event that handlers of signals may set, and an exception that the
first one raises."""

from __future__ import annotations

import signal
from queue import Empty, SimpleQueue
from types import FrameType


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


def exit_on_first(*numbers: int) -> None:
    """From now on the first of these signals ends the main thread, and with it all that it has begun: SystemExit(128 +
    its number). Later ones do nothing, as they would cut that short: ``timeout`` sends two. What the caller of this
    process ignores stays ignored."""
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, _go_on)
        raise SystemExit(128 + number)

    for number in heeded:
        signal.signal(number, end)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which programs started later would have as well."""
