"""Faults of producers' requests, and the records that arrived."""

from __future__ import annotations

from sparklog.errors import ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Produce,
    ProduceReply,
    ProduceResult,
    Request,
)
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault


def times(count: int, wanted: type, act: Fault) -> Fault:
    """Apply ``act`` to the first ``count`` requests of a type."""
    left = count

    def fault(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        nonlocal left
        if not isinstance(request, wanted) or not left:
            return False
        left -= 1
        return act(broker, connection, request)

    return fault


def refuse(code: ErrorCode) -> Fault:
    def act(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        assert isinstance(request, Produce)
        results = tuple(ProduceResult(int(code), -1, 0, 0, "on purpose") for _ in request.partitions)
        connection.reply(ProduceReply(request.cid, results))
        return True

    return act


def hang_up(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    connection.close()
    return True


def say_nothing(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    return True


class LoseAnswers:
    """A fault that performs a request and then closes the connection instead of responding."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if isinstance(request, Produce) and self.left:
            self.left -= 1
            reply = connection.reply

            def lose(*_: object, **__: object) -> None:
                connection.reply = reply  # type: ignore[method-assign]
                connection.close()

            connection.reply = lose  # type: ignore[method-assign]
        return False


def values(fake: FakeCluster, topic: str) -> list[bytes]:
    return [value for batch in fake.records(topic) for value in batch.column("value").to_pylist()]


def produce_requests(fake: FakeCluster) -> list[Produce]:
    return [request for broker in fake.brokers for request in broker.requests if isinstance(request, Produce)]
