"""Tests of the command as users run it: a process with pipes, signals and an exit code, against real brokers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.testing.process_cluster import ProcessCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COMMAND = [sys.executable, "-m", "sparklog.cli.main"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(1, settings={"default.replication.factor": "1"}) as running:
        yield running


@pytest.fixture
def environment(cluster: ProcessCluster) -> dict[str, str]:
    return {**os.environ, "SPARKLOG_BOOTSTRAP": cluster.bootstrap, "TERM": "dumb"}


def sparklog(environment: dict[str, str], *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], env=environment, input=stdin, capture_output=True, timeout=60, check=False
    )


def test_a_file_becomes_records_and_lines(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("carrier,delay\nUA,1.5\nAA,\n")
    assert sparklog(environment, "topics", "create", "f", "-p", 2, "--schema-from", tmp_path / "f.csv").returncode == 0
    written = sparklog(environment, "produce", "f", tmp_path / "f.csv")
    assert written.returncode == 0, written.stderr
    assert written.stderr.startswith(b"2 records written to f in ")
    read = sparklog(environment, "consume", "f", "--format", "json")
    assert sorted(map(json.loads, read.stdout.splitlines()), key=str) == [
        {"carrier": "AA", "delay": None},
        {"carrier": "UA", "delay": 1.5},
    ]
    assert sparklog(environment, "topics", "list").stdout == b"f\n"
    (broker,) = json.loads(sparklog(environment, "brokers", "--json").stdout)["brokers"]
    assert (broker["state"], broker["leaders"]) == ("running", 2)
    assert sparklog(environment, "topics", "delete", "f", "--yes").returncode == 0
    gone = sparklog(environment, "consume", "f")
    assert (gone.returncode, gone.stdout) == (1, b"")
    assert gone.stderr.startswith(b"sparklog: UNKNOWN_TOPIC_OR_PARTITION")
    assert gone.stderr.count(b"\n") == 1


def test_ctrl_c_ends_a_following_consumer(environment: dict[str, str]) -> None:
    assert sparklog(environment, "topics", "create", "follow").returncode == 0
    with subprocess.Popen(
        [*COMMAND, "consume", "follow", "--follow"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        try:
            assert sparklog(environment, "produce", "follow", "-q", stdin=b"first\n").returncode == 0
            assert reader.stdout.readline() == b"first\n"
            reader.send_signal(signal.SIGINT)
            assert reader.wait(30) == 130
            assert b"Traceback" not in reader.stderr.read()
        finally:
            reader.kill()


@pytest.mark.extended
def test_a_closed_pipe_ends_the_command(environment: dict[str, str]) -> None:
    assert sparklog(environment, "topics", "create", "pipe").returncode == 0
    lines = b"".join(b"%d\n" % number for number in range(200_000))
    assert sparklog(environment, "produce", "pipe", "-q", stdin=lines).returncode == 0
    with subprocess.Popen(
        [*COMMAND, "consume", "pipe"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert reader.stdout.readline().strip().isdigit()
        reader.stdout.close()
        assert reader.wait(30) == 141
        assert reader.stderr.read() == b""


def test_lines_are_written_as_they_arrive(environment: dict[str, str]) -> None:
    assert sparklog(environment, "topics", "create", "typed").returncode == 0
    with subprocess.Popen([*COMMAND, "produce", "typed", "-q"], env=environment, stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        try:
            writer.stdin.write(b"now\n")
            writer.stdin.flush()
            read = sparklog(environment, "consume", "typed", "--follow", "-n", 1)
            assert read.stdout == b"now\n", "the line must arrive while standard input is still open"
            writer.stdin.close()
            assert writer.wait(30) == 0
        finally:
            writer.kill()


def test_a_terminal_gets_a_table(environment: dict[str, str]) -> None:
    assert sparklog(environment, "topics", "create", "shown").returncode == 0
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, "topics", "list"], env={**environment, "COLUMNS": "100"}, stdout=theirs, timeout=60, check=False
        )
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert "shown" in shown
    assert "in sync" in shown


def test_top_draws_on_a_terminal(environment: dict[str, str]) -> None:
    assert sparklog(environment, "topics", "create", "watched").returncode == 0
    ours, theirs = pty.openpty()
    shown = bytearray()
    try:
        terminal = {**environment, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        with subprocess.Popen([*COMMAND, "top", "-i", "0.2", "-n", "3"], env=terminal, stdout=theirs) as watching:
            os.close(theirs)
            with contextlib.suppress(OSError):  # the read fails when no process has the other end open
                while part := os.read(ours, 65536):
                    shown += part
            assert watching.wait(30) == 0
    finally:
        os.close(ours)
    assert shown.startswith(b"\x1b[?1049h") and b"\x1b[?1049l" in shown, (
        "top must switch to the alternate screen and back"
    )
    assert b"1 brokers, 0 under-replicated, 0 without a leader" in shown
    assert b"busiest partitions" in shown and b"watched-0" in shown


@pytest.mark.extended
def test_a_brokers_refusal_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    assert sparklog(environment, "topics", "create", "small", "-c", "max.message.bytes=2048").returncode == 0
    large = tmp_path / "large.txt"
    large.write_text("x" * 4096 + "\n")
    for arguments, expected in (
        (("topics", "create", "a/b"), b"INVALID_TOPIC_EXCEPTION: topic name 'a/b'"),
        (("topics", "create", "many", "-r", 3), b"found replication factor 3; expected 1 to 1"),
        (("produce", "small", large), b"MESSAGE_TOO_LARGE"),
        (("consume", "small", "--from", 7), b"OFFSET_OUT_OF_RANGE"),
    ):
        refused = sparklog(environment, *arguments)
        assert refused.returncode in {1, 2}, refused
        assert refused.stdout == b""
        assert expected in refused.stderr
        assert refused.stderr.count(b"\n") == 1 and refused.stderr.startswith(b"sparklog: ")
    assert b"many" not in sparklog(environment, "topics", "list").stdout
    assert sparklog(environment, "consume", "small").stdout == b""
    assert sparklog(environment, "topics", "delete", "small", "--yes").returncode == 0
