"""A test of a broker whose disk fails an fsync: after a restart in the same boot, it does not trust its page cache."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sparklog.model import BrokerRegistration
from sparklog.storage.directory_trust import RUNNING_FILE, BootMark
from sparklog.testing.failing_disk import READ_ONLY
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import codecs, paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded, read_all
from tests.broker.topics import PATIENCE_S, Writer, create_topic, new_producer_id, wait_equal, wait_isr
from tests.tiers import marked_after

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}
LOG_FAILED = 74


def last_registration(cluster: ProcessCluster) -> BrokerRegistration:
    async def read(store: ClusterStore) -> BrokerRegistration:
        path = paths.incarnation(0)
        return codecs.decode_broker(path, (await store.session.get(path)).data, 0)

    return cluster.ask_zookeeper(read)


def untrusted(cluster: ProcessCluster) -> list[str]:
    async def read(store: ClusterStore) -> list[str]:
        return list(await store.session.children(paths.UNTRUSTED))

    return cluster.ask_zookeeper(read)


@pytest.mark.parametrize("fails", marked_after(1, ["fsync", READ_ONLY], pytest.mark.extended))
def test_a_broker_is_not_trusted_after_a_failed_fsync(cluster: ProcessCluster, tmp_path: Path, fails: str) -> None:
    """If its disk cannot store that, ZooKeeper does."""
    topic, slot, switch = f"failed-{fails}", cluster.slots[0], tmp_path / "switch"
    create_topic(cluster, topic, assignment=((0, 1, 2),), config={"flush.messages": "1"})
    slot.program = ("sparklog.testing.failing_disk", str(switch))
    try:
        cluster.restart(0)
        wait_isr(cluster, topic, ALL)
        # The next leader gets a batch again that the failing leader had replicated: it must count once.
        producer_id = new_producer_id(cluster)
        written = 0
        with Writer(cluster, topic) as writer:
            writer.write(encoded(1, producer=(producer_id, 0, written)))
            written += 1
            assert last_registration(cluster).trusted
            process = slot.process
            assert process is not None
            switch.write_text(fails)
            while process.poll() is None:  # as leader or as follower: it fsyncs each batch
                writer.write(encoded(1, producer=(producer_id, 0, written)))
                written += 1
        assert process.wait(PATIENCE_S) == LOG_FAILED
        switch.unlink()
        mark = msgspec.json.decode((slot.log_dir / RUNNING_FILE).read_bytes(), type=BootMark)
        assert mark.doubted is (fails != READ_ONLY)
        cluster.start_broker(0)
        assert not last_registration(cluster).trusted
        wait_isr(cluster, topic, ALL)
        wait_equal(cluster, topic, written)
        for broker_id in ALL:
            with cluster.connect(broker_id) as connection:
                assert len(read_all(connection, topic)) == written
        wait_until(lambda: not untrusted(cluster), PATIENCE_S, "the mark to be taken away")
        cluster.restart(0)
        assert last_registration(cluster).trusted, "a controller must have acted on the doubt"
    finally:
        slot.program = ("sparklog.broker",)
        cluster.restart(0)
