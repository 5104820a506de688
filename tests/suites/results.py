"""Results of other projects' test suites: how each test ended, what is expected, and the table of both.

The file ``expected/NAME.tsv`` has a row for each test of a suite that does not pass on sparklog or on Kafka: the test,
its results on Kafka and on sparklog, and the reason. A test without a row passes on both.
"""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
#: An expected result of a test that has a race of its own: it passes in some runs.
VARIES = "varies"
OUTCOMES = (PASSED, FAILED, SKIPPED, VARIES)
EXPECTED = Path(__file__).with_name("expected")
_COLUMNS = ("test", "kafka", "sparklog", "reason")
_SUMMARY = re.compile(r"^\| (\d{4}_\w+)\s+\|\s+(\w+) \|\s+[\d.]+s \|[ \t]*(.*)$", re.MULTILINE)
_FAILURE = re.compile(r'^### Test "(\d{4}_\w+?)(?: \(.*\))?" failed at .*: ###\n(.*)$', re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class Result(NamedTuple):
    """How one test ended, and what the suite says about it."""

    outcome: str
    words: str = ""


class Expected(NamedTuple):
    """The expected results of one test on both systems."""

    kafka: str
    sparklog: str
    reason: str


def read_expected(suite: str) -> dict[str, Expected]:
    """Return the tests of a suite that do not pass everywhere.

    Raises:
        ValueError: a row is incomplete or has an unknown result.
    """
    with (EXPECTED / f"{suite}.tsv").open(newline="") as file:
        reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            raise ValueError(f"{file.name}: the columns are {reader.fieldnames}, expected {_COLUMNS}")
        found = {row.pop("test"): Expected(**row) for row in reader}
    for test, row in found.items():
        if not (row.kafka in OUTCOMES and row.sparklog in OUTCOMES and row.reason):
            raise ValueError(f"{suite}: {test} has the row {row}")
    return found


def differences(
    results: Mapping[str, Result], expected: Mapping[str, Expected], system: str
) -> Iterator[tuple[str, str]]:
    """Yield each test whose result on ``system`` ("kafka", "sparklog") is not the expected one, with both results."""
    for test, result in sorted(results.items()):
        row = expected.get(test)
        wanted = PASSED if row is None else str(getattr(row, system))
        if wanted not in {result.outcome, VARIES}:
            yield test, f"{result.outcome} instead of {wanted}: {result.words}"


def table(results: Mapping[str, Result], expected: Mapping[str, Expected]) -> str:
    """Return the results as text: their numbers, and each test that did not pass with its reason."""
    numbers = Counter(result.outcome for result in results.values())
    lines = [", ".join(f"{numbers[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED))]
    for test, result in sorted(results.items()):
        if result.outcome != PASSED:
            row = expected.get(test)
            reason = row.reason if row is not None else f"NOT EXPECTED: {result.words}"
            lines.append(f"{result.outcome:8} {test}: {reason}")
    return "\n".join(lines)


def read_summary(output: str) -> dict[str, Result]:
    """Return the results in the output of librdkafka's test-runner.

    Its summary has them. The runner may abort before the summary when a test has failed.
    """
    named = {"PASSED": PASSED, "FAILED": FAILED, "RUNNING": FAILED}
    text = _COLOR.sub("", output)
    found = {}
    for name, state, words in _SUMMARY.findall(text):
        if state in named or words:  # a test of another scenario is skipped without a reason
            found[name] = Result(named.get(state, SKIPPED), words.strip())
    for name, words in _FAILURE.findall(text):
        found[name] = Result(FAILED, _line(words))
    return found


def read_junit(path: Path) -> dict[str, Result]:
    """Return the results in a JUnit file of pytest, by module and name."""
    found: dict[str, Result] = {}
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        result = Result(PASSED)
        for child in case:
            if child.tag in {"failure", "error"}:
                result = Result(FAILED, _line(child.get("message")))
            elif child.tag == "skipped":
                result = Result(SKIPPED, _line(child.get("message")))
        before = found.get(name)  # a test whose tear-down failed has two entries
        found[name] = before if before is not None and before.outcome == FAILED else result
    return found


def read_go(output: str) -> dict[str, Result]:
    """Return the results in the output of ``go test -json``. A test that did not end has failed."""
    named = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}
    found: dict[str, Result] = {}
    words: dict[str, str] = {}
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        test, action = event.get("Test"), event["Action"]
        if test is None:
            continue
        if action == "run":
            found[test] = Result(FAILED, "did not end")
        elif action == "output" and re.search(r"_test\.go:\d+: ", event["Output"]):
            words.setdefault(test, _line(event["Output"]))
        elif action in named:
            found[test] = Result(named[action], words.get(test, ""))
    return found


def _line(text: str | None) -> str:
    return " ".join((text or "").split())[:300]
