"""Transactions of Kafka's clients while brokers die: each transaction is committed or aborted as a whole, once."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.cluster.embedded_zookeeper import find_java
from sparklog.testing.final_logs import wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.broker.transactions import find_coordinator
from tests.integration.kafka_records import PATIENCE_S, read_confluent, read_partitions, read_sparklog
from tests.integration.kafka_transactions import PYTHON, JavaProducer, TransactionalProducer
from tests.kafka_tools import KafkaTools
from tests.tiers import marked_after

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning"),
]

PARTITIONS = 3
KEY = "faulty"
SETTINGS = {
    "zookeeper.session.timeout.ms": "1000",
    "replica.lag.time.max.ms": "1500",
    "min.insync.replicas": "2",
}
#: The topics that must be in sync before the next broker dies.
_ALL = ["out", "__transaction_state"]


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("out", partitions=PARTITIONS, replication_factor=3)
        yield running


class Writer:
    """A thread that writes numbered transactions. After an error it continues with a new producer."""

    def __init__(self, create: Callable[[], TransactionalProducer]) -> None:
        self._create = create
        self._random = random.Random(7)
        #: The outcome of each transaction: committed, aborted or unknown.
        self.outcomes: dict[int, str] = {}
        self.errors: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def commits(self) -> int:
        return sum(outcome == "committed" for outcome in self.outcomes.values())

    def wait_progress(self) -> None:
        """Wait for five further commits."""
        wanted, end_s = self.commits + 5, time.monotonic() + PATIENCE_S
        while self.commits < wanted:
            assert self.failure is None, self.failure
            assert time.monotonic() < end_s, f"no commits any more: {self.errors}"
            time.sleep(0.02)

    def _run(self) -> None:
        producer: TransactionalProducer | None = None
        try:
            while not self._stop.is_set():
                producer = self._attempt(producer)
        except BaseException as error:
            self.failure = error
        finally:
            self._close(producer)

    def _attempt(self, producer: TransactionalProducer | None) -> TransactionalProducer | None:
        """Write one transaction. Return its producer, or None after an error."""
        try:
            producer = producer or self._create()
            self._transaction(producer)
        except Exception as error:
            self.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            self._close(producer)
            return None
        return producer

    @staticmethod
    def _close(producer: TransactionalProducer | None) -> None:
        if producer is not None:
            with contextlib.suppress(Exception):  # The next producer fences this one.
                producer.close()

    def _transaction(self, producer: TransactionalProducer) -> None:
        number = len(self.outcomes)
        commit = self._random.random() < 0.75
        self.outcomes[number] = "aborted"
        producer.begin()
        for one in range(12):
            producer.send("out", one % PARTITIONS, f"{number} {one}")
        if commit:
            self.outcomes[number] = "unknown"
            producer.commit()
            self.outcomes[number] = "committed"
        else:
            if self._random.random() < 0.5:
                producer.flush()  # Otherwise librdkafka drops the records that it has not sent.
            producer.abort()


def kill_coordinator(cluster: ProcessCluster, writer: Writer) -> None:
    for _ in range(3):
        _kill(cluster, writer, find_coordinator(cluster, "transaction", f"id:{KEY}"))


def kill_all_in_turn(cluster: ProcessCluster, writer: Writer) -> None:
    for broker in range(3):
        _kill(cluster, writer, broker)


def _kill(cluster: ProcessCluster, writer: Writer, broker: int) -> None:
    cluster.kill(broker)
    writer.wait_progress()
    cluster.start_broker(broker)
    wait_in_sync(cluster, _ALL, PATIENCE_S)
    writer.wait_progress()


def restart_all(cluster: ProcessCluster, writer: Writer) -> None:
    for broker in range(3):
        cluster.stop_broker(broker)
        writer.wait_progress()
        cluster.start_broker(broker)
        wait_in_sync(cluster, _ALL, PATIENCE_S)
        writer.wait_progress()


def check(cluster: ProcessCluster, writer: Writer, create: Callable[[], TransactionalProducer]) -> None:
    """Check the fate of each transaction, after a new producer has ended the last one."""
    assert writer.failure is None, writer.failure
    create().close()
    found = read_sparklog(cluster.bootstrap, "out")
    assert read_partitions(cluster.bootstrap, "out") == found
    assert {place: one.value for place, one in found.items()} == {
        place: one.value for place, one in read_confluent(cluster.kafka_bootstrap, "out", PARTITIONS).items()
    }
    times = Counter((one.value or b"").decode() for one in found.values())
    assert set(times.values()) <= {1}, "a record is there twice"
    counts = Counter(int(value.split()[0]) for value in times)
    for number, outcome in writer.outcomes.items():
        expected = {"committed": {12}, "aborted": {0}, "unknown": {0, 12}}[outcome]
        assert counts[number] in expected, f"transaction {number} is {outcome}, {counts[number]} records found"
    for partition in range(PARTITIONS):
        in_order = [int((found[place].value or b"").split()[0]) for place in sorted(found) if place[0] == partition]
        assert in_order == sorted(in_order), "the transactions of a producer have an order"
    assert writer.commits >= 20


@pytest.mark.parametrize(
    "disturb", marked_after(1, [kill_coordinator, kill_all_in_turn, restart_all], pytest.mark.extended)
)
def test_each_transaction_of_confluent_kafka_has_one_fate(
    cluster: ProcessCluster, disturb: Callable[[ProcessCluster, Writer], None]
) -> None:
    pytest.importorskip("confluent_kafka")
    create = lambda: PYTHON["confluent_kafka"](cluster.kafka_bootstrap, KEY)  # noqa: E731
    with Writer(create) as writer:
        writer.wait_progress()
        disturb(cluster, writer)
    check(cluster, writer, create)


@pytest.mark.extended
def test_each_transaction_of_aiokafka_has_one_fate(cluster: ProcessCluster) -> None:
    pytest.importorskip("aiokafka")
    create = lambda: PYTHON["aiokafka"](cluster.kafka_bootstrap, KEY)  # noqa: E731
    with Writer(create) as writer:
        writer.wait_progress()
        kill_all_in_turn(cluster, writer)
    check(cluster, writer, create)


@pytest.mark.extended
@pytest.mark.parametrize("disturb", [kill_coordinator, kill_all_in_turn])
def test_each_transaction_of_kafkas_java_producer_has_one_fate(
    cluster: ProcessCluster, jars: Path, disturb: Callable[[ProcessCluster, Writer], None]
) -> None:
    with KafkaTools(jars) as tools:
        create = lambda: JavaProducer(tools, cluster.kafka_bootstrap, KEY)  # noqa: E731
        with Writer(create) as writer:
            writer.wait_progress()
            disturb(cluster, writer)
        check(cluster, writer, create)


COPIED = 20_000


@pytest.mark.extended
def test_kafkas_message_copier_copies_each_record_once_under_kills(cluster: ProcessCluster, jars: Path) -> None:
    """Kafka's own job for its transactions: consume, process, produce, and send offsets, under kills of all parts."""
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic("in", partitions=1, replication_factor=3)
    with Producer(cluster.bootstrap) as producer:
        for number in range(COPIED):
            producer.send("in", str(number).encode(), partition=0)
    command = [
        find_java(), "-Xmx256m", "-XX:+UseSerialGC", "-cp", f"{jars}/*",
        "org.apache.kafka.tools.TransactionalMessageCopier",
        "--broker-list", cluster.kafka_bootstrap, "--input-topic", "in", "--input-partition", "0",
        "--output-topic", "out", "--consumer-group", "copier", "--transactional-id", KEY,
        "--transaction-size", "200", "--enable-random-aborts", "--max-messages", "-1",
    ]  # fmt: skip
    end_s = time.monotonic() + 300
    left = COPIED
    for life in range(100):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as copier:
            assert copier.stdout is not None
            for rounds, line in enumerate(copier.stdout, 1):
                status = json.loads(line) if line.startswith("{") else {}
                left = status.get("remaining", left)
                if left <= 0 or time.monotonic() > end_s:
                    break
                if life < 4 and rounds == 12:
                    if life % 2:
                        cluster.kill(life % 3)
                        cluster.start_broker(life % 3)
                        wait_in_sync(cluster, [*_ALL, "in"], PATIENCE_S)
                    break
            copier.kill()
        with Admin(cluster.bootstrap) as admin:
            committed = {place.partition: offset for place, offset in admin.group_offsets("copier").items()}
        if committed.get(0) == COPIED or time.monotonic() > end_s:
            break
    PYTHON["confluent_kafka"](cluster.kafka_bootstrap, KEY).close()  # ends the transaction of the killed copier
    found = read_sparklog(cluster.bootstrap, "out")
    values = Counter(int(one.value or b"-1") for one in found.values())
    assert set(values.values()) <= {1}, "a record was copied twice"
    assert sorted(values) == list(range(COPIED))
