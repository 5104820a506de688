"""Tests of producers that are never closed: they are collected with their threads and sockets, and no accepted
record is lost."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from sparklog import Producer
from tests.client.fake_cluster import FakeCluster
from tests.client.producing import LoseAnswers, values

_TIMEOUT_S = 30


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, "the expected event did not happen"
        time.sleep(0.01)


def producer_threads() -> int:
    return sum(thread.name == "sparklog-producer" for thread in threading.enumerate())


@pytest.mark.parametrize("options", [{}, {"acks": 1}, {"linger_ms": 0}, {"transactional_id": "t"}], ids=str)
def test_an_unused_producer_is_collected_with_its_thread(fake: FakeCluster, options: dict[str, object]) -> None:
    fake.create("t", partitions=1)
    before = producer_threads()
    producer = Producer(fake.bootstrap, **options)  # type: ignore[arg-type]
    if "transactional_id" not in options:
        producer.send("t", b"v").result(_TIMEOUT_S)
        producer.send("t", b"v").result(_TIMEOUT_S)
    collected = weakref.ref(producer)
    del producer
    gc.collect()
    assert collected() is None
    until(lambda: producer_threads() <= before)  # a thread of an earlier test may end meanwhile


def test_records_of_a_collected_producer_are_sent(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    for broker in fake.brokers:
        fake.fault(broker.broker_id, LoseAnswers(1))
    producer = Producer(fake.bootstrap, linger_ms=10_000, request_timeout_s=2)
    futures = [producer.send("t", b"%d" % i) for i in range(5)]
    del producer
    gc.collect()
    assert [future.result(_TIMEOUT_S).offset for future in futures] == list(range(5))
    assert values(fake, "t") == [b"%d" % i for i in range(5)]


def test_records_of_a_collected_producer_are_sent_before_exit(fake: FakeCluster) -> None:
    fake.create("t", partitions=1)
    program = f"""
import sparklog
def write():
    producer = sparklog.Producer({fake.bootstrap!r}, linger_ms=10_000)
    for i in range(5):
        producer.send("t", b"%d" % i)
write()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=_TIMEOUT_S, start_new_session=True)
    assert values(fake, "t") == [b"%d" % i for i in range(5)]


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no threads after the main one (gh-113964)"
)
@pytest.mark.parametrize("imported", ["pass", "import sparklog; sparklog.Producer"], ids=["late", "early"])
def test_a_producer_works_in_a_thread_that_outlives_the_main_one(fake: FakeCluster, imported: str) -> None:
    fake.create("t", partitions=1)
    program = f"""
import threading
{imported}
def write():
    threading.main_thread().join()
    import sparklog
    with sparklog.Producer({fake.bootstrap.replace("127.0.0.1", "localhost")!r}) as producer:
        producer.send("t", b"late").result()
threading.Thread(target=write).start()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=_TIMEOUT_S, start_new_session=True)
    assert values(fake, "t") == [b"late"]
