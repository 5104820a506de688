"""A test in which one command restarts all brokers one after the other while clients write and read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.results import RecordMetadata
from sparklog.errors import BrokerError, ErrorCode
from tests.cluster.supervised_cluster import SupervisedCluster

PARTITIONS = 6
PATIENCE_S = 60.0


class Traffic:
    """Clients that number the records of each partition from 0 and read them all, until ``end``."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._enough = threading.Event()
        self.errors: list[BaseException] = []
        self.acknowledged: list[Future[RecordMetadata]] = []
        self.sent = 0
        self.seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self) -> None:
        with Producer(self._bootstrap, linger_ms=1) as producer:
            while not self._enough.is_set():
                number, partition = divmod(self.sent, PARTITIONS)
                self.acknowledged.append(producer.send("t", b"%d" % number, partition=partition))
                self.sent += 1
                if partition == PARTITIONS - 1:
                    time.sleep(0.005)

    def _read(self) -> None:
        count = 0
        deadline = None
        with Consumer(self._bootstrap, "t", log_columns=True) as consumer:
            while not self._enough.is_set() or count < self.sent:
                for batch in consumer.poll(0.2):
                    columns = (batch.column(name).to_pylist() for name in ("_partition", "_offset", "value"))
                    for partition, offset, value in zip(*columns, strict=True):
                        self.seen[partition].append((offset, int(value)))
                    count += batch.num_rows
                if self._enough.is_set():
                    deadline = deadline or time.monotonic() + PATIENCE_S
                    assert time.monotonic() < deadline, f"{count} of {self.sent} records read"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedCluster]:
    with SupervisedCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_every_broker_restarts_without_client_errors(
    cluster: SupervisedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("t", partitions=PARTITIONS, replication_factor=3)
        before = {broker.broker_id: broker.incarnation for broker in admin.describe_cluster().brokers}
        traffic = Traffic(cluster.bootstrap)
        try:
            code = run(["brokers", "rolling-restart", "--bootstrap", cluster.bootstrap, "--timeout", "30"])
        finally:
            traffic.end()
        out = capsys.readouterr()
        assert code == 0, out.err
        assert out.out.splitlines()[-1] == "restarted 3 brokers, every replica is in sync"
        assert traffic.errors == []
        assert [future.exception() for future in traffic.acknowledged if future.exception() is not None] == []
        for partition in range(PARTITIONS):
            count = len(range(partition, traffic.sent, PARTITIONS))
            assert traffic.seen[partition] == [(number, number) for number in range(count)]
        after = {broker.broker_id: broker.incarnation for broker in admin.describe_cluster().brokers}
        assert all(after[broker_id] > before[broker_id] for broker_id in before)
        topic = admin.describe_topic("t")
        assert all(set(part.isr) == {0, 1, 2} and part.leader == part.replicas[0] for part in topic.partitions)
        # The supervisors count no crash: a crash would delay the next start.
        assert [supervisor._delay_s for supervisor in cluster.supervisors] == [0.0] * 3


def test_a_drained_broker_hosts_nothing(cluster: SupervisedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap) as producer:
        admin.create_topic("three", partitions=1, replication_factor=3)
        with pytest.raises(BrokerError) as caught:
            admin.drain_broker(0)
        assert caught.value.code == ErrorCode.INVALID_REPLICATION_FACTOR
        for name in admin.list_topics():
            admin.delete_topic(name)
        admin.create_topic("two", partitions=6, replication_factor=2, config={"min.insync.replicas": 2})
        sent = [producer.send("two", b"x", partition=number % 6) for number in range(60)]
        assert run(["brokers", "-b", cluster.bootstrap, "drain", "0", "--yes", "--wait", "--timeout", "30"]) == 0
        assert capsys.readouterr().out == "broker 0: 4 partitions are being moved\nbroker 0: holds no replicas\n"
        assert all(set(part.replicas) == {1, 2} for part in admin.describe_topic("two").partitions)
        sent += [producer.send("two", b"x", partition=number % 6) for number in range(60)]
        assert sorted(future.result(PATIENCE_S).offset for future in sent) == sorted([*range(20)] * 6)
        deadline = time.monotonic() + PATIENCE_S
        while held := next(one.replicas for one in admin.describe_brokers() if one.address.broker_id == 0):
            assert time.monotonic() < deadline, held
            time.sleep(0.05)
