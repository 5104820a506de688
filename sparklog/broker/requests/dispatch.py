"""The dispatch of decoded requests to the functions that handle them.

A handler is a plain function that sends the response itself, at once or later. If a handler raises an exception, the
client gets an error response, and the connection stays open.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from sparklog.broker.requests.access import Access
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ErrorReply, Request
from sparklog.protocol.senders import SenderKind
from sparklog.security.request_rules import RULES

_log = logging.getLogger(__name__)

HandleRequest = Callable[[ServerConnection, Any, memoryview], None]
Handlers = Mapping[type, HandleRequest]


def checked_handlers(access: Access, handlers: Handlers) -> Handlers:
    """Return the handlers, with a check of the sender before each request that only brokers may send.

    The check is ``Access.require``. All other handlers stay as they are.
    """

    def of_brokers(handle: HandleRequest) -> HandleRequest:
        def checked(connection: ServerConnection, request: Any, body: memoryview) -> None:
            access.require(connection, SenderKind.BROKER, type(request).__name__)
            handle(connection, request, body)

        return checked

    return {
        kind: of_brokers(handle) if RULES[kind].sender is SenderKind.BROKER else handle
        for kind, handle in handlers.items()
    }


class ConnectionHandler:
    """The handler of all requests on one connection, which passes each request to the handler of its kind.

    A part of the server's connection. ``on_lost`` is called with the connection when the connection has ended.
    ``of_tokens`` are the handlers for a client that has logged in with a delegation token; None means ``handlers``.
    """

    def __init__(
        self,
        handlers: Handlers,
        counters: Counter[str],
        connection: ServerConnection,
        on_lost: Callable[[ServerConnection], None],
        of_tokens: Handlers | None = None,
    ) -> None:
        self._handlers = handlers
        self._of_tokens = handlers if of_tokens is None else of_tokens
        self._counters = counters
        self._connection = connection
        self._on_lost = on_lost
        counters["connections.opened"] += 1

    def request_received(self, request: Request, body: memoryview) -> None:
        connection = self._connection
        try:
            handlers = self._of_tokens if connection.token_id else self._handlers
            handlers[type(request)](connection, request, body)
        except BrokerError as error:
            connection.reply(ErrorReply(request.cid, error.code, error.detail))
        except Exception as error:
            self._counters["requests.failed"] += 1
            _log.exception("%s from %s failed", type(request).__name__, connection.peer)
            connection.reply(
                ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}")
            )

    def connection_lost(self) -> None:
        self._counters["connections.closed"] += 1
        self._on_lost(self._connection)
