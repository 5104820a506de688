"""Tests of data that disappears: old segments, a topic deleted while a broker is away, a disk that breaks under a
broker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparklog.errors import ErrorCode
from sparklog.model import LeaderAndIsr, TopicSchema
from sparklog.protocol.messages import (
    EARLIEST,
    LATEST,
    Ack,
    ControlUpdate,
    ControlUpdateReply,
    DeleteTopic,
    PartitionDecision,
    TopicChange,
)
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import decoded, encoded, fetch, list_offset, read_all
from tests.broker.topics import (
    PATIENCE_S,
    Writer,
    create_topic,
    leader,
    partition,
    replica,
    running,
    wait_equal,
    wait_isr,
)

pytestmark = pytest.mark.integration
LOG_FAILED = 74


def test_a_topic_deleted_while_a_broker_was_down_stays_deleted(cluster: ProcessCluster) -> None:
    old_id = create_topic(cluster, "reborn")
    with Writer(cluster, "reborn") as writer:
        writer.write(encoded(5, "old-"))
    wait_equal(cluster, "reborn", 5)
    directory = Path(replica(cluster, 2, "reborn").directory)
    assert directory.exists()
    cluster.kill(2)
    with cluster.connect(0) as connection:
        assert isinstance(connection.request(DeleteTopic(0, "reborn", 10_000))[0], Ack)
        assert cluster.metadata(0, "reborn").topics[0].code != 0
    cluster.start_broker(2)
    wait_until(lambda: not directory.exists(), PATIENCE_S, f"{directory} to be deleted")
    new_id = create_topic(cluster, "reborn")
    assert new_id != old_id
    with Writer(cluster, "reborn") as writer:
        assert writer.write(encoded(1, "new-")) == 0
    wait_equal(cluster, "reborn", 1)
    for broker_id in running(cluster):
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, "reborn") == [b"new-0"]


def test_a_former_replica_keeps_its_data_until_it_leaves_the_isr(cluster: ProcessCluster) -> None:
    """A broker that is no longer a replica keeps its log while it is in the ISR, although it does not host the
    partition."""
    topic_id = create_topic(cluster, "left", assignment=((0, 1, 2),))
    with Writer(cluster, "left") as writer:
        writer.write(encoded(1))
    wait_equal(cluster, "left", 1)
    directory = Path(replica(cluster, 2, "left").directory)
    cluster.kill(2)
    wait_isr(cluster, "left", {0, 1})
    cluster.stop_controller()
    try:
        cluster.start_broker(2)
        with cluster.connect(2, identity=Identity(SenderKind.CONTROLLER, -1, 1)) as connection:

            def tell(sequence: int, isr: tuple[int, ...], *, full: bool) -> None:
                state = LeaderAndIsr(0, 50, isr, 1)
                decision = PartitionDecision("left", topic_id, 0, state, 1000 + sequence, (0, 1))
                change = TopicChange("left", topic_id, (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),), (), None, {})
                told = ControlUpdate(
                    0, "stand-in", 1, cluster.describe(2).incarnation, full, (), (change,), (decision,), (), sequence
                )
                reply, _ = connection.request(told)
                assert isinstance(reply, ControlUpdateReply) and (reply.code, reply.failed) == (ErrorCode.NONE, ())

            assert directory.exists()
            tell(1, (0, 1, 2), full=True)
            assert directory.exists()
            tell(2, (0, 1, 2), full=False)
            assert directory.exists()
            tell(3, (0, 1), full=False)
            assert not directory.exists()
    finally:
        cluster.start_controller()
    wait_equal(cluster, "left", 1)


def test_a_broker_with_a_failed_disk_hands_over_and_exits(cluster: ProcessCluster) -> None:
    create_topic(cluster, "broken-disk", assignment=((0, 1, 2),), config={"segment.bytes": "4096"})
    with Writer(cluster, "broken-disk") as writer:
        writer.write(encoded(5))
        wait_equal(cluster, "broken-disk", 5)
        slot, process = cluster.slots[0], cluster.slots[0].process
        assert process is not None
        # Open files stay usable, but a new segment cannot be created.
        shutil.rmtree(replica(cluster, 0, "broken-disk").directory)
        written = 5
        while leader(cluster, "broken-disk") == 0:
            writer.write(encoded(5))
            written += 5
        writer.write(encoded(5))
    assert process.wait(PATIENCE_S) == LOG_FAILED
    assert "is offline" in slot.log_file.read_text()
    assert 0 not in partition(cluster, "broken-disk").isr
    with cluster.connect(leader(cluster, "broken-disk")) as connection:
        assert list_offset(connection, "broken-disk", LATEST).offset == written + 5
    cluster.start_broker(0)
    wait_isr(cluster, "broken-disk", {0, 1, 2})
    wait_equal(cluster, "broken-disk", written + 5)


def test_a_follower_that_missed_deleted_segments_starts_at_the_leaders_start(
    cluster: ProcessCluster,
) -> None:
    config = {"segment.bytes": "4096", "retention.bytes": "8192"}
    create_topic(cluster, "retained", assignment=((0, 1, 2),), config=config)
    with Writer(cluster, "retained") as writer:
        writer.write(encoded(5))
        wait_equal(cluster, "retained", 5)
        cluster.kill(2)
        for _ in range(60):
            writer.write(encoded(5))

    def starts() -> set[int]:
        return {replica(cluster, broker_id, "retained").log_start_offset for broker_id in running(cluster)}

    wait_until(lambda: len(starts()) == 1 and min(starts()) > 100, PATIENCE_S, "old segments to be deleted")
    with cluster.connect(0) as connection:
        start = list_offset(connection, "retained", EARLIEST).offset
        fetched, _ = fetch(connection, "retained", 5)
        assert fetched.code == ErrorCode.OFFSET_OUT_OF_RANGE and f"[{start}, 305)" in fetched.detail
        found, body = fetch(connection, "retained", start)
        assert decoded(found, body)[0][0] <= start
    cluster.start_broker(2)
    wait_isr(cluster, "retained", {0, 1, 2})
    wait_equal(cluster, "retained", 305)
    wait_until(lambda: len(starts()) == 1, PATIENCE_S, "replicas to begin at the same offset")
