"""Tests that a request with the maximum number of entries takes no long turn of the loop, from its header to its
response.

They measure the processor time of this thread, without the garbage collector, which mostly examines objects of other
tests. The bound of 0.1 s is several times the longest turn, and less than the time of ten times as many entries.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sparklog.broker.transactions.coordinator_runtime import _encoded
from sparklog.coordinator.effects import Append, SendMarkers
from sparklog.coordinator.events import (
    AddRequested,
    Appended,
    BeginRequested,
    EndRequested,
    MarkersWritten,
    RewriteRequested,
)
from sparklog.coordinator.group_events import CommitRequested
from sparklog.coordinator.group_records import CommittedOffset, OffsetKey, group_record
from sparklog.coordinator.groups import Groups
from sparklog.coordinator.records import (
    OPEN,
    Participant,
    PartitionPlace,
    RegisteredTopic,
    Transaction,
    participant_record,
    transaction_record,
)
from sparklog.coordinator.transactions import Transactions
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import DEFAULT_LISTENER
from sparklog.protocol.connection import encode_reply
from sparklog.protocol.fields import MAX_COLUMNS, MAX_PEER_ENTRIES, MAX_PLAIN
from sparklog.protocol.header_limits import MAX_HEADER_BYTES
from sparklog.protocol.messages import (
    ACKS_ALL,
    CONSUMER,
    MAX_ENTRIES,
    CommitOffsets,
    DeleteRecords,
    DeleteRecordsPartition,
    ElectLeaders,
    Fetch,
    FetchPartition,
    GroupOffset,
    ListOffsets,
    ListOffsetsPartition,
    Metadata,
    Produce,
    ProducePartition,
    Reply,
    Request,
    decode_request,
    encode_message,
)
from tests.broker.staged import Stage
from tests.broker.test_sliced_requests import Connection, turns_until

LIMIT_S = 0.1
NAMES = tuple(f"a-topic-of-this-or-that-name-{number:06}" for number in range(MAX_ENTRIES))
LARGEST: tuple[Request, ...] = (
    Fetch(7, CONSUMER, -1, 0, 1, 1, 0, 0, -1, tuple(FetchPartition(name, 0, "i" * 32, 1, 0, 1) for name in NAMES)),
    ListOffsets(7, 0, tuple(ListOffsetsPartition(name, 0, -1) for name in NAMES)),
    DeleteRecords(7, tuple(DeleteRecordsPartition(name, 0, -1) for name in NAMES)),
    ElectLeaders(7, "preferred", 1000, tuple((name, 0) for name in NAMES)),
    Metadata(7, NAMES),
    Produce(7, ACKS_ALL, 1000, tuple(ProducePartition(name, 0, "", 0, 0) for name in NAMES)),
)


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Loop(asyncio.SelectorEventLoop):
    """A loop that measures its longest turn in this thread's processor time."""

    longest_s = 0.0

    def _run_once(self) -> None:
        began_s = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.thread_time() - began_s)


class Answered(Connection):
    """A connection that encodes its responses, as the server's does."""

    listener = DEFAULT_LISTENER

    def reply(self, message: Reply, body: Any = (), body_bytes: int = -1) -> None:
        encode_reply(message)
        super().reply(message)


def longest_turn_s(request: Request) -> float:
    header = encode_message(request)

    async def test() -> float:
        stage, connection = Stage(), Answered()
        await asyncio.sleep(0)
        loop.longest_s = 0.0
        await asyncio.sleep(0)
        stage.handle(connection, decode_request(header))
        await turns_until(lambda: connection.replies)
        await asyncio.sleep(0)
        assert connection.replies[0].cid == 7
        await stage.context.end_tasks()
        return loop.longest_s

    loop = Loop()
    try:
        return loop.run_until_complete(test())
    finally:
        loop.close()


@pytest.mark.alone
@pytest.mark.parametrize("request_", LARGEST, ids=lambda request: type(request).__name__)
def test_no_turn_of_the_largest_request_takes_long(request_: Request) -> None:
    assert min(longest_turn_s(request_) for _ in range(3)) < LIMIT_S


WIDEST: dict[str, list[Any]] = {
    "heartbeat": ["g", "m", 1, 1, [["t", "", [1] * 200]] * MAX_ENTRIES],
    "heartbeat of many topics": ["g", "m", 1, 1, [["t", "", [1] * 14]] * MAX_PLAIN],
    "create_topic": ["t", 1, 1, 1000, b"", [], None, {}, [[1] * 200] * MAX_ENTRIES],
    "alter_reassignments": [[["t", 1, [1] * 200]] * MAX_ENTRIES, 1],
    "fetch": [-1, 0, 1, 1, 1, 0, 0, -1, [["t", 0, "", -1, 0, 1, -1, -1, [""] * 8]] * MAX_PEER_ENTRIES],
    "fetch of columns": [-1, 0, 1, 1, 1, 0, 0, -1, [["t", 0, "", -1, 0, 1, -1, -1, [""] * MAX_COLUMNS]] * 209],
    "write_markers": [[["t", 0, [[1, 1]] * MAX_PEER_ENTRIES, []]] * 6],
    "end_transaction": ["k", "r", 1, True, [300] * MAX_PLAIN, 1],
    "metadata": [None, True, False, None, [[]] * (MAX_HEADER_BYTES - 100)],
}


@pytest.mark.alone
@pytest.mark.parametrize("tag", WIDEST)
def test_no_header_takes_long_to_decode(tag: str) -> None:
    """The header may have any content: as many of the smallest entries as its bounds allow."""
    header = msgspec.msgpack.encode([tag.split(maxsplit=1)[0], 7, *WIDEST[tag]])
    assert len(header) <= MAX_HEADER_BYTES
    found = []
    for _ in range(3):
        began_s = time.thread_time()
        decode_request(header)
        found.append(time.thread_time() - began_s)
    assert min(found) < LIMIT_S


# --- what brokers may send more of ------------------------------------------------------------------------------------


def refusal(request: Request) -> BrokerError:
    async def test() -> BrokerError:
        stage, connection = Stage(), Connection()
        with pytest.raises(BrokerError) as caught:
            stage.handle(connection, request)
        return caught.value

    return asyncio.run(test())


def test_a_consumers_fetch_of_too_many_partitions_is_refused() -> None:
    wanted = (FetchPartition("t", 0, "", -1, 0, 1),) * (MAX_ENTRIES + 1)
    forgotten = (("t", 0),) * (MAX_ENTRIES + 1)
    for request in (
        Fetch(7, CONSUMER, -1, 0, 1, 1, 0, 0, -1, wanted),
        Fetch(7, CONSUMER, -1, 0, 1, 1, 0, 5, 1, (), forgotten),
    ):
        error = refusal(request)
        assert error.code is ErrorCode.INVALID_REQUEST and str(MAX_ENTRIES) in error.detail


def test_a_clients_commit_of_too_many_offsets_is_refused() -> None:
    error = refusal(CommitOffsets(7, "g", (GroupOffset("t", 0, 0),) * (MAX_ENTRIES + 1)))
    assert error.code is ErrorCode.INVALID_REQUEST and str(MAX_ENTRIES) in error.detail


# --- coordinators -----------------------------------------------------------------------------------------------------


def longest_step_s(core: Any, events: list[Any]) -> float:
    """Return the processor time of a coordinator's longest step, including the batches of its appends."""
    core.start(0)
    longest_s = 0.0
    while events:
        began_s = time.thread_time()
        effects = core.step(events.pop(0), 1)
        for effect in effects:
            if isinstance(effect, Append):
                _encoded(effect.records, 0)
        longest_s = max(longest_s, time.thread_time() - began_s)
        events[:0] = [event for event in map(result_of, effects) if event is not None]
    return longest_s


def result_of(effect: object) -> object:
    match effect:
        case Append():
            return Appended(effect.append)
        case SendMarkers():
            places = tuple(PartitionPlace(marker.topic, marker.partition, marker.topic_id) for marker in effect.markers)
            return MarkersWritten(effect.key, effect.decision, places, effect.part)
        case _:
            return None


@pytest.mark.alone
def test_no_step_of_a_groups_coordinator_takes_long() -> None:
    offsets = tuple(GroupOffset(name, 0, 5, "i" * 32) for name in NAMES)
    events = [CommitRequested(ticket, "g", offsets, None, "", -1) for ticket in (1, 2)]
    assert min(longest_step_s(Groups(), list(events)) for _ in range(3)) < LIMIT_S


@pytest.mark.alone
def test_no_step_of_a_transactions_coordinator_takes_long() -> None:
    offsets = tuple(GroupOffset(name, 0, 5, "i" * 32) for name in NAMES)
    places = tuple(PartitionPlace(name, 0, "i" * 32) for name in NAMES)
    events = [
        BeginRequested(1, "k", "r", -1, 60_000, 1, 0, False),
        AddRequested(2, "k", "r", 1, 0, places, "", (), -1, 0),
        AddRequested(3, "k", "r", 1, 0, (), "g", offsets, -1, 0),
    ]
    assert min(longest_step_s(Transactions(), list(events)) for _ in range(3)) < LIMIT_S


@pytest.mark.alone
def test_no_step_takes_long_when_a_large_group_is_rewritten() -> None:
    groups = Groups()
    offsets = (GroupOffset("t", number, 5, "i" * 32) for number in range(100_000))
    keyed = ((OffsetKey(1, "g", offset.topic, offset.partition), CommittedOffset(1, offset, 1)) for offset in offsets)
    groups.load(group_record(*found) for found in keyed)
    assert longest_step_s(groups, [RewriteRequested()]) < LIMIT_S


def sink(tasks: int, *, partitions: int, of: int) -> Transactions:
    """Return the coordinator of a sink's open transaction: each task writes this number ``of`` a topic's partitions."""
    core = Transactions()
    open_now = Transaction(state=OPEN, run_id="r", run=1, version=2, timeout_ms=60_000, by_topic=True)
    core.load([transaction_record("k", open_now)])
    for task in range(tasks):
        numbers = tuple(sorted((task * partitions + number) % of for number in range(partitions)))
        participant = Participant(0, (RegisteredTopic("t", numbers, "i" * 32),))
        core.load([participant_record("k", task, participant)])
    return core


@pytest.mark.alone
@pytest.mark.parametrize(("tasks", "partitions", "of"), [(100_000, 10, 1000), (2000, 500, 100_000), (100_000, 1, 1)])
def test_no_step_takes_long_when_a_large_sink_commits(tasks: int, partitions: int, of: int) -> None:
    end = EndRequested(1, "k", "r", 2, True, tuple(range(tasks)), 5000, 0)
    core = sink(tasks, partitions=partitions, of=of)
    assert longest_step_s(core, [end]) < LIMIT_S
    assert not core._entries["k"].participants


@pytest.mark.alone
def test_no_step_takes_long_when_many_tasks_of_a_sink_register() -> None:
    core = sink(50_000, partitions=1, of=1000)
    tasks = range(50_000, 55_000)
    events = [AddRequested(task, "k", "r", task, 0, (PartitionPlace("t", 0, "i" * 32),), version=2) for task in tasks]
    core.start(0)
    (first,) = core.step(events[0], 1)
    for event in events[1:]:
        core.step(event, 1)
    assert isinstance(first, Append)
    assert longest_step_s(core, [Appended(first.append)]) < LIMIT_S
    assert len(core._entries["k"].participants) == 55_000
