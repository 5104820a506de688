"""Tests of brokers that return after their host's page cache was lost: their logs may be shorter, and they know
that."""

from __future__ import annotations

import shutil
import signal

import msgspec
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.model import TopicPartition
from sparklog.record.header import HEADER_BYTES
from sparklog.storage.checkpoints import CHECKPOINT_FILE
from sparklog.storage.directory_trust import RUNNING_FILE, BootMark
from sparklog.storage.formats import encode_state
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded, read_all
from tests.broker.topics import PATIENCE_S, Writer, create_topic, leader, partition, wait_equal, wait_isr
from tests.tiers import marked_after

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}


def lose_page_cache(cluster: ProcessCluster, broker_id: int, topic: str, *, batches: int) -> None:
    """Change a dead broker's log directory as a power failure does: another boot id, and a log without its last
    batches."""
    log_dir = cluster.slots[broker_id].log_dir
    earlier = msgspec.json.decode((log_dir / RUNNING_FILE).read_bytes(), type=BootMark)
    (log_dir / RUNNING_FILE).write_bytes(encode_state(msgspec.structs.replace(earlier, boot_id="an earlier boot")))
    (index,) = (log_dir / f"{topic}-0").glob("*.index")
    with index.open("r+b") as file:
        file.truncate(index.stat().st_size - batches * HEADER_BYTES)


def untrusted(cluster: ProcessCluster) -> set[str]:
    async def marked(store: ClusterStore) -> set[str]:
        return set(await store.session.children(paths.UNTRUSTED))

    return cluster.ask_zookeeper(marked)


def test_a_leader_restarted_without_its_tail_does_not_lead(cluster: ProcessCluster) -> None:
    """The leader returns before the controller misses it, in the ISR and first in the assignment. Its followers have
    all records."""
    create_topic(cluster, "lost-tail", assignment=((0, 1, 2),))
    with Writer(cluster, "lost-tail") as writer:
        for _ in range(10):
            writer.write(encoded(1))
        wait_equal(cluster, "lost-tail", 10)
        epoch = partition(cluster, "lost-tail").leader_epoch
        cluster.kill(0, retire=False)
        lose_page_cache(cluster, 0, "lost-tail", batches=4)
        cluster.start_broker(0)
        wait_until(lambda: partition(cluster, "lost-tail").leader_epoch > epoch, PATIENCE_S, "a new epoch")
        assert leader(cluster, "lost-tail") in {1, 2}
        wait_isr(cluster, "lost-tail", ALL)
        writer.write(encoded(1))
    wait_equal(cluster, "lost-tail", 11)
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert len(read_all(connection, "lost-tail")) == 11
    wait_until(lambda: not untrusted(cluster), PATIENCE_S, "the marks to be taken away")


@pytest.mark.parametrize("what", marked_after(1, ["older-copy", "directory", "log"], pytest.mark.extended))
def test_a_leader_restarted_on_another_directory_does_not_lead(cluster: ProcessCluster, what: str) -> None:
    """The directory or one log was emptied while the broker was down, or restored from a copy after a clean
    shutdown: no file is damaged."""
    topic, log_dir = f"not-its-last-{what}", cluster.slots[0].log_dir
    copy = log_dir.with_name("copy")
    create_topic(cluster, topic, assignment=((0, 1, 2),))
    with Writer(cluster, topic) as writer:
        writer.write(encoded(1))
        if what == "older-copy":
            cluster.stop_broker(0)
            shutil.copytree(log_dir, copy)
            cluster.start_broker(0)
            wait_isr(cluster, topic, ALL)
            with Admin(cluster.bootstrap) as admin:
                admin.elect_leaders([TopicPartition(topic, 0)])
        for _ in range(9):
            writer.write(encoded(1))
        wait_equal(cluster, topic, 10)
        checkpoint = log_dir / CHECKPOINT_FILE
        wait_until(
            lambda: checkpoint.exists() and topic.encode() in checkpoint.read_bytes(), PATIENCE_S, "a checkpoint"
        )
        assert leader(cluster, topic) == 0
        epoch = partition(cluster, topic).leader_epoch
        cluster.kill(0, retire=False)
        shutil.rmtree(log_dir / f"{topic}-0" if what == "log" else log_dir)
        if what == "older-copy":
            copy.rename(log_dir)
        cluster.start_broker(0)
        wait_until(lambda: partition(cluster, topic).leader_epoch > epoch, PATIENCE_S, "a new epoch")
        assert leader(cluster, topic) in {1, 2}
        wait_isr(cluster, topic, ALL)
        writer.write(encoded(1))
    wait_equal(cluster, topic, 11)
    wait_until(lambda: not untrusted(cluster), PATIENCE_S, "the marks to be taken away")


def test_the_longest_log_leads_after_a_power_failure_of_all_brokers(cluster: ProcessCluster) -> None:
    """The controller changes during the recovery as well: the next one distrusts no broker."""
    #: by topic: the brokers, preferred leader first, and the number of lost batches of each, out of ten
    topics = {"power-cut-a": {0: 5, 1: 1, 2: 3}, "power-cut-b": {1: 4, 2: 2, 0: 6}}
    for topic, lost in topics.items():
        create_topic(cluster, topic, assignment=(tuple(lost),))
        with Writer(cluster, topic) as writer:
            for number in range(10):
                writer.write(encoded(1, f"{number}-"))
        wait_equal(cluster, topic, 10)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once: no leader removes another broker from an ISR
        for broker_id in ALL:
            cluster.kill(broker_id, number, retire=False)
    for topic, lost in topics.items():
        for broker_id, batches in lost.items():
            lose_page_cache(cluster, broker_id, topic, batches=batches)
    cluster.start_brokers()
    for topic in topics:
        leader(cluster, topic)  # there is a controller
    cluster.stop_controller()
    cluster.start_controller()
    for topic, lost in topics.items():
        end = 10 - min(lost.values())
        wait_isr(cluster, topic, ALL)
        wait_equal(cluster, topic, end)
        with cluster.connect(leader(cluster, topic)) as connection:
            assert read_all(connection, topic, end=end) == [b"%d-0" % number for number in range(end)]
    wait_until(lambda: not untrusted(cluster), PATIENCE_S, "the marks to be taken away")
