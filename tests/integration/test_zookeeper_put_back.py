"""Tests of a ZooKeeper that is restored from an older copy under a cluster that has continued: all components are
real."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from sparklog import Admin, Consumer, Producer
from sparklog.cli.main import run
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
SETTINGS = {"zookeeper.session.timeout.ms": "2000", "log.retention.check.interval.ms": "200"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(base_dir=tmp_path / "cluster", settings=SETTINGS) as cluster:
        yield cluster


def copy_zookeeper(cluster: ProcessCluster) -> Path:
    """Copy ZooKeeper's data while it is stopped."""
    copy = cluster.base_dir / "zookeeper-copy"
    cluster.signal_zookeeper(signal.SIGSTOP)
    try:
        shutil.copytree(cluster.base_dir / "zookeeper" / "data", copy)
    finally:
        cluster.signal_zookeeper(signal.SIGCONT)
    return copy


def stop_all(cluster: ProcessCluster) -> None:
    cluster.stop_brokers()
    cluster.stop_controller()
    cluster.signal_zookeeper(signal.SIGTERM)


def put_back(cluster: ProcessCluster, copy: Path) -> None:
    """Restore ZooKeeper's data from the copy while nothing runs, and start the cluster again."""
    stop_all(cluster)
    data = cluster.base_dir / "zookeeper" / "data"
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    cluster.start_zookeeper()
    cluster.start_controller()
    cluster.start_brokers()


def write(cluster: ProcessCluster, topic: str, *values: bytes) -> None:
    """Write the values with a new producer, each acknowledged by all replicas."""
    with Producer(cluster.bootstrap, acks="all", linger_ms=0) as producer:
        for value in values:
            producer.write(topic, pa.table({"value": [value]}), partition=0).result()


def make_topic(cluster: ProcessCluster, topic: str) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=1, replication_factor=3, config={"retention.ms": "-1"})
        admin.wait_until_in_sync([topic])


def read_values(bootstrap: str, topic: str) -> list[bytes]:
    """Read partition 0 from its beginning to its present end."""
    tp = TopicPartition(topic, 0)
    values: list[bytes] = []
    with Consumer(bootstrap, [tp], start="earliest") as consumer:
        end = consumer.end_offsets()[tp]
        while consumer.position(tp) < end:
            for batch in consumer.poll(1.0):
                values += batch.column("value").to_pylist()
    return values


def wait_for_set_aside(cluster: ProcessCluster, broker_id: int, count: int) -> None:
    """Wait until the broker has this number of logs set aside."""
    wait_until(
        lambda: cluster.describe(broker_id).counters.get("set.aside.logs") == count,
        PATIENCE_S,
        f"{count} set-aside logs on broker {broker_id}",
    )


@pytest.mark.extended
def test_no_record_is_mistaken_for_a_duplicate_after_a_restore(
    cluster: ProcessCluster,
) -> None:
    make_topic(cluster, "t")
    copy = copy_zookeeper(cluster)
    before = [b"before-%d" % i for i in range(15)]
    for first in (0, 5, 10):
        write(cluster, "t", *before[first : first + 5])
    put_back(cluster, copy)
    after = [b"after-%d" % i for i in range(7)]
    write(cluster, "t", *after)
    assert read_values(cluster.bootstrap, "t") == [*before, *after]


@pytest.mark.extended
def test_logs_of_a_topic_unknown_to_the_copy_are_kept(cluster: ProcessCluster) -> None:
    make_topic(cluster, "t")
    copy = copy_zookeeper(cluster)
    make_topic(cluster, "later")
    write(cluster, "later", *(b"%d" % i for i in range(10)))
    put_back(cluster, copy)
    for broker_id, slot in cluster.slots.items():
        wait_for_set_aside(cluster, broker_id, 1)
        assert len(list(slot.log_dir.glob("set-aside/*-later-0/*.arrow"))) == 1


def counters(cluster: ProcessCluster) -> dict[str, int]:
    """Return the numbers that must never decrease: by name, for each broker and for the partition ``t-0``."""

    async def read(store: ClusterStore) -> dict[str, int]:
        epoch = codecs.decode("", (await store.session.get(paths.CONTROLLER_EPOCH)).data, codecs.CounterNode).value
        incarnations = {f"incarnation of {b.broker_id}": b.incarnation for b in await store.live_brokers()}
        ids = codecs.decode("", (await store.session.get(paths.PRODUCER_IDS)).data, codecs.CounterNode).value
        stored = await store.states.read(TopicPartition("t", 0))
        assert stored is not None
        return {
            "controller epoch": epoch,
            "producer ids": ids,
            "leader epoch": stored.state.leader_epoch,
            **incarnations,
        }

    return cluster.ask_zookeeper(read)


def test_every_counter_continues_above_the_restored_copy(cluster: ProcessCluster) -> None:
    make_topic(cluster, "t")
    copy = copy_zookeeper(cluster)
    for turn in range(3):
        cluster.stop_controller()
        cluster.start_controller()
        for broker_id in cluster.slots:
            cluster.restart(broker_id)
        write(cluster, "t", b"before-%d" % turn)
    before = counters(cluster)
    put_back(cluster, copy)
    write(cluster, "t", b"after")
    after = counters(cluster)
    assert after.keys() == before.keys()
    assert {name: value for name, value in after.items() if value <= before[name]} == {}
    assert read_values(cluster.bootstrap, "t") == [b"before-0", b"before-1", b"before-2", b"after"]
    with Admin(cluster.bootstrap) as admin:
        admin.wait_until_in_sync(["t"])
    stop_all(cluster)
    logs = [(slot.log_dir / "t-0" / f"{0:020d}.arrow").read_bytes() for slot in cluster.slots.values()]
    assert logs[0] == logs[1] == logs[2]


def test_a_topic_unknown_to_the_copy_is_restored_completely(
    cluster: ProcessCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    make_topic(cluster, "t")
    copy = copy_zookeeper(cluster)
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(
            "later", partitions=2, replication_factor=3, config={"retention.ms": "-1", "cleanup.policy": "compact"}
        )
        admin.wait_until_in_sync(["later"])
        before = admin.describe_topic("later")
    values = [b"%d" % i for i in range(10)]
    with Producer(cluster.bootstrap, acks="all", linger_ms=0) as producer:
        for value in values:
            producer.send("later", value, key=value, partition=0).result(PATIENCE_S)
    put_back(cluster, copy)
    for broker_id in cluster.slots:
        wait_for_set_aside(cluster, broker_id, 1)
    brokers = ("-b", cluster.bootstrap)
    assert run(["partitions", "set-aside", "list", "--json", *brokers]) == 0
    listed = msgspec.json.decode(capsys.readouterr().out)
    assert [(log["broker_id"], log["topic"], log["log_end_offset"]) for log in listed] == [
        (broker_id, "later", 10) for broker_id in cluster.slots
    ]
    assert run(["partitions", "set-aside", "restore", "later", "--yes", *brokers]) == 0
    with Admin(cluster.bootstrap) as admin:
        admin.wait_until_in_sync(["later"], timeout_s=PATIENCE_S)
        after = admin.describe_topic("later")
    assert (after.topic_id, after.config, after.key) == (before.topic_id, before.config, before.key)
    assert [p.replicas for p in after.partitions] == [p.replicas for p in before.partitions]
    assert read_values(cluster.bootstrap, "later") == values
    for broker_id in cluster.slots:
        wait_for_set_aside(cluster, broker_id, 0)
    assert run(["partitions", "set-aside", "restore", "later", "--yes", *brokers]) == 1


@pytest.mark.extended
def test_a_set_aside_log_is_removed_by_hand_only(cluster: ProcessCluster, capsys: pytest.CaptureFixture[str]) -> None:
    make_topic(cluster, "t")
    copy = copy_zookeeper(cluster)
    make_topic(cluster, "later")
    write(cluster, "later", b"value")
    put_back(cluster, copy)
    make_topic(cluster, "later")
    for broker_id in cluster.slots:
        wait_for_set_aside(cluster, broker_id, 1)
    with Admin(cluster.bootstrap) as admin:
        logs = admin.set_aside_logs()
        with pytest.raises(BrokerError, match="exists, with id") as refused:
            admin.restore_set_aside(logs[0].topic_id)
        assert refused.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        with pytest.raises(BrokerError) as refused:
            admin.restore_set_aside("no such id")
        assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_ID
    names = [f"{log.broker_id}/{log.name}" for log in logs]
    assert run(["partitions", "set-aside", "remove", *names, "--yes", "-b", cluster.bootstrap]) == 0
    assert run(["partitions", "set-aside", "remove", names[0], "--yes", "-b", cluster.bootstrap]) == 0
    for broker_id, slot in cluster.slots.items():
        wait_for_set_aside(cluster, broker_id, 0)
        assert not list(slot.log_dir.glob("set-aside/*"))
    assert run(["partitions", "set-aside", "remove", "later", "--yes", "-b", cluster.bootstrap]) == 2
    assert "BROKER/LOG" in capsys.readouterr().err
