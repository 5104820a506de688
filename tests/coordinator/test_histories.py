"""Random histories of one key: each version is committed at most once, by one set of winners, and each producer id has
one fate.

Drivers die and return, tasks append late, and the coordinator changes at any moment.
"""

from __future__ import annotations

import random

import pytest

from sparklog.coordinator import core, transaction_end
from sparklog.coordinator.effects import Begun, Done, Ended
from sparklog.coordinator.events import MarkersWritten
from sparklog.coordinator.records import PartitionPlace
from tests.coordinator.host import Host

PARTITIONS = [("a", 0), ("a", 1), ("b", 0)]


class Log:
    """One partition's log: the producer ids with appends, and the outcome of each here."""

    def __init__(self) -> None:
        self.appended: set[int] = set()
        self.fate: dict[int, str] = {}


class History:
    """One seed: tasks register, are verified as by a leader, and append; drivers decide; all interleaved."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.host = Host()
        self.logs = {partition: Log() for partition in PARTITIONS}
        self.runs: list[dict[str, object]] = []
        self.version = 0
        self.told: dict[int, set[frozenset[int]]] = {}
        self.number = 0

    def play(self, steps: int = 200) -> None:
        often = [self.join, self.register, self.register, self.decide, self.deliver, *[self.commit_append] * 4]
        seldom = [self.start_run, self.crash, self.time_passes, self.rewrite]
        for _ in range(steps):
            self.chance.choice(seldom if self.chance.random() < 0.15 or not self.runs else often)()
        self.calm_down()

    def start_run(self) -> None:
        self.number += 1
        self.runs.append(
            {"id": f"r{self.number}", "version": self.version, "tickets": [], "ids": set(), "wrote": set()}
        )
        self.runs = self.runs[-3:]

    def join(self) -> None:
        if self.runs:
            run = self.chance.choice(self.runs)
            run["tickets"].append(self.host.begin("k", run["id"], run["version"]))  # type: ignore[attr-defined, arg-type]

    def register(self) -> None:
        """Register a partition for a task, and append there after its leader has verified the task."""
        ready = [run for run in self.runs if self.ids(run)]
        if not ready:
            return
        run = self.chance.choice(ready)
        producer = self.chance.choice(sorted(self.ids(run)))
        partition = self.chance.choice(PARTITIONS)
        self.host.add("k", str(run["id"]), producer, partition)
        if self.chance.random() < 0.5 and self.host.appends:
            self.host.commit_one()
        log = self.logs[partition]
        if producer not in log.fate and isinstance(
            self.host.answers[self.host.verify("k", producer, *partition)], Done
        ):
            log.appended.add(producer)
            run["wrote"].add(producer)  # type: ignore[attr-defined]

    def ids(self, run: dict[str, object]) -> set[int]:
        found = set()
        for ticket in run["tickets"]:  # type: ignore[attr-defined]
            outcome = self.host.answers.get(ticket)
            if isinstance(outcome, Begun) and not outcome.committed:
                found.add(outcome.producer_id)
        return found

    def decide(self) -> None:
        if not self.runs:
            return
        run = self.chance.choice(self.runs)
        if not run["wrote"] and self.chance.random() < 0.9:
            return
        winners = tuple(sorted(run["wrote"]))  # type: ignore[call-overload]
        commit = self.chance.random() < 0.8
        ticket = self.host.end("k", str(run["id"]), int(str(run["version"])), *winners, commit=commit)
        run.setdefault("ends", []).append((ticket, commit, winners))  # type: ignore[attr-defined]
        self.note()

    def note(self) -> None:
        for run in self.runs:
            for ticket, commit, winners in run.get("ends", ()):  # type: ignore[attr-defined]
                outcome = self.host.answers.get(ticket)
                if commit and isinstance(outcome, Ended) and not outcome.replayed:
                    self.told.setdefault(int(str(run["version"])), set()).add(frozenset(winners))
                    self.version = max(self.version, int(str(run["version"])) + 1)

    def commit_append(self) -> None:
        if self.host.appends:
            if self.chance.random() < 0.1:
                self.host.refuse_one()
            else:
                self.host.commit_one()
            self.note()

    def deliver(self) -> None:
        """Deliver some markers, in any order, and some of them twice."""
        for sent in list(self.host.markers):
            marker = self.chance.choice(sent.markers)
            self.mark(marker)
            place = PartitionPlace(marker.topic, marker.partition)
            self.host.step(MarkersWritten(sent.key, sent.decision, (place,), sent.part))

    def mark(self, marker: object) -> None:
        log = self.logs[marker.topic, marker.partition]  # type: ignore[attr-defined]
        for fate in ("committed", "aborted"):
            for producer, _ in getattr(marker, fate):
                assert log.fate.setdefault(producer, fate) == fate, f"{producer} was {log.fate[producer]}, now {fate}"

    def crash(self) -> None:
        if self.chance.random() < 0.5:
            self.host.crash(keep=self.chance.randint(0, len(self.host.appends)))

    def time_passes(self) -> None:
        self.host.tick(self.chance.choice([100, 1_000, 70_000]))
        self.note()

    def rewrite(self) -> None:
        if self.chance.random() < 0.3:
            self.host.rewrite()

    def calm_down(self) -> None:
        """Abort every open transaction and deliver every marker."""
        for _ in range(3):
            self.host.tick(4_000_000)
            while self.host.appends or self.host.markers:
                while self.host.appends:
                    self.host.commit_one()
                sent = self.host.markers[0] if self.host.markers else None
                for marker in sent.markers if sent is not None else ():
                    self.mark(marker)
                if sent is not None:
                    self.host.markers.remove(sent)
                    written = tuple(PartitionPlace(marker.topic, marker.partition) for marker in sent.markers)
                    self.host.step(MarkersWritten(sent.key, sent.decision, written, sent.part))
        self.note()

    def check(self, where: str = "") -> None:
        for version, told in self.told.items():
            assert len(told) == 1, f"{where}version {version} was committed by {told}"
        committed = {
            producer for log in self.logs.values() for producer, fate in log.fate.items() if fate == "committed"
        }
        winners = {producer for told in self.told.values() for group in told for producer in group}
        for partition, log in self.logs.items():
            for producer in log.appended:
                assert producer in log.fate, f"{where}{partition}: producer {producer} stays open"
                assert (log.fate[producer] == "committed") == (producer in committed), (
                    f"{where}{producer} is half committed"
                )
                if producer in winners:
                    assert log.fate[producer] == "committed", (
                        f"{producer} received a commit, but its fate is {log.fate}"
                    )


@pytest.mark.parametrize("block", range(8))
def test_every_producer_id_has_one_fate(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if block % 2:
        monkeypatch.setattr(transaction_end, "PARTICIPANTS_AT_ONCE", 1 + block // 2 % 2)
        monkeypatch.setattr(core, "RECORDS_AT_ONCE", 1 + block // 4)
    for seed in range(block * 50, block * 50 + 50):
        history = History(seed)
        history.play()
        history.check(f"seed {seed}, ")


def test_the_histories_contain_enough_events() -> None:
    """Without events the test above would prove nothing."""
    histories = [History(seed) for seed in range(50)]
    for history in histories:
        history.play()
    fates = [fate for history in histories for log in history.logs.values() for fate in log.fate.values()]
    assert sum(len(history.told) for history in histories) > 20
    assert fates.count("committed") > 40 and fates.count("aborted") > 100
