"""Tests of logs without a topic: kept while they may be the last copy, deleted once they are known not to be.
Brokers are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog import Admin, Producer
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk.cluster_store import ClusterStore

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
SETTINGS = {
    "zookeeper.session.timeout.ms": "2000",
    "log.retention.check.interval.ms": "200",
    "log.checkpoint.interval.ms": "500",
    "log.set.aside.retention.ms": "0",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(base_dir=tmp_path_factory.mktemp("cluster"), settings=SETTINGS) as cluster:
        yield cluster


def written(cluster: ProcessCluster, topic: str, replicas: int) -> list[int]:
    """Create a topic of one partition, with ten records on all replicas. Return the replicas."""
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap, acks="all") as producer:
        admin.create_topic(topic, partitions=1, replication_factor=replicas)
        admin.wait_until_in_sync([topic])
        for number in range(10):
            producer.send(topic, b"%d" % number, partition=0).result(PATIENCE_S)
        return list(admin.describe_topic(topic).partitions[0].replicas)


def names(cluster: ProcessCluster, broker_id: int, topic: str) -> list[str]:
    """Return the places of the topic's log in this broker's directory, live or set aside."""
    log_dir: Path = cluster.slots[broker_id].log_dir
    live = [path.name for path in log_dir.glob(f"{topic}-*")]
    return live + [f"set-aside/{path.name}" for path in log_dir.glob(f"set-aside/*-{topic}-*")]


def counter(cluster: ProcessCluster, broker_id: int, name: str) -> int:
    return cluster.describe(broker_id).counters.get(name, 0)


def wait_for(cluster: ProcessCluster, broker_id: int, name: str, value: int) -> None:
    wait_until(lambda: counter(cluster, broker_id, name) == value, PATIENCE_S, f"{name} of broker {broker_id}")


def looks_again(cluster: ProcessCluster, broker_id: int) -> None:
    """Wait for a complete check of the set-aside logs, from its start."""
    looks = counter(cluster, broker_id, "set.aside.looks")
    wait_until(lambda: counter(cluster, broker_id, "set.aside.looks") > looks + 1, PATIENCE_S, "a look")


def test_the_log_of_a_topic_deleted_during_downtime_is_deleted(cluster: ProcessCluster) -> None:
    written(cluster, "deleted", 3)
    cluster.stop_broker(2)
    with Admin(cluster.bootstrap) as admin:
        admin.delete_topic("deleted")
    cluster.start_broker(2)
    wait_until(lambda: not names(cluster, 2, "deleted"), PATIENCE_S, "the log to be deleted")
    wait_for(cluster, 2, "set.aside.deleted", 1)


def test_a_moved_replicas_log_is_deleted_once_its_leader_has_it(cluster: ProcessCluster) -> None:
    stays, away = written(cluster, "moved", 2)
    [other] = {0, 1, 2} - {stays, away}
    cluster.stop_broker(away)
    with Admin(cluster.bootstrap) as admin:
        target = {TopicPartition("moved", 0): [stays, other]}
        admin.reassign(target)
        admin.wait_until_moved(target, timeout_s=PATIENCE_S)
    cluster.start_broker(away)
    wait_for(cluster, away, "set.aside.deleted", 1)
    assert names(cluster, away, "moved") == []


def test_the_only_copy_of_a_log_is_kept_at_any_age(cluster: ProcessCluster) -> None:
    """A user removed the topic's nodes from ZooKeeper by hand, which is not a requested deletion."""
    replicas = written(cluster, "vanished", 2)
    size = sum(file.stat().st_size for file in (cluster.slots[replicas[0]].log_dir / "vanished-0").glob("0*"))

    async def remove(store: ClusterStore) -> None:
        session = store.session
        for path in ("partitions/0/state", "partitions/0", "partitions"):
            await session.delete(f"/brokers/topics/vanished/{path}")
        await session.delete("/brokers/topics/vanished")

    cluster.ask_zookeeper(remove)
    for broker_id in replicas:
        wait_for(cluster, broker_id, "set.aside.logs", 1)
        looks_again(cluster, broker_id)
        [name] = names(cluster, broker_id, "vanished")
        assert name.startswith("set-aside/")
        # Its bytes count as used.
        assert counter(cluster, broker_id, "set.aside.bytes") >= size > 0
        with Admin(cluster.bootstrap) as admin:
            [described] = [b for b in admin.describe_brokers() if b.address.broker_id == broker_id]
            assert described.size_bytes >= size
