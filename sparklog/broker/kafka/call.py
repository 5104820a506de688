"""One request in progress on a Kafka connection, as its handler sees it.

A handler gets the call and the decoded request, and returns the response. A handler is one of two kinds of functions:

- A coroutine function, which runs as a task. It is cancelled when the client's connection ends.
- A plain function, which returns the response or a future of it. The handlers of Produce and Fetch should be of this
  kind: the time of a plain function counts towards the server's limit for one iteration of the event loop
  (``net.turn``).

If a handler raises BrokerError, the client gets a response with only this error (``error_responses``). This requires
that the response has a top-level error code. Otherwise the handler itself adds the error to each topic or partition of
its response. A handler returns None for a request without a response (Produce with acks=0).

The requests of one connection are handled one after the other, as in Kafka, and only Produce requests that follow each
other are in progress at the same time. Responses have the order of the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

from sparklog.broker.requests.dispatch import Handlers
from sparklog.broker.requests.slices import Slices
from sparklog.broker.security.forwarding_connections import ForwardingConnection
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.connection import error_of_reply
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import ErrorReply, Reply, Request

#: The maximum number of entries of a response that is encoded on the event loop. The encoding takes up to 20 ms.
LOOP_ENTRIES = 5000
#: A handler of one API: it gets the call and the decoded request, and returns the response. See the module's docstring.
Handler = Callable[["KafkaCall", Any], "Awaitable[Any] | Any"]


class NativeHandlers(NamedTuple):
    """Two tables of handlers of sparklog's own requests.

    ``of_tokens`` is for clients that have logged in with a delegation token, and ``of_users`` for all other clients.
    """

    of_users: Handlers
    of_tokens: Handlers

    def of(self, connection: ServerConnection) -> Handlers:
        """Return the handlers that match the way in which this connection logged in."""
        return self.of_tokens if connection.token_id else self.of_users


class KafkaCall:
    """One request in progress on a Kafka connection.

    The dispatcher creates it for each request, on the broker's event loop.
    """

    __slots__ = ("_natives", "_slices", "client_id", "connection", "encodes_in_thread", "version")

    def __init__(
        self,
        connection: ServerConnection,
        natives: NativeHandlers,
        slices: Slices,
        *,
        version: int,
        client_id: str,
    ) -> None:
        #: The connection that sent the request. It has the principal, the listener and the address of the client.
        self.connection = connection
        #: The version of the API that the client chose for this request.
        self.version = version
        #: The client id in the request's header; empty without one.
        self.client_id = client_id
        #: Whether a thread encodes the response, because it has more than ``LOOP_ENTRIES`` entries. Only the
        #: handlers of Produce and Fetch set it. The dispatcher counts the entries of all other responses.
        self.encodes_in_thread = False
        self._natives = natives
        self._slices = slices

    async def pause(self) -> None:
        """Let other work run if large requests have used the event loop for long (``Slices.pause``).

        A handler calls this between the entries of a request. ``native`` calls it itself.
        """
        await self._slices.pause()

    async def native(self, request: Request, body: Sequence[Buffer] | memoryview = ()) -> Reply:
        """Run the handler of a request of sparklog's own protocol for the principal of this connection.

        Return the reply without its body. ACLs, quotas and the audit log apply as if a client of sparklog had sent the
        request. The correlation id of ``request`` has no meaning.

        Raises:
            BrokerError: the reply is an error.
        """
        await self.pause()
        whole = body if isinstance(body, memoryview) else memoryview(b"".join(body))
        inner = NativeConnection(self.connection)
        self._natives.of(self.connection)[type(request)](cast(ServerConnection, inner), request, whole)
        reply = await inner.answer
        if reply is None:
            raise RuntimeError(f"{type(request).__name__} has no reply")
        if isinstance(reply, ErrorReply):
            raise error_of_reply(reply)
        return reply


class NativeConnection(ForwardingConnection):
    """A substitute for a Kafka connection, which a handler of sparklog's own protocol gets.

    The handler's reply becomes the result of ``answer``. The result is None if the handler sends no reply.
    """

    def __init__(self, connection: ServerConnection) -> None:
        super().__init__(connection)
        self.answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        """Return whether the client's connection has ended, or the call no longer waits for the answer."""
        return self.client.closed or self.answer.done()

    @property
    def writable(self) -> bool:
        return self.client.writable

    def reply(self, message: Reply, body: Sequence[Buffer] = (), body_bytes: int = -1) -> None:
        if not self.answer.done():
            self.answer.set_result(message)

    def done(self, cid: int) -> None:
        if not self.answer.done():
            self.answer.set_result(None)
