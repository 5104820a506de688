"""kcat writes a file with acks=all and idempotence, and reads it, while brokers are killed and restart: no record is
lost, repeated or reordered."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sparklog.testing.final_logs import metadata_of, wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin
from tests.integration.kafka_records import PATIENCE_S, read_sparklog
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

PARTITIONS = 3
TOPIC = "lines"
SETTINGS = {"zookeeper.session.timeout.ms": "1000", "replica.lag.time.max.ms": "1500", "min.insync.replicas": "2"}
#: The lines that the reading kcat receives between two faults.
_STEP = 500


@pytest.fixture
def kcat() -> str:
    program = shutil.which("kcat")
    if program is None:
        pytest.skip("kcat is not installed")
    return program


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3, settings=SETTINGS, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3)
        yield running


class Lines:
    """A named pipe as a file of numbered lines, ``<key>:<number>``, that ends when ``finish`` is called.

    So kcat reads its file during all faults, on machines of any speed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self.count = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        with self.path.open("w") as pipe, suppress(BrokenPipeError):
            while not self._ends.wait(0.01):
                pipe.writelines(f"key {number % 50}:{number}\n" for number in range(self.count, self.count + 50))
                pipe.flush()
                self.count += 50

    def finish(self) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Kcat:
    """A running kcat, whose output goes to a file. SIGKILL ends it at the end of the test."""

    def __init__(self, output: Path, *command: str) -> None:
        self.output = output
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)

    def __enter__(self) -> Kcat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def lines(self) -> int:
        return self.output.read_bytes().count(b"\n")

    def errors(self) -> str:
        return self.output.with_suffix(".err").read_text()[-2000:]


def placed(output: bytes) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Return the keys and values that kcat has printed, by partition and offset."""
    found: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for line in output.splitlines():
        partition, offset, key, value = line.split(b":")
        assert (int(partition), int(offset)) not in found, "kcat has read a record twice"
        found[int(partition), int(offset)] = key, value
    return found


def test_kcat_writes_and_reads_each_line_once_under_faults(cluster: ProcessCluster, kcat: str, tmp_path: Path) -> None:
    # kcat ends when it is connected to no broker. By default librdkafka connects only to the brokers that it needs.
    stay = ("-E", "-X", "enable.sparse.connections=false", "-X", "reconnect.backoff.max.ms=500")
    server = (kcat, "-b", cluster.kafka_bootstrap, "-t", TOPIC, *stay)
    sent = Lines(tmp_path / "lines")
    once = ("-X", "acks=all", "-X", "enable.idempotence=true", "-X", f"message.timeout.ms={int(5000 * PATIENCE_S)}")
    read = ("-C", "-o", "beginning", "-q", "-u", "-f", "%p:%o:%k:%s\n")
    with (
        Kcat(tmp_path / "written", *server, "-P", "-K:", "-l", str(sent.path), *once) as writer,
        Kcat(tmp_path / "read", *server, *read) as reader,
    ):
        sent.start()

        def wait_progress() -> None:
            before = reader.lines + _STEP

            def moved() -> bool:
                assert writer.process.poll() is None, writer.errors()
                assert reader.process.poll() is None, reader.errors()
                return reader.lines >= before

            wait_until(moved, "kcat reads what kcat writes", timeout_s=2 * PATIENCE_S)

        wait_progress()
        for partition in range(PARTITIONS):
            broker = metadata_of(cluster, TOPIC)[partition].leader
            cluster.kill(broker)
            wait_progress()
            cluster.start_broker(broker)
            wait_in_sync(cluster, [TOPIC], PATIENCE_S)
        for broker in range(3):
            cluster.restart(broker)
            wait_in_sync(cluster, [TOPIC], PATIENCE_S)
            wait_progress()
        sent.finish()
        assert writer.process.wait(2 * PATIENCE_S) == 0, writer.errors()
        wait_until(lambda: reader.lines >= sent.count, "kcat reads all lines")
        while_written = placed(reader.output.read_bytes())
    done = subprocess.run([*server, *read, "-e"], capture_output=True, timeout=PATIENCE_S, check=True)
    found = placed(done.stdout)
    assert found == while_written
    assert {place: (record.key, record.value) for place, record in read_sparklog(cluster.bootstrap, TOPIC).items()} == (
        found
    )
    assert sorted(int(value) for _, value in found.values()) == list(range(sent.count))
    assert all(key == b"key %d" % (int(value) % 50) for key, value in found.values())
    for partition in range(PARTITIONS):
        numbers = [int(found[place][1]) for place in sorted(found) if place[0] == partition]
        assert numbers == sorted(numbers), "the lines of a partition have the order of the file"
