"""Faults for transactional producers, and the records that readers see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparklog.client.cluster.isolation_level import Isolation
from sparklog.client.consumer.consumer import Consumer
from sparklog.errors import ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    AddToTransaction,
    ErrorReply,
    Request,
)
from sparklog.record.header import BatchHeader
from sparklog.testing.process_cluster import wait_until
from tests.client.fake_cluster import FakeBroker, FakeCluster, Fault

K = TypeVar("K", bound=Request)


def seen(fake: FakeCluster, topic: str, isolation: Isolation = "read_committed") -> list[bytes]:
    with Consumer(fake.bootstrap, topic, isolation=isolation) as consumer:
        values: list[bytes] = consumer.to_table(timeout_s=5).column("value").to_pylist()
        return values


def requests(fake: FakeCluster, kind: type[K]) -> list[K]:
    return [request for broker in fake.brokers for request in broker.requests if isinstance(request, kind)]


def headers(fake: FakeCluster, topic: str) -> list[BatchHeader]:
    return fake.do(lambda: [header for log in fake.topics[topic].logs for header, _ in log.batches])


def lose_answer(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
    """Perform the request, and close the connection instead of responding."""
    reply = connection.reply

    def lose(*_: object, **__: object) -> None:
        connection.reply = reply  # type: ignore[method-assign]
        connection.close()

    connection.reply = lose  # type: ignore[method-assign]
    return False


def answer(code: ErrorCode) -> Fault:
    def act(broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        connection.reply(ErrorReply(request.cid, int(code), "on purpose"))
        return True

    return act


class Held:
    """A fault that holds requests back until the test releases them."""

    def __init__(self, fake: FakeCluster, wanted: Callable[[Request], bool]) -> None:
        self._fake = fake
        self._wanted = wanted
        self._open = False
        self._kept: list[tuple[FakeBroker, ServerConnection, Request]] = []
        fake.fault(0, self)

    def __call__(self, broker: FakeBroker, connection: ServerConnection, request: Request) -> bool:
        if self._open or not self._wanted(request):
            return False
        self._kept.append((broker, connection, request))
        return True

    def wait(self) -> None:
        wait_until(lambda: self._kept, 5, "a request to hold")

    def release(self) -> None:
        def go() -> None:
            self._open = True
            for broker, connection, request in self._kept:
                self._fake.coordinator.handle(broker.broker_id, request, connection.reply)  # type: ignore[arg-type]

        self._fake.do(go)


def adds(topic: str, partition: int) -> Callable[[Request], bool]:
    return lambda request: isinstance(request, AddToTransaction) and (topic, partition) in request.partitions
