"""Tests that requests of many entries take several turns of the broker's loop, and that many fetches of one append
do as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.groups.group_requests import GroupRequests
from sparklog.broker.requests import fetch, open_fetch, slices
from sparklog.broker.transactions.transaction_host import TransactionHost
from sparklog.broker.transactions.transaction_requests import TransactionRequests
from sparklog.coordinator.group_records import (
    FORMAT_VERSION,
    About,
    CommittedOffset,
    MemberKey,
    MemberState,
    OffsetKey,
    group_record,
)
from sparklog.coordinator.groups import Groups
from sparklog.coordinator.records import (
    OPEN,
    Participant,
    RegisteredTopic,
    Transaction,
    participant_record,
    transaction_record,
)
from sparklog.coordinator.transactions import Transactions
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    CONSUMER,
    CommitOffsets,
    DeleteRecords,
    DeleteRecordsPartition,
    DescribeGroup,
    DescribeGroupReply,
    ElectLeaders,
    Fetch,
    FetchOffsets,
    FetchOffsetsReply,
    FetchPartition,
    FetchReply,
    GroupOffset,
    ListOffsets,
    ListOffsetsPartition,
    ListTransactions,
    ListTransactionsReply,
    Reply,
    Request,
    TransactionMarker,
    WriteMarkers,
)
from tests.broker.staged import Stage, until

COUNT = 300
NAMES = tuple(f"unknown-{number}" for number in range(COUNT))


class Connection:
    """The parts of a connection that a handler needs. It records the responses."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.held = False
        self.writable = True
        self.identity = None
        self.token_id = ""
        self.peer = self.client_id = "test"
        self.within_host = False

    def reply(self, message: Reply, body: Any = (), body_bytes: int = -1) -> None:
        self.replies.append(message)

    def pause_requests(self) -> None:
        self.held = True

    def resume_requests(self) -> None:
        self.held = False


@pytest.fixture(autouse=True)
def one_entry_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_S", 0.0)
    monkeypatch.setattr(open_fetch, "_READS_S", 0.0)
    monkeypatch.setattr(open_fetch, "_READS_AT_CLOCK", 1)
    monkeypatch.setattr(fetch, "TURN_S", 0.0)


async def turns_until(true: Callable[[], object]) -> int:
    """Count the turns of the loop until the condition holds."""
    for turns in range(100_000):
        if true():
            return turns
        await asyncio.sleep(0)
    raise AssertionError("the condition did not hold in time")


def staged() -> Stage:
    return Stage()


def group_requests(stage: Stage, groups: object) -> GroupRequests:
    """Return the handlers of group requests. ``groups`` returns the coordinator of each group."""
    broker = stage.broker
    takes_part = broker.hanging.takes_part
    return GroupRequests(stage.context, broker.access, broker.slices, groups=cast(Any, groups), takes_part=takes_part)


def wanted(name: str) -> FetchPartition:
    return FetchPartition(name, 0, "", -1, 0, 1 << 20)


def consumer_fetch(cid: int, partitions: tuple[FetchPartition, ...], max_wait_ms: int = 0) -> Fetch:
    return Fetch(cid, CONSUMER, -1, max_wait_ms, 1, 1 << 20, 0, 0, -1, partitions)


@pytest.mark.parametrize(
    "request_",
    [
        ListOffsets(7, 0, tuple(ListOffsetsPartition(name, 0, -1) for name in NAMES)),
        DeleteRecords(7, tuple(DeleteRecordsPartition(name, 0, -1) for name in NAMES)),
        ElectLeaders(7, "preferred", 1000, tuple((name, 0) for name in NAMES)),
        WriteMarkers(7, tuple(TransactionMarker(name, 0, ((1, 1),), ()) for name in NAMES)),
        consumer_fetch(7, tuple(wanted(name) for name in NAMES)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_each_entry_of_a_request_may_be_a_separate_turn(request_: Request) -> None:
    async def test() -> None:
        stage, connection = staged(), Connection()
        stage.handle(connection, request_)
        assert not connection.replies
        assert await turns_until(lambda: connection.replies) > COUNT / 2
        (reply,) = connection.replies
        assert reply.cid == 7
        results = reply.partitions if isinstance(reply, FetchReply) else reply.results
        assert [result.code for result in results] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * COUNT
        await turns_until(lambda: not connection.held)
        await stage.context.end_tasks()

    asyncio.run(test())


def test_offsets_of_many_partitions_are_examined_in_turns() -> None:
    async def test() -> None:
        stage, connection = staged(), Connection()
        committed: list[int] = []

        class Host:
            def ask(self, event: Any, outcome: Any) -> None:
                committed.append(len(event(1).offsets))

        class Groups:
            def of(self, group: str) -> Host:
                return Host()

        requests = group_requests(stage, Groups())
        request = CommitOffsets(7, "g", tuple(GroupOffset(name, 0, 0) for name in NAMES))
        requests.commit_offsets(cast(Any, connection), request, memoryview(b""))
        assert await turns_until(lambda: committed) > COUNT / 2
        assert committed == [0]

    asyncio.run(test())


def test_all_offsets_of_a_group_are_collected_in_turns() -> None:
    async def test() -> None:
        stage, connection, groups = staged(), Connection(), Groups()
        offsets = [GroupOffset(name, 0, 5, "id") for name in NAMES]
        keys = [OffsetKey(FORMAT_VERSION, "g", name, 0) for name in NAMES]
        values = [CommittedOffset(FORMAT_VERSION, offset, 0) for offset in offsets]
        groups.load([group_record(*found) for found in zip(keys, values, strict=True)])
        host = SimpleNamespace(groups=groups)
        requests = group_requests(stage, SimpleNamespace(of=lambda _: host))
        requests.fetch_offsets(cast(Any, connection), FetchOffsets(7, "g"), memoryview(b""))
        groups.load([group_record(keys[-1], None)])  # a change in a later turn is not in the response
        assert await turns_until(lambda: connection.replies) > COUNT / 2
        expected = tuple(sorted(offsets, key=lambda offset: offset.topic))
        assert connection.replies == [FetchOffsetsReply(7, expected)]

    asyncio.run(test())


def test_the_members_of_a_group_are_described_in_turns() -> None:
    async def test() -> None:
        stage, connection, groups = staged(), Connection(), Groups()
        keys = [MemberKey(FORMAT_VERSION, "g", name) for name in NAMES]
        groups.load([group_record(key, MemberState(FORMAT_VERSION, About(("t",)), 1, (), 1, 0)) for key in keys])
        groups.start(0)
        host = SimpleNamespace(groups=groups)
        requests = group_requests(stage, SimpleNamespace(of=lambda _: host))
        requests.describe(cast(Any, connection), DescribeGroup(7, "g"), memoryview(b""))
        assert await turns_until(lambda: connection.replies) > COUNT / 2
        (reply,) = connection.replies
        assert isinstance(reply, DescribeGroupReply) and reply.description is not None
        assert [member.member_id for member in reply.description.members] == sorted(NAMES)
        requests.describe(cast(Any, connection), DescribeGroup(8, "unknown"), memoryview(b""))
        assert connection.replies[1:] == [DescribeGroupReply(8, None)]

    asyncio.run(test())


def test_the_tasks_of_a_transaction_are_described_in_turns() -> None:
    async def test() -> None:
        stage, connection, core = staged(), Connection(), Transactions()
        participant = Participant(0, (RegisteredTopic("t", (0, 1), "id"),))
        core.load([transaction_record("k", Transaction(state=OPEN, run_id="r", version=2))])
        core.load([participant_record("k", number, participant) for number in range(COUNT)])
        host: Any = SimpleNamespace(_transactions=core, names=core.names)
        host.describe = partial(TransactionHost.describe, host)
        transactions = SimpleNamespace(all_ready=lambda: [host])
        requests = TransactionRequests(
            stage.context,
            stage.broker.slices,
            transactions=cast(Any, transactions),
            registry=cast(Any, None),
        )
        requests.list_transactions(cast(Any, connection), ListTransactions(7), memoryview(b""))
        for _ in range(COUNT // 2):
            await asyncio.sleep(0)
        core.load([participant_record("k", 0, None)])  # a change in a later turn is not in the response
        assert await turns_until(lambda: connection.replies) > COUNT / 4
        (reply,) = connection.replies
        assert isinstance(reply, ListTransactionsReply)
        (described,) = reply.transactions
        assert described.participants == tuple((number, 0, (("t", 0), ("t", 1))) for number in range(COUNT))

    asyncio.run(test())


# --- long polls -------------------------------------------------------------------------------------------------------


def test_fetches_woken_by_an_append_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    async def test() -> None:
        stage = staged()
        fetches = stage.broker.fetches

        class Waiting:
            of_follower = is_due_to_read = done = False

            def __init__(self, number: int) -> None:
                self.number = number

            def read_again(self) -> None:
                self.is_due_to_read = False
                looked.append(self.number)

        waiting = [Waiting(number) for number in range(COUNT)]
        for one in waiting:
            fetches.read_soon(cast(Any, one))
        assert await turns_until(lambda: len(looked) == COUNT) >= COUNT
        assert looked == list(range(COUNT))

    asyncio.run(test())


def test_followers_are_served_before_waiting_consumers() -> None:
    looked: list[str] = []

    async def test() -> None:
        fetches = staged().broker.fetches

        class Waiting:
            is_due_to_read = done = False

            def __init__(self, name: str, of_follower: bool) -> None:
                self.name = name
                self.of_follower = of_follower

            def read_again(self) -> None:
                looked.append(self.name)

        for name in ("first", "second", "third"):
            fetches.read_soon(cast(Any, Waiting(name, False)))
        await turns_until(lambda: looked)
        fetches.read_soon(cast(Any, Waiting("follower", True)))
        await turns_until(lambda: len(looked) == 4)
        assert looked == ["first", "follower", "second", "third"]

    asyncio.run(test())


def test_only_later_reads_for_consumers_are_charged() -> None:
    charged: list[tuple[str, bool]] = []

    async def test() -> None:
        fetches = staged().broker.fetches
        fetches.time_used = lambda connection, took_s: charged.append((cast(Any, connection), took_s > 0))

        class Waiting:
            is_due_to_read = done = False

            def __init__(self, name: str, of_follower: bool) -> None:
                self.connection = name
                self.of_follower = of_follower

            def read_again(self) -> None:
                self.done = True

        waiting = [Waiting("consumer", False), Waiting("follower", True)]
        for one in waiting:
            fetches.read_soon(cast(Any, one))
        await turns_until(lambda: all(one.done for one in waiting))

    asyncio.run(test())
    assert charged == [("consumer", True)]


def _nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a read without records for any fetch."""
    from sparklog.broker.requests.fetch_read import PartitionRead
    from sparklog.protocol.messages import FetchedPartition

    def look(partitions: Any, one: FetchPartition, **_: Any) -> PartitionRead:
        return PartitionRead(FetchedPartition(one.topic, one.partition, 0, 0, 0, 0, 0), (), 0, urgent=False)

    monkeypatch.setattr(open_fetch, "read_for_consumer", look)


def test_a_connection_has_a_bounded_number_of_waiting_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above it, the oldest fetch gets the records that exist."""
    _nothing_yet(monkeypatch)

    async def test() -> None:
        stage, connection, other = staged(), Connection(), Connection()
        for cid in range(20):
            stage.broker.fetches.handle(
                cast(Any, connection), consumer_fetch(cid, (wanted("t"),), 60_000), memoryview(b"")
            )
        stage.handle(other, consumer_fetch(1, (wanted("t"),), 60_000))
        await asyncio.sleep(0)
        assert [reply.cid for reply in connection.replies] == [0, 1, 2, 3]
        assert not other.replies
        for one in (connection, other):
            stage.broker.fetches.connection_lost(cast(Any, one))

    asyncio.run(test())


def test_beyond_the_brokers_bound_fetches_wait_only_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _nothing_yet(monkeypatch)
    monkeypatch.setattr(fetch, "_MOST_WAITING", 3)

    async def test() -> None:
        stage = staged()
        fetches = stage.broker.fetches
        connections = [Connection() for _ in range(5)]
        for one in connections:
            fetches.handle(cast(Any, one), consumer_fetch(1, (wanted("t"),), 60_000), memoryview(b""))
        assert not any(one.replies for one in connections)
        assert len(fetches._sessionless[("t", 0)]) == 3, "an append may examine no more fetches"
        await until(lambda: all(one.replies for one in connections[3:]))
        assert not any(one.replies for one in connections[:3])
        fetches.connection_lost(cast(Any, connections[0]))
        fetches.handle(cast(Any, connections[4]), consumer_fetch(2, (wanted("t"),), 60_000), memoryview(b""))
        assert len(fetches._sessionless[("t", 0)]) == 3, "there is space again"
        for one in connections:
            fetches.connection_lost(cast(Any, one))
        assert not fetches._sessionless and not fetches._sessionless_count

    asyncio.run(test())
