"""Tests of quotas: the precedence, the bound on the rate of any window, and the bound on the number of buckets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.security.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    QuotaBuckets,
    QuotaEntity,
    QuotaLimit,
    QuotaTable,
    TokenBucket,
    check_entity,
    check_quota,
)

RATE = PRODUCER_BYTE_RATE
#: The entities in the order in which Kafka's documentation lists them, for user anna and client id app.
ORDER = (
    QuotaEntity("anna", "app"),
    QuotaEntity("anna", DEFAULT),
    QuotaEntity("anna"),
    QuotaEntity(DEFAULT, "app"),
    QuotaEntity(DEFAULT, DEFAULT),
    QuotaEntity(DEFAULT),
    QuotaEntity(None, "app"),
    QuotaEntity(None, DEFAULT),
)
#: The clients that share the quota of each of these entities.
OWNERS = (
    QuotaEntity("anna", "app"),
    QuotaEntity("anna", "app"),
    QuotaEntity("anna"),
    QuotaEntity("anna", "app"),
    QuotaEntity("anna", "app"),
    QuotaEntity("anna"),
    QuotaEntity(None, "app"),
    QuotaEntity(None, "app"),
)


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_most_specific_entity_decides(first: int) -> None:
    table = QuotaTable({entity: {RATE: 100.0 + step} for step, entity in enumerate(ORDER) if step >= first})
    assert table.limit(RATE, user="anna", client_id="app") == QuotaLimit(100.0 + first, ORDER[first], OWNERS[first])


def test_an_entity_without_this_quota_leaves_it_to_the_next() -> None:
    table = QuotaTable({ORDER[0]: {CONSUMER_BYTE_RATE: 1.0}, ORDER[6]: {RATE: 7.0}})
    found = table.limit(RATE, user="anna", client_id="app")
    assert found is not None and found.rate == 7.0
    assert table.limit(RATE, user="anna", client_id="other") is None
    assert table.limit(REQUEST_PERCENTAGE, user="anna", client_id="app") is None
    assert (table.has(RATE), table.has(REQUEST_PERCENTAGE), table.limits_clients) == (True, False, True)
    assert not QuotaTable({QuotaEntity(ip=DEFAULT): {CONNECTION_CREATION_RATE: 1}}).limits_clients


def test_an_address_has_its_own_quota_or_the_default() -> None:
    name = CONNECTION_CREATION_RATE
    table = QuotaTable({QuotaEntity(ip="10.0.0.1"): {name: 5}, QuotaEntity(ip=DEFAULT): {name: 2}})
    own, other = table.limit_of_address(name, "10.0.0.1"), table.limit_of_address(name, "10.0.0.2")
    assert own is not None and other is not None
    assert (own.rate, other.rate) == (5, 2)
    assert other.owner == QuotaEntity(ip="10.0.0.2")
    assert QuotaTable().limit_of_address(name, "10.0.0.1") is None


def test_a_debt_is_paid_off_at_the_rate() -> None:
    bucket = TokenBucket(rate=1000, burst=1000, now_s=0)
    assert bucket.charge(1000, 0) == 0
    assert bucket.charge(500, 0) == pytest.approx(0.5)
    assert bucket.charge(1000, 0.25) == pytest.approx(1.25)
    assert bucket.wait_s(1.5) == 0
    assert not bucket.is_full(2.4)
    assert bucket.is_full(2.6)
    assert bucket.charge(2000, 100) == pytest.approx(1.0), "at most the burst is saved up"


charges = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0, 5000)),  # the pause after the time to wait, and the amount
    min_size=1,
    max_size=40,
)


@given(st.floats(1, 10_000), st.floats(0.1, 10), charges)
def test_the_rate_over_any_window_stays_within_quota_and_burst(
    rate: float, window_s: float, steps: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(rate, rate * window_s, 0.0)
    now_s, done = 0.0, []
    for pause_s, amount in steps:
        now_s += pause_s
        done.append((now_s, amount))
        now_s += bucket.charge(amount, now_s)
    for first in range(len(done)):
        total = 0.0
        for at_s, amount in done[first:]:
            allowed = rate * (at_s - done[first][0]) + rate * window_s
            assert total <= allowed * (1 + 1e-9) + 1e-6, "charges before the last one fit without a debt"
            total += amount


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 2), st.floats(0, 3000)), min_size=1, max_size=60))
def test_clients_that_share_a_bucket_share_its_rate(steps: list[tuple[int, float, float]]) -> None:
    """Each client waits for the returned time, so at most one charge of each exceeds the allowance."""
    rate, burst = 1000.0, 1000.0
    bucket = TokenBucket(rate, burst, 0.0)
    free_s = [0.0] * 5
    now_s = total = 0.0
    largest = [0.0] * 5
    for client, pause_s, amount in steps:
        now_s = max(now_s + pause_s, free_s[client])
        free_s[client] = now_s + bucket.charge(amount, now_s)
        largest[client] = max(largest[client], amount)
        total += amount
    assert total <= rate * now_s + burst + sum(largest) + 1e-6


def limit_of(user: str, rate: float = 1000.0) -> QuotaLimit:
    return QuotaLimit(rate, QuotaEntity(DEFAULT), QuotaEntity(user))


def test_a_bucket_is_kept_until_its_rate_changes() -> None:
    buckets = QuotaBuckets(RATE, window_s=1)
    bucket = buckets.bucket(limit_of("anna"), 0)
    bucket.charge(5000, 0)
    assert buckets.bucket(limit_of("anna"), 1) is bucket
    assert buckets.bucket(limit_of("ben"), 1) is not bucket
    raised = buckets.bucket(limit_of("anna", 2000.0), 1)
    assert (raised.rate, raised.burst, raised.wait_s(1)) == (2000, 2000, 0)


def test_the_number_of_buckets_is_bounded_without_losing_debts() -> None:
    buckets = QuotaBuckets(RATE, window_s=1, limit=50)
    for number in range(1000):
        buckets.bucket(limit_of(f"idle {number}"), 0)
    assert len(buckets) == 50
    debtors = QuotaBuckets(RATE, window_s=1, limit=50)
    for number in range(50):
        debtors.bucket(limit_of(f"debtor {number}"), 0).charge(5000, 0)
    shared = debtors.bucket(limit_of("late 1"), 0)
    assert debtors.bucket(limit_of("late 2"), 0) is shared
    assert len(debtors) == 51
    assert debtors.bucket(limit_of("debtor 7"), 0).wait_s(0) == pytest.approx(4.0)
    own = debtors.bucket(limit_of("late 1"), 100)
    assert own is not shared, "by now the others have paid off their debts"
    debtors.keep_only(QuotaTable())
    assert len(debtors) == 50


@pytest.mark.parametrize("entity", [QuotaEntity(), QuotaEntity("anna", ip="10.0.0.1"), QuotaEntity("a" * 256)])
def test_impossible_entities_are_refused(entity: QuotaEntity) -> None:
    with pytest.raises(BrokerError) as refused:
        check_entity(entity)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("entity", "name", "value"),
    [
        (QuotaEntity("anna"), RATE, 0.0),
        (QuotaEntity("anna"), RATE, -1.0),
        (QuotaEntity("anna"), RATE, math.nan),
        (QuotaEntity("anna"), RATE, math.inf),
        (QuotaEntity("anna"), REQUEST_PERCENTAGE, 101.0),
        (QuotaEntity("anna"), CONNECTION_CREATION_RATE, 1.0),
        (QuotaEntity(ip="10.0.0.1"), RATE, 1.0),
        (QuotaEntity("anna"), "SCRAM-SHA-256", None),
    ],
)
def test_impossible_quotas_are_refused(entity: QuotaEntity, name: str, value: float | None) -> None:
    with pytest.raises(BrokerError) as refused:
        check_quota(entity, name, value)
    assert refused.value.code is ErrorCode.INVALID_CONFIG


def test_possible_quotas_pass_the_checks() -> None:
    for entity in (*ORDER, QuotaEntity(ip=DEFAULT)):
        check_entity(entity)
    check_quota(QuotaEntity("anna"), RATE, 1024.0)
    check_quota(QuotaEntity(DEFAULT), RATE, None)
    check_quota(QuotaEntity(ip=DEFAULT), CONNECTION_CREATION_RATE, 10)
