"""Batches of small multis (ZooKeeper transactions).

If a broker with thousands of partitions fails, the controller and the leaders send thousands of small multis. The
results are the same as if each small multi were sent alone. ZooKeeper performs a batch as a whole or not at all. If
it refuses one member, each member is sent again alone and gets its own result. If the connection breaks, the outcome of
every member is unknown, as it would be for a member that was sent alone.

No write waits only to fill a batch: the writes that are started in one iteration of the event loop form a batch. While
``_IN_FLIGHT`` batches are in flight, further writes accumulate.

Equal checks in a batch are sent only once. Therefore no small multi may write a node whose version another small multi
checks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparklog.zk.errors import ZkMultiFailed
from sparklog.zk.ops import Check, Op

#: The number of small multis in a batch. ZooKeeper drops the connection at 1 MB, and each multi has about 200 bytes. If
#: one member is refused, this number of single requests follows.
_MEMBERS = 50
_IN_FLIGHT = 2

Results = tuple[Any, ...]


class _Member(NamedTuple):
    ops: Sequence[Op]
    future: asyncio.Future[Results]


class MultiBatcher:
    """A component that sends several small multis (ZooKeeper transactions) of one ``ZkSession`` in one request.

    ``send`` is the session's ``multi``. This function returns a future at once. The future fails if the request cannot
    be sent.
    """

    def __init__(self, send: Callable[[Sequence[Op]], asyncio.Future[Results]]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Member] = deque()
        self._in_flight = 0
        self._scheduled = False

    def multi(self, ops: Sequence[Op]) -> asyncio.Future[Results]:
        """Perform these operations, all or none, in one request with other multis.

        The future has the results or the error of these operations only.
        """
        future: asyncio.Future[Results] = self._loop.create_future()
        self._waiting.append(_Member(ops, future))
        if not self._scheduled and self._in_flight < _IN_FLIGHT:
            self._scheduled = True
            self._loop.call_soon(self._send_next)
        return future

    def _send_next(self) -> None:
        self._scheduled = False
        while self._waiting and self._in_flight < _IN_FLIGHT:
            members = [self._waiting.popleft() for _ in range(min(_MEMBERS, len(self._waiting)))]
            self._in_flight += 1
            if len(members) == 1:
                self._send_single(members[0])
            else:
                self._send_batch(members)

    def _ended(self) -> None:
        self._in_flight -= 1
        if self._waiting:
            self._send_next()

    def _send_single(self, member: _Member) -> None:
        def done(sent: asyncio.Future[Results]) -> None:
            _forward(sent, member.future)
            self._ended()

        self._send(member.ops).add_done_callback(done)

    def _send_batch(self, members: Sequence[_Member]) -> None:
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
                self._send_singly(members)
                return
            for member, span in zip(members, spans, strict=True):
                if sent.cancelled() or error is not None:
                    _forward(sent, member.future)
                elif not member.future.done():
                    member.future.set_result(tuple(sent.result()[place] for place in span))
            self._ended()

        self._send(ops).add_done_callback(done)

    def _send_singly(self, members: Sequence[_Member]) -> None:
        """Send each member of a refused batch alone, so that each gets its own result."""
        self._in_flight += len(members) - 1
        for member in members:
            self._send_single(member)


def _forward(sent: asyncio.Future[Results], future: asyncio.Future[Results]) -> None:
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
