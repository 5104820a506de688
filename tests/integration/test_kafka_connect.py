"""Kafka Connect's file connectors, in a standalone worker with the settings of docs/kafka.md, on real brokers.

Kafka's jars are fetched once from Maven Central (``bench.kafka_jars``). If they cannot be fetched, pytest skips these
tests.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kafka_jars import connect_jars
from sparklog.errors import ClusterError
from sparklog.testing.final_logs import metadata_of, wait_in_sync
from sparklog.testing.process_cluster import ProcessCluster
from tests.conftest import ROOT
from tests.integration.kafka_records import PATIENCE_S, read_confluent
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

TOPIC = "lines"
PARTITIONS = 3
_JVM = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
#: The names of the files in the page's example, in the order of the command's arguments.
_FILES = ("worker.properties", "source.properties", "sink.properties")


@pytest.fixture(scope="module")
def jars() -> Path:
    try:
        return connect_jars(fetch=True)
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {"zookeeper.session.timeout.ms": "1000", "replica.lag.time.max.ms": "1500", "min.insync.replicas": "2"}
    with ProcessCluster(3, settings=settings, kafka=True) as running:
        yield running


def example() -> dict[str, str]:
    """Return the files of the page's example by their names."""
    page = (ROOT / "docs" / "kafka.md").read_text("utf-8")
    return dict(re.findall(r"^```properties\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


class Worker:
    """A standalone worker in ``directory``, with the example's settings. Owner: one test thread."""

    def __init__(self, jars: Path, bootstrap: str, directory: Path) -> None:
        self._jars = jars
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        for name, text in example().items():
            changed = text.replace("127.0.0.1:29092", bootstrap).replace("/path/", f"{directory}/")
            if name == _FILES[0]:  # a free port for its REST interface, and no Kafka installation to search
                changed = re.sub(r"plugin\.path=.*\n", "", changed) + "listeners=http://127.0.0.1:0\n"
                changed += "consumer.session.timeout.ms=6000\n"  # a killed worker's partitions move sooner
            (directory / name).write_text(changed)
        (directory / "lines.txt").touch()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def start(self) -> None:
        command = ["java", *_JVM, "-cp", f"{self._jars}/*", "org.apache.kafka.connect.cli.ConnectStandalone", *_FILES]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def end(self, number: signal.Signals) -> None:
        """Send SIGTERM, on which the worker stores its offsets, or SIGKILL, and wait for the worker's end."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(PATIENCE_S)
            finally:
                self._process.kill()
                self._process.wait()
            self._process = None

    def append(self, numbers: range) -> None:
        """Append a line for each number to the file that the source connector reads."""
        with (self._directory / "lines.txt").open("a") as file:
            file.writelines(f"line {number}\n" for number in numbers)

    def written(self) -> list[str]:
        """Return the lines that the sink connector has written completely."""
        file = self._directory / "copy.txt"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    def end_line(self) -> None:
        """End the last line of the sink's file, which a killed worker may have written in part."""
        with (self._directory / "copy.txt").open("a") as file:
            file.write("\n")

    def wait_for(self, count: int) -> None:
        """Wait until the sink connector has written the lines 0 to ``count``, each at least once."""

        def all_written() -> bool:
            assert self._process is not None and self._process.poll() is None, self.last_words()
            return not missing()

        def missing() -> set[str]:
            return {f"line {number}" for number in range(count)} - set(self.written())

        try:
            wait_until(all_written, f"{count} lines", timeout_s=2 * PATIENCE_S)
        except AssertionError as error:
            some = sorted(missing())[:5]
            raise AssertionError(f"{error}: {len(missing())} are missing: {some}\n{self.last_words()}") from error

    def last_words(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-5000:]


class Appends:
    """A thread that appends lines to the source's file until the ``with`` block ends. ``count`` has their number."""

    def __init__(self, worker: Worker, first: int) -> None:
        self._worker = worker
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = first

    def _run(self) -> None:
        while not self._stopped.wait(0.05):
            self._worker.append(range(self.count, self.count + 20))
            self.count += 20

    def __enter__(self) -> Appends:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def wait_for_more(self) -> None:
        """Wait until the sink has lines that were appended after this call."""
        self._worker.wait_for(self.count + 100)


def check_exactly_once(cluster: ProcessCluster, worker: Worker, count: int) -> None:
    """Check that the topic and the sink's file have each line once, and the file has each partition's order."""
    written = worker.written()
    assert Counter(written) == Counter(f"line {number}" for number in range(count))
    found = read_confluent(cluster.kafka_bootstrap, TOPIC, PARTITIONS)
    values = {place: (record.value or b"").decode() for place, record in found.items()}
    assert Counter(values.values()) == Counter(written)
    partition_of = {value: partition for (partition, _), value in values.items()}
    for partition in range(PARTITIONS):
        order = [value for (number, _), value in sorted(values.items()) if number == partition]
        assert order == sorted(order, key=lambda line: int(line.split()[1]))
        assert [line for line in written if partition_of[line] == partition] == order


def test_kafka_connects_files_are_copied_while_brokers_fail(
    cluster: ProcessCluster, jars: Path, tmp_path: Path
) -> None:
    assert tuple(example()) == _FILES
    with Worker(jars, cluster.kafka_bootstrap, tmp_path) as worker:
        worker.append(range(1000))
        worker.start()
        worker.wait_for(1000)
        with Appends(worker, 1000) as appends:
            appends.wait_for_more()
            victim = metadata_of(cluster, TOPIC)[0].leader
            cluster.kill(victim, retire=False)
            appends.wait_for_more()
            cluster.start_broker(victim)
            wait_in_sync(cluster, [TOPIC], PATIENCE_S)
            for broker in range(3):
                cluster.restart(broker)
                wait_in_sync(cluster, [TOPIC], PATIENCE_S)
            appends.wait_for_more()
        count = appends.count
        worker.wait_for(count)
        check_exactly_once(cluster, worker, count)

        worker.end(signal.SIGTERM)
        worker.append(range(count, count + 1000))  # the next worker continues from the stored offsets
        worker.start()
        count += 1000
        worker.wait_for(count)
        check_exactly_once(cluster, worker, count)

        worker.append(range(count, count + 1000))
        worker.wait_for(count + 500)
        worker.end(signal.SIGKILL)  # before the offsets are stored: lines may come again, and none is lost
        worker.end_line()
        worker.start()
        count += 1000
        worker.wait_for(count)
