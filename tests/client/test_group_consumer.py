"""Tests of a group's consumer and the notices of its session, without threads: the test plays the session."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest

from sparklog.client.consumer.group_commits import AssignedPartition
from sparklog.client.consumer.group_consumer import GroupConsumer
from sparklog.client.consumer.group_session import GroupNotice
from sparklog.client.errors import ClientTimeout
from sparklog.model import TopicPartition
from tests.waiting import wait_until

ASSIGNED = AssignedPartition("t", "id", 0)
TP = TopicPartition("t", 0)


class Session:
    """A stand-in for ``GroupSession``. Requests get no response unless the test gives it."""

    def __init__(self) -> None:
        self.assigned: frozenset[AssignedPartition] = frozenset()
        self.holding: frozenset[AssignedPartition] = frozenset()
        self.asked: list[Future[dict[AssignedPartition, int | None]]] = []
        self.commits: list[Mapping[AssignedPartition, int]] = []
        self.hangs = False

    def accept_assignment(self, incarnation: int) -> GroupNotice:
        self.holding |= self.assigned
        return GroupNotice(incarnation, 1, self.assigned, self.holding - self.assigned)

    def release(self, places: Collection[AssignedPartition]) -> None:
        self.holding -= frozenset(places)

    def commit(self, incarnation: int, offsets: Mapping[AssignedPartition, int]) -> Future[None]:
        self.commits.append(offsets)
        done: Future[None] = Future()
        if not self.hangs:
            done.set_result(None)
        return done

    def offsets(self, places: Collection[AssignedPartition]) -> Future[dict[AssignedPartition, int | None]]:
        self.asked.append(Future())
        return self.asked[-1]

    def close(self) -> None:
        pass


class Log:
    """Fetch the start positions as the consumer does: a partition without a commit starts at ``end``."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.at: dict[TopicPartition, int] = {}

    def positions(self) -> dict[TopicPartition, int]:
        return dict(self.at)

    def start_reading(self, places: Mapping[AssignedPartition, int | None]) -> None:
        self.at.update((TopicPartition(one[0], one[2]), self.end if at is None else at) for one, at in places.items())

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self.at.pop(tp, None)


def reading(session: Session, log: Log, **more: Any) -> GroupConsumer:
    options: dict[str, Any] = {"auto_commit_s": 3600.0, "on_assign": None, "on_revoke": None, "on_lost": None, **more}
    return GroupConsumer(log, session, commit_timeout_s=1.0, **options)  # type: ignore[arg-type]


def reading_from(start: int, session: Session, log: Log) -> GroupConsumer:
    """Return a consumer that has the one partition, whose committed offset is ``start``."""
    group = reading(session, log)
    session.assigned = frozenset({ASSIGNED})
    group.advance()
    session.asked[0].set_result({ASSIGNED: start})
    group.advance()
    return group


def test_a_reassigned_partition_asks_for_its_start_again() -> None:
    """The response arrived, the partition went to another consumer, which committed, and returned, all between two
    polls."""
    session, log = Session(), Log(500)
    group = reading(session, log)
    session.assigned = frozenset({ASSIGNED})
    group.advance()
    session.asked[0].set_result({ASSIGNED: None})
    session.assigned = frozenset()
    group.advance()
    assert not session.holding
    session.assigned = frozenset({ASSIGNED})
    group.advance()
    group.advance()
    assert len(session.asked) == 2
    assert log.at == {}
    session.asked[1].set_result({ASSIGNED: 120})
    group.advance()
    assert log.at == {TP: 120}


def test_partitions_held_by_no_transaction_start_at_once() -> None:
    session, log = Session(), Log(500)
    group = reading(session, log)
    others: list[AssignedPartition] = [AssignedPartition("t", "id", 1), AssignedPartition("t", "id", 2)]
    session.assigned = frozenset({ASSIGNED, others[0]})
    group.advance()
    session.asked[0].set_result({others[0]: 7})
    group.advance()
    assert log.at == {("t", 1): 7}, "the other partition is held: a start at the end would skip records"

    def asked_again() -> bool:
        group.advance()
        return len(session.asked) == 2

    wait_until(asked_again, "the question to be asked again")
    session.assigned |= {others[1]}
    group.advance()
    assert len(session.asked) == 3, "the new partition must not wait for the held one"
    session.asked[2].set_result({others[1]: None})
    group.advance()
    assert log.at == {("t", 1): 7, ("t", 2): 500}


def test_an_initial_position_is_committed_when_it_moves() -> None:
    for moves, expected in ((True, [{ASSIGNED: 500}]), (False, [])):
        session, log = Session(), Log(500)
        group = reading(session, log, start_moves=moves)
        session.assigned = frozenset({ASSIGNED})
        group.advance()
        session.asked[0].set_result({ASSIGNED: None})
        group.advance()
        session.assigned = frozenset()
        group.advance()
        assert session.commits == expected
        assert not session.holding


@pytest.mark.parametrize("offset", [1.5, True, None, "5", -1, 1 << 63])
def test_a_commit_of_an_invalid_offset_sends_no_request(offset: Any) -> None:
    """The coordinator would refuse it together with the other commits of its request."""
    session, log = Session(), Log(0)
    group = reading_from(0, session, log)
    with pytest.raises((TypeError, ValueError), match="t-0: "):
        group.commit({TP: offset})
    assert session.commits == []
    group.commit({TP: 5})
    assert session.commits == [{ASSIGNED: 5}]


def test_closing_a_group_after_a_failed_block_commits_no_positions() -> None:
    for processed, expected in ((True, [{ASSIGNED: 7}]), (False, [])):
        session, log = Session(), Log(0)
        group = reading_from(5, session, log)
        log.at[TP] = 7
        group.close(processed=processed)
        assert session.commits == expected


def test_a_cancelled_commit_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    session, log = Session(), Log(0)
    group = reading_from(5, session, log)
    log.at[TP], session.hangs = 7, True
    assert group.commit().cancel()
    session.hangs = False
    group.commit().result(0)
    assert session.commits == [{ASSIGNED: 7}] * 2
    assert not caplog.records


def test_a_position_moved_back_is_committed_despite_earlier_commits() -> None:
    session, log = Session(), Log(0)
    group = reading_from(10, session, log)
    for became in (None, ClientTimeout("no answer: it may have been committed")):
        log.at[TP], session.hangs = 20, True
        under_way = group.commit()
        if became is not None:
            under_way.set_exception(became)
        log.at[TP], session.hangs = 10, False
        group.commit().result(0)
        assert session.commits[-2:] == [{ASSIGNED: 20}, {ASSIGNED: 10}]
        group.commit().result(0)
        assert session.commits[-1:] == [{ASSIGNED: 10}] and len(session.commits) % 2 == 0, "once is enough"


def test_a_position_moved_back_is_committed_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, log = Session(), Log(0)
    group = reading_from(10, session, log)

    def interrupted(incarnation: int, offsets: Mapping[AssignedPartition, int]) -> Future[None]:
        Session.commit(session, incarnation, offsets)
        raise KeyboardInterrupt

    log.at[TP] = 20
    monkeypatch.setattr(session, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.commit()
    monkeypatch.undo()
    log.at[TP] = 10
    group.commit().result(0)
    assert session.commits == [{ASSIGNED: 20}, {ASSIGNED: 10}]


def test_a_negative_offset_is_refused_before_it_joins_other_commits() -> None:
    session, log = Session(), Log(0)
    group = reading_from(10, session, log)
    with pytest.raises(ValueError, match="offset -1: expected 0 or more"):
        group.commit({TP: -1})
    group.commit({TP: 0}).result(0)
    assert session.commits == [{ASSIGNED: 0}]


class _OwnTimeout(Exception):
    """The timeout of futures in Python 3.10, which is no ``TimeoutError``."""


@pytest.mark.parametrize("timeout", [futures.TimeoutError, _OwnTimeout])
def test_closing_waits_a_bounded_time_for_the_last_commit(
    monkeypatch: pytest.MonkeyPatch, timeout: type[Exception]
) -> None:
    monkeypatch.setattr("concurrent.futures.TimeoutError", timeout)
    monkeypatch.setattr("concurrent.futures._base.TimeoutError", timeout)
    session, log = Session(), Log(0)
    group = reading_from(5, session, log)
    log.at[TP], session.hangs = 7, True
    group.close()
    assert (session.commits, session.holding) == ([{ASSIGNED: 7}], frozenset())
