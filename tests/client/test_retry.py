"""Tests of the retries of failed calls, and of their final error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.retry import UNKNOWN_TOPIC_GRACE_S, Retry
from sparklog.client.cluster.routing_core import NoResponse
from sparklog.client.errors import ClientTimeout
from sparklog.errors import TRAITS, BrokerError, ErrorCode

UNKNOWN = BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "topic 't'")
GONE = BrokerError(ErrorCode.NETWORK_EXCEPTION, "gone")
REFUSED = BrokerError(ErrorCode.INVALID_CONFIG, "wrong")


@pytest.mark.parametrize(
    ("error", "passed_s", "contacted", "expected"),
    [
        (GONE, 0.0, True, 0.025),
        (GONE, 5.0, True, 0.025),
        (GONE, 9.98, True, "do it: not done within 10 s, last: NETWORK_EXCEPTION: gone"),
        (GONE, 0.9, False, 0.025),
        (GONE, 1.0, False, "gone (tried for 1 s)"),
        (REFUSED, 0.0, True, REFUSED),
        (UNKNOWN, 0.0, True, 0.025),
        (UNKNOWN, UNKNOWN_TOPIC_GRACE_S - 0.01, True, 0.025),
        (UNKNOWN, UNKNOWN_TOPIC_GRACE_S, True, UNKNOWN),
    ],
)
def test_an_error_decides_what_follows(
    error: BrokerError, passed_s: float, contacted: bool, expected: float | str | BrokerError
) -> None:
    retry = Retry(now_s=100.0, timeout_s=10.0, first_contact_s=1.0)
    try:
        found: object = retry.delay_s("do it", error, now_s=100.0 + passed_s, roll=0.5, contacted=contacted)
    except ClientTimeout as raised:
        found = str(raised)
        assert raised.__cause__ is error
    except BrokerError as raised:
        found = raised
    assert found == expected


def test_delays_increase_up_to_their_maximum() -> None:
    retry = Retry(now_s=0.0, timeout_s=100.0, backoff=Backoff(first_ms=100, max_ms=300))
    assert [retry.delay_s("x", GONE, now_s=1.0, roll=0.5) for _ in range(4)] == [0.1, 0.2, 0.3, 0.3]


def test_failures_that_may_have_had_an_effect_are_remembered() -> None:
    retry = Retry(now_s=0.0, timeout_s=100.0)
    for code, uncertain in [
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, False),
        (ErrorCode.CONCURRENT_TRANSACTIONS, False),
        (ErrorCode.NETWORK_EXCEPTION, True),
        (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, True),
    ]:
        retry.delay_s("x", BrokerError(code), now_s=0.0, roll=0.5)
        assert retry.uncertain == uncertain


def test_only_requests_without_a_response_count_as_silent() -> None:
    retry = Retry(now_s=0.0, timeout_s=100.0)
    for error in (GONE, NoResponse("host:1", 1.0), GONE, NoResponse("host:1", 2.0)):
        retry.delay_s("x", error, now_s=0.0, roll=0.5)
    assert retry.silences == 2


@given(
    st.floats(0.01, 60),
    st.lists(st.tuples(st.sampled_from(sorted(TRAITS)), st.floats(0, 5), st.floats(0, 0.99)), max_size=60),
)
def test_no_attempt_begins_after_the_timeout(timeout_s: float, failures: list[tuple[ErrorCode, float, float]]) -> None:
    retry = Retry(now_s=0.0, timeout_s=timeout_s)
    now_s = 0.0
    for code, lasted_s, roll in failures:
        now_s += lasted_s
        try:
            now_s += retry.delay_s("x", BrokerError(code), now_s=now_s, roll=roll)
        except (BrokerError, ClientTimeout):
            return
        assert now_s < timeout_s
