"""Tests of index files that an operator deleted, as Kafka's operators do: a broker copies the lost data, and deletes
none."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.client.producer.producer import Producer
from sparklog.storage.set_aside import SET_ASIDE
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import encoded, read_all
from tests.broker.topics import Writer, create_topic, segment_digests, wait_equal, wait_isr
from tests.cli.in_process import in_process
from tests.tiers import marked_after

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}


@pytest.mark.parametrize("ends", marked_after(1, ["killed", "stopped"], pytest.mark.extended))
def test_a_broker_without_its_index_files_copies_its_logs(cluster: ProcessCluster, ends: str) -> None:
    topic, slot = f"unindexed-{ends}", cluster.slots[0]
    create_topic(cluster, topic, assignment=((0, 1, 2),), config={"segment.bytes": "4096"})
    values: list[bytes] = []
    with Writer(cluster, topic) as writer:
        for number in range(30):
            writer.write(encoded(10, f"{number}-"))
            values += [f"{number}-{row}".encode() for row in range(10)]
    wait_equal(cluster, topic, len(values))
    if ends == "stopped":
        cluster.stop_broker(0)
    else:
        cluster.kill(0, retire=False)
    data = {path.name: path.read_bytes() for path in (slot.log_dir / f"{topic}-0").glob("*.arrow")}
    assert len(data) > 3
    for path in slot.log_dir.glob(f"{topic}-*/*.index"):
        path.unlink()
    cluster.start_broker(0)
    wait_isr(cluster, topic, ALL)
    wait_equal(cluster, topic, len(values))
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, topic) == values
    (aside,) = (slot.log_dir / SET_ASIDE).glob(f"*-{topic}-0")
    assert {path.name: path.read_bytes() for path in aside.glob("*.arrow")} == data
    assert segment_digests(cluster, 0, topic) == segment_digests(cluster, 1, topic)


def test_records_that_no_replica_has_are_salvaged(cluster: ProcessCluster, tmp_path: Path) -> None:
    """The index files of every replica were deleted. The data that were set aside are written to another topic."""
    create_topic(cluster, "unindexed", assignment=((0, 1, 2),), config={"segment.bytes": "4096"})
    values: list[bytes] = []
    with Writer(cluster, "unindexed") as writer:
        for number in range(30):
            writer.write(encoded(10, f"{number}-"))
            values += [f"{number}-{row}".encode() for row in range(10)]
    wait_equal(cluster, "unindexed", len(values))
    for broker_id in ALL:
        cluster.kill(broker_id, retire=False)
    for broker_id in ALL:
        for path in cluster.slots[broker_id].log_dir.glob("unindexed-*/*.index"):
            path.unlink()
    cluster.start_brokers()
    wait_isr(cluster, "unindexed", ALL)
    (aside,) = (cluster.slots[0].log_dir / SET_ASIDE).glob("*-unindexed-0")
    output = tmp_path / "rows.arrow"
    assert in_process("segments", "salvage", aside, "-o", output).code == 0
    with Producer(cluster.bootstrap) as producer:
        create_topic(cluster, "salvaged", assignment=((0, 1, 2),))
        producer.write("salvaged", pa.ipc.open_file(output).read_all()).result(30)
    wait_equal(cluster, "salvaged", len(values))
    with cluster.connect(0) as connection:
        assert read_all(connection, "salvaged") == values
