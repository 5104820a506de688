"""A test of a real broker that stays away: its replicas are rebuilt on others, and it returns without any."""

from __future__ import annotations

from pathlib import Path

from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import encoded
from tests.broker.topics import Writer, create_topic, hosted, partition, segment_digests, wait_equal, wait_isr

PATIENCE_S = 60.0
SETTINGS = {"broker.replace.after.ms": "300", "zookeeper.session.timeout.ms": "1000"}


def test_a_lost_broker_is_replaced_and_returns_empty(tmp_path: Path) -> None:
    with ProcessCluster(3, base_dir=tmp_path, settings=SETTINGS) as cluster:
        create_topic(cluster, "kept", assignment=((0, 1),))
        with Writer(cluster, "kept") as writer:
            for _ in range(20):
                writer.write(encoded(50))
            cluster.kill(0)
            wait_until(lambda: partition(cluster, "kept").replicas == (2, 1), PATIENCE_S, "broker 2 in its place")
            wait_isr(cluster, "kept", {1, 2})
            assert writer.write(encoded(50)) == 1000
        wait_equal(cluster, "kept", 1050)
        assert segment_digests(cluster, 1, "kept") == segment_digests(cluster, 2, "kept")
        cluster.start_broker(0)
        cluster.wait_ready()
        wait_until(lambda: hosted(cluster, 0, "kept") is None, PATIENCE_S, "broker 0 to hold nothing")
        assert not list(cluster.slots[0].log_dir.glob("kept-0*/*.arrow"))
        assert partition(cluster, "kept").replicas == (2, 1)
