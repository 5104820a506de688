"""Tests of the assignment of log directories: a pure decision, equal in every task."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sparklog.cluster.slots import FoundSlot, HostSurvey, Share, candidates, share_slots
from tests.cluster.support import spec


def survey(task: int, host: str = "a", *, slots: tuple[FoundSlot, ...] = (), vacancies: int = 0) -> HostSurvey:
    return HostSurvey(task, host, slots, tuple(f"/{host}/new-{k}" for k in range(vacancies)))


def slot(broker_id: int, *, host: str = "a", live: bool = False) -> FoundSlot:
    return FoundSlot(f"/{host}/slot-{broker_id}", broker_id, 9092 + broker_id, live)


def paths(shares: dict[int, Share]) -> dict[int, list[str]]:
    return {task: [found.path for found in share.slots] for task, share in shares.items()}


def test_a_fresh_host_is_divided_evenly() -> None:
    shares = share_slots([survey(task, vacancies=3) for task in range(3)], brokers=3, per_task=1)
    assert paths(shares) == {0: ["/a/new-0"], 1: ["/a/new-1"], 2: ["/a/new-2"]}


def test_two_tasks_supervise_three_running_brokers() -> None:
    standing = tuple(slot(broker_id, live=True) for broker_id in range(3))
    shares = share_slots([survey(task, slots=standing, vacancies=3) for task in range(2)], brokers=3, per_task=1)
    assert paths(shares) == {0: ["/a/slot-0", "/a/slot-2"], 1: ["/a/slot-1"]}


def test_a_lost_host_is_not_replaced_by_brokers_elsewhere() -> None:
    surveys = [survey(0, "a", slots=(slot(0),), vacancies=3), survey(1, "b", slots=(slot(1, host="b"),), vacancies=3)]
    assert paths(share_slots(surveys, brokers=3, per_task=1)) == {0: ["/a/slot-0"], 1: ["/b/slot-1"]}


def test_live_directories_come_first_then_data_then_new_ones() -> None:
    standing = (slot(0), slot(1), slot(2, live=True))
    shares = share_slots([survey(0, slots=standing, vacancies=2)], brokers=2, per_task=2)
    assert paths(shares) == {0: ["/a/slot-2", "/a/slot-0"]}


def test_a_task_without_a_directory_is_surplus() -> None:
    shares = share_slots([survey(0, vacancies=1), survey(1, vacancies=1)], brokers=2, per_task=2)
    assert paths(shares) == {0: ["/a/new-0"], 1: []}


def test_one_task_supervises_all_brokers_on_one_machine() -> None:
    assert paths(share_slots([survey(0, vacancies=3)], brokers=3, per_task=3)) == {
        0: ["/a/new-0", "/a/new-1", "/a/new-2"]
    }


hosts = st.dictionaries(
    st.sampled_from("abcd"),
    st.tuples(st.integers(1, 3), st.lists(st.booleans(), max_size=4), st.integers(0, 4)),
    min_size=1,
)


@given(hosts, st.integers(1, 6), st.integers(0, 3), st.randoms())
def test_every_task_decides_equally_and_assigns_no_directory_twice(
    cluster: dict[str, tuple[int, list[bool], int]], brokers: int, per_task: int, order: Random
) -> None:
    surveys: list[HostSurvey] = []
    next_id = 0
    for host, (tasks, standing, vacancies) in cluster.items():
        slots = tuple(slot(next_id + k, host=host, live=live) for k, live in enumerate(standing))
        next_id += len(standing)
        surveys += [
            survey(task, host, slots=slots, vacancies=vacancies) for task in range(len(surveys), len(surveys) + tasks)
        ]
    shuffled = list(surveys)
    order.shuffle(shuffled)
    shares = share_slots(surveys, brokers=brokers, per_task=per_task)
    assert shares == share_slots(shuffled, brokers=brokers, per_task=per_task)
    dealt = [
        (next(s.host for s in surveys if s.task == task), found.path) for task in shares for found in shares[task].slots
    ]
    assert len(dealt) == len(set(dealt)) <= brokers
    assert all(path.startswith(f"/{host}/") for host, path in dealt)


def test_new_slot_directories_continue_the_numbers(tmp_path: Path) -> None:
    for name in ("slot-0", "slot-2", "slot-10", "slot-x", "zookeeper"):
        (tmp_path / name).mkdir()
    standing, possible = candidates(spec(tmp_path))
    assert [path.name for path in standing] == ["slot-0", "slot-2", "slot-10"]
    assert [path.name for path in possible] == ["slot-1", "slot-3", "slot-4"]


def test_named_log_directories_are_the_only_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    standing, possible = candidates(spec(tmp_path, log_dirs=(str(tmp_path / "a"), str(tmp_path / "b"))))
    assert (standing, possible) == ([tmp_path / "a"], [tmp_path / "b"])
