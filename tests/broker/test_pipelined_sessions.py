"""Tests of a fetch session whose next request is sent before the last response, with both ends."""

from __future__ import annotations

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import Fetch, FetchPartition, FetchReply
from sparklog.replica.fetch_session import NO_SESSION, SessionBuilder, SessionCache, SessionRequest


def wanted(partition: int, offset: int = 0) -> FetchPartition:
    return FetchPartition("t", partition, "id", 3, offset, 1000)


def fetch(request: SessionRequest) -> Fetch:
    return Fetch(
        0, 1, 5, 500, 1, 1000, 0, request.session_id, request.session_epoch, request.partitions, request.forgotten
    )


@pytest.fixture
def builder() -> SessionBuilder:
    subject = SessionBuilder()
    subject.want(wanted(0))
    return subject


def begun(builder: SessionBuilder, cache: SessionCache) -> FetchReply:
    return cache.begin(fetch(builder.next_request()), 0).reply([])


def test_requests_overtake_responses_in_an_established_session(builder: SessionBuilder) -> None:
    cache = SessionCache(slots=10)
    assert not builder.established
    builder.on_response(begun(builder, cache))
    assert builder.established and not builder.changed
    first = fetch(builder.next_request())
    builder.want(wanted(1))
    assert builder.changed
    second = fetch(builder.next_request())
    assert [p.partition for p in second.partitions] == [1]
    answers = [cache.begin(request, 0).reply([]) for request in (first, second)]
    for answer in answers:
        assert answer.code == ErrorCode.NONE
        builder.on_response(answer)
    third = cache.begin(fetch(builder.next_request()), 0)
    assert third.session is not None and set(third.session.wanted) == {("t", 0), ("t", 1)}


def test_a_lost_request_is_noticed_and_everything_is_named_again(builder: SessionBuilder) -> None:
    cache = SessionCache(slots=10)
    builder.on_response(begun(builder, cache))
    builder.next_request()
    with pytest.raises(BrokerError) as caught:
        cache.begin(fetch(builder.next_request()), 0)
    assert caught.value.code is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    builder.on_response(FetchReply(0, caught.value.code, NO_SESSION, ()))
    assert not builder.established
    again = builder.next_request()
    assert (again.session_epoch, len(again.partitions)) == (0, 1)
    builder.on_response(cache.begin(fetch(again), 0).reply([]))
    assert builder.established
    idle = builder.next_request()
    assert (idle.session_epoch, idle.partitions) == (1, ()), "a full request gets an immediate response each time"
