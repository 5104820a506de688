"""Tests of the readers of other suites' results, and of the comparison with the expected ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.suites import results
from tests.suites.results import FAILED, PASSED, SKIPPED, VARIES, Expected, Result
from tests.suites.run import SUITES


def test_results_that_are_not_expected_are_differences() -> None:
    found = {
        "a": Result(PASSED),
        "b": Result(FAILED, "no topic"),
        "c": Result(FAILED),
        "d": Result(PASSED),
        "e": Result(SKIPPED),
    }
    expected = {
        "c": Expected(PASSED, FAILED, "why"),
        "d": Expected(PASSED, FAILED, "why"),
        "e": Expected(PASSED, VARIES, "why"),
    }
    assert dict(results.differences(found, expected, "sparklog")) == {
        "b": "failed instead of passed: no topic",
        "d": "passed instead of failed: ",
    }
    lines = results.table(found, expected).splitlines()
    assert lines[0] == "2 passed, 2 failed, 1 skipped"
    assert lines[1] == "failed   b: NOT EXPECTED: no topic"


def test_the_summary_of_librdkafka_is_read() -> None:
    output = """
\x1b[31m### Test "0115_producer_auth (of a topic)" failed at test.c:1:run() at Sat Nov 28 09:50:12 2026: ###
KAFKA_PATH must be set
TEST 20261128 (bare, scenario default) SUMMARY
#==================================================================#
|\x1b[32m <MAIN>                                   |     PASSED |   5.023s \x1b[0m|
|\x1b[32m 0001_multiobj                            |     PASSED |   5.021s \x1b[0m|
|\x1b[31m 0081_admin                               |     FAILED |   1.000s \x1b[0m|\x1b[31m test failed \x1b[0m
|\x1b[36m 0052_msg_timestamps                      |    SKIPPED |   0.000s \x1b[0m|\x1b[36m old \x1b[0m
|\x1b[36m 0107_topic_recreate                      |    SKIPPED |   0.000s \x1b[0m|
#==================================================================#
"""
    assert results.read_summary(output) == {
        "0001_multiobj": Result(PASSED),
        "0115_producer_auth": Result(FAILED, "KAFKA_PATH must be set"),
        "0081_admin": Result(FAILED, "test failed"),
        "0052_msg_timestamps": Result(SKIPPED, "old"),
    }


def test_the_results_of_pytest_are_read(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="test.test_a" name="test_one"/>'
        '<testcase classname="test.test_a" name="test_two"><failure message="no&#10; topic">long</failure></testcase>'
        '<testcase classname="test.test_a" name="test_two"><error message="tear-down"/></testcase>'
        '<testcase classname="test.test_a" name="test_three"><skipped message="old"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert results.read_junit(file) == {
        "test.test_a::test_one": Result(PASSED),
        "test.test_a::test_two": Result(FAILED, "no topic"),
        "test.test_a::test_three": Result(SKIPPED, "old"),
    }


def test_the_events_of_go_are_read() -> None:
    events = [
        {"Action": "run", "Test": "TestA"},
        {"Action": "output", "Test": "TestA", "Output": "    a_test.go:12: too few\n"},
        {"Action": "fail", "Test": "TestA"},
        {"Action": "run", "Test": "TestB"},
        {"Action": "pass", "Test": "TestB"},
        {"Action": "run", "Test": "TestC"},
        {"Action": "fail"},
    ]
    output = "\n".join(["# building", *map(json.dumps, events)])
    assert results.read_go(output) == {
        "TestA": Result(FAILED, "a_test.go:12: too few"),
        "TestB": Result(PASSED),
        "TestC": Result(FAILED, "did not end"),
    }


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_expected_results_have_reasons(suite: str) -> None:
    results.read_expected(suite)
