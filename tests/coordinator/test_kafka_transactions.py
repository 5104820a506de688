"""The transactions of Kafka's producers in the coordinator: epochs, retries, timeouts and takeovers."""

from __future__ import annotations

from typing import Any

import pytest

from sparklog.coordinator import records
from sparklog.coordinator.effects import Ended, KafkaProducerGiven
from sparklog.coordinator.events import KafkaAddRequested, KafkaEndRequested, KafkaInitRequested, VerifyRequested
from sparklog.coordinator.records import PartitionPlace
from sparklog.protocol.messages import GroupOffset
from tests.coordinator.host import Host

Identity = tuple[int, int]
PLACE = PartitionPlace("t", 0, "id")


class KafkaHost(Host):
    """A coordinator with the requests of Kafka's producers. Each request returns its ticket."""

    def init(self, key: str = "k", producer: Identity = (-1, -1), *, timeout_ms: int = 60_000) -> int:
        self.producer_ids += 1
        self.step(KafkaInitRequested(self._ticket(), key, timeout_ms, self.producer_ids, *producer))
        return self.tickets

    def put(self, producer: Identity, *places: PartitionPlace, key: str = "k", **more: Any) -> int:
        self.step(KafkaAddRequested(self._ticket(), key, *producer, places, **more))
        return self.tickets

    def decide(self, producer: Identity, *, commit: bool = True, raises: bool = False, key: str = "k") -> int:
        deadline_ms = self.now_ms + 5000
        self.producer_ids += 1
        self.step(KafkaEndRequested(self._ticket(), key, *producer, commit, deadline_ms, raises, self.producer_ids))
        return self.tickets

    def ask(self, producer: Identity, place: PartitionPlace = PLACE, key: str = "k") -> int:
        self.step(VerifyRequested(self._ticket(), key, *producer, place))
        return self.tickets

    def given(self, ticket: int) -> Identity:
        self.settle()
        outcome = self.answers[ticket]
        assert isinstance(outcome, KafkaProducerGiven | Ended), outcome
        return outcome.producer_id, outcome.producer_epoch

    def result(self, ticket: int) -> str:
        self.settle()
        return self.code(ticket)

    def marked(self) -> list[tuple[str, Identity]]:
        """Return the producers of the markers that are being sent, each with its fate."""
        found = []
        for marker in self.sent_markers():
            found += [("committed", one) for one in marker.committed] + [("aborted", one) for one in marker.aborted]
        return found


@pytest.fixture
def host() -> KafkaHost:
    return KafkaHost()


def test_one_producer_id_serves_many_transactions(host: KafkaHost) -> None:
    producer = host.given(host.init())
    assert producer[1] == records.FIRST_EPOCH
    for commit in (True, False, True):
        assert host.result(host.put(producer, PLACE)) == "Done"
        assert host.result(host.ask(producer)) == "Done"
        host.decide(producer, commit=commit)
        host.settle(markers=False)
        assert host.marked() == [("committed" if commit else "aborted", producer)]
        host.settle()
        assert host.result(host.ask(producer)) == "INVALID_TXN_STATE"


def test_the_end_raises_the_epoch_with_transaction_version_2(host: KafkaHost) -> None:
    first = host.given(host.init())
    host.put(first, PLACE)
    second = host.given(host.decide(first, raises=True))
    assert second == (first[0], first[1] + 1)
    assert host.result(host.put(first, PLACE)) == "INVALID_PRODUCER_EPOCH"
    assert host.given(host.decide(first, raises=True)) == second, "the repetition of a request has the same result"
    assert host.result(host.put(second, PLACE)) == "Done"
    third = host.given(host.decide(second, commit=False, raises=True))
    assert host.result(host.decide(second, commit=True, raises=True)) == "INVALID_TXN_STATE", "it has been aborted"
    assert host.result(host.decide(second, commit=True)) == "INVALID_PRODUCER_EPOCH"
    assert host.given(host.decide(third, commit=False, raises=True)) == (first[0], third[1] + 1), "nothing was open"


def test_a_new_producer_fences_the_old_one_and_aborts_its_transaction(host: KafkaHost) -> None:
    old = host.given(host.init())
    host.put(old, PLACE)
    ticket = host.init()
    host.settle(markers=False)
    assert ticket not in host.answers, "the transaction must end first"
    assert host.marked() == [("aborted", old)]
    new = host.given(ticket)
    assert new[0] == old[0] and new[1] > old[1]
    for late in (host.put(old, PLACE), host.decide(old), host.decide(old, commit=False), host.init(producer=old)):
        assert host.result(late) == "INVALID_PRODUCER_EPOCH"
    assert host.result(host.ask(old)) == "INVALID_PRODUCER_EPOCH"
    assert host.result(host.put(new, PLACE)) == "Done"
    assert host.result(host.ask(old)) == "INVALID_PRODUCER_EPOCH"


@pytest.mark.parametrize("opened", [False, True])
def test_a_producer_raises_its_own_epoch(host: KafkaHost, opened: bool) -> None:
    old = host.given(host.init())
    if opened:
        host.put(old, PLACE)
    new = host.given(host.init(producer=old))
    assert new == (old[0], old[1] + 1)
    assert host.given(host.init(producer=old)) == new, "the repetition of a request has the same result"
    assert host.result(host.put(old, PLACE)) == "INVALID_PRODUCER_EPOCH"
    assert host.result(host.init(producer=(old[0], 0))) == "INVALID_PRODUCER_EPOCH"


def test_a_producer_whose_time_is_up_is_fenced(host: KafkaHost) -> None:
    producer = host.given(host.init(timeout_ms=1000))
    host.put(producer, PLACE)
    host.settle()
    host.tick(600)
    host.put(producer, PartitionPlace("t", 1, "id"))
    host.settle()
    host.tick(600)
    host.settle()
    assert host.reports == ["transactions.timed_out"], "further partitions must not extend the transaction"
    assert host.result(host.decide(producer)) == "INVALID_PRODUCER_EPOCH"
    assert host.given(host.init())[0] == producer[0]


def test_a_sparklog_producer_and_a_kafka_producer_fence_each_other(host: KafkaHost) -> None:
    kafka = host.given(host.init())
    host.put(kafka, PLACE)
    ticket = host.begin("k", "run")
    host.settle()
    assert host.result(host.put(kafka, PLACE)) == "INVALID_PRODUCER_EPOCH"
    assert host.result(host.init(producer=kafka)) == "INVALID_PRODUCER_EPOCH"
    host.add("k", "run", host.producer(ticket), ("t", 0))
    later = host.given(host.init())
    assert later[0] != kafka[0]
    end = host.end("k", "run", -1, host.producer(ticket))
    assert host.result(end) == "UNKNOWN_PRODUCER_ID", "the run of the other producer is fenced"
    assert host.result(host.put(later, PLACE)) == "Done"


def test_offsets_need_their_group_in_the_transaction(host: KafkaHost) -> None:
    producer = host.given(host.init())
    offsets = (GroupOffset("in", 0, 7),)
    late = host.put(producer, group="g", offsets=offsets, begins=False)
    assert host.result(late) == "INVALID_TXN_STATE"
    assert host.result(host.put(producer, group="g")) == "Done"
    assert host.result(host.put(producer, group="g", offsets=offsets, begins=False)) == "Done"
    host.decide(producer)
    host.settle(markers=False)
    assert [(sent.group, sent.offsets) for sent in host.offsets] == [("g", offsets)]
    host.settle()
    assert host.result(host.put(producer, group="g", offsets=offsets)) == "Done", "version 5 begins the transaction"


def test_a_request_during_the_end_is_repeated_later(host: KafkaHost) -> None:
    producer = host.given(host.init())
    host.put(producer, PLACE)
    ticket = host.decide(producer)
    host.settle(markers=False)
    assert host.code(host.put(producer, PLACE)) == "CONCURRENT_TRANSACTIONS"
    again = host.decide(producer)
    host.settle()
    assert {type(host.answers[one]) for one in (ticket, again)} == {Ended}
    assert host.result(host.decide(producer)) == "Ended", "the repetition of a commit"
    assert host.result(host.decide(producer, commit=False)) == "INVALID_TXN_STATE"


@pytest.mark.parametrize("raises", [False, True])
def test_the_next_coordinator_knows_id_epoch_and_decision(host: KafkaHost, raises: bool) -> None:
    first = host.given(host.init())
    host.put(first, PLACE)
    host.decide(first, raises=raises)
    host.settle(markers=False)
    host.crash()
    assert host.marked() == [("committed", first)]
    host.settle()
    second = host.given(host.decide(first, raises=raises))
    assert second == (first[0], first[1] + raises)
    assert host.result(host.put(second, PLACE)) == "Done"
    host.crash()
    assert host.result(host.ask(second)) == "Done"


def test_a_producer_gets_another_id_when_its_epochs_are_used_up(
    host: KafkaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LAST_EPOCH", 3)
    producer = host.given(host.init())
    seen = [producer]
    for _ in range(4):
        host.put(seen[-1], PLACE)
        seen.append(host.given(host.decide(seen[-1], raises=True)))
    assert [epoch for _, epoch in seen] == [1, 2, 3, 1, 2]
    assert len({producer_id for producer_id, _ in seen}) == 2
    assert host.result(host.put(seen[2], PLACE)) != "Done"
    while seen[-1][1] < 3:
        seen.append(host.given(host.init()))
    again = host.given(host.init())
    assert again[0] not in {producer_id for producer_id, _ in seen} and again[1] == 1
