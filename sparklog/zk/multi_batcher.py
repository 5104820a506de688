"""Many small multis that travel as few larger ones: what a failure of a broker with thousands of partitions is made of.

Each small multi keeps its meaning. What is sent together is written together or not at all; when it is not, because one
of them is refused, every one is sent again by itself and gets its own answer. When the connection breaks under way
the fate of all of them is unknown, as it would be of each.

Nothing waits to find company: what was handed over in one turn of the loop goes together, and while ``_IN_FLIGHT``
larger ones are under way the rest gathers. One write alone goes at once.

Equal checks of a larger multi are sent once. That needs what all users of this keep to: a node whose version is checked
here is not written here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparklog.zk.errors import ZkMultiFailed
from sparklog.zk.ops import Check, Op

#: Small multis in a larger one. ZooKeeper drops the connection at 1 MB; these are some 200 bytes each, and one refused
#: makes as many single ones of them.
_MEMBERS = 50
_IN_FLIGHT = 2

Results = tuple[Any, ...]


class _Member(NamedTuple):
    ops: Sequence[Op]
    future: asyncio.Future[Results]


class MultiBatcher:
    """Owner: one ``ZkSession``. ``send`` is its multi: a future at once, which fails where nothing can be sent."""

    def __init__(self, send: Callable[[Sequence[Op]], asyncio.Future[Results]]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Member] = deque()
        self._in_flight = 0
        self._scheduled = False

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[Results]:
        """The result of these operations alone, or the error they alone would have met."""
        future: asyncio.Future[Results] = self._loop.create_future()
        self._waiting.append(_Member(ops, future))
        if not self._scheduled and self._in_flight < _IN_FLIGHT:
            self._scheduled = True
            self._loop.call_soon(self._go)
        return future

    def _go(self) -> None:
        self._scheduled = False
        while self._waiting and self._in_flight < _IN_FLIGHT:
            members = [self._waiting.popleft() for _ in range(min(_MEMBERS, len(self._waiting)))]
            self._in_flight += 1
            if len(members) == 1:
                self._alone(members[0])
            else:
                self._together(members)

    def _ended(self) -> None:
        self._in_flight -= 1
        if self._waiting:
            self._go()

    def _alone(self, member: _Member) -> None:
        def done(sent: asyncio.Future[Results]) -> None:
            _hand_on(sent, member.future)
            self._ended()

        self._send(member.ops).add_done_callback(done)

    def _together(self, members: Sequence[_Member]) -> None:
        places: dict[Check, int] = {}
        ops: list[Op] = []
        spans: list[list[int]] = []
        for member in members:
            span = []
            for op in member.ops:
                if not isinstance(op, Check):
                    place = len(ops)
                elif op in places:
                    span.append(places[op])
                    continue
                else:
                    place = places[op] = len(ops)
                ops.append(op)
                span.append(place)
            spans.append(span)

        def done(sent: asyncio.Future[Results]) -> None:
            error = None if sent.cancelled() else sent.exception()
            if isinstance(error, ZkMultiFailed):
                self._one_by_one(members)
                return
            for member, span in zip(members, spans, strict=True):
                if sent.cancelled() or error is not None:
                    _hand_on(sent, member.future)
                elif not member.future.done():
                    member.future.set_result(tuple(sent.result()[place] for place in span))
            self._ended()

        self._send(ops).add_done_callback(done)

    def _one_by_one(self, members: Sequence[_Member]) -> None:
        """Nothing of it was done: whoever was refused learns why, and the others are not held up by it."""
        self._in_flight += len(members) - 1
        for member in members:
            self._alone(member)


def _hand_on(sent: asyncio.Future[Results], future: asyncio.Future[Results]) -> None:
    if future.done():
        return
    if sent.cancelled():
        future.cancel()
        return
    error = sent.exception()
    if error is None:
        future.set_result(sent.result())
    else:
        future.set_exception(error)
