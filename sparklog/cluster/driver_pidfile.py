"""The file ``driver.json`` in the data directory: the driver's process, and the addresses of the brokers and ZooKeeper.

The driver writes the file when the cluster is ready, and removes it when it ends. If a driver was killed, the start
time in its file shows that the process has ended, even if another process has its pid.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sparklog.cluster.process import ProcessIdentity, identify, is_alive

_NAME = "driver.json"


class DriverPidfile(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    #: The addresses ``host:port,...`` of the brokers, and of ZooKeeper with the chroot.
    bootstrap: str
    zookeeper: str
    version: int = 1
    #: The addresses of the brokers for Kafka clients; empty if there are none.
    kafka: str = ""


def note_driver(data_dir: Path, bootstrap: str, zookeeper: str, kafka: str = "") -> None:
    """Write the file that names this process as the driver of the cluster of ``data_dir``."""
    own = identify(os.getpid())
    assert own is not None
    new = data_dir / f"{_NAME}.{os.getpid()}"
    new.write_bytes(msgspec.json.encode(DriverPidfile(own, bootstrap, zookeeper, kafka=kafka)))
    new.replace(data_dir / _NAME)


def forget_driver(data_dir: Path) -> None:
    """Remove the file that names the cluster's driver, if this process wrote it."""
    found = _read(data_dir)
    if found is not None and found.process.pid == os.getpid():
        (data_dir / _NAME).unlink(missing_ok=True)


def noted_driver(data_dir: Path) -> DriverPidfile | None:
    """Return the driver on this host that runs the cluster of ``data_dir``, as recorded in its file.

    Return None if no such driver is alive, or if it is not ready yet.
    """
    found = _read(data_dir)
    return found if found is not None and is_alive(found.process) else None


def _read(data_dir: Path) -> DriverPidfile | None:
    try:
        return msgspec.json.decode((data_dir / _NAME).read_bytes(), type=DriverPidfile)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
