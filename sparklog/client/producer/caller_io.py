"""Network I/O in the thread of a caller that waits for its record, in place of the producer's I/O thread.

The I/O thread lends its event loop to a caller that sends single records and waits for each of them; ``LoopHandoff``
explains why. The caller then sends its record and reads the response itself. The I/O thread gets the loop back if there
is other work, or if a response takes long.
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

#: A thread that has waited for more than this number of records in sequence may borrow the loop.
_WAITS_IN_SEQUENCE = 4
#: The time that a caller waits for a response. After this time, the caller returns the loop, and the I/O thread waits
#: for the response.
_RESPONSE_S = 0.005


class CallerIo:
    """A part of a producer that does the producer's I/O in a thread that waits for a record.

    For this, the I/O thread *lends* its event loop: it stops the loop, and the waiting thread does the loop's work. Any
    thread may call the methods.
    """

    def __init__(self, handoff: LoopHandoff, sender: SendLoop, thread: IoThread) -> None:
        """Create the helper of one producer.

        If an interrupt stops ``sender`` while it changes its state, ``thread`` ends.
        """
        self._handoff = handoff
        self._sender = sender
        self._needs_loop = sender.needs_loop
        self._io_thread = thread
        self._waits = 0
        self._waiting_thread = -1
        self._spin_policy = SpinPolicy(processors=processors())
        #: True while the thread that has entered the loop only waits. An interrupt is harmless then.
        self._only_waiting = False
        #: The connection whose responses are being read. An interrupt during the read closes only this connection,
        #: unless a callback is running.
        self._reading: AsyncConnection | None = None

    def wait_helping(self, finished: Callable[[], bool]) -> None:
        """Do the producer's I/O in the calling thread until ``finished()`` is true.

        This method may return earlier. Then the caller must wait in another way. The method borrows the event loop only
        for a thread that has waited for several single records in sequence.
        """
        if not self._handoff.lent and self._waits_in_sequence():
            try:
                self._handoff.borrow(lambda: not self._needs_loop())
            except RuntimeError:
                return  # the I/O thread has just ended and completed all open work
            if not self._handoff.lent:
                self._waits = -_WAITS_IN_SEQUENCE  # other work is in progress and will take a moment
        if self._handoff.lent:
            self.act(self._receive, (finished,), only_waiting=True)

    def _waits_in_sequence(self) -> bool:
        """Return whether this thread has waited more than ``_WAITS_IN_SEQUENCE`` times, without another in between."""
        thread = get_ident()
        if thread != self._waiting_thread:
            self._waiting_thread, self._waits = thread, 0
        self._waits += 1
        return self._waits > _WAITS_IN_SEQUENCE

    def act(self, work: Callable[..., None], arguments: tuple[Any, ...], *, only_waiting: bool = False) -> bool:
        """Run ``work`` in the calling thread if the I/O thread has lent the event loop. Return whether it ran.

        If ``only_waiting`` is true, ``work`` begins with a wait, and an interrupt of the wait does no harm.
        """
        handoff = self._handoff
        if get_ident() == handoff.thread:
            return False  # called from a callback: this thread has entered the loop already
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
                            # The interrupt may have stopped a change of the producer's state, which is then undefined.
                            self._io_thread.end(error)
                raise
            finally:
                needed = self._needs_loop()
                handoff.leave()
                if needed:
                    handoff.recall()
        except BaseException:
            handoff.leave_interrupted()
            self._io_thread.wake()  # if ``work`` did not run, no other thread would wake the I/O thread for it
            raise
        return True

    def _is_connection_given_up(self) -> bool:
        """Close the connection if an interrupt stopped a read of responses. Return whether nothing else was damaged.

        The bytes that were read are lost, so every request of that connection counts as failed and is sent again.
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
