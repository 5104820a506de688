"""Tests that docs/cli.md and the command agree: every command of the page runs, and the page has every command."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner

from sparklog.cli.main import app
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.cli.in_process import Result, in_process
from tests.cluster.supervised_cluster import SupervisedCluster
from tests.delta.tables import Archived, described, placed

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sparklog.cli.main"]
#: The page's words for a command that exits with 1.
FAILS = "exits with 1"
#: These run until a signal ends them, so they have no document to print. A dump of records is lines.
WITHOUT_JSON = {"cluster start", "controller"}


def lines_of(*sections: str) -> list[str]:
    """Return the page's commands in order: those of the sections, or with minus signs those of all other sections."""
    found = []
    for part in re.split(r"^## ", (ROOT / "docs" / "cli.md").read_text("utf-8"), flags=re.MULTILINE):
        title = part.partition("\n")[0]
        if (title in sections) or (sections[0].startswith("-") and f"-{title}" not in sections):
            found += [line.strip() for line in part.splitlines() if line.startswith("    ")]
    return [line for line in found if not line.startswith("export ")]


def words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    return list(lexer)


def stages_of(line: str) -> tuple[list[list[str]], str | None]:
    """Return the commands of a pipeline, and the file for its output."""
    words, file = words_of(line), None
    if ">" in words:
        at = words.index(">")
        words, file = words[:at], words[at + 1]
    stages: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            stages.append([])
        else:
            stages[-1].append(word)
    return stages, file


def run_line(line: str) -> Result:
    """Run a line as a shell would, with sparklog's commands in this process."""
    stages, file = stages_of(line)
    result = Result(0, b"", "")
    for stage in stages:
        if stage[0] == "sparklog":
            result = in_process(*stage[1:], stdin=result.out)
        else:
            done = subprocess.run(stage, input=result.out, capture_output=True, timeout=30, check=True)
            result = Result(0, done.stdout, "")
    if file is not None:
        Path(file).write_bytes(result.out)
    return result


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children or command.invoke_without_command:
        yield " ".join(path), command
    for name, child in children.items():
        yield from commands(child, (*path, name))


ALL = dict(sorted(commands(typer.main.get_command(app))))
ALL.pop("", None)


def name_of(words: list[str]) -> str:
    """Return the longest command that ``words`` begin with."""
    return max((name for name in ALL if words[: len(name.split())] == name.split()), key=len, default="")


# --- against clusters ---


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(240)
def test_every_command_of_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The commands have no login. As a super user they may use ACLs, too.
    settings = {
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.num.partitions": "1",
        "super.users": "User:ANONYMOUS",
    }
    with SupervisedCluster(tmp_path, brokers=4, settings=settings) as cluster:
        monkeypatch.setenv("SPARKLOG_BOOTSTRAP", cluster.bootstrap)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(tmp_path)
        for number in range(4):
            Path(f"broker-{number}").mkdir()
            Path(f"broker-{number}/logs").symlink_to(tmp_path / f"slot-{number}")
        archive_clicks(tmp_path / "lake")
        # The commands about tokens need a login: see tests/broker/test_delegation_tokens.py.
        for line in lines_of("-A cluster", "-Tokens"):
            result = run_line(line)
            expected = 1 if FAILS in line else 0
            assert result.code == expected, f"{line}\n{result.text}\n{result.err}"
            assert "--json" not in line or result.out.strip()[:1] in {b"[", b"{"} or ">" in line, line
        assert in_process("topics", "list").text == "events\n", "only the page's last topic may remain"


def archive_clicks(lake: Path) -> None:
    """Write the table of a deleted topic."""
    topic = described("clicks", DEFAULT_SCHEMA, partitions=2, key=("key",), event_time="timestamp")
    rows = [{"key": None, "value": b"%d" % offset, "headers": None} for offset in range(5)]
    own = pa.Table.from_pylist(rows, schema=DEFAULT_SCHEMA.remove(3))
    Archived(lake, topic).append(placed(own, [0] * 5, list(range(5)), [1_700_000_000_000_000] * 5), {0: 7, 1: 0})


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.extended
def test_a_cluster_is_started_inspected_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").symlink_to(ROOT / "conf")
    started, status, stopped, standby = (words_of(line) for line in lines_of("A cluster"))
    try:
        assert "brokers at 127.0.0.1:" in sparklog(started)
        assert "under replicated   0\n" in sparklog(status)
        assert '"brokers":[0]' in sparklog([*status, "--json"])
        again = subprocess.run([*COMMAND, *started[1:]], capture_output=True, timeout=60, check=False)
        assert (again.returncode, b"already" in again.stderr) == (1, True)
        stands_by(standby, zookeeper_of(tmp_path / "data"), monkeypatch)
    finally:
        said = sparklog(stopped)
    assert said.startswith("stopped in ")
    gone = subprocess.run([*COMMAND, *status[1:]], capture_output=True, timeout=60, check=False)
    assert (gone.returncode, b"no cluster driver" in gone.stderr) == (1, True)


def sparklog(words: list[str]) -> str:
    done = subprocess.run([*COMMAND, *words[1:]], capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done
    return done.stdout.decode()


def zookeeper_of(data_dir: Path) -> str:
    from sparklog.cluster.driver_pidfile import noted_driver

    found = noted_driver(data_dir)
    assert found is not None
    return found.zookeeper


def stands_by(words: list[str], zookeeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKLOG_ZOOKEEPER", zookeeper)
    with subprocess.Popen([*COMMAND, *words[1:]], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert b"standing by" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


# --- the page and the help, without a cluster ---


def test_the_page_has_every_command() -> None:
    shown = {name_of(stage[1:]) for line in lines_of("-") for stage in stages_of(line)[0] if stage[0] == "sparklog"}
    assert set(ALL) - shown == set()
    assert "" not in shown, "a line of the page names no command"


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_its_own_example(name: str) -> None:
    output = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    found = re.search(r"Example: (sparklog [^│\n]+)", output)
    assert found is not None, output
    assert name_of(shlex.split(found[1])[1:]) == name


@pytest.mark.parametrize("name", sorted(set(ALL) - WITHOUT_JSON))
def test_every_command_can_answer_in_json(name: str) -> None:
    assert "--json" in [option for parameter in ALL[name].params for option in parameter.opts]
