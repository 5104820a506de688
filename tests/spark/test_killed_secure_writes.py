"""A test of a streaming query on a secure cluster whose executors, driver and brokers are lost: each row is written
once, and no file has the password."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sparklog import Admin, Producer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import wait_until
from sparklog.testing.secure_cluster import SecureCluster
from sparklog.testing.standalone_spark import StandaloneSpark

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent.parent
PARTITIONS = 2
FIRST, LATER = 200, 100


class Copying:
    """A secure cluster of brokers, and Spark applications that copy its topic ``source`` to ``target``."""

    def __init__(self, brokers: SecureCluster, spark: StandaloneSpark, directory: Path) -> None:
        self.brokers = brokers
        self.spark = spark
        self.directory = directory
        self.password = brokers.client_security.password.reveal()
        self.password_file = directory / "password"
        self.password_file.touch(0o600)
        self.password_file.write_text(self.password)
        (directory / "events").mkdir()
        self.admin = Admin(brokers.bootstrap, security=brokers.client_security)
        for name in ("source", "target"):
            self.admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)

    def fill(self, start: int, end: int) -> None:
        with Producer(self.brokers.bootstrap, security=self.brokers.client_security) as producer:
            for number in range(start, end):
                producer.send("source", value=f"{number}".encode(), partition=number % PARTITIONS)
            producer.flush()

    def copied(self) -> list[int]:
        """Return the committed rows of the target, sorted."""
        found: list[int] = []
        places = [TopicPartition("target", number) for number in range(PARTITIONS)]
        for tp, end in self.admin.list_offsets(places, isolation="read_committed").items():
            with PartitionReader(
                self.brokers.bootstrap, tp, 0, end, isolation="read_committed", security=self.brokers.client_security
            ) as reader:
                for _, batch in reader:
                    found += [int(value) for value in batch.column("value").to_pylist()]
        return sorted(found)

    def wait_for(self, count: int, process: subprocess.Popen[bytes]) -> None:
        def enough() -> bool:
            assert process.poll() is None, (self.directory / "output").read_text()[-3000:]
            return len(self.copied()) >= count

        wait_until(enough, 200, f"{count} rows in the target")

    @contextmanager
    def driver(self, mode: str) -> Iterator[subprocess.Popen[bytes]]:
        words = (self.spark.url, self.brokers.bootstrap, self.brokers.ca, self.password_file, self.directory, mode)
        with (self.directory / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.secure_copy", *map(str, words)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_CONF_DIR": str(ROOT / "conf"),
                },
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)

    def files_with_the_password(self) -> list[Path]:
        secret = self.password.encode()
        places = (self.directory, self.spark.directory)
        files = {path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()}
        found = []
        for path in sorted(files):
            with suppress(FileNotFoundError):  # an executor that is ending deletes its temporary files
                found += [path] if secret in path.read_bytes() else []
        return found


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Copying]:
    directory = tmp_path / "job"
    directory.mkdir()
    hosts = ("127.0.0.1", "127.0.0.2")
    with (
        SecureCluster(3, base_dir=tmp_path / "brokers") as brokers,
        StandaloneSpark(tmp_path / "spark", workers=2, cores=2, keep_state=False, hosts=hosts) as spark,
    ):
        found = Copying(brokers, spark, directory)
        with found.admin:
            yield found


def test_a_secure_stream_survives_lost_executors_drivers_and_brokers(copying: Copying) -> None:
    copying.fill(0, FIRST)
    with copying.driver("continuous") as process:
        copying.wait_for(20, process)
        copying.spark.kill_worker(0)
        copying.spark.start_worker(0)
        before = len(copying.copied())
        for broker_id in range(3):
            copying.brokers.restart(broker_id)
        copying.brokers.kill(0)
        copying.brokers.start_broker(0)
        copying.wait_for(min(before + 20, FIRST), process)
        copying.spark.kill_worker(1)
        copying.spark.start_worker(1)
    # The driver was killed in the middle of its work. The next one continues at its checkpoint.
    copying.fill(FIRST, FIRST + LATER)
    with copying.driver("once") as process:
        assert process.wait(400) == 0, (copying.directory / "output").read_text()[-3000:]
    wait_until(lambda: len(copying.copied()) >= FIRST + LATER, 60, "the last transaction's markers")
    assert copying.copied() == [*range(FIRST + LATER)], "each row exactly once"
    assert copying.files_with_the_password() == [copying.password_file]
