"""The dispatch of Kafka requests to their handlers, and the order of the responses.

The requests of one connection are handled one after the other, as in Kafka. Only Produce requests that follow each
other are in progress at the same time, because each of them waits for the followers. Responses have the order of the
requests. A request that waits for its turn counts towards the limits of the connection (``net.server_connection``),
like every request without a response.

If the client's connection ends, the handlers that still run are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from sparklog.broker.kafka.call import LOOP_ENTRIES, Handler, KafkaCall, NativeHandlers
from sparklog.broker.kafka.error_codes import REFUSALS, kafka_error
from sparklog.broker.kafka.error_responses import error_response
from sparklog.broker.requests.slices import Slices
from sparklog.errors import ErrorCode
from sparklog.kafka.connection import KafkaRequest
from sparklog.kafka.wire import ApiKey, MalformedMessage, RequestHeader, decode_request, response_frame
from sparklog.net.server_connection import ServerConnection
from sparklog.net.turn import TURN_S
from sparklog.protocol.frames import Buffer

_log = logging.getLogger(__name__)

#: A request with more bytes is decoded in a thread, except a Produce request, whose elements have a lower limit. If
#: all elements have the minimum size, decoding this number of bytes takes about 30 ms.
_LOOP_BYTES = 128 * 1024
#: The APIs whose handlers themselves ask for a thread, because their responses are frequent.
_RECORDS = frozenset({ApiKey.PRODUCE, ApiKey.FETCH})


class RequestQuotas(Protocol):
    """The part of the quota manager that limits the time of requests."""

    @property
    def limits_time(self) -> bool: ...

    def timed(self, connection: ServerConnection, step: Callable[[], Any]) -> Any: ...

    def throttle_ms(self, connection: ServerConnection) -> int: ...


class _Timed(Coroutine[Any, Any, Any]):
    """A coroutine that runs each step of ``inner`` by ``timed``, which charges the step's time to a quota."""

    def __init__(self, inner: Coroutine[Any, Any, Any], timed: Callable[[Callable[[], Any]], Any]) -> None:
        self._inner = inner
        self._timed = timed

    def send(self, value: Any) -> Any:
        return self._timed(partial(self._inner.send, value))

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


class _Slot:
    """A request in progress, at its place in the order of the responses."""

    __slots__ = ("buffers", "done", "request", "work")

    def __init__(self, request: KafkaRequest) -> None:
        self.request = request
        self.work: asyncio.Future[Any] | None = None
        self.done = False
        #: The bytes of the response when the request is done; None for a request without a response.
        self.buffers: list[Buffer] | None = None


class KafkaHandler:
    """The handler of all requests on one Kafka connection.

    The server's connection owns this handler. ``on_lost`` is called with the connection when the connection has ended.
    ``quotas`` limits the time of requests. If the next request must wait because of a quota, the response contains the
    wait (``throttle_time_ms``), so that the client sends nothing meanwhile. ``slices`` runs the work on large requests.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        natives: NativeHandlers,
        counters: Counter[str],
        connection: ServerConnection,
        on_lost: Callable[[ServerConnection], None],
        *,
        quotas: RequestQuotas,
        slices: Slices,
    ) -> None:
        self._slices = slices
        self._quotas = quotas
        self._handlers = handlers
        self._natives = natives
        self._counters = counters
        self._connection = connection
        self._on_lost = on_lost
        self._waiting: deque[KafkaRequest] = deque()
        self._in_progress: deque[_Slot] = deque()
        self._starting = False
        counters["kafka.connections.opened"] += 1

    def request_received(self, request: KafkaRequest, body: memoryview) -> None:
        self._waiting.append(request)
        self._start()

    def connection_lost(self) -> None:
        self._counters["kafka.connections.closed"] += 1
        self._waiting.clear()
        slots, self._in_progress = self._in_progress, deque()
        for slot in slots:
            if slot.work is not None:
                slot.work.cancel()
        self._on_lost(self._connection)

    def _start(self) -> None:
        """Start the requests whose turn has come."""
        if self._starting:
            return
        self._starting = True
        ends_s = time.monotonic() + TURN_S
        try:
            while self._waiting and self._may_start(self._waiting[0]):
                slot = _Slot(self._waiting.popleft())
                self._in_progress.append(slot)
                self._begin(slot)
                if self._waiting and time.monotonic() >= ends_s:
                    asyncio.get_running_loop().call_soon(self._start)
                    break
        finally:
            self._starting = False

    def _may_start(self, request: KafkaRequest) -> bool:
        if not self._in_progress:
            return True
        last = self._in_progress[-1].request
        return request.header.api_key == ApiKey.PRODUCE == last.header.api_key

    def _begin(self, slot: _Slot) -> None:
        """Decode the request, and pass it to its handler."""
        header, message = slot.request.header, slot.request.message
        decode = partial(decode_request, header.api_key, header.api_version, message)
        if len(message) > _LOOP_BYTES and header.api_key != ApiKey.PRODUCE:
            slot.work = asyncio.get_running_loop().run_in_executor(None, decode)
            slot.work.add_done_callback(partial(self._decoded, slot))
            return
        try:
            request = decode()
        except MalformedMessage as error:
            self._give_up(str(error))
            return
        self._handle(slot, request)

    def _decoded(self, slot: _Slot, work: asyncio.Future[Any]) -> None:
        """Handle a request that a thread has decoded."""
        if work.cancelled() or self._connection.closed:
            return
        error = work.exception()
        if error is None:
            self._handle(slot, work.result())
        elif isinstance(error, MalformedMessage):
            self._give_up(str(error))
        else:
            self._fail(slot, error)

    def _handle(self, slot: _Slot, request: Any) -> None:
        header = slot.request.header
        try:
            call = KafkaCall(
                self._connection,
                self._natives,
                self._slices,
                version=header.api_version,
                client_id=header.client_id or "",
            )
            handler = partial(self._handlers[header.api_key], call, request)
            is_limited = self._quotas.limits_time
            result = self._quotas.timed(self._connection, handler) if is_limited else handler()
            if isinstance(result, Coroutine):
                if is_limited:
                    result = _Timed(result, partial(self._quotas.timed, self._connection))
                name = f"Kafka API {header.api_key}"
                result = asyncio.get_running_loop().create_task(result, name=name)
            if isinstance(result, asyncio.Future):
                slot.work = result
                result.add_done_callback(partial(self._completed, slot, call))
                return
            self._end(slot, self._frame(header, result) if result is not None else None)
        except Exception as error:
            self._fail(slot, error)

    def _completed(self, slot: _Slot, call: KafkaCall, work: asyncio.Future[Any]) -> None:
        """Encode the response of a handler, and end the request."""
        if work.cancelled():
            if not self._connection.closed:  # The broker is closing.
                self._connection.close()
            return
        try:
            response, header = work.result(), slot.request.header
            if response is None:
                self._end(slot, None)
            elif call.encodes_in_thread or (header.api_key not in _RECORDS and has_many_entries(response)):
                encode = partial(response_frame, header, self._throttled(response))
                slot.work = asyncio.get_running_loop().run_in_executor(None, encode)
                slot.work.add_done_callback(partial(self._encoded, slot))
            else:
                self._end(slot, self._frame(header, response))
        except Exception as failure:
            self._fail(slot, failure)

    def _encoded(self, slot: _Slot, work: asyncio.Future[list[Buffer]]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            self._end(slot, work.result())
        else:
            self._fail(slot, error)

    def _fail(self, slot: _Slot, error: BaseException) -> None:
        """Respond with an error. Close the connection if the API has no error for the whole request."""
        header = slot.request.header
        if isinstance(error, REFUSALS):
            code, detail = kafka_error(error)
        else:
            self._counters["requests.failed"] += 1
            _log.error("Kafka API %d from %s failed", header.api_key, self._connection.peer, exc_info=error)
            code, detail = int(ErrorCode.UNKNOWN_SERVER_ERROR), f"{type(error).__name__}: {error}"
        response = error_response(header.api_key, header.api_version, code, detail)
        if response is None:
            self._give_up(f"API {header.api_key} has no response for an error of the whole request: {detail}")
            return
        self._end(slot, self._frame(header, response))

    def _frame(self, header: RequestHeader, response: Any) -> list[Buffer]:
        return response_frame(header, self._throttled(response))

    def _throttled(self, response: Any) -> Any:
        """Enter into the response the time that the client's next request must wait because of a quota."""
        if getattr(response, "throttle_time_ms", None) == 0 and (wait_ms := self._quotas.throttle_ms(self._connection)):
            return replace(response, throttle_time_ms=wait_ms)
        return response

    def _give_up(self, reason: str) -> None:
        """Close the connection, and drop the requests that have not started."""
        self._waiting.clear()
        self._connection.give_up(reason)

    def _end(self, slot: _Slot, buffers: list[Buffer] | None) -> None:
        slot.buffers, slot.done, slot.work = buffers, True, None
        while self._in_progress and self._in_progress[0].done:
            first = self._in_progress.popleft()
            if first.buffers is None:
                self._connection.done(first.request.cid)
            else:
                self._connection.send(first.request.cid, first.buffers)
        self._start()


def has_many_entries(response: Any) -> bool:
    """Return whether the lists of a response have too many elements to be encoded on the event loop.

    The function visits only about ``LOOP_ENTRIES`` elements.
    """
    found, waiting = 0, [response]
    while waiting:
        struct = waiting.pop()
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if isinstance(value, list) and value:
                found += len(value)
                if found > LOOP_ENTRIES:
                    return True
                if isinstance(value[0], Struct):
                    waiting.extend(value)
    return False
