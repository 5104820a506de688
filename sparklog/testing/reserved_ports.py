"""Ports for servers of tests that restart: no other process takes such a port while its server is down.

The system gives free ports of its own range to outgoing connections (32,768 to 60,999 on Linux). A server that has such
a port and restarts may find it in use. So the ports here are below that range. A locked file for each reserved port
keeps the tests of other processes from using the port.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from sparklog.errors import ClusterError

#: Tests that name their ports take them from 29,000 upwards.
_PORTS = range(20_000, 29_000)


class ReservedPorts:
    """The reserved ports of one owner. ``close`` releases them."""

    def __init__(self) -> None:
        self._locks: list[int] = []

    def reserve(self, host: str = "127.0.0.1") -> int:
        """Reserve a port that is free at ``host``. Raises ClusterError if there is none."""
        directory = Path(tempfile.gettempdir()) / f"sparklog-test-ports-{os.getuid()}"
        directory.mkdir(exist_ok=True)
        for port in random.sample(_PORTS, len(_PORTS)):
            lock = os.open(directory / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((host, port))
            except OSError:  # another test has the port, or a program that reserves none uses it
                os.close(lock)
                continue
            self._locks.append(lock)
            return port
        raise ClusterError(f"no free port at {host} from {_PORTS.start} to {_PORTS.stop - 1}")

    def close(self) -> None:
        """Release the ports."""
        while self._locks:
            with contextlib.suppress(OSError):
                os.close(self._locks.pop())
