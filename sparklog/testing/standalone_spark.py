"""A standalone Spark cluster on this machine: Master and Workers of the pip package, as processes that tests can kill.

All files are in one directory: logs, the Workers' work directories, Spark's local directories, and the state from which
a restarted Master recovers its Workers and applications. ``stop`` ends all processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from sparklog.cluster.process import ProcessIdentity, identify, send_signal
from sparklog.errors import ClusterError
from sparklog.storage.disk import private_opener
from sparklog.testing.reserved_ports import ReservedPorts

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
#: The JVM options for a quick start, because these JVMs have little work.
_QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"


class StandaloneSpark:
    """A standalone Spark cluster. Use it as a context manager, or call ``start`` and ``stop``.

    Not thread-safe. Workers are numbered from 0. ``hosts`` are the addresses that Workers get in turn. Spark treats
    them as hosts, and does not start the second attempt of a task on the host of the first attempt. Without
    ``keep_state`` (Spark's default), a restarted Master has no state, and the executors of earlier applications end.
    ``settings`` are Spark's settings of the Master and the Workers.
    """

    def __init__(
        self,
        directory: Path,
        *,
        workers: int = 3,
        cores: int = 1,
        memory: str = "640m",
        keep_state: bool = True,
        hosts: Sequence[str] = (_HOST,),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._count = workers
        self._cores = cores
        self._memory = memory
        self._keep_state = keep_state
        self._hosts = hosts
        self._settings = settings or {}
        self._ports = ReservedPorts()
        self._port, self._ui_port = self._ports.reserve(), self._ports.reserve()
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://{_HOST}:{self._port}"

    def __enter__(self) -> StandaloneSpark:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> StandaloneSpark:
        """Start the Master and the Workers; return when the Master responds.

        To wait for the Workers as well, call ``wait_for_workers``.
        """
        self.start_master()
        for number in range(self._count):
            self.start_worker(number)
        return self

    def start_master(self) -> None:
        """Start the Master, on the same port as before if it ran before; return when it listens."""
        options = []
        if self._keep_state:
            options += ["-Dspark.deploy.recoveryMode=FILESYSTEM"]
            options += [f"-Dspark.deploy.recoveryDirectory={self._made('recovery')}"]
        words = ["--host", _HOST, "--port", str(self._port), "--webui-port", str(self._ui_port), *self._properties()]
        self._master = self._launch("master", ["org.apache.spark.deploy.master.Master", *words], options)
        self.wait_until(bool, "Master")

    def start_worker(self, number: int) -> None:
        host = self._hosts[number % len(self._hosts)]
        words = ["--host", host, "--webui-port", "0", "--cores", str(self._cores), "--memory", self._memory]
        words += ["--work-dir", str(self._made(f"worker-{number}") / "work"), *self._properties(), self.url]
        self._workers[number] = self._launch(
            f"worker-{number}", ["org.apache.spark.deploy.worker.Worker", *words], [], host
        )

    def kill_master(self) -> None:
        assert self._master is not None
        _end(self._master)

    def kill_worker(self, number: int) -> None:
        """Kill a Worker and the JVMs of its executors. The child processes of the executors survive."""
        executors = self.executors(number)
        _end(self._workers[number])
        for executor in executors:
            send_signal(executor, signal.SIGKILL)

    def executors(self, number: int) -> list[ProcessIdentity]:
        """Return the executor JVMs that Worker ``number`` has started."""
        children = Path(f"/proc/{self._workers[number].pid}/task").glob("*/children")
        pids = [int(pid) for file in children for pid in file.read_text().split()]
        return [found for pid in pids if (found := identify(pid)) is not None]

    def state(self) -> dict[str, Any]:
        """Return the state that the Master reports. It is empty while the Master does not respond."""
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{self._ui_port}/json/", timeout=5) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except (OSError, urllib.error.URLError, ValueError):
            return {}

    def wait_for_workers(self, count: int) -> None:
        self.wait_until(lambda state: state.get("aliveworkers") == count, f"{count} Workers")

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until ``condition`` is true of the Master's ``state``.

        Raises:
            ClusterError: timeout. The message says ``what`` the caller was waiting for.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not condition(state := self.state()):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.url}: no {what} within {_START_TIMEOUT_S:g} s; found {state or 'no response'}"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """End all processes. Workers end their executors.

        If a Worker was killed, its executors end when they lose the connection to the Worker.
        """
        left = [executor for number in self._workers for executor in self.executors(number)]
        for process in [*self._workers.values(), *([self._master] if self._master else [])]:
            _end(process)
        for executor in left:
            send_signal(executor, signal.SIGKILL)
        self._ports.close()

    # --- processes -------------------------------------------------------------------------------------------------

    def _launch(
        self, name: str, command: list[str], java_options: list[str], host: str = _HOST
    ) -> subprocess.Popen[bytes]:
        directory = self._made(name)
        environment = {
            **os.environ,
            "SPARK_HOME": str(_spark_home()),
            # For the launcher JVM, which only computes the command line.
            "SPARK_LAUNCHER_OPTS": _QUICK_JVM,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": " ".join(
                [_QUICK_JVM, os.environ.get("SPARK_DAEMON_JAVA_OPTS", ""), *java_options]
            ),
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_LOCAL_IP": host,
        }
        with (directory / "log").open("ab") as output:
            return subprocess.Popen(
                [str(_spark_home() / "bin" / "spark-class"), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )

    def _properties(self) -> list[str]:
        """Return the option with the file of the settings. A secret must not be in a command line."""
        if not self._settings:
            return []
        path = self.directory / "daemons.conf"
        with open(path, "w", opener=private_opener) as file:
            file.writelines(f"{name} {text}\n" for name, text in self._settings.items())
        return ["--properties-file", str(path)]

    def _made(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def _spark_home() -> Path:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ClusterError("pyspark is not installed in this environment")
    return Path(spec.origin).parent


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
