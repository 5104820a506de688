"""Starting a broker's process so that nothing ties it to the task that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.process_config import ProcessConfig
from sparklog.cluster import runtime_directory
from sparklog.cluster.cluster_secret import keep_on_host
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.process import ProcessIdentity, identify
from sparklog.cluster.slots import Slot
from sparklog.errors import ClusterError
from sparklog.protocol.proof import KeyRing
from sparklog.storage.disk import private_opener

#: What is run for each slot, with ``--config <file>`` after it.
BROKER_PROGRAM = (sys.executable, "-m", "sparklog.broker")


def spawn_broker(
    slot: Slot, spec: GenerationSpec, *, host: str, words: LastWords, program: tuple[str, ...] = BROKER_PROGRAM
) -> ProcessIdentity:
    """Start a process for ``slot`` and note it. Blocks for as long as a fork takes.

    Raises:
        ClusterError: it ended at once.
        OSError: the host's copy of the secret, or the configuration, cannot be written.
    """
    socket = runtime_directory.control_socket(slot.path)
    config = ProcessConfig(
        cluster_id=spec.cluster_id,
        broker_id=slot.broker_id,
        log_dir=str(slot.path),
        host=host,
        port=slot.port,
        bind_host=spec.bind_host,
        zookeeper=spec.zookeeper,
        settings=spec.settings,
        control_socket=str(socket),
        driver_epoch=spec.driver_epoch,
        generation=spec.generation,
        log_file=str(words.log),
        secret_file=str(keep_on_host(spec.cluster_id, KeyRing(spec.secrets))) if spec.secrets else "",
    )
    config_file = runtime_directory.process_config(slot.path)
    config_file.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    with open(words.out, "wb", opener=private_opener) as output:
        # Its own session: no terminal's signals, no part in the fate of the executor's process group. Its own files:
        # a pipe to the executor would block the broker once the executor is gone. Not in the executor's working
        # directory, which goes with the application.
        child = subprocess.Popen(
            [*program, "--config", str(config_file)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=broker_environment(os.environ),
        )
    # Popen's finalizer would warn of a child that still runs, which is the purpose here; ``reap`` collects it.
    child.returncode = 0
    process = identify(child.pid)
    if process is None:
        raise ClusterError(f"broker {slot.broker_id} ended with code {reap(child.pid)} at once: {words}")
    runtime_directory.note_process(slot.path, process)
    return process


def reap(pid: int) -> int | None:
    """Collect what is left of a process that has ended. Its exit code (negative: the signal); None: not our child."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def broker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment without Spark's part in it, and with this very package importable."""
    keep = {key: value for key, value in inherited.items() if not key.startswith(("PYSPARK_", "SPARK_", "_SPARK"))}
    paths = [str(Path(__file__).parents[2])]
    paths += [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path and not _is_sparks(path)]
    keep["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return keep


def _is_sparks(path: str) -> bool:
    name = Path(path).name
    return name == "pyspark.zip" or (name.startswith("py4j-") and name.endswith(".zip"))


class LastWords:
    """Why a process of ``log_dir`` ended: what it wrote to its standard error, else the gravest line it logged since
    this was made."""

    def __init__(self, log_dir: Path) -> None:
        #: Standard output and error: empty unless Python itself failed.
        self.out = log_dir / "broker.out"
        self.log = log_dir / "broker.log"
        self._log_bytes = self.log.stat().st_size if self.log.exists() else 0

    def __str__(self) -> str:
        written = _lines(self.out)
        if written:
            return written[-1]
        logged = _lines(self.log, skip_bytes=self._log_bytes)
        for level in (" CRITICAL ", " ERROR "):
            grave = [line for line in logged if level in line]
            if grave:
                return grave[-1].partition(level)[2].partition(": ")[2]
        return f"nothing was said in {self.log}"


def _lines(path: Path, *, skip_bytes: int = 0) -> list[str]:
    try:
        content = path.read_bytes()[skip_bytes:]
    except OSError:
        return []
    return [line.strip() for line in content.decode(errors="replace").splitlines() if line.strip()]
