"""The assignment of log directories (slots) to the tasks of a generation.

One log directory belongs to one broker. The assignment does not depend on a task's index, because executors change and
two tasks may share a host. Every task lists the log directories of its host and receives the lists of all tasks.
``share_slots`` then returns the same result in every task. A broker's id and port are stored only in the ``meta.json``
of its directory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from sparklog.cluster.generation import GenerationSpec


class FoundSlot(msgspec.Struct, frozen=True):
    """A log directory that was found on a host, or that could be created there.

    ``broker_id`` and ``port`` are -1 if the directory has never belonged to a broker.
    """

    path: str
    broker_id: int = -1
    port: int = -1
    #: Whether a broker process uses this directory or is starting with it.
    live: bool = False


class HostSurvey(msgspec.Struct, frozen=True):
    """The log directories of a host, as listed by one task.

    Two tasks have the same ``host`` if and only if they list the same directories.
    """

    task: int
    host: str
    slots: tuple[FoundSlot, ...]
    #: The directories that could be created for new brokers, the preferred one first.
    vacancies: tuple[str, ...]
    problem: str = ""


class Slot(NamedTuple):
    """The log directory of one broker. This process holds its lock."""

    path: Path
    broker_id: int
    port: int


class Share(msgspec.Struct, frozen=True):
    """The log directories whose brokers one task supervises."""

    slots: tuple[FoundSlot, ...]


def share_slots(surveys: Sequence[HostSurvey], *, brokers: int, per_task: int) -> dict[int, Share]:
    """Assign log directories to tasks. The result does not depend on the order of ``surveys``.

    Directories that have a broker come first: live brokers before stopped brokers, then lower ids before higher ids. So
    a running broker keeps a supervisor, and a broker with data restarts before a new one is created. A task may get
    more than ``per_task`` of these directories, because there may be fewer executors than before. New directories are
    then assigned, the least loaded task first, until tasks have ``per_task`` directories.
    """
    hosts: dict[str, list[HostSurvey]] = defaultdict(list)
    for survey in sorted(surveys, key=lambda survey: survey.task):
        hosts[survey.host].append(survey)
    load: dict[int, list[FoundSlot]] = {survey.task: [] for survey in surveys}

    known = [(slot, host) for host, tasks in hosts.items() for slot in tasks[0].slots if slot.broker_id >= 0]
    known.sort(key=lambda pair: (not pair[0].live, pair[0].broker_id, pair[1]))
    for slot, host in known[:brokers]:
        load[_least_loaded(hosts[host], load)].append(slot)

    missing = brokers - min(len(known), brokers)
    vacancies = {host: list(tasks[0].vacancies) for host, tasks in hosts.items()}
    while missing > 0:
        open_tasks = [
            survey
            for tasks in hosts.values()
            for survey in tasks
            if len(load[survey.task]) < per_task and vacancies[survey.host]
        ]
        if not open_tasks:
            break
        task = _least_loaded(open_tasks, load)
        host = next(survey.host for survey in open_tasks if survey.task == task)
        load[task].append(FoundSlot(vacancies[host].pop(0)))
        missing -= 1
    return {task: Share(tuple(slots)) for task, slots in load.items()}


def _least_loaded(tasks: Sequence[HostSurvey], load: dict[int, list[FoundSlot]]) -> int:
    return min((survey.task for survey in tasks), key=lambda task: (len(load[task]), task))


def candidates(spec: GenerationSpec) -> tuple[list[Path], list[Path]]:
    """Return the existing log directories of this host, and the paths of log directories that a task could create."""
    if spec.log_dirs:
        paths = [Path(path) for path in spec.log_dirs]
        return [path for path in paths if path.is_dir()], [path for path in paths if not path.is_dir()]
    root = Path(spec.data_dir)
    existing = sorted(
        (path for path in root.glob("slot-*") if path.is_dir() and path.name[5:].isdigit()),
        key=lambda path: int(path.name[5:]),
    )
    taken = {path.name for path in existing}
    free = (f"slot-{k}" for k in itertools.count() if f"slot-{k}" not in taken)
    return existing, [root / name for name in itertools.islice(free, spec.brokers)]
