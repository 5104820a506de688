"""Tests of a forked child and its parent's clients: the child gets an error, and the parent continues."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future, as_completed, wait
from typing import Any

import pyarrow as pa
import pytest

from sparklog import Admin, ClientForked, Consumer, Producer, TopicPartition
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.protocol.messages import Produce
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import say_nothing, times
from tests.tiers import marked_after

_TIMEOUT_S = 30


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child and check that it returns there in time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads run during this fork
        child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:  # the child must not continue with its parent's tests
            os._exit(code)
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)


def refuses(work: Callable[[], object]) -> None:
    with pytest.raises(ClientForked, match="after the fork"):
        work()


def test_a_producer_refuses_every_call_in_a_child(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"before").result(_TIMEOUT_S)

        def child() -> None:
            refuses(lambda: producer.send("t", b"child"))
            refuses(lambda: producer.write("t", pa.table({"value": [b"child"]})))
            refuses(lambda: producer.flush(1))
            producer.close()
            with producer:
                pass

        in_child(child)
        assert producer.send("t", b"after").result(_TIMEOUT_S).offset == 1


@pytest.mark.parametrize("how", marked_after(1, ["send", "write"], pytest.mark.extended))
def test_a_future_of_the_parent_fails_in_a_child(fake: FakeCluster, how: str) -> None:
    fake.create("t", partitions=1)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, times(1, Produce, say_nothing))
    with Producer(fake.bootstrap, request_timeout_s=5) as producer:  # the child has to begin earlier
        future = producer.send("t", b"v") if how == "send" else producer.write("t", pa.table({"value": [b"v"]}))
        called: list[object] = []
        other = producer.send("t", b"w")
        other.add_done_callback(called.append)

        def child() -> None:
            refuses(future.result)
            assert isinstance(future.exception(), ClientForked)
            both: list[Future[Any]] = [future, other]
            done, waiting = wait(both, timeout=_TIMEOUT_S)
            assert (len(done), len(waiting)) == (2, 0)
            assert len(list(as_completed(both, timeout=_TIMEOUT_S))) == 2
            refuses(other.result)
            assert not called, "the child must not call the parent's callbacks"

        in_child(child)
        future.result(_TIMEOUT_S)


def test_a_producer_made_in_a_child_works(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with Producer(fake.bootstrap) as producer:
        producer.send("t", b"before").result(_TIMEOUT_S)

        def child() -> None:
            with Producer(fake.bootstrap) as own:
                own.send("t", b"child").result(_TIMEOUT_S)

        in_child(child)
        assert producer.send("t", b"after").result(_TIMEOUT_S).offset == 2


def test_readers_refuse_calls_in_a_forked_child_but_not_its_parent(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    with (
        Producer(fake.bootstrap) as producer,
        Consumer(fake.bootstrap, "t") as consumer,
        Admin(fake.bootstrap) as admin,
        BlockingCluster(fake.bootstrap) as link,
        PartitionReader(fake.bootstrap, TopicPartition("t", 0), 0, 1) as reader,
    ):
        producer.send("t", b"before").result(_TIMEOUT_S)
        assert sum(batch.num_rows for batch in consumer.poll(_TIMEOUT_S)) == 1
        link.topic("t")
        admin.list_topics()

        def child() -> None:
            refuses(lambda: consumer.poll(1))
            refuses(lambda: consumer.to_table(timeout_s=1))
            refuses(lambda: admin.describe_topic("t"))
            refuses(lambda: link.topic("t"))
            refuses(lambda: list(reader))
            for client in (consumer, admin, link, reader):
                client.close()

        in_child(child)
        producer.send("t", b"after").result(_TIMEOUT_S)
        assert sum(batch.num_rows for batch in consumer.poll(_TIMEOUT_S)) == 1
        assert admin.list_topics() == ["t"]
        assert len(list(reader)) == 1
