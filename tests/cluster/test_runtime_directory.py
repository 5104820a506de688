"""Tests of the files that a host keeps for broker processes, and of their removal."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sparklog.cluster import runtime_directory
from sparklog.cluster.process import ProcessIdentity, identify


def kept(log_dir: Path, process: ProcessIdentity) -> None:
    runtime_directory.process_config(log_dir).write_bytes(msgspec.json.encode({"log_dir": str(log_dir)}))
    runtime_directory.control_socket(log_dir).touch()
    runtime_directory.note_process(log_dir, process)


def test_only_entries_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_directory, "_BASE", tmp_path)
    own = identify(os.getpid())
    assert own is not None
    dead = ProcessIdentity(own.pid, own.start_time - 1, own.boot_id)
    standing = tmp_path / "standing"
    standing.mkdir()
    kept(standing, dead)
    kept(tmp_path / "vanished", own)
    kept(tmp_path / "vanished-and-dead", dead)
    before = set(runtime_directory.runtime_directory().iterdir())
    runtime_directory.forget_vanished()
    gone = before - set(runtime_directory.runtime_directory().iterdir())
    socket = runtime_directory.control_socket(tmp_path / "vanished-and-dead")
    assert {path.name.partition(".")[0] for path in gone} == {socket.stem}
    assert len(gone) == 3
