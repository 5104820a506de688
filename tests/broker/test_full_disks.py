"""Tests of disks without space and of read-only disks, with real broker processes.

If no disk can be mounted, a limit of the file size replaces a full disk: it also breaks a write in the middle.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.errors import ClusterError, ErrorCode
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import LATEST, ProduceResult
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.support import encoded, list_offset, produce, read_all
from tests.broker.topics import create_topic, leader, replica, wait_equal, wait_isr

pytestmark = pytest.mark.integration
CANNOT_START = 69
BATCH = 200_000


def fill(connection: BlockingConnection, topic: str) -> tuple[ProduceResult, list[bytes]]:
    """Append batches until one is refused. Return the refusal and the acknowledged values."""
    values: list[bytes] = []
    for number in range(100):
        value = f"{number}-" + "x" * BATCH
        result = produce(connection, topic, encoded(1, value))
        if result.code != ErrorCode.NONE:
            return result, values
        assert result.base_offset == number
        values.append(f"{value}0".encode())
    raise AssertionError("100 batches fitted")


def sizes(directory: str) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in Path(directory).iterdir()}


def test_an_append_without_space_is_refused_completely(cluster: ProcessCluster) -> None:
    create_topic(cluster, "no-room", assignment=((0, 1, 2),))
    create_topic(cluster, "room", assignment=((0, 1, 2),))
    pid = cluster.pid(0)
    # The limit also applies to the broker's own log file.
    room = cluster.slots[0].log_file.stat().st_size + 5 * BATCH
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with cluster.connect(0) as connection:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            refused, values = fill(connection, "no-room")
            assert refused.code == ErrorCode.KAFKA_STORAGE_ERROR and refused.base_offset == -1
            assert "no-room-0" in refused.detail and "no room left in" in refused.detail
            assert str(cluster.slots[0].log_dir) in refused.detail
            written = sizes(replica(cluster, 0, "no-room").directory)
            for acks in (-1, 1):
                again = produce(connection, "no-room", encoded(1, "x" * BATCH), acks=acks)
                assert again.code == ErrorCode.KAFKA_STORAGE_ERROR
            assert sizes(replica(cluster, 0, "no-room").directory) == written, "a part of a batch was left in the file"
            assert list_offset(connection, "no-room", LATEST).offset == len(values)
            assert read_all(connection, "no-room") == values
            assert produce(connection, "room", encoded(3)).code == ErrorCode.NONE
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        assert produce(connection, "no-room", encoded(1)).base_offset == len(values)
        wait_equal(cluster, "no-room", len(values) + 1)
        assert read_all(connection, "no-room") == [*values, b"v0"]
    assert cluster.pid(0) == pid
    assert leader(cluster, "no-room") == 0


def test_a_follower_with_a_full_disk_leaves_the_isr_and_returns(cluster: ProcessCluster) -> None:
    config = {"replica.lag.time.max.ms": "500"}
    create_topic(cluster, "follower-no-room", assignment=((0, 1, 2),), config=config)
    pid = cluster.pid(2)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    room = cluster.slots[2].log_file.stat().st_size + 3 * BATCH
    with cluster.connect(0) as connection:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            for _ in range(room // BATCH + 2):
                assert produce(connection, "follower-no-room", encoded(1, "x" * BATCH)).code == ErrorCode.NONE
            wait_isr(cluster, "follower-no-room", {0, 1})
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        wait_isr(cluster, "follower-no-room", {0, 1, 2})
        wait_equal(cluster, "follower-no-room", room // BATCH + 2)
    assert cluster.pid(2) == pid


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MB for a cluster's only broker."""
    mounted = tmp_path / "data" / "broker-0"
    mounted.mkdir(parents=True)
    done = _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted))
    if done.returncode:
        pytest.skip(f"no disk can be mounted here, which takes root and its capabilities: {done.stderr.strip()}")
    try:
        yield tmp_path / "data"
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(["mount"], 1, "", str(error))


def test_a_disk_is_full_then_has_space_then_is_read_only(small_disk: Path) -> None:
    with ProcessCluster(1, base_dir=small_disk) as cluster:
        create_topic(cluster, "full", replicas=1)
        slot = cluster.slots[0]
        ballast = slot.log_dir / "ballast"
        with cluster.connect(0) as connection:
            ballast.write_bytes(bytes(2_000_000))
            refused, values = fill(connection, "full")
            assert refused.code == ErrorCode.KAFKA_STORAGE_ERROR
            assert "No space left on device" in refused.detail and str(slot.log_dir) in refused.detail
            assert list_offset(connection, "full", LATEST).offset == len(values)
            ballast.unlink()
            assert produce(connection, "full", encoded(1)).base_offset == len(values)
            values.append(b"v0")
        assert cluster.stop_broker(0) == 0
        assert _mount("-o", "remount,ro", str(slot.log_dir)).returncode == 0
        with pytest.raises(ClusterError) as caught:
            cluster.start_broker(0)
        assert slot.process is not None and slot.process.wait(10) == CANNOT_START
        last = str(caught.value).splitlines()[-1]
        assert "broker 0 cannot start" in last or "broker 0 stopped" in last
        assert "Read-only file system" in str(caught.value) and str(slot.log_dir) in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert _mount("-o", "remount,rw", str(slot.log_dir)).returncode == 0
        cluster.start_broker(0)
        leader(cluster, "full")
        with cluster.connect(0) as connection:
            assert read_all(connection, "full", end=len(values)) == values
