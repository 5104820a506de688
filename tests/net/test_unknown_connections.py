"""Tests of the choice of the connection that gives way to a new one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.net.unknown_connections import UnknownConnections, origin_of


@dataclass(frozen=True)
class Connection:
    peer_host: str
    number: int


def test_the_oldest_of_the_busiest_address_gives_way() -> None:
    unknown = UnknownConnections[Connection]()
    assert unknown.loser is None
    first, *busy = [Connection("10.0.0.1", 0)] + [Connection("10.0.0.2", number) for number in range(3)]
    unknown.add(first)
    for one in busy:
        unknown.add(one)
    for expected in (*busy[:2], first, busy[2]):
        assert unknown.loser == expected
        unknown.discard(expected)
    assert unknown.loser is None


def test_the_oldest_connection_is_closed_if_each_address_has_one() -> None:
    unknown = UnknownConnections[Connection]()
    for number in range(3):
        unknown.add(Connection(f"10.0.0.{number}", number))
    assert unknown.loser == Connection("10.0.0.0", 0)


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_a_site_counts_as_one_origin(address: str, origin: str) -> None:
    assert origin_of(address) == origin


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5)), max_size=100))
def test_the_choice_equals_a_search_of_all_connections(steps: list[tuple[bool, int, int]]) -> None:
    unknown, model = UnknownConnections[Connection](), list[Connection]()
    for adds, place, number in steps:
        one = Connection(f"10.0.0.{place}", number)
        if adds and one not in model:
            unknown.add(one)
            model.append(one)
        elif not adds:
            unknown.discard(one)
            model = [other for other in model if other != one]
        counts = {host: sum(other.peer_host == host for other in model) for host in {one.peer_host for one in model}}
        loser = unknown.loser
        assert list(unknown) == model and len(unknown) == len(model)
        assert (loser is None) == (not model)
        if loser is not None:
            assert counts[loser.peer_host] == max(counts.values())
            assert loser == next(other for other in model if other.peer_host == loser.peer_host)
