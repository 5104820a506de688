"""Tests of a broker's log: repeated lines of thousands of partitions, and texts of other users."""

from __future__ import annotations

import ast
import logging

import pytest

from sparklog.broker.lifecycle.logging_setup import LineFormatter, Lines
from tests.conftest import ROOT


def test_a_burst_of_log_lines_is_cut_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("sparklog.broker.lifecycle.logging_setup.time.monotonic", lambda: now)
    lines = Lines(logging.getLogger("sparklog.test"))
    with caplog.at_level(logging.INFO, logger="sparklog.test"):
        for number in range(1000):
            lines.info("partition %d", number)
        assert caplog.messages == [f"partition {number}" for number in range(20)]
        now += 10
        lines.info("partition %d", 1000)
        lines.info("partition %d", 1001)
    assert caplog.messages[20:] == ["partition 1000 (980 more like this were dropped)", "partition 1001"]
    assert caplog.records[-1].filename == "test_logging_setup.py"


def lines_of(message: str, *arguments: object, error: BaseException | None = None) -> list[str]:
    """Return the line of a log file for a record that another handler has already formatted."""
    record = logging.LogRecord(
        "sparklog.test",
        logging.INFO,
        __file__,
        1,
        message,
        arguments,
        (type(error), error, error.__traceback__) if error is not None else None,
        sinfo="Stack:\n  " + "\x1b[2J" if error is not None else None,
    )
    logging.Formatter().format(record)
    formatter = LineFormatter("%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s", datefmt="%H:%M:%S")
    return formatter.format(record).split("\n")


def test_a_name_in_a_message_cannot_forge_a_log_line() -> None:
    member = "m\n12:00:00 INFO [MainThread] sparklog.broker: all is well\x1b]0;owned\x07\u202e"
    (line,) = lines_of("member %s left group %r", member, "g")
    assert line.endswith(r"member m\n12:00:00 INFO [MainThread] sparklog.broker: all is well\x1b]0;owned\x07\u202e"
                         " left group 'g'")  # fmt: skip
    assert line.isprintable()


def test_tracebacks_keep_their_lines_and_cannot_resemble_messages() -> None:
    try:
        raise ValueError("first\n12:00:00 INFO [MainThread] forged\x1b[2J")
    except ValueError as error:
        first, *others = lines_of("failed", error=error)
    assert first.endswith("sparklog.test: failed")
    assert "| ValueError: first" in others
    assert r"| 12:00:00 INFO [MainThread] forged\x1b[2J" in others
    assert r"|   \x1b[2J" in others
    assert all(line.startswith("| ") and line.isprintable() for line in others)


def test_every_log_of_a_program_has_this_formatter() -> None:
    """The formatter covers log files and standard error, in brokers, drivers, tasks and standby controllers."""
    for module in [*ROOT.glob("sparklog/**/*.py"), *ROOT.glob("jobs/*.py")]:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "logging":
                is_base = module.name == "logging_setup.py" and node.attr == "Formatter"
                assert node.attr != "Formatter" or is_base, (
                    f"{module}:{node.lineno}: the handler must use LineFormatter"
                )
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.basicConfig":
                named = {keyword.arg for keyword in node.keywords}
                assert "handlers" in named and "format" not in named, (
                    f"{module}:{node.lineno}: the handler must use LineFormatter"
                )
