"""Tests of ``sparklog brokers drain``: a broker is empty when it hosts no replica, not when its first replicas are
gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.model import TopicPartition
from tests.client.fake_cluster import FakeCluster


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        monkeypatch.setenv("SPARKLOG_BOOTSTRAP", cluster.bootstrap)
        yield cluster


class Moves:
    """A stand-in that ends the moves that the command waits for. After each one a user creates the next topic."""

    def __init__(self, fake: FakeCluster, topics: list[str], *, dies: bool = False) -> None:
        self._fake = fake
        self._topics = topics
        self._dies = dies

    def end(self, targets: Mapping[TopicPartition, Sequence[int]], *, timeout_s: float | None = None) -> None:
        assert timeout_s is not None and timeout_s > 0
        for tp, target in targets.items():
            self._fake.move(tp, target[0])
            self._fake.do(lambda tp=tp: self._fake.moves.pop((tp.topic, tp.partition)))  # type: ignore[misc]
        if self._topics:
            self._fake.create(self._topics.pop(0))
        elif self._dies:
            self._fake.stop(0)


def holds(fake: FakeCluster) -> list[str]:
    return [name for name, topic in fake.topics.items() if any(log.leader == 0 for log in topic.logs)]


@pytest.mark.parametrize("dies", [False, True])
def test_replicas_created_during_a_drain_are_moved_and_reported(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dies: bool
) -> None:
    fake.create("first", partitions=4)
    monkeypatch.setattr(Admin, "wait_until_moved", Moves(fake, ["second", "third"], dies=dies).end)
    assert run(["brokers", "drain", "0", "--yes", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "broker 0: 2 partitions are being moved",
        "broker 0: 1 partitions created meanwhile are being moved: second-0",
        "broker 0: 1 partitions created meanwhile are being moved: third-0",
        "broker 0: holds no replicas",
    ]
    assert holds(fake) == []


def test_a_drain_without_wait_warns_of_later_replicas(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    fake.create("first")
    assert run(["brokers", "drain", "0", "--yes"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("broker 0: 1 partitions are being moved\n")
    assert "first:0" in said.out
    assert "may be placed on this broker" in said.err


def test_an_empty_broker_is_reported_empty(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["brokers", "drain", "0", "--yes", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "broker 0: holds no replicas"


def test_a_drain_asks_for_confirmation(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    fake.create("first")
    assert run(["brokers", "drain", "0"]) == 2
    assert "draining broker 0: stdin is not a terminal; pass --yes" in capsys.readouterr().err
    assert (fake.moves, holds(fake)) == ({}, ["first"])
