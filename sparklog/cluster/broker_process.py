"""The start of a broker's process, which is independent of the task that starts it."""

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

#: The command of a broker, to which ``--config <file>`` is appended.
BROKER_PROGRAM = (sys.executable, "-m", "sparklog.broker")


def spawn_broker(
    slot: Slot, spec: GenerationSpec, *, host: str, words: LastWords, program: tuple[str, ...] = BROKER_PROGRAM
) -> ProcessIdentity:
    """Start the process of a broker in the log directory of ``slot``, and record the identity of the process.

    Return when the process is started. The broker does not serve yet. ``words`` has the names of the output files.

    Raises:
        ClusterError: the process ended immediately.
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
    with open(config_file, "wb", opener=private_opener) as file:
        file.write(msgspec.json.format(msgspec.json.encode(config)))
    with open(words.out, "wb", opener=private_opener) as output:
        # The broker gets a new process session, so that it does not receive signals of a terminal or to the executor's
        # process group. It gets output files, because a pipe to the executor could block it after the executor has
        # ended. It gets another working directory than the executor's, which is deleted with the application.
        child = subprocess.Popen(
            [*program, "--config", str(config_file)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=broker_environment(os.environ),
        )
    # Otherwise Popen's finalizer would warn that the child still runs, which is intended here. ``reap`` collects it.
    child.returncode = 0
    process = identify(child.pid)
    if process is None:
        raise ClusterError(f"broker {slot.broker_id} exited immediately with code {reap(child.pid)}: {words}")
    runtime_directory.note_process(slot.path, process)
    return process


def reap(pid: int) -> int | None:
    """Collect the exit code of an ended child process; it is negative for a signal.

    Return None if ``pid`` is not a child of this process.
    """
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def broker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a broker: the environment of the Python worker without Spark's variables.

    A process with this environment can import the package sparklog.
    """
    keep = {key: value for key, value in inherited.items() if not key.startswith(("PYSPARK_", "SPARK_", "_SPARK"))}
    paths = [str(Path(__file__).parents[2])]
    paths += [path for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path and not _is_sparks(path)]
    keep["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return keep


def _is_sparks(path: str) -> bool:
    name = Path(path).name
    return name == "pyspark.zip" or (name.startswith("py4j-") and name.endswith(".zip"))


class LastWords:
    """An explanation of why a broker process of ``log_dir`` ended. ``str`` returns it as one line.

    The explanation is the last line of the process's output. If the output is empty, it is the last critical line, or
    else the last error line, that the process has logged since the creation of this object.
    """

    def __init__(self, log_dir: Path) -> None:
        #: The file with standard output and error. It is empty unless Python itself failed.
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
        return f"no error in {self.log}"


def _lines(path: Path, *, skip_bytes: int = 0) -> list[str]:
    try:
        content = path.read_bytes()[skip_bytes:]
    except OSError:
        return []
    return [line.strip() for line in content.decode(errors="replace").splitlines() if line.strip()]
