"""A caller who would only wait for the producer's I/O thread acts for it: sends what he handed over, takes the answer.

It may do so while the thread has lent its loop (``LoopHandoff`` says why). Whoever waits for one record after the other
borrows it; where something else goes on, or an answer takes longer, the thread gets it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from sparklog.client.producer.inflight_requests import InflightRequests
from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.spin_policy import SpinPolicy, processors
from sparklog.net.async_client import AsyncConnection

#: Who has waited for so many records one after the other will wait for the next one as well.
_WAITS_IN_TURN = 4
#: An answer that takes longer is waited for by the I/O thread: it has other things to look after as well.
_ANSWER_S = 0.005


class CallerIo:
    """Owner: the ``Sender``. Methods are for any thread."""

    def __init__(
        self,
        lease: LoopHandoff,
        requests: InflightRequests,
        *,
        loop_needed: Callable[[], bool],
        broken: Callable[[BaseException], None],
        wake: Callable[[], None],
    ) -> None:
        """``loop_needed``: something is to be done that only a loop that turns can do. ``broken`` is told when what
        was being done was interrupted, ``wake`` has the thread look again."""
        self._lease = lease
        self._requests = requests
        self._loop_needed = loop_needed
        self._broken = broken
        self._wake = wake
        self._waits = 0
        self._waiting_thread = -1
        self._wakefulness = SpinPolicy(processors=processors())
        #: Who acts only waits now: nothing is lost where it is interrupted.
        self._resting = False
        #: Whose answers are read where who acts does not rest: no more than this is lost, but while one is told of.
        self._reading: AsyncConnection | None = None

    def attend(self, finished: Callable[[], bool]) -> None:
        """Called by a thread that will wait until something is ``finished``: the caller who does so for one record
        after the other may do the I/O meanwhile. Returns sooner or later."""
        if not self._lease.lent and self._waits_in_turn():
            try:
                self._lease.borrow(lambda: not self._loop_needed())
            except RuntimeError:
                return  # the thread has just ended, and all that was open with it
            if not self._lease.lent:
                self._waits = -_WAITS_IN_TURN  # something goes on that will take a moment
        if self._lease.lent:
            self._act(self._receive, (finished,), resting=True)

    def _waits_in_turn(self) -> bool:
        """Whether it was always this thread that waited, the last few times."""
        thread = get_ident()
        if thread != self._waiting_thread:
            self._waiting_thread, self._waits = thread, 0
        self._waits += 1
        return self._waits > _WAITS_IN_TURN

    def act(self, work: Callable[..., None], *arguments: Any) -> bool:
        """Do some of the thread's work in its place, if it has lent its loop. False: not done."""
        return self._act(work, arguments, resting=False)

    def _act(self, work: Callable[..., None], arguments: tuple[Any, ...], *, resting: bool) -> bool:
        """``resting``: until ``work`` says otherwise."""
        lease = self._lease
        if get_ident() == lease.thread:
            return False  # in a callback: it is doing some already
        try:
            if not lease.enter():
                return False
            self._reading = None
            self._resting = resting
            try:
                work(*arguments)
            except BaseException as error:
                if not self._resting:
                    given_up = False
                    try:
                        given_up = self._is_connection_given_up()
                    finally:  # a second interrupt may come in the middle of that
                        if not given_up:
                            # An interrupt, perhaps, in the middle of something: nothing is certain any more.
                            self._broken(error)
                raise
            finally:
                needed = self._loop_needed()
                lease.leave()
                if needed:
                    lease.recall()
        except BaseException:
            lease.leave_interrupted()
            self._wake()  # perhaps nothing was done yet, and nobody else would say that there is something to do
            raise
        return True

    def _is_connection_given_up(self) -> bool:
        """An interrupt came while answers were read. What has been read of them is lost, so all on that connection is
        as if it had broken: what was sent is sent again. False: an answer was being told of."""
        if self._reading is None or self._reading.telling:
            return False
        self._reading.abort()
        return True

    def _receive(self, finished: Callable[[], bool]) -> None:
        """Take answers as they come, for as long as they usually take."""
        began = time.monotonic()
        until = began + _ANSWER_S
        while not finished():
            connection = self._requests.only_connection()
            if connection is None or began >= until:
                self._lease.recall()
                return
            readable = connection.wait_readable(until - began, self._wakefulness.awake_s)
            now = time.monotonic()
            self._wakefulness.answered(now - began)
            self._reading = connection
            self._resting = False
            is_read = readable and connection.read_now()
            self._resting = True
            if not is_read:
                self._lease.recall()
                return
            began = now
