"""Tests of versions by topic.

One transaction covers several topics, each with its own versions. Runs of one name may have two keys, and only one of
them may commit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sparklog.coordinator.effects import Append, Begun, Ended, Respond, Settled
from sparklog.coordinator.events import MarkersWritten, SettleRequested
from sparklog.coordinator.records import PartitionPlace
from sparklog.coordinator.transactions import Transactions, TransactionSettings
from tests.coordinator.host import Host

A, B, C = ("a", 0, "id-a"), ("b", 0, "id-b"), ("c", 0, "id-c")
ROWS = "app::x"


@pytest.fixture
def host() -> Host:
    return Host()


def begun(host: Host, run: str, version: int) -> int:
    ticket = host.begin(ROWS, run, version, by_topic=True)
    host.settle()
    outcome = host.answers[ticket]
    assert isinstance(outcome, Begun) and not outcome.committed
    return outcome.producer_id


def commit(host: Host, run: str, version: int, *places: tuple[str, int, str]) -> None:
    producer = begun(host, run, version)
    host.add(ROWS, run, producer, *places)
    host.settle()
    end = host.end(ROWS, run, version, producer)
    host.settle()
    assert host.answers[end] == Ended(True)


def versions(host: Host, run: str = "asking") -> list[int]:
    asked = [host.settle_version(ROWS, run, place[2]) for place in (A, B, C)]
    host.settle()
    found = [host.answers[ticket] for ticket in asked]
    return [outcome.last_version for outcome in found if isinstance(outcome, Settled)]


def test_a_commit_raises_the_version_of_every_topic_written(host: Host) -> None:
    assert versions(host) == [-1, -1, -1], "an unused key has no versions"
    assert not len(host.core), "a request for versions must not create a key"
    commit(host, "r1", 1, A)
    winner, loser = begun(host, "r2", 2), begun(host, "r2", 2)
    host.add(ROWS, "r2", winner, A, B)
    host.add(ROWS, "r2", loser, C)
    host.settle()
    host.end(ROWS, "r2", 2, winner)
    host.settle()
    assert versions(host) == [2, 2, -1]
    commit(host, "r3", 1, C)  # an earlier version, in a topic that does not have it
    assert versions(host) == [2, 2, 1]
    host.crash()
    assert versions(host) == [2, 2, 1]
    asked = host.settle_version("app:id-a:x", "asking")
    host.settle()
    assert host.answers[asked] == Settled(-1)


def test_an_aborted_transaction_raises_no_version(host: Host) -> None:
    producer = begun(host, "r1", 1)
    host.add(ROWS, "r1", producer, A, B)
    host.settle()
    host.end(ROWS, "r1", 1, commit=False)
    host.settle()
    assert versions(host) == [-1, -1, -1]
    late = host.begin(ROWS, "r1", 1, by_topic=True)
    assert host.code(late) == "INVALID_PRODUCER_EPOCH"


def test_settling_ends_open_transactions_and_waits_for_decided_ones(host: Host) -> None:
    producer = begun(host, "r1", 1)
    host.add(ROWS, "r1", producer, A)
    host.settle()
    own = host.settle_version(ROWS, "r1", "id-a")
    host.settle()
    assert host.answers[own] == Settled(-1), "a run must not wait for itself"
    host.end(ROWS, "r1", 1, producer)
    asked = host.settle_version(ROWS, "other", "id-a")
    host.settle(markers=False)
    assert asked not in host.answers, "the response came before the end of the transaction"
    host.settle()
    assert host.answers[asked] == Settled(1)
    producer = begun(host, "r2", 2)
    host.add(ROWS, "r2", producer, A)
    host.settle()
    asked = host.settle_version(ROWS, "other", "id-a")
    host.settle()
    assert host.answers[asked] == Settled(1)
    for refused in (
        host.end(ROWS, "r2", 2, producer),
        host.begin(ROWS, "r2", 2, by_topic=True),
        host.settle_version(ROWS, "r2", "id-a"),
    ):
        assert host.code(refused) == "INVALID_PRODUCER_EPOCH"
    assert host.reports == []


def test_a_deposed_coordinator_returns_no_versions(host: Host) -> None:
    """The coordinator's response would say that no version is committed or open, and the client would write the rows
    twice."""
    commit(host, "r1", 1, A)
    deposed = host.core
    host.crash()
    commit(host, "r2", 2, A)
    host.begin("app:id-b:x", "r3", 1)
    host.settle()
    for key in (ROWS, "app:id-b:x"):
        asked = deposed.step(SettleRequested(host.tickets + 1, key, "asking", "id-a"), host.now_ms)
        assert [type(effect) for effect in asked] == [Append]


def test_waiting_requests_are_answered_together(host: Host) -> None:
    """A request that finds another open run ends the group of requests."""
    producer = begun(host, "r1", 1)
    add = host.add(ROWS, "r1", producer, A)
    own = [host.settle_version(ROWS, "r1", place[2]) for place in (A, B)]
    other = [host.settle_version(ROWS, "other", place[2]) for place in (A, B)]
    late = host.settle_version(ROWS, "r1", "id-c")
    written = []
    while host.appends:
        host.commit_one()
        written.append([ticket in host.answers for ticket in (add, *own, *other)])
        if host.markers:
            host.settle()
    assert written[:2] == [[True, False, False, False, False], [True, True, True, False, False]]
    assert [host.answers[ticket] for ticket in (*own, *other)] == [Settled(-1)] * 4
    assert host.code(late) == "INVALID_PRODUCER_EPOCH"


def test_a_settle_whose_append_is_refused_can_be_retried(host: Host) -> None:
    asked = host.settle_version(ROWS, "asking", "id-a")
    host.refuse_one()
    assert host.code(asked) == "COORDINATOR_NOT_AVAILABLE"
    assert versions(host) == [-1, -1, -1]
    assert not len(host.core)


def test_a_repeated_decision_has_the_same_outcome(host: Host) -> None:
    producer = begun(host, "r1", 1)
    host.add(ROWS, "r1", producer, A)
    host.settle()
    first, again = (host.end(ROWS, "r1", 1, producer) for _ in range(2))
    host.commit_one()
    late_abort = host.end(ROWS, "r1", 1, commit=False)
    assert host.answers[late_abort] == Ended(True, replayed=True)
    host.settle()
    assert host.answers[first] == host.answers[again] == host.answers[host.end(ROWS, "r1", 1, producer)] == Ended(True)
    assert host.answers[host.end(ROWS, "r1", 1, commit=False)] == Ended(True)
    assert host.code(host.end(ROWS, "r2", 1, 999)) == "INVALID_TXN_STATE"
    for late in (host.begin(ROWS, "r1", 1, by_topic=True), host.settle_version(ROWS, "r1", "id-c")):
        assert host.code(late) == "INVALID_PRODUCER_EPOCH", "a task of an ended run began another transaction"
    assert versions(host) == [1, -1, -1]


def test_a_run_aborted_before_its_first_task_is_fenced(host: Host) -> None:
    for key, by_topic in ((ROWS, True), ("app:id-a:x", False)):
        end = host.end(key, "r1", 1, commit=False)
        assert end not in host.answers
        host.settle()
        assert host.answers[end] == Ended(True)
        assert host.code(host.begin(key, "r1", 1, by_topic=by_topic)) == "INVALID_PRODUCER_EPOCH"


def test_unused_topics_are_dropped() -> None:
    host = Host(TransactionSettings(producer_expiration_ms=1, sink_expiration_ms=900_000))
    commit(host, "r1", 1, A)
    host.tick(600_000)
    commit(host, "r2", 2, B)
    host.tick(600_000)
    host.settle()
    commit(host, "r3", 3, C)
    assert versions(host) == [-1, 2, 3]


class Run:
    """One run of version 1 of one name, with two tasks. With ``topic`` None its rows name the topics."""

    def __init__(self, histories: Histories, name: str, topic: tuple[str, int, str] | None, *, careless: bool) -> None:
        self.histories = histories
        self.host = histories.host
        self.name = name
        self.key = ROWS if topic is None else f"app:{topic[2]}:x"
        self.topics = [topic] if topic else histories.chance.sample([A, B, C], 2)
        self.careless = careless
        self.winners: list[int] = []
        self.tasks = [self.task(), self.task()]
        self.ticket: list[int | None] = [None, None]
        self.asked: list[object] = [None, None]
        self.over = False

    def task(self) -> Iterator[object]:
        """Yield requests, and receive each response."""
        outcome = yield lambda: self.host.begin(self.key, self.name, 1, by_topic=self.key == ROWS)
        if isinstance(outcome, Begun) and outcome.committed:
            return
        assert isinstance(outcome, Begun)
        producer, used = outcome.producer_id, []
        for place in self.topics:
            questions = [(ROWS, place[2])] + ([(f"app:{place[2]}:x", "")] if self.key == ROWS else [])
            known = False
            for key, topic_id in questions:
                if self.careless and key != self.key:
                    continue
                settled = yield lambda key=key, topic_id=topic_id: self.histories.settle(key, self.name, topic_id)
                known = known or settled.last_version >= 1
            if not known:
                yield lambda place=place: self.host.add(self.key, self.name, producer, place)
                used.append(place)
        if used:
            self.winners.append(producer)

    def go(self, number: int) -> None:
        """Run one step of one task: send a request or process its response. A refused run is over."""
        if self.over:
            return
        try:
            if self.asked[number] is None:
                self.asked[number] = next(self.tasks[number])
            elif self.ticket[number] is None:
                self.ticket[number] = self.asked[number]()  # type: ignore[operator]
            elif self.ticket[number] in self.host.answers:
                outcome = self.host.answers[self.ticket[number]]  # type: ignore[index]
                self.ticket[number] = None
                if hasattr(outcome, "code"):
                    self.over = True
                    return
                self.asked[number] = self.tasks[number].send(outcome)  # type: ignore[attr-defined]
        except StopIteration:
            self.asked[number] = self.end
            self.ticket[number] = -1
        if self.ticket == [-1, -1]:
            self.over = True
            self.end()

    def end(self) -> None:
        if self.winners:
            self.host.end(self.key, self.name, 1, *self.winners)


class Histories:
    """One seed: runs of one name, of both kinds, that all want to write the same rows."""

    def __init__(self, seed: int, *, careless: bool = False) -> None:
        self.chance = random.Random(seed)
        self.host = Host()
        self.careless = careless
        self.runs: list[Run] = []
        self.began = 0
        #: The coordinator before the present one. It does not know its successor.
        self.deposed: Transactions | None = None
        #: The rows of each topic, by producer id.
        self.fates: dict[str, dict[int, str]] = {"a": {}, "b": {}, "c": {}}
        self.winners: list[list[int]] = []

    def play(self) -> None:
        for _ in range(250):
            chosen = self.chance.random()
            if chosen < 0.03 or not self.runs:
                self.start()
            elif chosen < 0.04:
                self.deposed = self.host.core
                self.host.crash(keep=self.chance.randint(0, len(self.host.appends)))
                for run in self.runs:  # the request is sent again
                    run.ticket = [None if found != -1 and found not in self.host.answers else found
                                  for found in run.ticket]  # fmt: skip
            elif chosen < 0.045:
                self.host.tick(70_000)
            elif chosen < 0.7:
                self.chance.choice(self.runs).go(self.chance.randint(0, 1))
            elif chosen < 0.9 and self.host.appends:
                self.host.commit_one()
            else:
                self.deliver()
        for _ in range(3):
            self.host.tick(4_000_000)
            while self.host.appends or self.host.markers:
                while self.host.appends:
                    self.host.commit_one()
                for sent in list(self.host.markers):
                    self.mark(sent)
                self.host.settle()

    def start(self) -> None:
        self.began += 1
        topic = self.chance.choice([None, None, A, B])
        run = Run(self, f"r{self.began}", topic, careless=self.careless)
        self.winners.append(run.winners)
        self.runs = [*self.runs[-2:], run]

    def settle(self, key: str, run: str, topic_id: str) -> int:
        """Send some requests to the wrong coordinator first. Its appends are not committed. Then ask the right one."""
        if self.deposed is not None and self.chance.random() < 0.5:
            ticket = self.host.tickets = self.host.tickets + 1
            for effect in self.deposed.step(SettleRequested(ticket, key, run, topic_id), self.host.now_ms):
                if isinstance(effect, Respond):
                    self.host.answers[ticket] = effect.outcome
                    return ticket
        return self.host.settle_version(key, run, topic_id)

    def deliver(self) -> None:
        for sent in list(self.host.markers):
            self.mark(sent)
            written = tuple(PartitionPlace(marker.topic, marker.partition, marker.topic_id) for marker in sent.markers)
            self.host.step(MarkersWritten(sent.key, sent.decision, written, sent.part))

    def mark(self, sent: object) -> None:
        for marker in sent.markers:  # type: ignore[attr-defined]
            for fate in ("committed", "aborted"):
                for producer, _ in getattr(marker, fate):
                    assert self.fates[marker.topic].setdefault(producer, fate) == fate

    def doubled(self) -> list[str]:
        """Return the topics that have rows of two runs, and the runs that are in one of their topics and not in
        another."""
        by_run = {producer: number for number, winners in enumerate(self.winners) for producer in winners}
        found = []
        for topic, fates in self.fates.items():
            writers = {by_run[producer] for producer, fate in fates.items() if fate == "committed"}
            if len(writers) > 1:
                found.append(f"{topic} has the rows of runs {writers}")
        for producer in by_run:
            fate = {fates[producer] for fates in self.fates.values() if producer in fates}
            found += [f"{producer} is half committed"] * (len(fate) - 1)
        return found


@pytest.mark.parametrize("block", range(4))
def test_a_topic_has_the_rows_of_one_run_of_a_name(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        history = Histories(seed)
        history.play()
        assert history.doubled() == [], f"seed {seed}"


@pytest.mark.parametrize("seed", [602, 936])
def test_histories_with_a_trusted_deposed_coordinator_fail(seed: int) -> None:
    history = Histories(seed)
    history.play()
    assert history.doubled() == []


def test_the_histories_contain_enough_events() -> None:
    """Runs commit in them. If no run settles the key of the other kind, some histories commit twice."""
    histories = [Histories(seed) for seed in range(100)]
    for history in histories:
        history.play()
    fates = [fate for history in histories for fates in history.fates.values() for fate in fates.values()]
    assert fates.count("committed") > 100 and fates.count("aborted") > 100
    careless = [Histories(seed, careless=True) for seed in range(100)]
    for history in careless:
        history.play()
    assert any(history.doubled() for history in careless)
