"""A real Apache Kafka to compare with: one controller and three brokers of version 4.1 on loopback, without ZooKeeper.

Brokers have Kafka's defaults except for ``min.insync.replicas`` 2 and the cleaner's interval: writes wait for no
fsync, as in sparklog. Each process has its own process group, and the bench ends it by its id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

from sparklog.cluster.embedded_zookeeper import find_java
from sparklog.errors import ClusterError

_HOST = "127.0.0.1"
_CONTROLLER = 100
BROKERS = (1, 2, 3)
_BROKER_HEAP = "1g"
_CONTROLLER_HEAP = "512m"
_UP_TIMEOUT_S = 60.0
_DOWN_TIMEOUT_S = 40.0
_LOGGING = """\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=[%d] %p %m (%c)%n
rootLogger.level=ERROR
rootLogger.appenderRef.out.ref=out
logger.cleaner.name=org.apache.kafka.storage.internals.log.LogCleaner$CleanerThread
logger.cleaner.level=INFO
"""


class KafkaCluster:
    """A Kafka cluster in ``directory``. Owner: the bench's main thread, which calls ``start`` and ``stop``.

    ``settings`` override the brokers' default settings in this module.
    """

    def __init__(self, jars: Path, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._settings = settings or {}
        self._class_path = str(jars / "*")
        self._directory = directory
        self._cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self._ports = dict(zip((_CONTROLLER, *BROKERS), _free_ports(1 + len(BROKERS)), strict=True))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{_HOST}:{self._ports[node]}" for node in BROKERS)

    def start(self) -> None:
        """Start all nodes; return when all brokers accept connections.

        Raises:
            ClusterError: a node did not start; the message has its last output.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "log4j2.properties").write_text(_LOGGING)
        for node in self._ports:
            self._configure(node)
        for node in self._ports:
            self._launch(node)
        for node in self._ports:
            self._await_port(node)

    def stop(self) -> None:
        """Stop the brokers, which hand their leaderships to the controller, then the controller."""
        self.resume()
        for node in (*BROKERS, _CONTROLLER):
            if node != _CONTROLLER:
                self._signal(node, signal.SIGTERM)
        for node in BROKERS:
            self._reap(node)
        self._signal(_CONTROLLER, signal.SIGTERM)
        self._reap(_CONTROLLER)

    def pause(self) -> None:
        """Send SIGSTOP to all nodes: the cluster takes no processor time until ``resume``."""
        for node in self._ports:
            self._signal(node, signal.SIGSTOP)

    def resume(self) -> None:
        for node in self._ports:
            self._signal(node, signal.SIGCONT)

    # --- one broker ---

    def pids(self) -> list[int]:
        """Return the process ids of the brokers, without the controller's."""
        return [process.pid for node, process in self._processes.items() if node != _CONTROLLER]

    def data(self, node: int) -> Path:
        return self._directory / f"data-{node}"

    def words(self) -> str:
        """Return the text of all brokers' log files: errors, and the work of their cleaners."""
        return "".join(self._log(node).read_text(errors="replace") for node in BROKERS)

    def kill(self, node: int) -> None:
        self._signal(node, signal.SIGKILL)
        self._reap(node)

    def stop_broker(self, node: int) -> None:
        self._signal(node, signal.SIGTERM)
        self._reap(node)

    def launch_broker(self, node: int) -> None:
        """Start a broker without waiting for it."""
        self._launch(node)

    def format(self, node: int) -> None:
        """Give an empty directory its identity."""
        output = self._log(node)
        with output.open("ab") as log:
            command = [*self._java("128m"), "kafka.tools.StorageTool", "format", "-c", str(self._config(node))]
            command.append(f"--cluster-id={self._cluster_id}")  # one word: an id may begin with a dash
            done = subprocess.run(command, stdout=log, stderr=log, timeout=_UP_TIMEOUT_S, check=False)
        if done.returncode:
            raise ClusterError(f"Kafka cannot format {self.data(node)}: {self._last_words(node)}")

    # --- inside ---

    def _configure(self, node: int) -> None:
        role, name = ("controller", "CONTROLLER") if node == _CONTROLLER else ("broker", "PLAINTEXT")
        settings = {
            "node.id": node,
            "process.roles": role,
            "listeners": f"{name}://{_HOST}:{self._ports[node]}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"{_CONTROLLER}@{_HOST}:{self._ports[_CONTROLLER]}",
            "log.dirs": self.data(node),
            "min.insync.replicas": 2,
            "group.initial.rebalance.delay.ms": 0,
            "log.cleaner.backoff.ms": 1000,
            **self._settings,
        }
        self._config(node).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self.format(node)

    def _launch(self, node: int) -> None:
        heap = _CONTROLLER_HEAP if node == _CONTROLLER else _BROKER_HEAP
        # As Kafka's own start script chooses the collector.
        options = [f"-Xms{heap}", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"]
        with self._log(node).open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [*self._java(heap, *options), "kafka.Kafka", str(self._config(node))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _java(self, heap: str, *options: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self._directory / 'log4j2.properties'}"
        return [find_java(), f"-Xmx{heap}", *options, logging, "-cp", self._class_path]

    def _config(self, node: int) -> Path:
        return self._directory / f"node-{node}.properties"

    def _log(self, node: int) -> Path:
        return self._directory / f"node-{node}.log"

    def _last_words(self, node: int) -> str:
        return self._log(node).read_text(errors="replace")[-1500:]

    def _await_port(self, node: int) -> None:
        def up() -> bool:
            if self._processes[node].poll() is not None:
                raise ClusterError(f"Kafka's node {node} has ended: {self._last_words(node)}")
            with contextlib.suppress(OSError), socket.create_connection((_HOST, self._ports[node]), timeout=1):
                return True
            return False

        wait_for(up, _UP_TIMEOUT_S, f"Kafka's node {node}")

    def _signal(self, node: int, number: signal.Signals) -> None:
        process = self._processes.get(node)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, number)

    def _reap(self, node: int) -> None:
        process = self._processes.pop(node, None)
        if process is None:
            return
        try:
            process.wait(_DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(true: Callable[[], bool], timeout_s: float, what: str, *, every_s: float = 0.05) -> None:
    """Poll until ``true()`` holds.

    Raises:
        ClusterError: time is up; the message names ``what`` was awaited.
    """
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(every_s)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server((_HOST, 0)) for _ in range(count)]
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
