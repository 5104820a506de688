"""The handling of signals that request the end of this process.

The module has an event that signal handlers may set, a handler that raises an exception, and a way to run work that no
signal interrupts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

_Result = TypeVar("_Result")
#: The interval of checks whether the work has ended or a stop was requested.
_POLL_S = 0.1
#: The time after a signal in which further signals have no effect. A cluster takes less time to stop.
_PATIENCE_S = 60.0


class StopRequest:
    """An event that, unlike ``threading.Event``, a signal handler may set.

    Python runs signal handlers in the main thread, between any two instructions. At that moment the main thread may
    hold the lock of a ``threading.Event``, for example in ``wait``. If the handler then called ``set``, the main thread
    would wait forever for the lock that it holds itself. A handler may call ``SimpleQueue.put`` at any time. Source:
    Python's documentation of queue.
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
        """Wait until the event is set, at most ``timeout_s`` (0 or more). Return whether it is set."""
        if not self._asked:
            try:
                self._told.get(timeout=timeout_s)
            except Empty:
                return self._asked
            self._told.put(None)  # Other threads may wait as well.
        return self._asked


def exit_on_first(*numbers: int, stop: StopRequest | None = None) -> None:
    """Install a handler of these signals, which requests the end of this process.

    The first signal raises SystemExit(128 + its number) in the main thread, or sets ``stop`` if it is given.

    Further signals have no effect for a minute, because they would interrupt the stop (the command ``timeout`` sends
    two). After that, a signal raises SystemExit, at most once a minute: a finalizer may have lost the exception, or the
    stop may hang. Signals that the caller of this process ignores stay ignored.
    """
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
    """Run ``work`` in a new thread and wait for it. Return its result or raise its exception.

    In the main thread, a signal could raise an exception between a request to the JVM and the response. The next
    request would then receive the response to the interrupted one, or wait for a busy JVM thread.

    Raises:
        SystemExit: ``stop`` is set; the code is 128 + SIGTERM. The work then continues until it fails or the process
            ends.
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
