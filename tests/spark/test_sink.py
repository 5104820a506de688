"""Tests of concurrent runs of a sink, on real brokers: attempts that lose, drivers that are late, late writes.

No JVM: the tests do what Spark does with writers and messages.
"""

from __future__ import annotations

import datetime as dt
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import ProducerFenced, TransactionStateError
from sparklog.client.producer.two_phase_write import decide
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.spark import sink
from sparklog.spark.sink import SinkRun, WrittenRows, abort_run, batch_run, commit_run, known_run
from sparklog.spark.write_options import NamedWrite, WriteOptions
from sparklog.spark.write_plan import WritePlan, plan_write
from sparklog.spark.write_task import write_rows
from sparklog.spark.writer import BatchWriter
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = pytest.mark.integration

X = StructType().add("x", "long")


def rows(*values: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"x": pa.array(values, pa.int64())})


@pytest.fixture
def plan(brokers: ProcessCluster, admin: Admin, topic: str) -> WritePlan:
    admin.create_topic(topic, partitions=1, schema="x bigint")
    return plan_write(WriteOptions(brokers.bootstrap, topic, None, timeout_s=60), schema=X, now=True)


def seen(plan: WritePlan) -> list[int]:
    """Return the values that a reader of committed records sees, in offset order."""
    tp = TopicPartition(str(plan.options.topic), 0)
    with Admin(plan.options.bootstrap) as admin:
        end = admin.list_offsets([tp])[tp]
    with PartitionReader(plan.options.bootstrap, tp, 0, end) as reader:
        return [value for _, batch in reader for value in batch.column("x").to_pylist()]


def run(plan: WritePlan, version: int, run_id: str) -> SinkRun:
    return SinkRun(f"query:{plan.options.topic}", version, run_id)


def test_only_attempts_that_the_driver_names_are_committed(plan: WritePlan) -> None:
    """The run has two attempts of one task, a task that wrote and then died, and a task without rows."""
    now = run(plan, 0, "a")

    def dies() -> Iterator[pa.RecordBatch]:
        yield from rows(100)
        raise RuntimeError("the worker is gone")

    first, second = write_rows(plan, now, rows(1, 2)), write_rows(plan, now, rows(1, 2))
    with pytest.raises(RuntimeError, match="gone"):
        write_rows(plan, now, dies())
    empty = write_rows(plan, now, iter(()))
    assert (first.rows, empty.rows, first.run) == (2, 0, now)
    assert first.producer_id != second.producer_id
    assert seen(plan) == []
    commit_run(plan.options.bootstrap, [second, empty])
    assert seen(plan) == [1, 2]


def test_an_attempt_cannot_append_after_the_decision(plan: WritePlan) -> None:
    now = run(plan, 0, "a")
    winner: list[WrittenRows] = []

    def slow() -> Iterator[pa.RecordBatch]:
        yield from rows(*range(600_000))  # large enough to be sent immediately
        winner.append(write_rows(plan, now, rows(7)))
        commit_run(plan.options.bootstrap, winner)
        yield from rows(*range(600_000))

    with pytest.raises((ProducerFenced, TransactionStateError, BrokerError)):
        write_rows(plan, now, slow())
    assert seen(plan) == [7]


def test_a_slow_driver_cannot_commit_after_its_successor(plan: WritePlan) -> None:
    lingering = write_rows(plan, run(plan, 4, "old"), rows(1))
    later = write_rows(plan, run(plan, 4, "new"), rows(1))
    with pytest.raises(ProducerFenced):
        commit_run(plan.options.bootstrap, [lingering])
    with pytest.raises(ProducerFenced):
        write_rows(plan, run(plan, 4, "old"), rows(2))
    abort_run(plan.options.bootstrap, lingering.run)  # nor can it abort the successor's run
    commit_run(plan.options.bootstrap, [later])
    with pytest.raises(ProducerFenced):
        commit_run(plan.options.bootstrap, [lingering])
    assert seen(plan) == [1]


def test_a_committed_version_is_not_written_again(plan: WritePlan, caplog: pytest.LogCaptureFixture) -> None:
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 3, "first"), rows(1, 2))])
    replays = [write_rows(plan, run(plan, 3, "again"), rows(1)), write_rows(plan, run(plan, 2, "again"), rows(2))]
    assert [(found.is_replay, found.rows, found.ranges) for found in replays] == [(True, 1, ())] * 2
    commit_run(plan.options.bootstrap, replays[:1])
    assert "was already committed: skipped 1 rows" in caplog.text
    assert seen(plan) == [1, 2]
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 4, "again"), rows(3))])
    assert seen(plan) == [1, 2, 3]


def test_a_driver_may_commit_twice_and_abort_after_a_commit(plan: WritePlan) -> None:
    """Spark aborts when a commit call fails, and a lost response is enough for that."""
    written = write_rows(plan, run(plan, 0, "a"), rows(1))
    commit_run(plan.options.bootstrap, [written])
    commit_run(plan.options.bootstrap, [written])
    abort_run(plan.options.bootstrap, known_run([None, written]))
    assert seen(plan) == [1]


def test_a_version_without_rows_is_committed_too(plan: WritePlan) -> None:
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 0, "a"), iter(()))])
    assert write_rows(plan, run(plan, 0, "b"), rows(1)).is_replay


def test_readers_continue_after_an_abandoned_run_times_out(plan: WritePlan) -> None:
    options = WriteOptions(plan.options.bootstrap, plan.options.topic, None, timeout_s=1)
    abandoned = write_rows(WritePlan(options, X, plan.routes, None), run(plan, 0, "a"), rows(1))
    commit_run(plan.options.bootstrap, [write_rows(plan, batch_run("other", None), rows(2))])
    wait_until(lambda: seen(plan) == [2], 180, "the abandoned transaction to be aborted")
    with pytest.raises((ProducerFenced, TransactionStateError)):
        commit_run(plan.options.bootstrap, [abandoned])


def test_batch_writes_have_their_own_key_or_the_given_one(plan: WritePlan) -> None:
    def write(options: WriteOptions) -> None:
        writer = BatchWriter(WritePlan(options, X, plan.routes, None))
        writer.commit([writer.write(rows(1))])

    write(plan.options)
    write(plan.options)
    assert seen(plan) == [1, 1]
    for version in (5, 5, 4, 6):
        named = NamedWrite(str(plan.options.topic), version)
        write(WriteOptions(plan.options.bootstrap, plan.options.topic, None, named=named))
    assert seen(plan) == [1, 1, 1, 1]


def test_a_write_name_is_one_sequence_for_each_topic(admin: Admin, plan: WritePlan) -> None:
    """A write name counts in two topics, and in a recreated topic, independently. A mix-up would skip rows."""
    first = str(plan.options.topic)
    second = f"{first}-second"
    admin.create_topic(second, partitions=1, schema="x bigint")
    options = [
        WriteOptions(plan.options.bootstrap, topic, None, named=NamedWrite("one", 1)) for topic in (first, second)
    ]

    def write(options: WriteOptions, *values: int) -> WritePlan:
        made = plan_write(options, schema=X, now=True)
        writer = BatchWriter(made)
        writer.commit([writer.write(rows(*values))])
        return made

    for _ in range(2):
        for number, written in enumerate(options):
            assert seen(write(written, number)) == [number]
    admin.delete_topic(first)
    admin.create_topic(first, partitions=1, schema="x bigint")
    assert seen(write(options[0], 2)) == [2]


def test_a_topic_recreated_during_a_named_write_fails_it(admin: Admin, plan: WritePlan) -> None:
    """The write keeps the id of the topic that it was planned for. If it committed to the recreated topic, the next
    run would not know the write there, and would write its rows again."""
    topic = str(plan.options.topic)
    options = replace(plan.options, named=NamedWrite("one", 1))
    overtaken = BatchWriter(plan_write(options, schema=X, now=True))
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=1, schema="x bigint")
    with pytest.raises(BrokerError, match="deleted and created again since the write began") as caught:
        overtaken.write(rows(1))
    assert caught.value.code is ErrorCode.INCONSISTENT_TOPIC_ID
    overtaken.abort([None])
    for _ in range(2):
        writer = BatchWriter(plan_write(options, schema=X, now=True))
        writer.commit([writer.write(rows(1))])
    assert seen(plan) == [1]


class ByRows:
    """Named writes whose rows name their topics: three existing ones."""

    def __init__(self, admin: Admin, plan: WritePlan) -> None:
        self.admin = admin
        self.plan = plan
        first = str(plan.options.topic)
        self.topics = [first, *(f"{first}-{kind}" for kind in ("second", "third"))]
        for topic in self.topics[1:]:
            self.make(topic)

    def make(self, topic: str) -> None:
        self.admin.create_topic(topic, partitions=1, schema="x bigint")

    def remake(self, number: int) -> None:
        self.admin.delete_topic(self.topics[number])
        self.make(self.topics[number])

    def writer(self, version: int = 1, *, timeout_s: float = 60) -> BatchWriter:
        columns = StructType().add("x", "long").add("topic", "string")
        named = NamedWrite("one", version)
        options = WriteOptions(self.plan.options.bootstrap, None, None, timeout_s=timeout_s, named=named)
        return BatchWriter(plan_write(options, schema=columns, now=True))

    def by_option(self, number: int, version: int = 1) -> BatchWriter:
        options = replace(self.plan.options, topic=self.topics[number], named=NamedWrite("one", version))
        return BatchWriter(plan_write(options, schema=X, now=True))

    def rows(self, *values: int | None) -> Iterator[pa.RecordBatch]:
        """Yield one batch with a row for each topic, in order. None means no row for that topic."""
        there = {topic: value for topic, value in zip(self.topics, values, strict=False) if value is not None}
        yield pa.RecordBatch.from_pydict({"x": list(there.values()), "topic": list(there)})

    def write(self, *values: int | None, version: int = 1) -> WrittenRows:
        writer = self.writer(version)
        message = writer.write(self.rows(*values))
        assert isinstance(message, WrittenRows)
        writer.commit([message, writer.write(iter(()))])
        return message

    def seen(self) -> list[list[int]]:
        return [seen(replace(self.plan, options=replace(self.plan.options, topic=topic))) for topic in self.topics]

    def open_keys(self) -> list[str]:
        return [found.key for found in self.admin.transactions() if found.state == "open" and "one" in found.key]


@pytest.fixture
def by_rows(admin: Admin, plan: WritePlan) -> ByRows:
    return ByRows(admin, plan)


def test_a_named_write_to_several_topics_is_atomic(by_rows: ByRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """One driver dies before its decision, one task dies between two topics, and one driver dies directly after its
    first decision."""
    dead = by_rows.writer()
    left = [dead.write(by_rows.rows(1, 2)), dead.write(by_rows.rows(None, 3, 4))]
    assert by_rows.seen() == [[], [], []]
    again = by_rows.writer()

    def dies() -> Iterator[pa.RecordBatch]:
        yield from by_rows.rows(1)
        again.write(by_rows.rows(1))  # its rows are in the log of the first topic
        raise RuntimeError("the worker is gone")

    with pytest.raises(RuntimeError, match="gone"):
        again.write(dies())
    messages = [again.write(by_rows.rows(1, 2)), again.write(by_rows.rows(None, 3, 4))]
    with pytest.raises(ProducerFenced):
        dead.commit(left)

    def decide_and_die(*found: Any, **named: Any) -> None:
        decide(*found, **named)
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(sink, "decide", decide_and_die)
        again.commit(messages)
    assert by_rows.seen() == [[1], [2, 3], [4]]
    again.commit(messages)
    dead.abort(left)
    again.abort(messages)
    assert by_rows.write(1, 2).known_rows == 2
    assert by_rows.seen() == [[1], [2, 3], [4]]
    assert by_rows.open_keys() == []


def test_a_named_write_by_rows_counts_in_each_topic(by_rows: ByRows, caplog: pytest.LogCaptureFixture) -> None:
    """A write with the same name and version to other topics is a different write there, whether rows or an option
    name the topic."""
    for value in (1, 2):  # the second attempt is already committed
        by_rows.write(value)
    assert "was already committed: skipped 1 rows" in caplog.text
    assert by_rows.seen() == [[1], [], []]
    by_rows.write(3, 4)  # the same write with another topic
    assert by_rows.seen() == [[1], [4], []]
    for number, value in enumerate((5, 6, 7)):
        writer = by_rows.by_option(number)
        writer.commit([writer.write(rows(value))])
    assert by_rows.seen() == [[1], [4], [7]]
    by_rows.write(8, 8, 8)
    by_rows.write(9, None, 9, version=2)
    by_rows.write(10, 10, version=1)
    assert by_rows.seen() == [[1, 9], [4], [7, 9]]
    by_rows.write(11, 11, 11, version=2)
    assert by_rows.seen() == [[1, 9], [4, 11], [7, 9]]
    by_rows.remake(0)
    by_rows.write(12, 12, version=2)
    assert by_rows.seen() == [[12], [4, 11], [7, 9]]
    assert by_rows.open_keys() == []


@pytest.mark.parametrize("rows_first", [True, False])
def test_the_later_of_two_writes_of_one_name_wins(by_rows: ByRows, *, rows_first: bool) -> None:
    """One write names the topic by its rows, the other by an option. Each is a transaction of its own."""
    many, one = by_rows.writer(), by_rows.by_option(1)
    if rows_first:
        early, late = (many, many.write(by_rows.rows(1, 2))), (one, one.write(rows(2)))
    else:
        early, late = (one, one.write(rows(2))), (many, many.write(by_rows.rows(1, 2)))
    with pytest.raises(ProducerFenced):
        early[0].commit([early[1]])
    late[0].commit([late[1]])
    assert by_rows.seen() == [[] if rows_first else [1], [2], []]
    by_rows.write(1, 2)
    assert by_rows.seen() == [[1], [2], []]


def test_tasks_on_one_topic_keep_another_topics_rows_alive(by_rows: ByRows) -> None:
    """The rows of a task may be in a topic that no later task writes to. All tasks share one transaction, and the
    heartbeats of any task keep it open."""
    writer = by_rows.writer(timeout_s=9)
    first = writer.write(by_rows.rows(1))

    def deadline() -> dt.datetime:
        (found,) = [one for one in by_rows.admin.transactions() if one.key == "app::one"]
        assert found.state == "open" and found.deadline is not None
        assert TopicPartition(by_rows.topics[0], 0) in found.partitions
        return found.deadline

    def slow() -> Iterator[pa.RecordBatch]:
        yield from by_rows.rows(None, 2)
        before = deadline()
        wait_until(lambda: deadline() > before, 60, "a sign of life")

    writer.commit([first, writer.write(slow())])
    assert by_rows.seen() == [[1], [2], []]


def test_a_topic_recreated_between_two_tasks_fails_the_write(by_rows: ByRows) -> None:
    """If the driver committed, both topics of that name would know the write, and the next run would skip the rows
    of both tasks."""
    writer = by_rows.writer()
    messages = [writer.write(by_rows.rows(1, 2))]
    by_rows.remake(0)
    messages.append(writer.write(by_rows.rows(3)))
    with pytest.raises(BrokerError, match="deleted and created again between two tasks") as caught:
        writer.commit(messages)
    assert caught.value.code is ErrorCode.INCONSISTENT_TOPIC_ID
    writer.abort(messages)
    assert by_rows.seen() == [[], [], []]
    writer = by_rows.writer()
    writer.commit([writer.write(by_rows.rows(1, 2)), writer.write(by_rows.rows(3))])
    assert by_rows.seen() == [[1, 3], [2], []]


def test_an_aborted_named_write_by_rows_leaves_nothing_open(by_rows: ByRows) -> None:
    """A late task leaves no open transaction either: neither in a topic that no other task wrote to, nor as the
    first task."""
    writer = by_rows.writer()
    writer.write(by_rows.rows(1))
    writer.abort([None])
    unused = by_rows.writer()
    unused.abort([None])
    for late in (writer, unused):
        with pytest.raises(ProducerFenced):
            late.write(by_rows.rows(1, 1))
    commit_run(by_rows.plan.options.bootstrap, [write_rows(by_rows.plan, batch_run("after the abort"), rows(2))])
    assert by_rows.seen() == [[2], [], []]
    assert by_rows.open_keys() == []


def test_an_aborted_batch_leaves_nothing_and_stops_its_tasks(plan: WritePlan) -> None:
    writer = BatchWriter(plan)
    writer.write(rows(1))
    writer.abort([None])
    with pytest.raises(ProducerFenced):
        writer.write(rows(1))
    assert seen(plan) == []


def test_aborting_a_fenced_run_logs_no_warning(plan: WritePlan, caplog: pytest.LogCaptureFixture) -> None:
    """The open transaction belongs to the run that fenced this one, so no warning of a timeout is due."""
    named = replace(plan, options=replace(plan.options, named=NamedWrite("twice", 1)))
    first, second = BatchWriter(named), BatchWriter(named)
    first.write(rows(1))
    written = second.write(rows(2))
    with caplog.at_level("INFO", logger=sink.__name__):
        first.abort([None])
    assert [record.levelname for record in caplog.records] == ["INFO"]
    second.commit([written])
    assert seen(plan) == [2]


def test_at_least_once_writes_without_a_transaction(plan: WritePlan) -> None:
    options = WriteOptions(plan.options.bootstrap, plan.options.topic, None, exactly_once=False, acks="1")
    writer = BatchWriter(WritePlan(options, X, plan.routes, None))
    written = writer.write(rows(1, 2))
    assert isinstance(written, WrittenRows) and (written.rows, written.run) == (2, None)
    writer.abort([written])
    # acks=1 waits for no follower, but a reader waits for the high watermark.
    wait_until(lambda: seen(plan) == [1, 2], 180, "the followers")
    writer.commit([written])


def test_impossible_commit_messages_are_refused(plan: WritePlan) -> None:
    with pytest.raises(ClusterError, match="1 of 2 write tasks sent no result"):
        commit_run(plan.options.bootstrap, [WrittenRows(1), None])
    two = [WrittenRows(1, (), run(plan, 0, run_id), 1) for run_id in "ab"]
    with pytest.raises(ClusterError, match="different runs"):
        commit_run(plan.options.bootstrap, two)


#: Code that Spark runs in its own processes before and after a write's tasks.
_PLAN = """
import pickle, sys
from sparklog.spark.write_plan import plan_write
from sparklog.spark.writer import BatchWriter
options, columns = pickle.load(sys.stdin.buffer)
writer = BatchWriter(plan_write(options, schema=columns, now=True))
assert not {"asyncio", "uvloop", "pandas", "pyarrow.compute", "sparklog.client.producer.producer"} & set(sys.modules)
admin = {f"sparklog.client.admin.{name}" for name in ("admin", "topics", "descriptions")}
assert not admin & set(sys.modules)
assert not {"sparklog.spark.topics", "sparklog.spark.columns", "difflib"} & set(sys.modules)
assert not sys.modules["sparklog.protocol.messages"].request_decoder.cache_info().currsize
sys.stdout.buffer.write(pickle.dumps(writer))
"""
_COMMIT = """
import pickle, sys
writer, messages = pickle.load(sys.stdin.buffer)
writer.commit(messages)
assert not {"numpy", "pyarrow", "difflib"} & set(sys.modules)
assert not sys.modules["sparklog.protocol.messages"].request_decoder.cache_info().currsize
"""


def in_a_process(code: str, given: object) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(given), capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_planner_and_committer_import_only_what_they_use(plan: WritePlan, admin: Admin) -> None:
    admin.add_columns(str(plan.options.topic), pa.schema([("y", pa.list_(pa.string()))]))
    writer = pickle.loads(in_a_process(_PLAN, (plan.options, X)))
    messages = [writer.write(rows(1, 2)), writer.write(rows(3))]
    in_a_process(_COMMIT, (writer, messages))
    assert sorted(seen(plan)) == [1, 2, 3]
