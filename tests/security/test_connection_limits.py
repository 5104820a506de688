"""Tests of the limits of clients' connections by address, by user, and per second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.model import Principal
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.principals import ANONYMOUS
from sparklog.security.quotas import CONNECTION_CREATION_RATE, DEFAULT, QuotaEntity, QuotaTable

ANNA = Principal("User", "anna")
MANY = 1000


def admit(
    limits: ConnectionLimits,
    number: int,
    *,
    address: str = "10.0.0.1",
    principal: Principal = ANNA,
    within_host: bool = False,
    now_s: float = 0,
) -> bool:
    return not limits.admit(number, address=address, principal=principal, within_host=within_host, now_s=now_s)


def test_an_address_has_a_limit_until_a_connection_ends() -> None:
    limits = ConnectionLimits(per_address=2, per_user=MANY, window_s=1)
    assert [admit(limits, number) for number in range(3)] == [True, True, False]
    assert admit(limits, 3, address="10.0.0.2")
    limits.leave(2)  # it was refused
    assert not admit(limits, 4)
    limits.leave(0)
    assert admit(limits, 5)


def test_a_user_has_a_limit_over_all_addresses() -> None:
    limits = ConnectionLimits(per_address=MANY, per_user=2, window_s=1)
    assert [admit(limits, number, address=f"10.0.0.{number}") for number in range(3)] == [True, True, False]
    assert admit(limits, 3, principal=Principal("User", "ben"))


def test_clients_without_a_login_have_no_limit_as_a_user() -> None:
    limits = ConnectionLimits(per_address=MANY, per_user=2, window_s=1)
    assert all(admit(limits, number, principal=ANONYMOUS) for number in range(10))


def test_new_connections_of_an_address_are_limited_per_second() -> None:
    limits = ConnectionLimits(per_address=MANY, per_user=MANY, window_s=1)
    limits.apply(QuotaTable({QuotaEntity(ip=DEFAULT): {CONNECTION_CREATION_RATE: 5}}))
    assert sum(admit(limits, number) for number in range(100)) == 6
    assert admit(limits, 101, address="10.0.0.2")
    assert admit(limits, 102, within_host=True), "its TCP connection was counted"
    assert sum(admit(limits, 200 + number, now_s=10) for number in range(100)) == 6
    limits.apply(QuotaTable())
    assert all(admit(limits, 300 + number, now_s=10) for number in range(100))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans()), max_size=200))
def test_counts_equal_the_open_connections(steps: list[tuple[int, int, bool]]) -> None:
    limits, opened = ConnectionLimits(per_address=5, per_user=8, window_s=1), dict[int, tuple[str, Principal]]()
    for number, place, opens in steps:
        if not opens or number in opened:
            limits.leave(number)
            opened.pop(number, None)
            continue
        address, principal = f"10.0.0.{place}", Principal("User", f"u{place % 2}")
        same_address = sum(one[0] == address for one in opened.values())
        same_user = sum(one[1] == principal for one in opened.values())
        admitted = admit(limits, number, address=address, principal=principal)
        assert admitted is (same_address < 5 and same_user < 8)
        if admitted:
            opened[number] = address, principal
