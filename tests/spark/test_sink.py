"""Runs of a sink against each other, on real brokers: attempts that lose, drivers that linger, what comes late. No JVM:
what Spark does with writers and messages is done here by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from sparklog.client.admin import Admin
from sparklog.client.errors import ProducerFenced, TransactionStateError
from sparklog.client.reader import PartitionReader
from sparklog.errors import BrokerError, ClusterError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.spark.sink import SinkRun, Written, WrittenByTopic, abort_run, batch_run, commit_run, known_run
from sparklog.spark.write_options import NamedWrite, WriteOptions
from sparklog.spark.writer import BatchWriter, WritePlan, plan_write, write_rows
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
    """What a reader of committed records has, in order of offsets."""
    tp = TopicPartition(str(plan.options.topic), 0)
    with Admin(plan.options.bootstrap) as admin:
        end = admin.list_offsets([tp])[tp]
    with PartitionReader(plan.options.bootstrap, tp, 0, end) as reader:
        return [value for _, batch in reader for value in batch.column("x").to_pylist()]


def run(plan: WritePlan, version: int, run_id: str) -> SinkRun:
    return SinkRun(f"query:{plan.options.topic}", version, run_id)


def test_only_attempts_that_the_driver_names_are_committed(plan: WritePlan) -> None:
    """Two attempts of one task, one that wrote and then died, and a task without rows."""
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


def test_what_an_attempt_appends_after_the_decision_is_refused(plan: WritePlan) -> None:
    now = run(plan, 0, "a")
    winner: list[Written] = []

    def slow() -> Iterator[pa.RecordBatch]:
        yield from rows(*range(600_000))  # enough to be sent at once
        winner.append(write_rows(plan, now, rows(7)))
        commit_run(plan.options.bootstrap, winner)
        yield from rows(*range(600_000))

    with pytest.raises((ProducerFenced, TransactionStateError, BrokerError)):
        write_rows(plan, now, slow())
    assert seen(plan) == [7]


def test_a_driver_that_lingers_cannot_commit_what_a_later_one_took_over(plan: WritePlan) -> None:
    lingering = write_rows(plan, run(plan, 4, "old"), rows(1))
    later = write_rows(plan, run(plan, 4, "new"), rows(1))
    with pytest.raises(ProducerFenced):
        commit_run(plan.options.bootstrap, [lingering])
    with pytest.raises(ProducerFenced):
        write_rows(plan, run(plan, 4, "old"), rows(2))
    abort_run(plan.options.bootstrap, lingering.run)  # nor abort it
    commit_run(plan.options.bootstrap, [later])
    with pytest.raises(ProducerFenced):
        commit_run(plan.options.bootstrap, [lingering])
    assert seen(plan) == [1]


def test_a_version_that_is_committed_is_counted_not_written(plan: WritePlan, caplog: pytest.LogCaptureFixture) -> None:
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 3, "first"), rows(1, 2))])
    replays = [write_rows(plan, run(plan, 3, "again"), rows(1)), write_rows(plan, run(plan, 2, "again"), rows(2))]
    assert [(found.is_replay, found.rows, found.ranges) for found in replays] == [(True, 1, ())] * 2
    commit_run(plan.options.bootstrap, replays[:1])
    assert "was committed before: 1 rows left out" in caplog.text
    assert seen(plan) == [1, 2]
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 4, "again"), rows(3))])
    assert seen(plan) == [1, 2, 3]


def test_a_driver_may_ask_twice_and_abort_after_it_has_committed(plan: WritePlan) -> None:
    """Spark aborts when a commit call failed, and that may have been no more than a lost answer."""
    written = write_rows(plan, run(plan, 0, "a"), rows(1))
    commit_run(plan.options.bootstrap, [written])
    commit_run(plan.options.bootstrap, [written])
    abort_run(plan.options.bootstrap, known_run([None, written]))
    assert seen(plan) == [1]


def test_a_version_without_rows_is_committed_too(plan: WritePlan) -> None:
    commit_run(plan.options.bootstrap, [write_rows(plan, run(plan, 0, "a"), iter(()))])
    assert write_rows(plan, run(plan, 0, "b"), rows(1)).is_replay


def test_an_abandoned_run_lets_readers_go_on_after_its_time_out(plan: WritePlan) -> None:
    options = WriteOptions(plan.options.bootstrap, plan.options.topic, None, timeout_s=1)
    abandoned = write_rows(WritePlan(options, X, plan.routes, None), run(plan, 0, "a"), rows(1))
    commit_run(plan.options.bootstrap, [write_rows(plan, batch_run("other", None), rows(2))])
    wait_until(lambda: seen(plan) == [2], 180, "the abandoned transaction to be aborted")
    with pytest.raises((ProducerFenced, TransactionStateError)):
        commit_run(plan.options.bootstrap, [abandoned])


def test_batch_writes_have_a_key_each_or_the_one_they_were_given(plan: WritePlan) -> None:
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


def test_a_name_is_one_sequence_for_each_topic(admin: Admin, plan: WritePlan) -> None:
    """Two topics under one name and number, and a topic made anew: none is taken for another, which would leave its
    rows out."""
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


def test_a_topic_made_anew_under_a_named_write_fails_it(admin: Admin, plan: WritePlan) -> None:
    """It is known by the topic that it was planned for: committed as that, its rows in the new one would be written
    again by the next run."""
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


def test_a_named_write_whose_rows_name_their_topics_is_one_of_that_name_in_each(
    admin: Admin, plan: WritePlan, caplog: pytest.LogCaptureFixture
) -> None:
    """Written to other topics under the same name and number, it is another write; after a driver's death between two
    topics' decisions, the rest is written."""
    first = str(plan.options.topic)
    topics = [first, *(f"{first}-{kind}" for kind in ("second", "third"))]
    for topic in topics[1:]:
        admin.create_topic(topic, partitions=1, schema="x bigint")
    named = NamedWrite("one", 1)

    def rows_of(values: dict[str, int]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"x": list(values.values()), "topic": list(values)})

    def writer() -> BatchWriter:
        columns = StructType().add("x", "long").add("topic", "string")
        options = WriteOptions(plan.options.bootstrap, None, None, timeout_s=60, named=named)
        return BatchWriter(plan_write(options, schema=columns, now=True))

    def found() -> list[list[int]]:
        return [seen(replace(plan, options=replace(plan.options, topic=topic))) for topic in topics]

    for value in (1, 2):  # the second time it is known
        made = writer()
        made.commit([made.write(rows_of({topics[0]: value})), made.write(iter(()))])
    assert "was committed before: 1 rows left out" in caplog.text
    made = writer()
    message = made.write(rows_of({topics[1]: 3, topics[2]: 4}))
    assert isinstance(message, WrittenByTopic)
    assert found() == [[1], [], []]
    made.commit([WrittenByTopic(message.parts[:1])])  # and then the driver was gone
    assert found() == [[1], [3], []]
    made = writer()
    made.commit([made.write(rows_of({topics[0]: 1, topics[1]: 3, topics[2]: 4}))])
    assert found() == [[1], [3], [4]]
    by_option = replace(plan.options, topic=topics[2], named=named)
    made = BatchWriter(plan_write(by_option, schema=X, now=True))
    made.commit([made.write(rows(5))])
    assert found() == [[1], [3], [4]]


def test_an_aborted_named_write_of_rows_that_name_their_topics_leaves_nothing_open(
    admin: Admin, plan: WritePlan
) -> None:
    columns = StructType().add("x", "long").add("topic", "string")
    options = WriteOptions(plan.options.bootstrap, None, None, named=NamedWrite("aborted", 1))
    writer = BatchWriter(plan_write(options, schema=columns, now=True))
    writer.write(iter([pa.RecordBatch.from_pydict({"x": [1], "topic": [plan.options.topic]})]))
    writer.abort([None])
    commit_run(plan.options.bootstrap, [write_rows(plan, batch_run("after the abort"), rows(2))])
    assert seen(plan) == [2]


def test_an_aborted_batch_leaves_nothing_and_its_tasks_cannot_go_on(plan: WritePlan) -> None:
    writer = BatchWriter(plan)
    writer.write(rows(1))
    writer.abort([None])
    with pytest.raises(ProducerFenced):
        writer.write(rows(1))
    assert seen(plan) == []


def test_at_least_once_on_request(plan: WritePlan) -> None:
    options = WriteOptions(plan.options.bootstrap, plan.options.topic, None, exactly_once=False, acks="1")
    writer = BatchWriter(WritePlan(options, X, plan.routes, None))
    written = writer.write(rows(1, 2))
    assert isinstance(written, Written) and (written.rows, written.run) == (2, None)
    writer.abort([written])
    # acks=1 waits for no follower, readers do.
    wait_until(lambda: seen(plan) == [1, 2], 180, "the followers")
    writer.commit([written])


def test_messages_that_cannot_be(plan: WritePlan) -> None:
    with pytest.raises(ClusterError, match="1 of 2 write tasks reported nothing"):
        commit_run(plan.options.bootstrap, [Written(1), None])
    two = [Written(1, (), run(plan, 0, run_id), 1) for run_id in "ab"]
    with pytest.raises(ClusterError, match="different runs"):
        commit_run(plan.options.bootstrap, two)
