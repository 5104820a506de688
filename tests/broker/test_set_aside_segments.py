"""Tests of segments that recovery set aside: deleted once the leader has all their records, kept otherwise. Brokers
are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.model import TopicPartition
from sparklog.record.header import unpack_headers
from sparklog.storage.set_aside import SET_ASIDE
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded
from tests.broker.topics import PATIENCE_S, Writer, create_topic, wait_equal, wait_isr

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}
SETTINGS = {
    "zookeeper.session.timeout.ms": "2000",
    "log.retention.check.interval.ms": "200",
    "log.set.aside.retention.ms": "0",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS) as cluster:
        yield cluster


def segment(cluster: ProcessCluster, broker_id: int, topic: str) -> Path:
    return cluster.slots[broker_id].log_dir / f"{topic}-0" / f"{0:020d}.arrow"


def damage(cluster: ProcessCluster, broker_id: int, topic: str) -> None:
    """Change a byte of the third batch of a stopped broker. Recovery checks all batches, because none was fsynced."""
    path = segment(cluster, broker_id, topic)
    header = unpack_headers(path.with_suffix(".index").read_bytes())[2]
    with path.open("r+b") as file:
        file.seek(header.position + header.stored_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def aside(cluster: ProcessCluster, broker_id: int, topic: str) -> list[Path]:
    return list((cluster.slots[broker_id].log_dir / SET_ASIDE).glob(f"*-{topic}-0"))


def counters(cluster: ProcessCluster, broker_id: int) -> dict[str, int]:
    return dict(cluster.describe(broker_id).counters)


def looked(cluster: ProcessCluster, broker_id: int) -> None:
    """Wait for a complete check of the set-aside segments, from its start."""
    before = counters(cluster, broker_id).get("set.aside.looks", 0)
    wait_until(lambda: counters(cluster, broker_id)["set.aside.looks"] > before + 1, PATIENCE_S, "a look")


def test_segments_the_leader_has_are_deleted_and_unknown_ones_stay(cluster: ProcessCluster) -> None:
    for topic in ("sound", "unknown"):
        create_topic(cluster, topic, assignment=((0, 1, 2),))
        with Writer(cluster, topic) as writer:
            for _ in range(10):
                writer.write(encoded(5))
        wait_equal(cluster, topic, 50)
    cluster.kill(2, retire=False)
    damage(cluster, 2, "sound")
    segment(cluster, 2, "unknown").with_suffix(".index").unlink()
    cluster.start_broker(2)
    for topic in ("sound", "unknown"):
        wait_isr(cluster, topic, ALL)
        wait_equal(cluster, topic, 50)
    wait_until(lambda: counters(cluster, 2).get("set.aside.deleted") == 1, PATIENCE_S, "what the leader has to go")
    assert not aside(cluster, 2, "sound")
    looked(cluster, 2)
    assert len(aside(cluster, 2, "unknown")) == 1


def test_segments_whose_offsets_were_reused_stay(cluster: ProcessCluster) -> None:
    """Every replica was damaged. New records get the offsets of the segments that were set aside."""
    create_topic(cluster, "lost", assignment=((0, 1, 2),))
    with Writer(cluster, "lost") as writer:
        for _ in range(10):
            writer.write(encoded(5))
    wait_equal(cluster, "lost", 50)
    for broker_id in ALL:
        cluster.kill(broker_id, retire=False)
    for broker_id in ALL:
        damage(cluster, broker_id, "lost")
    cluster.start_brokers()
    wait_isr(cluster, "lost", ALL)
    wait_equal(cluster, "lost", 10)
    with Writer(cluster, "lost") as writer:
        for _ in range(20):
            writer.write(encoded(5))
    wait_equal(cluster, "lost", 110)
    with Admin(cluster.bootstrap) as admin:  # even if these records are deleted
        admin.delete_records({TopicPartition("lost", 0): 100})
    for broker_id in ALL:
        looked(cluster, broker_id)
        assert len(aside(cluster, broker_id, "lost")) == 1
