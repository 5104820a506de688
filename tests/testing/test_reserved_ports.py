"""Tests of the ports that no other process takes while a test's server is down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparklog.errors import ClusterError
from sparklog.testing import reserved_ports
from sparklog.testing.reserved_ports import ReservedPorts


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_system_gives_no_reserved_port_to_a_connection() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = ReservedPorts()
    assert not first <= ports.reserve() <= last
    ports.close()


def test_a_reserved_port_belongs_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ReservedPorts()
    free = mine.reserve()
    mine.close()
    monkeypatch.setattr(reserved_ports, "_PORTS", range(free, free + 1))
    code = (
        f"from sparklog.testing import reserved_ports; reserved_ports._PORTS = range({free}, {free} + 1);"
        "print(reserved_ports.ReservedPorts().reserve(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{free}\n"
        with pytest.raises(ClusterError, match="no free port"):
            mine.reserve()
        other.communicate("\n")
    assert mine.reserve() == free
    mine.close()
