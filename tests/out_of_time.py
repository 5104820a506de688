"""A second attempt, alone, for tests of real processes that only timed out: ``-p tests.out_of_time``.

A test does not control how long a session, a JVM or an election takes on a shared machine. If every failure of a run is
a timeout, ``--again`` runs these tests a second time, and their result is final. Any other failure (a lost, duplicate
or reordered record, a wrong result) fails the whole run immediately: a timeout beside it may be its consequence.

A run with ``--again`` appends the tests that it repeats to the file in ``SPARKLOG_SECOND_ATTEMPTS``, if that is set:
``tests/run`` prints them at its end.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

#: A larger number of timeouts has another cause.
AT_MOST = 3
#: The environment variable that names the file of second attempts.
SECOND_ATTEMPTS = "SPARKLOG_SECOND_ATTEMPTS"

_KEY = "sparklog/out_of_time"
_RAN_OUT = re.compile(
    r"(\w+\.)*(ClientTimeout|TimeoutError|TimeoutExpired): |.*\bwaited [\d.]+ s in vain\b|.*\bTimeout \(?>"
)


def ran_out(message: str) -> bool:
    """Return whether the first line of an exception reports a timeout."""
    return bool(_RAN_OUT.match(message.partition("\n")[0]))


class OutOfTime:
    """The failures of one run, including those of its workers. Owner: the process that reports."""

    def __init__(self) -> None:
        self._waits: list[str] = []
        self._others = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and ran_out(crash.message):
            self._waits.append(report.nodeid)
        else:
            self._others += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = session.config.cache
        assert cache is not None
        waits = sorted(set(self._waits))
        cache.set(_KEY, waits if not self._others and len(waits) <= AT_MOST else [])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="only what ran out of time in the last run")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.getoption("again"):
        config.pluginmanager.register(OutOfTime())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("again"):
        return
    assert config.cache is not None
    wanted = set(config.cache.get(_KEY, []))
    if not wanted:
        pytest.exit("not only for lack of time: no second attempt", returncode=1)
    items[:] = [item for item in items if item.nodeid in wanted]
    if attempts := os.environ.get(SECOND_ATTEMPTS):
        with Path(attempts).open("a") as file:
            file.writelines(f"{item.nodeid}\n" for item in items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    assert config.cache is not None
    waits = config.cache.get(_KEY, [])
    if waits and not config.getoption("again"):
        terminalreporter.section("out of time, to be tried again alone")
        for nodeid in waits:
            terminalreporter.write_line(nodeid)
