"""Tests of a fetcher whose leader violates the protocol: it reports that and starts again, and does not end
silently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.fetcher import Fetchers
from sparklog.broker.replication.partition import Partition
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.net.server import serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ControlUpdate, Fetch, FetchedPartition, FetchReply, HelloReply, Request
from tests.broker.support import broker_context

LEADER = 1


class FakeLeader:
    """A leader that gives every request the same response, immediately or after ``hold``."""

    def __init__(self, *answers: FetchedPartition) -> None:
        self.connections: list[ServerConnection] = []
        self.requests = 0
        self.last: Fetch | None = None
        self.hold = False
        #: the brokers whose descriptions were requested
        self.held: list[int] = []
        self._held_cids: list[int] = []
        self.answers = answers

    def __call__(self, connection: ServerConnection) -> FakeLeader:
        self.connections.append(connection)
        return self

    def request_received(self, request: Request, body: memoryview) -> None:
        assert isinstance(request, Fetch)
        self.requests += 1
        self.last = request
        if self.hold:
            self.held.append(request.incarnation)
            self._held_cids.append(request.cid)
            return
        self.connections[-1].reply(FetchReply(request.cid, 0, 7, self.answers))

    def answer_what_is_held(self) -> None:
        while self._held_cids:
            self.answer_oldest()

    def answer_oldest(self) -> None:
        self.connections[-1].reply(FetchReply(self._held_cids.pop(0), 0, 7, self.answers))

    def connection_lost(self) -> None: ...


def run(
    tmp_path: Path,
    answers: tuple[FetchedPartition, ...],
    followed: SimpleNamespace,
    scenario: Callable[[BrokerContext, FakeLeader], Awaitable[None]],
) -> None:
    """Run a broker that follows a partition of a leader with these responses, in leader epoch 0."""

    async def go() -> None:
        leader = FakeLeader(*answers)
        server = await serve(
            leader,
            host="127.0.0.1",
            port=0,
            describe=lambda cid, version: HelloReply(cid, version, LEADER, 1, "cluster", 2**20),
            max_frame_bytes=2**20,
            max_in_flight=10,
            queued_max_bytes=2**20,
        )
        broker = broker_context(2)
        endpoint = BrokerEndpoint(LEADER, "127.0.0.1", server.port, 1)
        broker.cache.apply(ControlUpdate(0, "c", 1, 1, False, (endpoint,), (), ()))
        fetchers = Fetchers(broker)
        followed.fetchers = fetchers
        fetchers.follow(cast(Partition, followed), LEADER, 0)
        await scenario(broker, leader)
        await fetchers.close()
        await server.close()

    asyncio.run(go())


def _replica(**more: object) -> SimpleNamespace:
    return SimpleNamespace(**{"leader_epoch": 0, "refuses_truncation": False, **more})


def partition(topic_id: str = "id", **more: object) -> SimpleNamespace:
    log = SimpleNamespace(log_end_offset=0, last_epoch=-1, log_start_offset=0)
    tp = TopicPartition("t", 0)
    states = {"stopped": False, "is_truncating": False, "awaits_name": False, "replica": _replica()}
    return SimpleNamespace(tp=tp, topic_id=topic_id, log=log, **{**states, **more})


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


#: For a partition that is not followed here: responses of one partition and of several are applied in different ways.
BESIDE = pytest.mark.parametrize("beside", [(), (FetchedPartition("other", 0, 0, 0, 0, 0, 0),)])


@BESIDE
def test_an_unreadable_response_closes_its_connection_but_not_the_fetcher(
    tmp_path: Path, beside: tuple[FetchedPartition, ...]
) -> None:
    """The response announces a batch without its bytes."""
    taken: list[object] = []

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        await until(lambda: len(leader.connections) > 2)
        assert broker.counters["fetcher.connections.failed"] >= 2
        assert not taken

    followed = partition(on_leader_response=lambda *answer: taken.append(answer))
    run(tmp_path, (*beside, FetchedPartition("t", 0, 0, 0, 0, 0, 1, 1, 0)), followed, scenario)


@BESIDE
def test_a_late_response_of_a_deposed_leader_moves_no_log_start(
    tmp_path: Path, beside: tuple[FetchedPartition, ...]
) -> None:
    """After an unclean election its log may start where its successor still has committed records."""
    moved: list[int] = []
    replica = _replica(leader_epoch=1, lagging=False)
    followed = partition(replica=replica, on_leader_response=lambda *_: None, advance_log_start=moved.append)

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        await until(lambda: leader.requests > 2)
        assert not moved
        replica.leader_epoch = 0
        await until(lambda: bool(moved))
        assert set(moved) == {5}

    run(tmp_path, (*beside, FetchedPartition("t", 0, 0, 9, 9, 5, 0, 0, 0)), followed, scenario)


def test_the_fetcher_drops_a_partition_it_no_longer_follows(tmp_path: Path) -> None:
    """Connections last for months, while topics are created and deleted."""
    replica = _replica()
    followed = partition(replica=replica, on_leader_response=lambda *_: None)

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        fetcher = followed.fetchers._by_leader[LEADER]
        await until(lambda: bool(fetcher._positions))
        followed.fetchers.unfollow(followed)
        assert not fetcher._positions

    run(tmp_path, (FetchedPartition("t", 0, 0, 0, 0, 0, 0),), followed, scenario)


def test_a_response_for_an_unfollowed_partition_leaves_no_state(
    tmp_path: Path,
) -> None:
    followed = partition(replica=_replica(), on_leader_response=lambda *_: None)

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        leader.hold = True
        fetcher = followed.fetchers._by_leader[LEADER]
        await until(lambda: bool(leader.held))
        followed.fetchers.unfollow(followed)
        leader.answer_what_is_held()
        await until(lambda: not fetcher._in_flight)
        assert not fetcher._positions

    run(tmp_path, (FetchedPartition("t", 0, 0, 0, 0, 0, 0),), followed, scenario)


@BESIDE
def test_a_response_for_an_earlier_topic_of_that_name_is_ignored(
    tmp_path: Path, beside: tuple[FetchedPartition, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both topics are fetched from offset 0 in leader epoch 0. The second response arrives while the first one is
    applied, one partition a turn."""
    monkeypatch.setattr("sparklog.broker.replication.fetcher._TURN_S", -1)
    applied: list[tuple[str, int]] = []

    def version(topic_id: str) -> SimpleNamespace:
        return partition(
            topic_id,
            replica=_replica(),
            on_leader_response=lambda event, *_: applied.append((topic_id, event.high_watermark)),
        )

    def answers(mark: int) -> tuple[FetchedPartition, ...]:
        parted = None if mark else (0, 0)  # after which the request names the partition again
        return (*beside, FetchedPartition("t", 0, 0, mark, mark, 0, mark, diverging=parted))

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        await until(lambda: bool(applied))
        leader.hold = True
        await until(lambda: len(leader.held) == 1)
        earlier.fetchers.unfollow(earlier)
        earlier.fetchers.follow(cast(Partition, version("again")), LEADER, 0)
        await until(lambda: len(leader.held) == 2)
        applied.clear()
        leader.answers = answers(1)
        leader.answer_oldest()
        leader.answers = answers(2)
        leader.answer_oldest()
        await until(lambda: len(leader.held) == 3)
        assert applied == [("again", 2)]

    earlier = version("id")
    run(tmp_path, answers(0), earlier, scenario)


@BESIDE
def test_a_partition_is_not_fetched_while_its_log_is_truncated(
    tmp_path: Path, beside: tuple[FetchedPartition, ...]
) -> None:
    """The leader would send the divergence point repeatedly."""

    def ordered(*_: object) -> None:
        followed.is_truncating = True

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        fetcher = followed.fetchers._by_leader[LEADER]
        leader.hold = True
        await until(lambda: len(leader.held) == 1)
        leader.answer_oldest()
        await until(lambda: len(leader.held) == 2)
        assert followed.is_truncating and leader.last is not None
        assert (leader.last.partitions, leader.last.forgotten) == ((), (("t", 0),))
        leader.answers = ()
        followed.is_truncating = False
        fetcher.follow(cast(Partition, followed), 0)
        await until(lambda: len(leader.held) == 3)
        assert [(wanted.topic, wanted.fetch_offset) for wanted in leader.last.partitions] == [("t", 0)]

    followed = partition(replica=_replica(), on_leader_response=ordered)
    run(tmp_path, (*beside, FetchedPartition("t", 0, 0, 0, 0, 0, 0, diverging=(0, 0))), followed, scenario)


def test_a_reregistered_follower_does_not_wait_for_its_long_poll(tmp_path: Path) -> None:
    """The follower's leaders ignore the records of the earlier incarnation, and commit nothing before this one has
    fetched."""

    async def scenario(broker: BrokerContext, leader: FakeLeader) -> None:
        broker.incarnation = 4
        await until(lambda: leader.requests > 2)
        leader.hold = True
        await until(lambda: leader.held == [4])
        broker.incarnation = 5
        await until(lambda: leader.held == [4, 5])
        assert len(leader.connections) == 1

    followed = partition(replica=_replica(), on_leader_response=lambda *_: None)
    run(tmp_path, (FetchedPartition("t", 0, 0, 0, 0, 0, 0),), followed, scenario)
