"""The I/O thread of a producer, and the methods with which other threads give it work.

The thread runs the event loop, or lends the loop to a caller that would only wait for the thread (``CallerIo``). The
sender decides what the loop does (``SendLoop``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sparklog.client.errors import ProducerClosed, closed_for
from sparklog.client.producer.caller_io import CallerIo
from sparklog.client.producer.loop_handoff import LoopHandoff
from sparklog.client.producer.send_loop import SendLoop
from sparklog.net.loop import new_event_loop

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0


def _do_nothing() -> None:
    """Do nothing: the default of a callback."""


class ProducerThread:
    """The I/O thread of one producer. A part of the ``Sender``. Any thread may call its methods, except ``end``."""

    def __init__(self, sender: SendLoop) -> None:
        """Create the event loop. ``start`` starts the thread."""
        self._sender = sender
        self.loop = new_event_loop()
        self.handoff = LoopHandoff(self.loop)
        self.caller_io = CallerIo(self.handoff, sender, self)
        #: ``CallerIo.wait_helping``, which every single record calls.
        self.wait_helping = self.caller_io.wait_helping
        #: Whether ``run_once`` was posted to the loop and has not begun.
        self.woken = False
        #: The reason for the producer's end, or None.
        self.broken: BaseException | None = None
        #: The error for work that the ended producer does not accept.
        self.closed_error = ProducerClosed("the producer is closed")
        #: A callback that the thread calls once, when it ends.
        self.on_end: Callable[[], None] = _do_nothing
        self._ended = False
        self._ending = threading.Lock()
        self._io_thread = threading.Thread(target=self._run, name="sparklog-producer", daemon=True)

    def start(self) -> None:
        self._io_thread.start()

    # --- from any thread ---

    def wake(self) -> None:
        """Make the I/O thread call the sender's ``run_once`` soon."""
        if not self.woken:
            self.woken = True
            try:
                self.handoff.post(self._sender.run_once)
            except RuntimeError:
                if self.broken is None:  # the loop is closed only after the thread's end
                    raise
            except BaseException:
                # An interrupt may have prevented the post, and a second one is harmless.
                self.handoff.post(self._sender.run_once)
                raise

    def on_chunk_opened(self) -> None:
        """Start to send a new chunk of records.

        The calling thread sends the records if the I/O thread has lent the event loop. Otherwise the I/O thread sends
        them.
        """
        if not self.handoff.lent or not self.caller_io.act(self._sender.run_once, ()):
            self.wake()

    def recall_loop(self) -> None:
        """Give the event loop back to the I/O thread, before the caller waits without running the loop."""
        self.handoff.recall()

    def on_io_thread(self) -> bool:
        """Return whether the calling thread is the one that runs the loop's callbacks."""
        return threading.get_ident() == self.handoff.thread

    def hand_over(self, work: Callable[..., None], *arguments: Any) -> None:
        """Make the I/O thread call ``work``. Raises ProducerClosed if the thread has ended."""
        with self._ending:
            if self._ended:
                raise closed_for(self.closed_error)
            self.handoff.post(work, *arguments)

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], start: Callable[[Coroutine[Any, Any, None]], None]) -> T:
        """Run a coroutine on the I/O thread and wait for its result. ``start`` creates the task in that thread.

        Raises:
            ProducerClosed: the thread has ended, or ends before the coroutine ends.
        """
        self.refuse_own_thread("a transaction")
        done: Future[T] = Future()

        async def run() -> None:
            try:
                done.set_result(await work())
            except asyncio.CancelledError:
                done.set_exception(self.closed_error)
            except BaseException as error:
                done.set_exception(error)

        def begin() -> None:
            if self.broken is None:
                start(run())
            else:
                done.set_exception(self.closed_error)

        self.hand_over(begin)
        return done.result()

    def refuse_own_thread(self, what: str) -> None:
        """Raise RuntimeError if the caller is a future's callback, because the I/O thread would wait for itself.

        ``what`` names the call in the message.
        """
        if self.on_io_thread():
            raise RuntimeError(f"{what} cannot be waited for in a future's callback")

    def stop(self, reason: BaseException) -> None:
        """End the thread, and wait a limited time for its end. Unfinished work fails with ``reason``."""
        with contextlib.suppress(ProducerClosed):  # the thread has ended already
            self.hand_over(self.end, reason)
        self._io_thread.join(_STOP_TIMEOUT_S)

    def retire(self) -> None:
        """Make the thread end after all accepted work has ended. Take no lock; see ``ProducerLifetime.retire``."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self.handoff.post(self._sender.begin_to_retire)

    # --- on the I/O thread, or on a caller's thread that has entered the loop ---

    def end(self, reason: BaseException) -> None:
        """End the producer, on purpose or after an error. All open work fails with ``reason``."""
        if self.broken is not None:
            return
        self.broken = reason
        self.closed_error = reason if isinstance(reason, ProducerClosed) else closed_for(reason)
        try:
            self._sender.fail_all(self.closed_error)
        finally:
            self.handoff.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._unforeseen)
        try:
            self._run_until_stopped()
            self.loop.run_until_complete(self._sender.disconnect())
        finally:
            # Called again, because an interrupt may have stopped another thread inside ``end``.
            self._sender.fail_all(self.closed_error)
            self.on_end()
            with self._ending:
                self._ended = True
            # One more iteration of the loop runs work that was posted just before, and lets transports close their
            # sockets.
            self.loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            self.loop.close()

    def _run_until_stopped(self) -> None:
        try:
            self.handoff.run()
        except BaseException as error:
            _log.exception("a producer's thread")
            self.end(error)
            self.loop.run_forever()  # one iteration: the loop is already stopped

    def _unforeseen(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no code caught.

        An error in a callback or task of the producer means that some work was not done and may never be, so the
        producer ends with this error. Any other error comes from a connection, and ends only that connection.
        """
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and error is not None:
            self.end(error)
