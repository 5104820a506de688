"""A test of two interrupts of a thread that receives a producer's responses, the second while the first one closes a
connection."""

from __future__ import annotations

import threading

import pytest

from sparklog import Producer
from sparklog.client.errors import ProducerClosed
from sparklog.net.async_client import AsyncConnection
from sparklog.protocol.connection import ClientEnd
from tests.client.fake_cluster import FakeCluster
from tests.client.test_loop_handoff import acting


def test_a_second_interrupt_leaves_no_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    here, decode, fail_waiting = threading.get_ident(), ClientEnd.decode_single, AsyncConnection._fail_waiting
    came: list[str] = []

    def first(self, *arguments):  # type: ignore[no-untyped-def]
        if not came and threading.get_ident() == here:
            came.append("first")
            raise KeyboardInterrupt
        return decode(self, *arguments)

    def second(self) -> None:  # type: ignore[no-untyped-def]
        if came == ["first"]:
            came.append("second")
            self._waiting = {}  # only this frame knows the waiting threads
            raise KeyboardInterrupt
        fail_waiting(self)

    with FakeCluster() as fake:
        fake.create("t", partitions=1)
        producer = Producer(fake.bootstrap, request_timeout_s=4, delivery_timeout_s=8)
        acting(producer)
        monkeypatch.setattr(ClientEnd, "decode_single", first)
        monkeypatch.setattr(AsyncConnection, "_fail_waiting", second)
        sent = []
        with pytest.raises(KeyboardInterrupt):
            for _ in range(50):
                sent.append(producer.send("t", b"v"))
                sent[-1].result()
        assert came == ["first", "second"]
        with pytest.raises(ProducerClosed):
            sent[-1].result(15)
        producer.close()
