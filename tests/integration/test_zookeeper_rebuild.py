"""Tests of a ZooKeeper whose data is lost permanently and rebuilt from the brokers' directories, with real
components."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from sparklog import Admin, Consumer, Producer
from sparklog.cli.main import run
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.zk.cluster_store import ClusterStore

pytestmark = pytest.mark.integration

SETTINGS = {"zookeeper.session.timeout.ms": "2000", "log.checkpoint.interval.ms": "500"}


def read_values(bootstrap: str, topic: str, partitions: int) -> list[list[object]]:
    """Read each partition from its beginning to its present end. Return the values of its first or second column."""
    column = "number" if topic == "typed" else "value"
    found: list[list[object]] = []
    for number in range(partitions):
        tp = TopicPartition(topic, number)
        with Consumer(bootstrap, [tp], start="earliest") as consumer:
            values: list[object] = []
            end = consumer.end_offsets()[tp]
            while consumer.position(tp) < end:
                values += [value for batch in consumer.poll(1.0) for value in batch.column(column).to_pylist()]
            found.append(values)
    return found


def lose_zookeeper(cluster: ProcessCluster) -> None:
    """Stop all processes, delete ZooKeeper's data, and start an empty ZooKeeper."""
    cluster.stop_brokers()
    cluster.stop_controller()
    cluster.signal_zookeeper(signal.SIGTERM)
    shutil.rmtree(cluster.base_dir / "zookeeper" / "data")
    cluster.start_zookeeper()


def test_a_cluster_without_its_zookeeper_is_rebuilt_completely(tmp_path: Path) -> None:
    with ProcessCluster(base_dir=tmp_path / "cluster", settings=SETTINGS) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("default", partitions=3, replication_factor=3, config={"retention.ms": "-1"})
            admin.create_topic(
                "typed",
                partitions=2,
                replication_factor=2,
                schema="number long, text string",
                key="number",
                config={"cleanup.policy": "compact", "segment.bytes": "4096"},
            )
            admin.create_topic("empty", partitions=4, replication_factor=3)
            admin.wait_until_in_sync(["default", "typed", "empty"])
            before = {topic.name: topic for topic in admin.describe_topics(["default", "typed", "empty"])}
        for broker_id in (0, 1):  # leader epochs increase
            cluster.restart(broker_id)
        with Producer(cluster.bootstrap, acks="all", linger_ms=0) as producer:
            for number in range(3):
                values = [b"%d-%d" % (number, i) for i in range(20)]
                producer.write("default", pa.table({"value": values}), partition=number).result()
            numbers = list(range(30))
            rows = pa.table({"number": pa.array(numbers, pa.int64()), "text": [f"row {i}" for i in numbers]})
            producer.write("typed", rows).result()
        with Consumer(cluster.bootstrap, "default", group="readers") as consumer:
            while consumer.poll(1.0):
                pass
            consumer.commit()
        offsets = committed(cluster)
        counts = {name: len(before[name].partitions) for name in ("default", "typed")}
        read = {name: read_values(cluster.bootstrap, name, count) for name, count in counts.items()}
        epochs = {name: [p.leader_epoch for p in before[name].partitions] for name in before}

        lose_zookeeper(cluster)
        log_dirs = [str(slot.log_dir) for slot in cluster.slots.values()]
        assert run(["zookeeper", "rebuild", *log_dirs, "--zookeeper", cluster.zookeeper, "--yes"]) == 0
        assert run(["zookeeper", "rebuild", *log_dirs, "--zookeeper", cluster.zookeeper, "--yes"]) == 1

        cluster.start_controller()
        cluster.start_brokers()
        with Admin(cluster.bootstrap) as admin:
            admin.wait_until_in_sync(["default", "typed"], timeout_s=60)
            after = {topic.name: topic for topic in admin.describe_topics(["default", "typed", "empty"])}
        assert {name: read_values(cluster.bootstrap, name, count) for name, count in counts.items()} == read
        for name, topic in before.items():
            again = after[name]
            assert (again.topic_id, again.config, again.key) == (topic.topic_id, topic.config, topic.key)
            assert [p.replicas for p in again.partitions] == [p.replicas for p in topic.partitions]
            if name != "empty":
                assert all(p.leader_epoch > epoch for p, epoch in zip(again.partitions, epochs[name], strict=True))
        assert committed(cluster) == offsets
        with Producer(cluster.bootstrap, acks="all", linger_ms=0) as producer:
            producer.write("default", pa.table({"value": [b"more"]}), partition=0).result()
        assert read_values(cluster.bootstrap, "default", 1)[0][-1] == b"more"
        assert all(not list(slot.log_dir.glob("set-aside/*")) for slot in cluster.slots.values())


def committed(cluster: ProcessCluster) -> object:
    with Admin(cluster.bootstrap) as admin:
        return admin.group_offsets("readers")


def test_a_rebuild_refuses_to_overwrite_or_disturb_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessCluster(base_dir=tmp_path / "cluster", settings=SETTINGS) as cluster:
        log_dirs = [str(slot.log_dir) for slot in cluster.slots.values()]
        assert run(["zookeeper", "rebuild", *log_dirs, "--zookeeper", cluster.zookeeper, "--yes"]) == 1
        assert "is running: stop it first" in capsys.readouterr().err
        cluster.stop_brokers()
        cluster.start_controller()
        rebuild = ["zookeeper", "rebuild", *log_dirs, "--zookeeper", cluster.zookeeper, "--yes"]
        assert run(rebuild) == 1
        assert "that know the cluster's secret" in capsys.readouterr().err
        rebuild += ["--secret-file", str(cluster.secret_file)]
        assert run(rebuild) == 1
        assert "stop the cluster first" in capsys.readouterr().err

        async def brokers(store: ClusterStore) -> tuple[object, ...]:
            return await store.live_brokers()

        assert cluster.ask_zookeeper(brokers) == ()
