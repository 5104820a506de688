"""Tests of the partitions that one fetch names, and of their order."""

from __future__ import annotations

import pytest

from sparklog.client.consumer import fetch_turns
from sparklog.client.consumer.fetch_turns import FetchTurns
from sparklog.model import TopicPartition


def partitions(count: int) -> list[TopicPartition]:
    return [TopicPartition("t", number) for number in range(count)]


def requests(brokers: int, group: list[TopicPartition], rounds: int) -> list[list[TopicPartition]]:
    """Return the partitions in the requests to the first broker, if the fetcher asks all brokers in turn."""
    turns = FetchTurns(lambda _: None)
    named = [[turns.next(broker, group) for broker in range(brokers)] for _ in range(rounds)]
    return [of_brokers[0] for of_brokers in named]


@pytest.mark.parametrize("brokers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [300, 400, 500, 600])
def test_requests_with_some_partitions_reach_all_in_time(
    brokers: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_turns, "MAX_ENTRIES", 200)
    group = partitions(count)
    found = requests(brokers, group, rounds=3)
    assert all(len(named) == len(set(named)) == 200 for named in found)
    assert set().union(*found) == set(group)


@pytest.mark.parametrize("brokers", [1, 2, 3, 4])
def test_every_partition_of_a_broker_comes_first_in_turn(brokers: int) -> None:
    group = partitions(4)
    found = requests(brokers, group, rounds=4)
    assert {named[0] for named in found} == set(group)
    assert all(set(named) == set(group) for named in found)
