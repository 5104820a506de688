"""``jobs/cluster.py`` as a separate process that tests start, watch and end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from sparklog.cluster.process import ProcessIdentity, identify, is_alive, send_signal
from sparklog.cluster.runtime_directory import noted_process
from tests.conftest import ROOT

READY_S = 150.0


class ClusterJob:
    """One run of the cluster job. ``brokers`` and ``executors`` are its processes, as the kernel lists them."""

    def __init__(self, data_dir: Path, *arguments: str, submit: Sequence[str] = ()) -> None:
        self.data_dir = data_dir
        self.lines: list[str] = []
        environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": " ".join([*submit, "pyspark-shell"])}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "jobs" / "cluster.py"), "--data-dir", str(data_dir), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, timeout_s: float = READY_S) -> re.Match[str]:
        """Wait for ``pattern`` in the output, and return the first match."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.output)) is None:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            assert not ended, f"the job ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.output}"
            time.sleep(0.05)
        return found

    def ready(self) -> str:
        """Wait for the ready block, and return its bootstrap servers."""
        return self.wait_for(r"bootstrap servers  (\S+)").group(1)

    def generations(self) -> list[str]:
        """Return the reports of all generations, oldest first: ``0 adopted, 1 started, ...``."""
        return re.findall(r"generation \d+: brokers (.*)", self.output)

    def wait_for_generation(self, number: int, *, timeout_s: float = 60.0) -> str:
        """Wait for the report after the first ``number`` ones, and return it."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.generations()) <= number:
            assert time.monotonic() < deadline, f"no generation after {number} within {timeout_s} s:\n{self.output}"
            time.sleep(0.05)
        return found[number]

    def brokers(self) -> dict[str, int]:
        found = {}
        for slot in sorted(self.data_dir.glob("slot-*")):
            process = noted_process(slot)
            if process is not None and is_alive(process):
                found[slot.name] = process.pid
        return found

    def java_processes(self, name: str) -> list[ProcessIdentity]:
        """Return the Java processes of this cluster whose main class ends with ``name``.

        A process that a JVM has forked has the command line of the JVM until it executes its own program. It does not
        count.
        """
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if any(word.endswith(name) for word in words) and any(str(self.data_dir) in word for word in words):
                    parents[int(entry.name)] = _parent_pid(int(entry.name))
        own = [identify(pid) for pid, parent_pid in parents.items() if parent_pid not in parents]
        return [process for process in own if process is not None]

    def executors(self) -> list[ProcessIdentity]:
        return self.java_processes("CoarseGrainedExecutorBackend")

    def executor_of(self, slot: str) -> ProcessIdentity:
        """Return the JVM whose barrier task has started the broker of ``slot``. The loss of an executor without a
        task proves nothing."""
        (broker,) = identify_all([self.brokers()[slot]])
        return parent(parent(parent(broker)))  # the task's Python worker, and the daemon that forks workers

    def zookeepers(self) -> list[ProcessIdentity]:
        return self.java_processes("QuorumPeerMain")

    def stop(self, number: signal.Signals = signal.SIGINT, *, timeout_s: float = 60.0) -> float:
        """Request an ordered stop, and return the seconds until the process has exited."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout_s)
        self._close()
        return time.monotonic() - began

    def kill(self) -> None:
        """Send SIGKILL to the driver, and wait until its executors have exited."""
        self.process.kill()
        self.process.wait()
        self._close()
        deadline = time.monotonic() + 60
        while self.executors():
            assert time.monotonic() < deadline, "executors are still running after their driver's death"
            time.sleep(0.1)

    def destroy(self) -> None:
        """End the remaining processes, each by its identity."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()
        left = [*self.executors(), *self.zookeepers()]
        left += [process for slot in self.data_dir.glob("slot-*") if (process := noted_process(slot)) is not None]
        for process in left:
            send_signal(process, signal.SIGKILL)

    def _close(self) -> None:
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def identify_all(pids: Iterable[int]) -> list[ProcessIdentity]:
    """Return the processes of ``pids``. All of them must run."""
    found = [identify(pid) for pid in pids]
    assert all(process is not None for process in found), f"{pids}: some have exited"
    return [process for process in found if process is not None]


def parent(process: ProcessIdentity) -> ProcessIdentity:
    (found,) = identify_all([_parent_pid(process.pid)])
    return found


def _parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
