"""Tests of release 0.1.0's directories, checkpoints, messages and processes with the present code.

``make_0_1_0.py`` created the files. They never change: a file that a test here cannot read is one that no user can read
either.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from sparklog import Admin, Consumer, Producer, TopicPartition
from sparklog.protocol.frames import PREFIX, PREFIX_BYTES
from sparklog.protocol.messages import decode_reply, decode_request
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import leader, wait_isr
from tests.tiers import marked_after

FILES = Path(__file__).parent / "release_0_1_0"
SETTINGS = {"default.replication.factor": "1", "log.cleaner.enable": "false"}
TOPICS = ("default", "typed", "compacted", "copy")
PATIENCE_S = 60
ALL = {0, 1, 2}
#: Write ``count`` numbered values with acks=all and print the topic's values from the beginning, as release 0.1.0.
OLD_CLIENT = """
import json, sys
import sparklog
assert sparklog.__file__.startswith(sys.argv[1]), sparklog.__file__
bootstrap, topic, first, count = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
with sparklog.Producer(bootstrap) as producer:
    for number in range(first, first + count):
        producer.send(topic, str(number)).result(60)
with sparklog.Consumer(bootstrap, topic) as consumer:
    print(json.dumps([int(value) for value in consumer.to_table()["value"].to_pylist()]))
"""


def unpack(name: str, into: Path) -> Path:
    with tarfile.open(FILES / name) as archive:
        archive.extractall(into, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(into)
    return into


def expected(topic: str) -> pa.Table:
    with pa.ipc.open_file(FILES / "expected" / f"{topic}.arrow") as file:
        return file.read_all()


def read(bootstrap: str, topic: str) -> pa.Table:
    with Consumer(bootstrap, topic, log_columns=True) as consumer:
        return consumer.to_table().sort_by([("_partition", "ascending"), ("_offset", "ascending")])


# --- directories ---


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("cluster.tar.xz", tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def cluster(directories: Path) -> Iterator[ProcessCluster]:
    """Start the present ZooKeeper, controller and broker on the directories of 0.1.0."""
    with ProcessCluster(1, base_dir=directories / "data", settings=SETTINGS) as cluster:
        yield cluster


@pytest.mark.integration
@pytest.mark.timeout(300)
class TestDirectories:
    @pytest.mark.parametrize("topic", TOPICS)
    def test_every_committed_record_is_read_at_its_offset(self, cluster: ProcessCluster, topic: str) -> None:
        found = read(cluster.bootstrap, topic)
        assert found.slice(0, expected(topic).num_rows).equals(expected(topic))

    def test_committed_transactions_are_read_and_open_ones_aborted(self, cluster: ProcessCluster) -> None:
        with Consumer(cluster.bootstrap, "transactional") as consumer:
            values = sorted(consumer.to_table()["value"].to_pylist())
        committed = sorted(f"commit-{run}-{i}".encode() for run in (0, 2) for i in range(5))
        assert values == committed
        with Producer(cluster.bootstrap, transactional_id="writer-3") as producer, producer.transaction():
            producer.send("transactional", "later", partition=0)
        with Consumer(cluster.bootstrap, "transactional") as consumer:
            assert sorted(consumer.to_table()["value"].to_pylist()) == sorted([*committed, b"later"])

    def test_a_group_resumes_its_committed_offsets(self, cluster: ProcessCluster) -> None:
        with Admin(cluster.bootstrap) as admin:
            offsets = admin.group_offsets("readers")
        assert offsets == {TopicPartition("default", 0): 17, TopicPartition("default", 1): 23}

    def test_new_records_follow_the_old_ones(self, cluster: ProcessCluster) -> None:
        with Producer(cluster.bootstrap) as producer:
            producer.send("compacted", "new", key="k").result(PATIENCE_S)
        table = read(cluster.bootstrap, "compacted")
        assert table["value"].to_pylist()[-1] == b"new"
        assert table["_offset"].to_pylist()[-1] == expected("compacted")["_offset"].to_pylist()[-1] + 1

    @pytest.mark.extended
    def test_a_spark_query_resumes_its_checkpoint_exactly_once(
        self, cluster: ProcessCluster, directories: Path
    ) -> None:
        """The query's last micro-batch was written and not committed in the checkpoint: Spark runs it again."""
        with Producer(cluster.bootstrap) as producer:
            for i in range(110, 115):
                producer.send("default", f"value-{i}", key=f"key-{i}", partition=i % 2)
        job = Path(__file__).parent / "copy_query.py"
        subprocess.run(
            [sys.executable, str(job), cluster.bootstrap, str(directories / "checkpoint")],
            check=True,
            timeout=240,
            start_new_session=True,
        )
        keys = sorted(read(cluster.bootstrap, "copy")["key"].to_pylist())
        assert keys == sorted(f"key-{i}".encode() for i in range(115))


# --- messages ---


def plain(value: Any) -> Any:
    """Return ``value`` in JSON's types, to compare it with the file."""
    return json.loads(json.dumps(value, default=str))


def recorded() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FILES / "wire.json").read_text())
    return found


@pytest.mark.parametrize("number", range(len(recorded())))
def test_a_message_of_0_1_0_is_decoded(number: int) -> None:
    message = recorded()[number]
    frame = bytes.fromhex(message["frame"])
    _, header_length = PREFIX.unpack_from(frame)
    header = memoryview(frame)[PREFIX_BYTES : PREFIX_BYTES + header_length]
    decoded = decode_request(header) if message["request"] else decode_reply(header)
    assert type(decoded).__name__ == message["kind"]
    assert_contains(plain(msgspec.to_builtins(decoded)), message["fields"])


def assert_contains(found: Any, told: Any) -> None:
    """Compare the stored fields with the decoded ones. Later fields may exist at any level."""
    if isinstance(told, dict):
        for name, value in told.items():
            assert_contains(found[name], value)
    elif isinstance(told, list):
        assert len(found) >= len(told)
        for part, value in zip(found, told, strict=False):
            assert_contains(part, value)
    else:
        assert found == told


# --- processes side by side ---


@pytest.fixture(scope="module")
def old_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("sparklog.tar.xz", tmp_path_factory.mktemp("old"))


def old_client(sources: Path, bootstrap: str, topic: str, first: int, count: int) -> list[int]:
    """Write and read with the client of 0.1.0. Return all values of the topic."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_CLIENT, str(sources), bootstrap, topic, str(first), str(count)],
        cwd=sources,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    values: list[int] = json.loads(done.stdout)
    return values


def write(bootstrap: str, topic: str, first: int, count: int) -> None:
    with Producer(bootstrap) as producer:
        for number in range(first, first + count):
            producer.send(topic, str(number)).result(PATIENCE_S)


def values_of(bootstrap: str, topic: str) -> list[int]:
    with Consumer(bootstrap, topic) as consumer:
        return [int(value) for value in consumer.to_table()["value"].to_pylist()]


@pytest.mark.integration
@pytest.mark.timeout(300)
class TestProcesses:
    def test_brokers_are_upgraded_one_by_one_under_both_releases_clients(self, old_sources: Path) -> None:
        cluster = ProcessCluster(3, settings={"default.replication.factor": "3", "min.insync.replicas": "2"})
        for slot in cluster.slots.values():
            slot.sources = str(old_sources)
        with cluster:
            with Admin(cluster.bootstrap) as admin:
                admin.create_topic("upgraded", partitions=1)
            written = 0
            for broker_id in (None, *ALL):
                if broker_id is not None:
                    cluster.stop_broker(broker_id)
                    cluster.slots[broker_id].sources = ""
                    cluster.start_broker(broker_id)
                    cluster.wait_ready()
                    wait_isr(cluster, "upgraded", ALL)
                write(cluster.bootstrap, "upgraded", written, 10)
                found = old_client(old_sources, cluster.bootstrap, "upgraded", written + 10, 10)
                written += 20
                assert found == values_of(cluster.bootstrap, "upgraded") == list(range(written))

    @pytest.mark.parametrize(
        "old_leads",
        marked_after(1, [True, False], pytest.mark.extended),
        ids=["the-leader-is-old", "the-leader-is-new"],
    )
    def test_a_killed_leader_is_replaced_by_another_releases_broker(self, old_sources: Path, old_leads: bool) -> None:
        cluster = ProcessCluster(2, settings={"default.replication.factor": "2", "min.insync.replicas": "1"})
        for slot in cluster.slots.values():
            slot.sources = str(old_sources)
        with cluster:
            # A broker of 0.1.0 takes part if it already runs: no new driver starts one.
            cluster.slots[1].sources = ""
            cluster.restart(1)
            cluster.wait_ready()
            with Admin(cluster.bootstrap) as admin:
                admin.create_topic("mixed", partitions=2)
                description = admin.describe_topic("mixed")
            wanted = 0 if old_leads else 1
            number = next(p.partition for p in description.partitions if p.leader == wanted)
            with Producer(cluster.bootstrap) as producer:
                for value in range(20):
                    producer.send("mixed", str(value), partition=number).result(PATIENCE_S)
                cluster.kill(wanted)
                wait_until(
                    lambda: leader(cluster, "mixed", number) == 1 - wanted, PATIENCE_S, "the other broker to lead"
                )
                for value in range(20, 40):
                    producer.send("mixed", str(value), partition=number).result(PATIENCE_S)
            assert values_of(cluster.bootstrap, "mixed") == list(range(40))
