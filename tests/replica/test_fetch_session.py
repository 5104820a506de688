"""Tests of incremental fetch sessions: named partitions, due partitions, and recovery after a lost request."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import msgspec
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import CONSUMER, Fetch, FetchedPartition, FetchPartition, FetchReply
from sparklog.replica.fetch_session import FULL, SESSIONLESS, SessionBuilder, SessionCache, SessionRequest


def wanted(partition: int, offset: int = 0, *, epoch: int = 1, topic_id: str = "id") -> FetchPartition:
    return FetchPartition("t", partition, topic_id, epoch, offset, 1000)


def result(partition: int, *, mark: int = 0, batches: int = 0, code: int = 0) -> FetchedPartition:
    return FetchedPartition("t", partition, code, mark, mark, 0, mark, batch_count=batches)


def fetch(request: SessionRequest, *, replica: int = 2, incarnation: int = 1) -> Fetch:
    return Fetch(0, replica, incarnation, 500, 1, 1 << 20, 0, *msgspec.structs.astuple(request))


def named(partitions: Iterable[FetchPartition]) -> list[int]:
    return [partition.partition for partition in partitions]


def opened(cache: SessionCache, *partitions: int) -> tuple[SessionBuilder, int]:
    """Return a fetcher in a session to which everything was sent once, and the session's id."""
    builder = SessionBuilder()
    for partition in partitions:
        builder.want(wanted(partition))
    context = cache.begin(fetch(builder.next_request()), 0)
    reply = context.reply([result(partition) for partition in partitions])
    builder.on_response(reply)
    return builder, reply.session_id


def test_the_first_request_names_all_partitions_and_later_ones_changes() -> None:
    cache = SessionCache(slots=4, first_id=70)
    builder, session_id = opened(cache, 0, 1, 2)
    assert session_id == 70
    builder.want(wanted(1))
    builder.want(wanted(2, 5))
    builder.drop("t", 0)
    request = builder.next_request()
    assert (request.session_id, request.session_epoch) == (70, 1)
    assert (named(request.partitions), request.forgotten) == ([2], (("t", 0),))
    context = cache.begin(fetch(request), 0)
    assert named(context.due().values()) == [2]
    assert not cache.wake(("t", 0))


def test_a_due_partition_leaves_no_gap_to_scan() -> None:
    """If the table kept its gaps, every request of an idle session would scan thousands of them."""
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, *range(5000))
    context = cache.begin(fetch(builder.next_request()), 0)
    assert context.session is not None and context.due() == {}
    assert sys.getsizeof(context.session.due) == sys.getsizeof({})


def test_an_idle_partition_is_neither_read_nor_named() -> None:
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, 0, 1)
    context = cache.begin(fetch(builder.next_request()), 0)
    assert context.due() == {}
    (session,) = cache.wake(("t", 1))
    assert session is context.session
    assert named(context.due().values()) == [1]
    assert not context.has_news_else_not_due(result(1))
    assert context.due() == {}
    cache.wake(("t", 1))
    assert context.has_news_else_not_due(result(1, mark=3))
    assert context.reply([result(1, mark=3)]).partitions == (result(1, mark=3),)
    assert context.due() == {}


def test_records_stay_due_until_the_fetcher_has_moved() -> None:
    """The fetcher may not have used the response."""
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, 0, 1)
    cache.wake(("t", 0))
    cache.wake(("t", 1))
    context = cache.begin(fetch(builder.next_request()), 0)
    builder.on_response(context.reply([result(0, mark=1, batches=2)]))
    assert named(context.due().values()) == [1, 0]
    builder.want(wanted(0, 8))
    context = cache.begin(fetch(builder.next_request()), 0)
    assert [(p.partition, p.fetch_offset) for p in context.due().values()] == [(1, 0), (0, 8)]
    assert context.reply([result(0, mark=1), result(1)]).partitions == ()
    assert context.due() == {}


def test_another_leader_epoch_or_topic_gets_a_full_response() -> None:
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, 0)
    builder.want(wanted(0, epoch=2))
    context = cache.begin(fetch(builder.next_request()), 0)
    assert context.reply([result(0)]).partitions == (result(0),)


def test_a_repeated_or_lost_request_is_recognized() -> None:
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, 0)
    request = builder.next_request()
    cache.begin(fetch(request), 0)
    with pytest.raises(BrokerError) as caught:
        cache.begin(fetch(request), 0)
    assert caught.value.code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    builder.on_response(FetchReply(0, ErrorCode.INVALID_FETCH_SESSION_EPOCH, 0, ()))
    again = builder.next_request()
    assert (again.session_epoch, named(again.partitions)) == (FULL, [0])


@pytest.mark.parametrize("who", [{"replica": 3}, {"incarnation": 2}, {"replica": CONSUMER}])
def test_a_session_belongs_to_its_fetcher_alone(who: dict[str, int]) -> None:
    cache = SessionCache(slots=4)
    builder, _ = opened(cache, 0)
    with pytest.raises(BrokerError) as caught:
        cache.begin(fetch(builder.next_request(), **who), 0)
    assert caught.value.code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND


def test_a_new_session_replaces_the_fetchers_old_one() -> None:
    cache = SessionCache(slots=4)
    builder, session_id = opened(cache, 0)
    context = cache.begin(fetch(SessionRequest(session_id, FULL, (wanted(5),), ())), 0)
    assert context.session is not None
    assert len(cache) == 1
    assert not cache.wake(("t", 0))
    builder.lost()
    again = builder.next_request()
    assert (again.session_id, again.session_epoch) == (session_id, FULL)


def test_a_reregistered_fetcher_drops_its_earlier_sessions() -> None:
    cache = SessionCache(slots=4)
    builder, session_id = opened(cache, 0)
    builder.lost()
    context = cache.begin(fetch(builder.next_request(), incarnation=2), 0)
    assert context.session is not None and context.session.session_id != session_id
    assert len(cache) == 1
    cache.begin(fetch(SessionRequest(context.session.session_id, FULL, (), ()), incarnation=1), 0)
    assert list(cache.wake(("t", 0))) == [context.session], "an earlier incarnation must not end a later one's session"


def test_no_other_fetcher_can_close_a_session_by_its_number() -> None:
    cache = SessionCache(slots=4)
    _, session_id = opened(cache, 0)
    cache.begin(fetch(SessionRequest(session_id, SESSIONLESS, (), ()), replica=CONSUMER), 0)
    cache.begin(fetch(SessionRequest(session_id, FULL, (), ()), replica=3), 0)
    assert len(cache.wake(("t", 0))) == 1


def test_a_session_ends_with_its_last_connection() -> None:
    cache = SessionCache(slots=4)
    builder = SessionBuilder()
    builder.want(wanted(0))
    builder.on_response(cache.begin(fetch(builder.next_request()), 0, connection="first").reply([result(0)]))
    cache.begin(fetch(builder.next_request()), 0, connection="second")
    other = SessionBuilder()
    other.want(wanted(0))
    cache.begin(fetch(other.next_request(), replica=3), 0, connection="first")
    cache.connection_lost("first")
    (session,) = cache.wake(("t", 0))
    assert session.replica_id == 2, "the fetcher has continued on another connection"
    cache.connection_lost("first")
    cache.connection_lost("second")
    assert len(cache) == 0
    assert not cache.wake(("t", 0))


def test_a_single_fetch_leaves_no_session() -> None:
    cache = SessionCache(slots=4)
    context = cache.begin(fetch(SessionRequest(0, SESSIONLESS, (wanted(0),), ()), replica=CONSUMER), 0)
    assert named(context.due().values()) == [0]
    assert context.has_news_else_not_due(result(0))
    assert context.reply([result(0)]).partitions == (result(0),)
    assert len(cache) == 0


def test_slots_go_to_followers_before_consumers() -> None:
    cache = SessionCache(slots=1, keep_ms=100)
    full = SessionRequest(0, FULL, (wanted(0),), ())
    assert cache.begin(fetch(full, replica=CONSUMER), 0).session is not None
    assert cache.begin(fetch(full, replica=CONSUMER), 99).session is None
    assert cache.begin(fetch(full, replica=CONSUMER), 100).session is not None
    assert cache.begin(fetch(full, replica=2), 101).session is not None
    assert cache.begin(fetch(full, replica=3), 102).session is None
    assert cache.begin(fetch(full, replica=CONSUMER), 103).session is None
    assert len(cache) == 1


def test_a_fetcher_without_a_slot_keeps_naming_all_partitions() -> None:
    builder = SessionBuilder()
    builder.want(wanted(0))
    builder.next_request()
    builder.on_response(FetchReply(0, ErrorCode.NONE, 0, ()))
    assert named(builder.next_request().partitions) == [0]


def test_an_unused_response_can_be_requested_again() -> None:
    builder, _ = opened(SessionCache(slots=1), 0, 1)
    builder.want(wanted(0))
    builder.want(wanted(1), again=True)
    assert named(builder.next_request().partitions) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_agree_for_any_wanted_dropped_and_lost_partitions(seed: int) -> None:
    chance = random.Random(seed)
    cache = SessionCache(slots=2, keep_ms=1)
    builder = SessionBuilder()
    want: dict[int, FetchPartition] = {}
    for step in range(200):
        for _ in range(chance.randrange(3)):
            partition = chance.randrange(6)
            if chance.random() < 0.3:
                want.pop(partition, None)
                builder.drop("t", partition)
            else:
                want[partition] = wanted(partition, chance.randrange(3))
                builder.want(want[partition])
        try:
            context = cache.begin(fetch(builder.next_request()), step)
        except BrokerError as refusal:
            builder.on_response(FetchReply(0, refusal.code, 0, ()))
            continue
        assert context.session is not None
        assert {key[1]: found for key, found in context.session.wanted.items()} == want
        reply = context.reply([result(p.partition, batches=chance.randrange(2)) for p in context.due().values()])
        if chance.random() < 0.1:
            builder.lost()
        elif chance.random() < 0.1:
            cache.close(context.session.session_id)
        else:
            builder.on_response(reply)


def test_partitions_of_all_sessions_are_bounded() -> None:
    cache = SessionCache(slots=10, max_partitions=5)

    def begin(replica: int, partitions: range, session_id: int = 0, session_epoch: int = FULL) -> int:
        named_ = tuple(wanted(number) for number in partitions)
        context = cache.begin(fetch(SessionRequest(session_id, session_epoch, named_, ()), replica=replica), 0)
        assert context.named == named_
        return context.session.session_id if context.session is not None else 0

    consumer = begin(CONSUMER, range(3))
    assert consumer
    assert begin(CONSUMER, range(3)) == 0, "the response must come, without a session"
    with pytest.raises(BrokerError) as caught:
        begin(CONSUMER, range(3, 6), consumer, 1)
    assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED and "at most 5" in caught.value.detail
    assert len(cache) == 0
    first, second = begin(CONSUMER, range(2)), begin(CONSUMER, range(2, 4))
    assert begin(2, range(3)), "the oldest consumer's session must make room"
    assert len(cache) == 2
    with pytest.raises(BrokerError) as caught:
        begin(CONSUMER, range(1), first, 1)
    assert caught.value.code is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert begin(CONSUMER, range(2, 4), second, 1) == second, "changed positions must not add partitions"
