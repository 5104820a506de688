"""Tests of the assignment of test groups to processes: a process with a session gets the other groups of that
directory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.conftest import pytest_xdist_make_scheduler

ORDER = ["delta/test_long", "spark/test_long", "zk/test_a", "delta/test_b", "delta/test_c", "spark/test_d"]


class Process:
    """A worker as the scheduler sees it: the tests that it received, in order."""

    shutting_down = False

    def __init__(self, collection: list[str]) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self._collection = collection
        self.sent: list[str] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += [self._collection[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_process_finishes_one_session_before_it_begins_another() -> None:
    tests = [f"tests/{name}.py::test_{number}" for name in ORDER for number in range(3)]
    two = [Process(tests), Process(tests)]
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=option)
    groups = pytest_xdist_make_scheduler(cast(Any, config), None)
    for process in two:
        groups.add_node(process)
        groups.add_node_collection(process, tests)
    groups.schedule()
    done = [0, 0]
    while not groups.tests_finished:
        for number, process in enumerate(two):  # all processes have the same speed
            if done[number] < len(process.sent):
                groups.mark_test_complete(process, tests.index(process.sent[done[number]]))
                done[number] += 1
    files = [list(dict.fromkeys(test.partition("::")[0][6:-3] for test in process.sent)) for process in two]
    assert files == [
        ["delta/test_long", "delta/test_b", "delta/test_c"],
        ["spark/test_long", "spark/test_d", "zk/test_a"],
    ]
    assert sorted(two[0].sent + two[1].sent) == sorted(tests), "each test must run once"
