"""That a signal has asked this process to end: an event that handlers of signals may set."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class StopRequest:
    """As ``threading.Event``, whose ``set`` a handler may not call: Python runs handlers in the main thread between any
    two of its instructions, also while it holds the event's lock, as it does in ``wait``; ``set`` would then wait for
    the thread that it runs in. ``SimpleQueue.put`` may be called anywhere. Source: Python's documentation of queue.
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
        """Whether it is set, after ``timeout_s`` at the latest."""
        if not self._asked:
            try:
                self._told.get(timeout=timeout_s)
            except Empty:
                return self._asked
            self._told.put(None)  # others may wait as well
        return self._asked
