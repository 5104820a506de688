"""Tests of the check whether the process of another archive may still run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sparklog.delta.process_liveness import longest_wait_s, may_run, this_process
from tests.waiting import wait_until


def test_a_local_process_is_examined_and_a_remote_one_may_run() -> None:
    own = this_process()
    host, boot, number, began = own.split("/")
    assert number.isdecimal() and began.isdecimal()
    assert not may_run(own), "this process knows which archives it runs"
    assert not may_run(""), "a commit of an old release names no process"
    for other in (
        f"elsewhere/{boot}/{number}/{began}",
        f"{host}/earlier/{number}/{began}",
        "as a later version says it",
    ):
        assert may_run(other)
    assert not may_run(f"{host}/{boot}/{number}/1"), "another process has the pid by now"
    with subprocess.Popen(["sleep", "600"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        found = f"{host}/{boot}/{process.pid}/{stat.rpartition(')')[2].split()[19]}"
        assert may_run(found)
        process.kill()
        wait_until(lambda: not may_run(found), "the end of a process without a wait()")
    assert not may_run(found)


def test_the_wait_for_another_archive_is_limited() -> None:
    assert [longest_wait_s(every_s) for every_s in (0.0, 2.0, 30.0, 3600.0)] == [10.0, 5.0, 47.0, 120.0]
