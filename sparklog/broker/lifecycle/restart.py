"""RestartBroker requests: a controlled shutdown, after which the supervisor starts the broker again."""

from __future__ import annotations

import logging

from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Ack, RestartBroker

_log = logging.getLogger(__name__)


def handle_restart_broker(
    broker: BrokerState, connection: ServerConnection, request: RestartBroker, body: memoryview
) -> None:
    if request.incarnation != broker.incarnation:
        raise BrokerError(
            ErrorCode.STALE_BROKER_EPOCH,
            f"broker {broker.broker_id}: expected incarnation {broker.incarnation}, found {request.incarnation}",
        )
    broker.restart()
    _log.info("restart requested by %s", connection.peer)
    connection.reply(Ack(request.cid))
