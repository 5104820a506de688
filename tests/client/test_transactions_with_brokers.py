"""Tests of the clients' transactions with real brokers: whatever process is killed, readers see committed
transactions once and completely, and no others."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.isolation_level import Isolation
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.errors import ProducerFenced
from sparklog.client.producer.producer import Producer
from sparklog.model import TopicPartition
from sparklog.protocol.messages import FindCoordinator, FindCoordinatorReply
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3) as running:
        yield running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as client:
        for name in client.list_topics():
            client.delete_topic(name)
        yield client


def values(cluster: ProcessCluster, topic: str, isolation: Isolation = "read_committed") -> list[bytes]:
    with Consumer(cluster.bootstrap, topic, isolation=isolation) as consumer:
        found: list[bytes] = consumer.to_table(timeout_s=30).column("value").to_pylist()
        return found


def coordinator_of(cluster: ProcessCluster, key: str) -> int:
    with BlockingCluster(cluster.bootstrap) as link:
        request = FindCoordinator(0, "transaction", key)
        reply = link.retrying("coordinator", lambda: link.ask_any(request, FindCoordinatorReply))
        return reply.broker.broker_id


class Worker:
    """A ``copy_worker`` process, which is killed at the end."""

    def __init__(self, cluster: ProcessCluster, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.client.copy_worker", cluster.bootstrap, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)

    def wait_line(self, timeout_s: float = 30.0) -> None:
        """Wait for the next line of its output."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert readable, "the worker printed nothing"
        assert os.read(self.process.stdout.fileno(), 65536), f"the worker ended: {self.process.wait()}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def worker(cluster: ProcessCluster, *arguments: str) -> Iterator[Worker]:
    started = Worker(cluster, *arguments)
    try:
        yield started
    finally:
        started.kill()


def test_transactions_are_committed_aborted_and_fenced(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("t", partitions=3, replication_factor=3)
    tps = [TopicPartition("t", number) for number in range(3)]
    with (
        Producer(cluster.bootstrap, transactional_id="x") as first,
        Producer(cluster.bootstrap, transactional_id="x") as second,
    ):
        with first.transaction():
            for tp in tps:
                first.send("t", b"whole", partition=tp.partition)
            first.send_offsets({tps[0]: 42}, group="g")
        assert values(cluster, "t") == [b"whole"] * 3
        assert admin.group_offsets("g") == {tps[0]: 42}
        first.begin()
        first.send("t", b"aborted", partition=0).result(30)
        first.send_offsets({tps[0]: 43}, group="g")
        (told,) = [found for found in admin.transactions() if found.state == "open"]
        assert (told.key, told.partitions) == ("id:x", (tps[0],))
        first.abort()
        first.begin()
        first.send("t", b"fenced", partition=1).result(30)
        assert admin.list_offsets([tps[1]]) == {tps[1]: 2}  # after the first marker
        second.begin()
        with pytest.raises(ProducerFenced):
            first.commit()
        second.send("t", b"second", partition=1)
        second.commit()
    assert sorted(values(cluster, "t")) == [b"second", b"whole", b"whole", b"whole"]
    assert Counter(values(cluster, "t", "read_uncommitted")) == Counter(
        [b"whole"] * 3 + [b"aborted", b"fenced", b"second"]
    )
    assert admin.group_offsets("g") == {tps[0]: 42}


def test_a_killed_producers_transaction_ends_by_successor_or_timeout(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("t", replication_factor=3)
    tp = TopicPartition("t", 0)
    with worker(cluster, "abandoned:5") as abandoned, worker(cluster, "succeeded:600") as succeeded:
        abandoned.wait_line()
        succeeded.wait_line()
    with Producer(cluster.bootstrap) as plain:
        plain.send("t", b"after", partition=0).result(30)
    assert admin.list_offsets([tp]) == {tp: 0}
    with Producer(cluster.bootstrap, transactional_id="succeeded") as successor, successor.transaction():
        successor.send("t", b"again", partition=0)
    wait_until(lambda: admin.list_offsets([tp])[tp] >= 6, 30, "the time-out")
    assert values(cluster, "t") == [b"after", b"again"]
    assert not [found for found in admin.transactions() if found.state != "empty"]


@pytest.mark.extended
def test_read_process_write_is_exactly_once_despite_kills(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("in", partitions=2, replication_factor=3)
    admin.create_topic("out", partitions=2, replication_factor=3)
    sent = [b"%d" % number for number in range(1500)]
    with Producer(cluster.bootstrap) as producer:
        for value in sent:
            producer.send("in", value, key=value)
    for number, fault in enumerate(("", "coordinator", "leader", "")):
        with worker(cluster) as copying:
            for _ in range(3):
                copying.wait_line()
            if fault:
                out = TopicPartition("out", 0)
                cluster.kill(
                    coordinator_of(cluster, "id:copier") if fault == "coordinator" else leader_of(cluster, out)
                )
            copying.wait_line()
            # The kill comes at any moment: between any two steps of a transaction.
            time.sleep(0.013 * number)
        for slot in cluster.slots.values():
            if not slot.running:
                cluster.start_broker(slot.broker_id)
        admin.wait_until_in_sync(["in", "out"])
    ends = admin.list_offsets([TopicPartition("in", 0), TopicPartition("in", 1)])
    with worker(cluster) as copying:
        wait_until(lambda: admin.group_offsets("copy") == ends, 60, "the copy to be complete")
    assert Counter(values(cluster, "out")) == Counter(sent)


def leader_of(cluster: ProcessCluster, tp: TopicPartition) -> int:
    with Admin(cluster.bootstrap) as admin:
        leader = admin.describe_topic(tp.topic).partitions[tp.partition].leader
        assert leader is not None
        return leader


class Writer:
    """Transactions one after the other: each writes its number to every partition, and every fifth one is aborted."""

    def __init__(self, cluster: ProcessCluster, topic: str, partitions: int) -> None:
        self.committed: list[bytes] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._partitions = partitions
        self._thread = threading.Thread(target=self._run, args=(cluster.bootstrap, topic))
        self._thread.start()

    def goes_on(self, transactions: int) -> None:
        wanted = len(self.committed) + transactions
        wait_until(lambda: self.error or len(self.committed) >= wanted, 60, f"{transactions} more transactions")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        if self.error is not None:
            raise self.error

    def _run(self, bootstrap: str, topic: str) -> None:
        number = 0
        try:
            with Producer(bootstrap, transactional_id="writer") as producer:
                while not self._stop.is_set():
                    number += 1
                    producer.begin()
                    for partition in range(self._partitions):
                        producer.send(topic, b"%d" % number, partition=partition)
                    if number % 5 == 0:
                        producer.flush()
                        producer.abort()
                    else:
                        producer.commit()
                        self.committed.append(b"%d" % number)
        except BaseException as error:
            self.error = error


@pytest.mark.extended
def test_transactions_continue_when_coordinator_and_leader_fail(cluster: ProcessCluster, admin: Admin) -> None:
    admin.create_topic("t", partitions=3, replication_factor=3)
    writer = Writer(cluster, "t", 3)
    try:
        writer.goes_on(5)
        before, began = len(writer.committed), time.monotonic()
        writer.goes_on(20)
        pace = (len(writer.committed) - before) / (time.monotonic() - began)
        coordinator = coordinator_of(cluster, "id:writer")
        cluster.kill(coordinator)
        writer.goes_on(5)
        cluster.start_broker(coordinator)
        admin.wait_until_in_sync(["t"])
        leader = leader_of(cluster, TopicPartition("t", 1))
        cluster.kill(leader, signal.SIGSTOP)
        cluster.retire(leader, cluster.pid(leader))
        writer.goes_on(5)
        cluster.kill(leader, signal.SIGCONT)
        writer.goes_on(5)
        cluster.restart(coordinator_of(cluster, "id:writer"))
        writer.goes_on(5)
    finally:
        writer.stop()
    assert Counter(values(cluster, "t")) == Counter(writer.committed * 3)
    assert pace > 2, f"{pace:.1f} transactions/s"
