"""The runner of a term's core, a ``Controller``: it calls ``step``, sets the timer, and owns the term's tasks.

The runner itself does no I/O. The parts of a term that read ZooKeeper or perform effects start their work as tasks of
the runner, and pass the resulting events to it. The term ends when the core resigns, or when any step or task fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sparklog.cluster.retry_pauses import growing_pauses
from sparklog.controller.controller import Controller
from sparklog.controller.effects import Effect
from sparklog.controller.events import ControllerTicked, Event
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import PAUSE_S, ZkSession
from sparklog.zk.unreadable import Unreadable

log = logging.getLogger(__name__)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class CoreRunner:
    """The runner of the ``Controller`` of one term, with the term's timer and tasks. A part of ``ControllerTerm``.

    Not thread-safe: use it only on the event loop of the term, until ``close``.
    """

    def __init__(
        self,
        core: Controller,
        session: ZkSession,
        *,
        unreadable: Unreadable,
        perform: Callable[[Effect], None],
        on_change: Callable[[], None],
    ) -> None:
        self.core = core
        #: Whether the term ended with an unexpected error.
        self.failed = False
        self.counters: Counter[str] = Counter()
        #: A future that is done, with the reason, when the term is over.
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._session = session
        self._unreadable = unreadable
        self._perform = perform
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """Return the tasks that have not ended."""
        return frozenset(self._tasks)

    def step(self, event: Event) -> None:
        """Pass ``event`` to the ``Controller`` and perform the resulting effects. End the term if that fails.

        The callers include timers and watches, which cannot handle an error. A new term is safer than one that
        continues with an incomplete state.
        """
        if self.over.done():
            return
        try:
            self.advance(event)
        except Exception as error:
            self.fail(type(event).__name__, error)

    def advance(self, event: Event) -> None:
        """Pass ``event`` to the ``Controller`` and perform the resulting effects.

        An error of the ``Controller`` or of an effect is raised to the caller.
        """
        for effect in self.core.step(event, _now_ms()):
            self._perform(effect)
        self._set_timer()
        self.report_change()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.deadline_ms
        if deadline is not None and not self.over.done():
            self._timer = self._loop.call_later(max(0, deadline - _now_ms()) / 1000, self.step, ControllerTicked())

    def report_change(self) -> None:
        """Call ``on_change``, because the state or the counters of the term may have changed."""
        if self._unreadable.count:
            self.counters["controller.zookeeper.unreadable"] = self._unreadable.count
        self._on_change()

    def fail(self, what: str, error: BaseException) -> None:
        """End the term because of an unexpected error. ``what`` names the event or task that failed."""
        log.error("%s failed", what, exc_info=error)
        self.failed = True
        self.finish(f"{what}: {type(error).__name__}: {error}")

    def finish(self, reason: str) -> None:
        """End the term for this reason. If the term has already ended, do nothing."""
        if not self.over.done():
            self.over.set_result(reason)

    async def close(self) -> None:
        """Cancel the timer and all tasks, and wait for the tasks."""
        self.finish("cancelled")
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- tasks -----------------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task of the term. The term ends if the task fails."""
        if self.over.done():
            work.close()
            return
        task = self._loop.create_task(work, name=f"controller: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.over.done():
            # An unexpected error ends the term, as in ``step``.
            self.fail(task.get_name(), error)

    async def retry(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Carry out an idempotent operation. Retry until it succeeds.

        It may fail because of a lost connection, a refusal by ZooKeeper, or an unreadable node.
        """
        for pause_s in growing_pauses(PAUSE_S):
            await self._session.connected()
            try:
                await operation()
                return
            except ZkUnreachable as error:
                log.info("retrying after %s", error)
                pause_s = PAUSE_S
            except (ZkError, ZkFormatError) as error:
                log.warning("retrying after %s", error)
                self.counters["controller.requests.repeated"] += 1
            await asyncio.sleep(pause_s)
