"""Tests of a group's consumers with real brokers: shared partitions, commits, and late members."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.errors import CommitRefused, TransactionStateError
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.topics import PATIENCE_S, create_topic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

#: A session that does not expire on a busy machine, and one that should.
LONG_MS, SHORT_MS = 120_000, 1500


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(3) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, timeout_s=PATIENCE_S) as client:
        yield client


Join = Callable[..., Consumer]


@pytest.fixture
def join(cluster: ProcessCluster) -> Iterator[Join]:
    """Yield a function that creates consumers of a group. The fixture closes the remaining ones at the end."""
    with contextlib.ExitStack() as stack:

        def make(group: str, *topics: str, **more: Any) -> Consumer:
            options = {"session_timeout_ms": LONG_MS, "heartbeat_interval_ms": 300, "timeout_s": PATIENCE_S, **more}
            return stack.enter_context(Consumer(cluster.bootstrap, topics, group=group, **options))

        yield make


def fill(cluster: ProcessCluster, topic: str, partitions: int, each: int, *, prefix: str = "") -> None:
    with Producer(cluster.bootstrap) as producer:
        for number in range(each * partitions):
            producer.send(topic, f"{prefix}{number}", partition=number % partitions)


def poll_until(consumers: Sequence[Consumer], true: Callable[[], bool], what: str) -> list[str]:
    """Poll the consumers in turn, and return their records."""
    found: list[str] = []
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"not in time: {what}"
        for consumer in consumers:
            for batch in consumer.poll(0.05):
                found += [value.decode() for value in batch.column("value").to_pylist()]
    return found


def sizes(*consumers: Consumer) -> list[int]:
    return [len(consumer.assignment) for consumer in consumers]


def test_a_group_reads_each_record_once_and_resumes_its_positions(
    cluster: ProcessCluster, admin: Admin, join: Join
) -> None:
    create_topic(cluster, "shared", partitions=6)
    fill(cluster, "shared", 6, 10)
    calls: list[tuple[str, str, int]] = []

    def named(name: str) -> dict[str, Any]:
        return {
            "on_assign": lambda partitions: calls.append((name, "assign", len(partitions))),
            "on_revoke": lambda partitions: calls.append((name, "revoke", len(partitions))),
        }

    first = join("sharing", "shared", **named("first"))
    seen: list[str] = poll_until([first], lambda: sizes(first) == [6], "the first to have all")
    seen += poll_until([first], lambda: sum(first.positions().values()) == 60, "sixty records")
    first.commit()
    assert first.committed() == admin.group_offsets("sharing") == first.positions()
    second = join("sharing", "shared", auto_commit_interval_ms=60_000, **named("second"))
    seen += poll_until([first, second], lambda: sizes(first, second) == [3, 3], "halves")
    assert calls == [("first", "assign", 6), ("first", "revoke", 3), ("second", "assign", 3)]
    assert not set(first.assignment) & set(second.assignment)
    with pytest.raises(CommitRefused) as refused:
        first.commit(dict.fromkeys(second.assignment, 1))
    assert refused.value.code == ErrorCode.STALE_MEMBER_EPOCH
    fill(cluster, "shared", 6, 5, prefix="later-")
    both = [first, second]
    seen += poll_until(both, lambda: sum(sum(one.positions().values()) for one in both) == 90, "ninety records")
    assert len(seen) == len(set(seen)) == 90, "no record twice, because every member continued from the commits"
    # A client also has a host name if it talks to a broker of its host over a socket without an address.
    assert {member.host for member in describe(admin, "sharing").members} == {"127.0.0.1"}
    assert [member.member_id for member in describe(admin, "sharing").members] == sorted(
        [first.member_id, second.member_id]
    )
    with pytest.raises(BrokerError) as held:
        admin.commit_offsets("sharing", {TopicPartition("shared", 0): 0})
    assert held.value.code == ErrorCode.NON_EMPTY_GROUP
    with pytest.raises(BrokerError, match="NON_EMPTY_GROUP"):
        admin.delete_group("sharing")
    ticket = first.commit_async()
    ticket.result(PATIENCE_S)
    closed = time.monotonic()
    second.close()
    poll_until([first], lambda: sizes(first) == [6], "the first to have all again")
    assert time.monotonic() - closed < LONG_MS / 1000, "immediately, and not at the session's end"
    assert sum(first.committed().values()) == 90, "close() must commit if auto-commit is on"
    assert calls[3:] == [("second", "revoke", 3), ("first", "assign", 3)]
    first.close()
    assert describe(admin, "sharing").state == "empty"
    third = join("sharing", "shared")
    assert not poll_until([third], lambda: sizes(third) == [6], "a third to have all")
    assert third.positions() == admin.group_offsets("sharing")
    other = join("another group", "shared", start="latest")
    poll_until([other], lambda: sizes(other) == [6], "another group")
    assert sum(other.positions().values()) == 90
    assert {"sharing", "another group"} <= set(admin.list_groups())


def describe(admin: Admin, group: str) -> Any:
    found = admin.describe_group(group)
    assert found is not None
    return found


def test_heartbeats_continue_during_user_code_and_end_without_polls(
    cluster: ProcessCluster, admin: Admin, join: Join
) -> None:
    create_topic(cluster, "worked", partitions=2)
    fill(cluster, "worked", 2, 5)
    lost: list[int] = []
    busy = join("workers", "worked", session_timeout_ms=SHORT_MS, on_lost=lambda found: lost.append(len(found)))
    poll_until([busy], lambda: sum(busy.positions().values()) == 10, "ten records")
    member = busy.member_id
    time.sleep(2.5 * SHORT_MS / 1000)
    busy.commit()
    assert (busy.member_id, lost) == (member, []), "a session ended although heartbeats should continue"
    busy.close()
    late = join("late workers", "worked", session_timeout_ms=SHORT_MS, max_poll_interval_ms=SHORT_MS,
                on_lost=lambda found: lost.append(len(found)))  # fmt: skip
    poll_until([late], lambda: sum(late.positions().values()) == 10, "ten records")
    other = join("late workers", "worked")
    end = time.monotonic() + PATIENCE_S
    while sizes(other) != [2]:
        assert time.monotonic() < end
        other.poll(0.05)
    with pytest.raises(CommitRefused) as refused:
        late.commit()
    assert refused.value.code == ErrorCode.UNKNOWN_MEMBER_ID
    assert not admin.group_offsets("late workers")
    poll_until([late, other], lambda: sizes(late, other) == [1, 1], "the late one to be back")
    assert lost == [2]
    late.commit()


def test_a_member_learns_of_a_rebalance_within_an_iteration(cluster: ProcessCluster, admin: Admin, join: Join) -> None:
    create_topic(cluster, "stored", partitions=2)
    fill(cluster, "stored", 2, 2000)
    first = join("iterating", "stored", max_records=1, auto_commit_interval_ms=100)
    batches = iter(first)
    next(batches)
    second = join("iterating", "stored")
    for _ in range(1500):
        if sizes(first, second) == [1, 1]:
            break
        next(batches)
        second.poll(0.01)
    assert sizes(first, second) == [1, 1], "a member gives up a partition only after it has returned its records"
    for _ in range(400):
        if admin.group_offsets("iterating"):
            break
        next(batches)
        second.poll(0.01)
    assert admin.group_offsets("iterating"), "and auto-commit must not come earlier"


def test_patterns_follow_created_and_deleted_topics(cluster: ProcessCluster, admin: Admin, join: Join) -> None:
    create_topic(cluster, "pat-one", partitions=2)
    create_topic(cluster, "not-pat", partitions=2)
    reader = join("patterns", pattern="pat-.*")
    poll_until([reader], lambda: sizes(reader) == [2], "the existing topic")
    create_topic(cluster, "pat-two", partitions=3)
    poll_until([reader], lambda: sizes(reader) == [5], "the new topic")
    admin.create_partitions("pat-two", 4)
    poll_until([reader], lambda: sizes(reader) == [6], "the new partition")
    fill(cluster, "pat-two", 4, 2)
    assert len(poll_until([reader], lambda: sum(reader.positions().values()) == 8, "eight records")) == 8
    admin.delete_topic("pat-one")
    poll_until([reader], lambda: sizes(reader) == [4], "the deleted topic")
    wrong = join("patterns", pattern="pat-(")
    with pytest.raises(BrokerError) as refused:
        poll_until([wrong], lambda: False, "a refusal")
    assert refused.value.code == ErrorCode.INVALID_REGULAR_EXPRESSION


def test_a_static_member_that_returns_moves_no_partition(cluster: ProcessCluster, admin: Admin, join: Join) -> None:
    create_topic(cluster, "static", partitions=4)
    names = ("a", "b")
    first, second = (join("statics", "static", instance_id=name) for name in names)
    poll_until([first, second], lambda: sizes(first, second) == [2, 2], "halves")
    had, epoch = first.assignment, describe(admin, "statics").group_epoch
    first.close()
    assert len(describe(admin, "statics").members) == 2
    back = join("statics", "static", instance_id="a")
    poll_until([back, second], lambda: sizes(back) == [2], "the member to return")
    assert sorted(back.assignment) == sorted(had)
    assert describe(admin, "statics").group_epoch == epoch + 1
    third = join("statics", "static", instance_id="a")
    poll_until([third], lambda: sizes(third) == [2], "the successor with that id")
    with pytest.raises(BrokerError) as fenced:
        poll_until([back], lambda: False, "a refusal")
    assert fenced.value.code == ErrorCode.FENCED_INSTANCE_ID
    assert back.assignment == []
    assert sizes(second) == [2]


def test_a_group_starts_where_configured_and_refuses_bad_calls(cluster: ProcessCluster, join: Join) -> None:
    create_topic(cluster, "timed", partitions=1)
    with Producer(cluster.bootstrap) as producer:
        for second in range(6):
            producer.send("timed", str(second), timestamp=second * 1_000_000)
    reader = join("timers", "timed", start=dt.datetime.fromtimestamp(3.5, dt.timezone.utc), max_records=1)
    got = poll_until([reader], lambda: bool(reader.assignment) and reader.positions() == {("timed", 0): 6}, "the end")
    assert got == ["4", "5"]
    for options, code in (
        ({"session_timeout_ms": 10}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"heartbeat_interval_ms": 1}, ErrorCode.INVALID_CONFIG),
    ):
        refused = join("refused", "timed", **options)
        with pytest.raises(BrokerError) as error:
            poll_until([refused], lambda: False, "a refusal")
        assert error.value.code == code
        assert "expected" in error.value.detail


def test_records_during_a_handover_from_the_end_are_read(cluster: ProcessCluster, join: Join) -> None:
    """The test also checks that an abandoned commit does not affect other commits, and that a failing block commits
    nothing."""
    create_topic(cluster, "handed", partitions=2)
    fill(cluster, "handed", 2, 5, prefix="before")
    options = {"start": "latest", "auto_commit_interval_ms": 60_000}
    with join("hands", "handed", **options) as first:
        poll_until([first], lambda: sizes(first) == [2], "the first has all")
    fill(cluster, "handed", 2, 5, prefix="between")
    second = join("hands", "handed", **options)
    got = poll_until([second], lambda: len(second.assignment) == 2 and sum(second.positions().values()) == 20, "all")
    assert len(got) == 10
    assert all(value.startswith("between") for value in got)
    for _ in range(200):
        second.commit_async({TopicPartition("handed", 0): 1}).cancel()
    second.commit({TopicPartition("handed", 0): 10, TopicPartition("handed", 1): 10})
    second.close()
    fill(cluster, "handed", 2, 1, prefix="last")
    with pytest.raises(ZeroDivisionError), join("hands", "handed", **options) as third:
        poll_until([third], lambda: len(third.assignment) == 2 and sum(third.positions().values()) == 22, "the last")
        raise ZeroDivisionError
    fourth = join("hands", "handed", **options)
    assert len(poll_until([fourth], lambda: sum(fourth.positions().values()) == 22, "the last again")) == 2


def test_a_partition_waits_for_transactional_offsets_of_its_former_owner(cluster: ProcessCluster, join: Join) -> None:
    """Source: KIP-447. Without the wait the next owner would start where the open transaction began."""
    create_topic(cluster, "fenced", partitions=2)
    create_topic(cluster, "made", partitions=1)
    fill(cluster, "fenced", 2, 10)
    first = join("fencing", "fenced")
    poll_until([first], lambda: sum(first.positions().values()) == 20, "twenty records")
    with Producer(cluster.bootstrap, transactional_id="of-first") as producer:
        producer.begin()
        producer.send("made", b"of twenty")
        before = first.group_metadata()
        producer.send_offsets(first.positions(), group=before)
        second = join("fencing", "fenced")
        poll_until([first, second], lambda: sizes(first) == [1], "the first to give one up")
        for _ in range(10):
            assert not second.poll(0.1)
        assert sizes(second) == [0], "no committed offset is known yet"
        producer.commit()
        poll_until([first, second], lambda: sizes(second) == [1], "the second to begin")
        (given,) = second.assignment
        assert second.positions() == {given: 10}
        producer.begin()
        producer.send("made", b"of what is another's")
        with pytest.raises(CommitRefused) as refused:
            producer.send_offsets({given: 3}, group=before)
        assert refused.value.code == ErrorCode.STALE_MEMBER_EPOCH
        with pytest.raises(TransactionStateError, match="only be aborted"):
            producer.commit()
        producer.abort()
        producer.begin()
        (kept,) = first.assignment
        producer.send_offsets({kept: 4}, group=first.group_metadata())
        assert first.committed() == {kept: 10}, "its own transaction must not delay it"
        producer.abort()
    first.close()
    poll_until([second], lambda: sizes(second) == [2], "the aborted transaction to be found out")
    assert second.positions() == {given: 10, kept: 10}
