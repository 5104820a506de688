"""RestartBroker requests: a controlled shutdown, after which the supervisor starts the broker again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparklog.broker.context import BrokerContext
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Ack, RestartBroker

_log = logging.getLogger(__name__)


class RestartRequests:
    """The handler of RestartBroker requests.

    ``restart`` begins the shutdown, or raises BrokerError if a restart is not possible.
    """

    def __init__(self, context: BrokerContext, restart: Callable[[], None]) -> None:
        self._context = context
        self._restart = restart

    def handle(self, connection: ServerConnection, request: RestartBroker, body: memoryview) -> None:
        context = self._context
        if request.incarnation != context.incarnation:
            raise BrokerError(
                ErrorCode.STALE_BROKER_EPOCH,
                f"broker {context.broker_id}: expected incarnation {context.incarnation}, found {request.incarnation}",
            )
        self._restart()
        _log.info("restart requested by %s", connection.peer)
        connection.reply(Ack(request.cid))
