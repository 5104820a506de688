"""The I/O that a waiting caller does for the producer's I/O thread: it sends its record and reads the response.

This is possible while the thread has lent its loop; ``LoopHandoff`` has the reason. A caller that waits for single
records in sequence borrows the loop. The thread gets it back if there is other work, or if a response takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.record_chunk import IoThread
from sparklog.client.producer.send_loop import SendLoop
from sparklog.client.producer.spin_policy import SpinPolicy, processors
from sparklog.net.async_client import AsyncConnection

#: A thread that has waited for this number of records in sequence is expected to wait for the next one as well.
_WAITS_IN_SEQUENCE = 4
#: The I/O thread waits for a slower response, because it has other work as well.
_RESPONSE_S = 0.005


class CallerIo:
    """The rules by which callers act for the I/O thread. Owner: that thread. Any thread may call its methods."""

    def __init__(self, handoff: LoopHandoff, sender: SendLoop, thread: IoThread) -> None:
        """Create the rules of one producer. ``thread`` ends if an interrupt stops some work of ``sender``."""
        self._handoff = handoff
        self._sender = sender
        self._io_thread = thread
        self._waits = 0
        self._waiting_thread = -1
        self._spin_policy = SpinPolicy(processors=processors())
        #: True while the acting thread only waits: an interrupt loses nothing then.
        self._only_waiting = False
        #: The connection whose responses are being read. An interrupt loses at most this connection, unless a callback
        #: runs.
        self._reading: AsyncConnection | None = None

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        """Do the I/O in the calling thread, which waits until ``finished``. Return early if that is not possible.

        Only a thread that waits for single records in sequence does the I/O.
        """
        if not self._handoff.lent and self._waits_in_sequence():
            try:
                self._handoff.borrow(lambda: not self._sender.needs_loop())
            except RuntimeError:
                return  # the thread has just ended, and completed all open work
            if not self._handoff.lent:
                self._waits = -_WAITS_IN_SEQUENCE  # other work is in progress and will take a moment
        if self._handoff.lent:
            self._act(self._receive, (finished,), only_waiting=True)

    def _waits_in_sequence(self) -> bool:
        """Return whether the last few waits were all of this thread."""
        thread = get_ident()
        if thread != self._waiting_thread:
            self._waiting_thread, self._waits = thread, 0
        self._waits += 1
        return self._waits > _WAITS_IN_SEQUENCE

    def act(self, work: Callable[..., None], *arguments: Any) -> bool:
        """Do some work of the I/O thread in its place, if the loop is lent. Return whether the work was done."""
        return self._act(work, arguments, only_waiting=False)

    def _act(self, work: Callable[..., None], arguments: tuple[Any, ...], *, only_waiting: bool) -> bool:
        """Enter, run ``work`` and leave. ``only_waiting`` is the initial state; ``work`` may change it."""
        handoff = self._handoff
        if get_ident() == handoff.thread:
            return False  # a callback: this thread acts already
        try:
            if not handoff.enter():
                return False
            self._reading = None
            self._only_waiting = only_waiting
            try:
                work(*arguments)
            except BaseException as error:
                if not self._only_waiting:
                    given_up = False
                    try:
                        given_up = self._is_connection_given_up()
                    finally:  # a second interrupt may arrive in the block above
                        if not given_up:
                            # An interrupt inside a change of state: the state is undefined from here.
                            self._io_thread.end(error)
                raise
            finally:
                needed = self._sender.needs_loop()
                handoff.leave()
                if needed:
                    handoff.recall()
        except BaseException:
            handoff.leave_interrupted()
            self._io_thread.wake()  # perhaps nothing was done, and no other thread would report the work
            raise
        return True

    def _is_connection_given_up(self) -> bool:
        """Close the connection if an interrupt arrived while responses were read. Return whether that is sufficient.

        The bytes that were read are lost, so every request of that connection is treated as failed and sent again.
        Return False if a callback was running.
        """
        if self._reading is None or self._reading.delivering:
            return False
        self._reading.abort()
        return True

    def _receive(self, finished: Callable[[], bool]) -> None:
        """Read responses while they arrive, for as long as they usually take."""
        began = time.monotonic()
        until = began + _RESPONSE_S
        while not finished():
            connection = self._sender.only_connection()
            if connection is None or began >= until:
                self._handoff.recall()
                return
            readable = connection.wait_readable(until - began, self._spin_policy.spin_s)
            now = time.monotonic()
            self._spin_policy.on_response(now - began)
            self._reading = connection
            self._only_waiting = False
            is_read = readable and connection.read_now()
            self._only_waiting = True
            if not is_read:
                self._handoff.recall()
                return
            began = now
