"""``driver.json`` in the data directory: which process runs the cluster there, and where its brokers listen.

Written once the cluster is ready, and removed by the driver that wrote it. What a killed driver leaves names a process
that is gone, and is told from a living one by its start time.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sparklog.cluster.process import ProcessIdentity, identify, is_alive

_NAME = "driver.json"


class DriverPidfile(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    #: ``host:port,...`` of the brokers, and of ZooKeeper with the chroot.
    bootstrap: str
    zookeeper: str
    version: int = 1


def note_driver(data_dir: Path, bootstrap: str, zookeeper: str) -> None:
    """Write this process to the data directory as the cluster's driver."""
    own = identify(os.getpid())
    assert own is not None
    new = data_dir / f"{_NAME}.{os.getpid()}"
    new.write_bytes(msgspec.json.encode(DriverPidfile(own, bootstrap, zookeeper)))
    new.replace(data_dir / _NAME)


def forget_driver(data_dir: Path) -> None:
    """Remove the note, if it is this process's."""
    found = _read(data_dir)
    if found is not None and found.process.pid == os.getpid():
        (data_dir / _NAME).unlink(missing_ok=True)


def noted_driver(data_dir: Path) -> DriverPidfile | None:
    """The driver that runs the cluster of this data directory on this host; None: there is none, or it is not ready."""
    found = _read(data_dir)
    return found if found is not None and is_alive(found.process) else None


def _read(data_dir: Path) -> DriverPidfile | None:
    try:
        return msgspec.json.decode((data_dir / _NAME).read_bytes(), type=DriverPidfile)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None
