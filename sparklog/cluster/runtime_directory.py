"""The directory with the control sockets and process files of a host's brokers.

The path of a Unix socket has at most 108 bytes, so these files cannot be in the log directories. Their names depend
only on the log directory, so every supervisor finds them, even under another driver. The directory is in /tmp, not
TMPDIR, which cluster managers set to a directory that is deleted with the container.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparklog.cluster.process import ProcessIdentity, is_alive
from sparklog.errors import ClusterError
from sparklog.net.user_directory import user_directory
from sparklog.storage.disk import private_opener

_BASE = Path("/tmp")


def runtime_directory() -> Path:
    """Return the directory for the sockets and process files of this user's brokers. Create it if it does not exist.

    Raises:
        ClusterError: the path is not a directory that only this user can enter.
    """
    return user_directory(_BASE)


def _stem(log_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(log_dir.resolve())).hexdigest()[:16]


def control_socket(log_dir: Path) -> Path:
    return runtime_directory() / f"{_stem(log_dir)}.sock"


@contextlib.contextmanager
def host_lock(*, timeout_s: float = 10.0) -> Iterator[None]:
    """Hold this user's lock on this host for a ``with`` block.

    Without the lock, two tasks could give the same port to two new log directories.

    Raises:
        ClusterError: the lock is not available within ``timeout_s``.
    """
    with _lock(runtime_directory() / "claims.lock", timeout_s=timeout_s, what="claims on this host"):
        yield


def note_process(log_dir: Path, identity: ProcessIdentity) -> None:
    """Record the process that was started for ``log_dir``. Supervisors use the record if the process has no socket."""
    target = runtime_directory() / f"{_stem(log_dir)}.json"
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(msgspec.json.encode(identity))
    Path(file.name).replace(target)


def noted_process(log_dir: Path) -> ProcessIdentity | None:
    try:
        return msgspec.json.decode((runtime_directory() / f"{_stem(log_dir)}.json").read_bytes(), type=ProcessIdentity)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def process_config(log_dir: Path) -> Path:
    """Return the path of the configuration file of the broker process of ``log_dir``."""
    return runtime_directory() / f"{_stem(log_dir)}.config.json"


def secret_file(cluster_id: str) -> Path:
    """Return the path of this host's copy of the cluster's secret, which all brokers of the host share."""
    name = hashlib.sha256(cluster_id.encode()).hexdigest()[:16]
    return runtime_directory() / f"{name}.secret"


def forget(log_dir: Path) -> None:
    """Remove the configuration file and the process record of a broker process that has stopped cleanly."""
    process_config(log_dir).unlink(missing_ok=True)
    (runtime_directory() / f"{_stem(log_dir)}.json").unlink(missing_ok=True)


def forget_vanished() -> None:
    """Remove the files of ended processes whose log directories were deleted.

    The next process in an existing log directory uses or overwrites the files of the earlier one.
    """
    for config in runtime_directory().glob("*.config.json"):
        try:
            log_dir = Path(msgspec.json.decode(config.read_bytes(), type=_Configured).log_dir)
        except (FileNotFoundError, msgspec.MsgspecError):
            continue
        process = noted_process(log_dir)
        if not log_dir.exists() and (process is None or not is_alive(process)):
            control_socket(log_dir).unlink(missing_ok=True)
            forget(log_dir)


class _Configured(msgspec.Struct):
    """The log directory in a broker's configuration file."""

    log_dir: str


@contextlib.contextmanager
def _lock(path: Path, *, timeout_s: float, what: str) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with open(path, "ab", opener=private_opener) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ClusterError(
                        f"{what}: {path} has been locked by another process for over {timeout_s:g} s"
                    ) from None
                time.sleep(0.05)
        yield
