"""Delayed responses to requests that wait for ZooKeeper or for an update of the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sparklog.broker.context import BrokerContext
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import NO_LEADER, TopicRecord
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ErrorReply, Reply, Request

_DEFAULT_TIMEOUT_MS = 30_000
_MAX_TIMEOUT_MS = 600_000


def reply_later(
    context: BrokerContext, connection: ServerConnection, request: Request, work: Coroutine[Any, Any, Reply]
) -> None:
    """Run ``work`` as a background task, and respond with its result or with the error that it raises.

    If the request is administrative, record in the audit log what the request has changed.
    """

    async def answer() -> None:
        try:
            reply = await work
            connection.reply(reply)
            context.audit.replied(connection, request, reply)
        except BrokerError as error:
            reply = ErrorReply(request.cid, error.code, error.detail)
            connection.reply(reply)
            context.audit.replied(connection, request, reply)
        except ClusterError as error:
            connection.reply(ErrorReply(request.cid, ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)))
        except Exception as error:
            connection.reply(
                ErrorReply(request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, f"{type(error).__name__}: {error}")
            )
            raise

    context.spawn(answer(), f"{type(request).__name__} of {connection.peer}")


def limit_s(timeout_ms: int) -> float:
    """Return the maximum time in seconds that a request with this timeout waits; 0 or less means the default."""
    return (min(timeout_ms, _MAX_TIMEOUT_MS) if timeout_ms > 0 else _DEFAULT_TIMEOUT_MS) / 1000


async def wait_for_metadata(context: BrokerContext, condition: Callable[[], bool], timeout_ms: int) -> bool:
    """Wait until ``condition`` is true, and check it after each metadata update.

    Return whether it became true within ``timeout_ms``.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s(timeout_ms)
    while not condition():
        left_s = end - loop.time()
        if left_s <= 0:
            return False
        await asyncio.wait({context.next_metadata()}, timeout=left_s)
    return True


async def wait_for_leaders(context: BrokerContext, record: TopicRecord, timeout_ms: int) -> bool:
    """Wait until the topic of ``record`` has all partitions of ``record``, each with a leader.

    Return whether this happened within ``timeout_ms``.
    """

    def led() -> bool:
        topic = context.cache.topic(record.name)
        return (
            topic is not None
            and topic.change.topic_id == record.topic_id
            and len(topic.partitions) >= len(record.assignment)
            and all(known.state.leader != NO_LEADER for known in topic.partitions.values())
        )

    return await wait_for_metadata(context, led, timeout_ms)
