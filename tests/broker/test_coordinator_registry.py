"""Tests of the life of coordinators: each follows the leadership of its partition, and is recreated after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.transactions import coordinator_registry
from sparklog.broker.transactions.coordinator_registry import CoordinatorHosting
from sparklog.broker.transactions.hosted_coordinators import HostedCoordinators
from sparklog.model import TopicPartition

TOPIC = "__transaction_state"


@dataclass
class Replica:
    is_leader: bool = True
    leader_epoch: int = 1


@dataclass
class Partition:
    tp: TopicPartition = field(default_factory=lambda: TopicPartition(TOPIC, 3))
    replica: Replica = field(default_factory=Replica)
    stopped: bool = False
    offline: str | None = None


class Host:
    """A stand-in for a coordinator that records its events."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.epoch = partition.replica.leader_epoch
        self.ended = False
        self.loaded = False
        self.on_failed: Callable[[], None] = lambda: None

    async def load(self) -> None:
        self.loaded = True

    def end(self) -> None:
        self.ended = True


class Stage:
    def __init__(self) -> None:
        self.made: list[Host] = []
        self.tasks: list[asyncio.Task[None]] = []
        broker = SimpleNamespace(spawn=lambda work, name: self.tasks.append(asyncio.ensure_future(work)))
        self.hosted: Any = HostedCoordinators(cast(Any, broker), TOPIC)
        self.hosting = CoordinatorHosting(cast(Any, broker), self.hosted, cast(Any, self.make))
        self.partition = Partition()

    def make(self, partition: Partition) -> Host:
        self.made.append(Host(partition))
        return self.made[-1]

    async def changed(self) -> list[Host]:
        """Report a possible change of the partition's role, and return its coordinator."""
        self.hosting.role_changed(cast(Any, self.partition))
        await asyncio.sleep(0)
        await asyncio.gather(*self.tasks)
        return list(self.hosted)


def test_a_coordinator_lives_for_one_leader_epoch() -> None:
    async def play() -> None:
        stage = Stage()
        first = await stage.changed()
        assert first == stage.made and first[0].loaded
        assert await stage.changed() == first, "only the ISR has changed, not the epoch"
        stage.partition.replica.leader_epoch = 2
        second = await stage.changed()
        assert second == stage.made[1:] and first[0].ended
        stage.partition.replica.is_leader = False
        assert await stage.changed() == [] and second[0].ended
        stage.partition.replica.is_leader = True
        stage.partition.offline = "broken"
        assert await stage.changed() == []

    asyncio.run(play())


@pytest.mark.parametrize("deposed", [False, True])
def test_a_failed_coordinator_is_loaded_again_from_its_log(monkeypatch: pytest.MonkeyPatch, deposed: bool) -> None:
    monkeypatch.setattr(coordinator_registry, "_AGAIN_S", 0.0)

    async def play() -> None:
        stage = Stage()
        first = (await stage.changed())[0]
        first.on_failed()
        if deposed:
            stage.partition.replica.is_leader = False
            await stage.changed()
        await asyncio.sleep(0.01)
        await asyncio.gather(*stage.tasks)
        assert first.ended
        assert [host.loaded for host in stage.made] == ([True] if deposed else [True, True])

    asyncio.run(play())
