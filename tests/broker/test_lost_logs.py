"""Tests of brokers that return in the same boot without a log, with an unreadable log, or with another one.

No timer writes a checkpoint here: a broker has stored the names of its logs before it acknowledged the first record.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import CHECKPOINT_FILE
from sparklog.storage.directory_trust import RUNNING_FILE, BootMark
from sparklog.storage.partition_file import PARTITION_FILE
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded, read_all
from tests.broker.topics import PATIENCE_S, Writer, create_topic, leader, wait_equal, wait_isr
from tests.tiers import marked_after

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}
SETTINGS = {"log.checkpoint.interval.ms": "600000"}


@pytest.fixture(scope="module")
def started() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: ProcessCluster) -> ProcessCluster:
    started.start_controller()
    started.start_brokers()
    return started


def lose(log_dir: Path, topic: str) -> None:
    shutil.rmtree(log_dir / f"{topic}-0")


def tear(log_dir: Path, topic: str) -> None:
    (log_dir / f"{topic}-0" / PARTITION_FILE).write_bytes(b"")


def exchange(log_dir: Path, topic: str) -> None:
    one, other, between = log_dir / f"{topic}-0", log_dir / f"{topic}-1", log_dir / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def lose_the_checkpoint_too(log_dir: Path, topic: str) -> None:
    lose(log_dir, topic)
    (log_dir / CHECKPOINT_FILE).unlink()


def doubted(cluster: ProcessCluster) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the contents of the marks in ZooKeeper, by broker."""

    async def marked(store: ClusterStore) -> dict[str, tuple[tuple[str, int], ...]]:
        found = {}
        for name in await store.session.children(paths.UNTRUSTED):
            node = await store.session.get(f"{paths.UNTRUSTED}/{name}")
            found[name] = codecs.decode(name, node.data, codecs.UntrustedNode).partitions
        return found

    return cluster.ask_zookeeper(marked)


def kill_all(cluster: ProcessCluster) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: no leader removes another broker from an ISR
        for broker_id in ALL:
            cluster.kill(broker_id, number, retire=False)


@pytest.mark.parametrize(
    "damage", marked_after(1, [lose, tear, exchange, lose_the_checkpoint_too], pytest.mark.extended)
)
def test_a_broker_restarted_without_a_log_does_not_lead_it(
    cluster: ProcessCluster, damage: Callable[[Path, str], None]
) -> None:
    """The broker is first in the assignment and in the ISR. If it led with an empty log, the others would truncate
    all their records."""
    topic = f"lost-{damage.__name__}"
    create_topic(cluster, topic, partitions=2, assignment=((0, 1, 2), (0, 1, 2)))
    for number in (0, 1):
        with Writer(cluster, topic, number) as writer:
            for _ in range(5):
                writer.write(encoded(1))
        wait_equal(cluster, topic, 5, number)
    kill_all(cluster)
    damage(cluster.slots[0].log_dir, topic)
    cluster.start_broker(0)  # it is live when a leader is elected
    cluster.start_brokers()
    assert leader(cluster, topic) in {1, 2}
    for number in (0, 1):
        wait_isr(cluster, topic, ALL, number)
        with Writer(cluster, topic, number) as writer:
            writer.write(encoded(1))
        wait_equal(cluster, topic, 6, number)
        with cluster.connect(leader(cluster, topic, number)) as connection:
            assert len(read_all(connection, topic, partition=number)) == 6
    wait_until(lambda: not doubted(cluster), PATIENCE_S, "the mark to be taken away")


def test_only_the_lost_log_is_doubted(cluster: ProcessCluster) -> None:
    """The broker leads its intact logs again, if it comes first in the assignment."""
    topic = "lost-one-of-two"
    create_topic(cluster, topic, partitions=2, assignment=((0, 1, 2), (0, 1, 2)))
    for number in (0, 1):
        with Writer(cluster, topic, number) as writer:
            writer.write(encoded(1))
        wait_equal(cluster, topic, 1, number)
    cluster.stop_controller()
    kill_all(cluster)
    lose(cluster.slots[0].log_dir, topic)
    cluster.start_broker(0)
    wait_until(lambda: doubted(cluster) == {"0": ((topic, 0),)}, PATIENCE_S, "a mark that names the log")
    cluster.start_controller()
    cluster.start_brokers()
    # Of the brokers with an intact log, the first that registers leads.
    assert leader(cluster, topic, 0) in {1, 2}
    assert leader(cluster, topic, 1) == 0
    for number in (0, 1):
        wait_isr(cluster, topic, ALL, number)
        wait_equal(cluster, topic, 1, number)
    wait_until(lambda: not doubted(cluster), PATIENCE_S, "the mark to be taken away")


def test_replicas_that_were_always_empty_are_not_doubted(cluster: ProcessCluster) -> None:
    """Empty replicas have no directory either. If they were doubted, the partition would wait for the last of them."""
    topic = "never-written"
    create_topic(cluster, topic, assignment=((0, 1, 2),))
    kill_all(cluster)
    cluster.start_broker(0)
    assert leader(cluster, topic) == 0
    cluster.start_brokers()
    wait_isr(cluster, topic, ALL)
    with Writer(cluster, topic) as writer:
        writer.write(encoded(1))
    wait_equal(cluster, topic, 1)


@pytest.mark.extended
def test_an_earlier_releases_mark_promises_no_names(cluster: ProcessCluster) -> None:
    """No checkpoint names the logs of its last seconds. A log without a name is intact, and one that cannot be read
    is doubted."""
    topic = "of-an-earlier-release"
    create_topic(cluster, topic, assignment=((0, 1, 2),))
    with Writer(cluster, topic) as writer:
        for _ in range(5):
            writer.write(encoded(1))
    wait_equal(cluster, topic, 5)
    kill_all(cluster)
    log_dir = cluster.slots[0].log_dir
    mark = msgspec.json.decode((log_dir / RUNNING_FILE).read_bytes())
    assert mark.pop("named") is True and mark.pop("logs") == []
    (log_dir / RUNNING_FILE).write_bytes(msgspec.json.encode(mark))
    assert msgspec.json.decode((log_dir / RUNNING_FILE).read_bytes(), type=BootMark).named is False
    (log_dir / CHECKPOINT_FILE).unlink()
    tear(log_dir, topic)
    cluster.start_broker(0)  # it is live when a leader is elected
    cluster.start_brokers()
    assert leader(cluster, topic) in {1, 2}
    wait_isr(cluster, topic, ALL)
    wait_equal(cluster, topic, 5)


def stop_with_an_older_copy_on_one(cluster: ProcessCluster, topic: str, **config: str) -> None:
    """Commit ten records and stop the cluster. Then restore broker 0's log with the first five, and the matching
    checkpoint."""
    log_dir = cluster.slots[0].log_dir
    copy = log_dir.with_name(f"copy-for-{topic}")
    settings = {key.replace("_", "."): value for key, value in config.items()}
    create_topic(cluster, topic, assignment=((0, 1, 2),), config=settings)
    with Writer(cluster, topic) as writer:
        for _ in range(5):
            writer.write(encoded(1))
        wait_equal(cluster, topic, 5)
        cluster.stop_broker(0)
        shutil.copytree(log_dir / f"{topic}-0", copy / f"{topic}-0")
        shutil.copy(log_dir / CHECKPOINT_FILE, copy)
        cluster.start_broker(0)
        wait_isr(cluster, topic, ALL)
        for _ in range(5):
            writer.write(encoded(1))
    wait_equal(cluster, topic, 10)
    cluster.stop_brokers()
    shutil.rmtree(log_dir / f"{topic}-0")
    (copy / f"{topic}-0").rename(log_dir / f"{topic}-0")
    (copy / CHECKPOINT_FILE).rename(log_dir / CHECKPOINT_FILE)
    cluster.start_broker(0)  # it is live when a leader is elected, and comes first in the assignment
    cluster.start_controller()


def test_a_leader_with_an_older_copy_yields_to_a_fuller_replica(cluster: ProcessCluster) -> None:
    """An operator has restored the log after a clean shutdown: the broker finds no damage."""
    topic = "older-copy"
    stop_with_an_older_copy_on_one(cluster, topic)
    cluster.start_brokers()
    with Writer(cluster, topic) as writer:
        writer.write(encoded(1))
    assert leader(cluster, topic) in {1, 2}
    wait_isr(cluster, topic, ALL)
    wait_equal(cluster, topic, 11)
    with cluster.connect(leader(cluster, topic)) as connection:
        assert len(read_all(connection, topic)) == 11


@pytest.mark.extended
def test_contradictory_copies_wait_for_an_operator(cluster: ProcessCluster, caplog: pytest.LogCaptureFixture) -> None:
    """The broker with the older copy is alone until it has committed records of its own."""
    topic, tp = "disputed", TopicPartition("disputed", 0)
    stop_with_an_older_copy_on_one(cluster, topic, min_insync_replicas="1")

    async def is_disputed(store: ClusterStore) -> bool:
        stored = await store.states.read(tp)
        return stored is not None and stored.state.disputed

    with Writer(cluster, topic) as writer:
        for _ in range(2):
            assert writer.write(encoded(1)) >= 5
        cluster.start_brokers()
        wait_until(lambda: cluster.ask_zookeeper(is_disputed), PATIENCE_S, "the partition to be disputed")
    assert "run 'sparklog topics elect-leaders disputed:0 --unclean'" in caplog.text
    cluster.stop_broker(0)
    with Admin(cluster.bootstrap) as admin:
        assert admin.elect_leaders([tp], unclean=True) == {}
    assert leader(cluster, topic) in {1, 2}
    cluster.start_broker(0)
    wait_isr(cluster, topic, ALL)
    wait_equal(cluster, topic, 10)
