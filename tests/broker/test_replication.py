"""Tests of three real brokers: acknowledged records stay, whichever broker dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition, VersionedState
from sparklog.protocol.messages import (
    ACKS_ALL,
    CONSUMER,
    EARLIEST,
    LATEST,
    Fetch,
    FetchPartition,
    FetchReply,
    ProduceReply,
)
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded, fetch, list_offset, produce, produce_request, read_all
from tests.broker.topics import (
    PATIENCE_S,
    Writer,
    create_topic,
    leader,
    new_producer_id,
    partition,
    replica,
    running,
    segment_digests,
    wait_equal,
    wait_isr,
)

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}
Writers = Callable[..., Writer]


@pytest.fixture
def writers(cluster: ProcessCluster) -> Iterator[Writers]:
    """Yield a function that creates writers for (topic, partition). The fixture closes them."""
    with ExitStack() as stack:
        yield lambda topic, number=0: stack.enter_context(Writer(cluster, topic, number))


def test_every_kind_of_acks_is_read_back_from_every_replica(cluster: ProcessCluster) -> None:
    create_topic(cluster, "acks")
    with cluster.connect(leader(cluster, "acks")) as connection:
        connection.send(*produce_request("acks", [encoded(2, "none-")], acks=0))
        first = produce(connection, "acks", encoded(2, "one-"), acks=1)
        last = produce(connection, "acks", encoded(1, "all-"), encoded(1, "all-again-"), acks=-1)
        assert (first.code, first.base_offset, last.code, last.base_offset) == (0, 2, 0, 4)
        assert list_offset(connection, "acks", LATEST).offset == 6
        assert list_offset(connection, "acks", EARLIEST).offset == 0
    wait_equal(cluster, "acks", 6)
    expected = [b"none-0", b"none-1", b"one-0", b"one-1", b"all-0", b"all-again-0"]
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, "acks") == expected


def test_a_producer_without_acks_finds_a_leader_that_has_moved(cluster: ProcessCluster) -> None:
    """The old leader lives and sends no response: the producer only notices that it closes the connection."""
    create_topic(cluster, "no-acks", assignment=((0, 1, 2),))
    with Producer(cluster.bootstrap, acks=0, linger_ms=0) as producer, Admin(cluster.bootstrap) as admin:
        producer.send("no-acks", b"to broker 0").result(PATIENCE_S)
        wait_equal(cluster, "no-acks", 1)
        order = {TopicPartition("no-acks", 0): (1, 2, 0)}
        admin.reassign(order)
        admin.wait_until_moved(order)
        assert not admin.elect_leaders(order)
        wait_until(lambda: partition(cluster, "no-acks").leader == 1, PATIENCE_S, "broker 1 to lead")

        def arrived() -> bool:
            producer.send("no-acks", b"to broker 1").result(PATIENCE_S)
            return replica(cluster, 1, "no-acks").high_watermark > 1

        wait_until(arrived, PATIENCE_S, "records at the new leader")


def test_a_waiting_consumer_is_woken_by_a_commit(cluster: ProcessCluster) -> None:
    create_topic(cluster, "wake")
    at = leader(cluster, "wake")
    took: list[float] = []

    def wait_for_it() -> None:
        with cluster.connect(at) as waiting:
            began = time.monotonic()
            fetched, _ = fetch(waiting, "wake", 0, max_wait_ms=10_000)
            took.append(time.monotonic() - began if fetched.batch_count else -1.0)

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    before = cluster.describe(at).counters["fetch.consumer.requests"]
    wait_until(
        lambda: took or cluster.describe(at).counters["fetch.consumer.requests"] >= before, PATIENCE_S, "the fetch"
    )
    with cluster.connect(at) as connection:
        assert produce(connection, "wake", encoded(1)).code == 0
    waiter.join(PATIENCE_S)
    assert took and 0 <= took[0] < 5


@pytest.mark.parametrize("acks", [ACKS_ALL, 1])
def test_a_waiting_consumer_gets_records_before_their_acknowledgement(cluster: ProcessCluster, acks: int) -> None:
    """Both share one connection, on which responses come in the order of their requests."""
    topic = f"first-{acks}"
    create_topic(cluster, topic, replicas=3 if acks == ACKS_ALL else 1)
    with cluster.connect(leader(cluster, topic)) as connection:
        produce(connection, topic, encoded(1, "a"), acks=ACKS_ALL)  # the new log has its name then
        for offset in range(1, 4):
            wanted = FetchPartition(topic, 0, "", -1, offset, 1 << 20)
            connection.send(Fetch(0, CONSUMER, -1, 30_000, 1, 1 << 20, 0, 0, -1, (wanted,)))
            connection.send(*produce_request(topic, [encoded(1, "b")], acks=acks))
            replies = [connection.receive()[0] for _ in range(2)]
            assert [type(reply) for reply in replies] == [FetchReply, ProduceReply]
            assert isinstance(replies[0], FetchReply)
            assert replies[0].partitions[0].batch_count == 1


def test_offsets_are_found_by_time(cluster: ProcessCluster) -> None:
    create_topic(cluster, "times")
    with cluster.connect(leader(cluster, "times")) as connection:
        stamps = [produce(connection, "times", encoded(3)).append_time_us for _ in range(3)]
        assert stamps == sorted(set(stamps))
        assert list_offset(connection, "times", stamps[1]).offset == 3
        assert list_offset(connection, "times", stamps[2] + 1).offset == -1


def test_a_retry_gets_its_first_offsets_and_is_stored_once(cluster: ProcessCluster) -> None:
    create_topic(cluster, "retry")
    producer_id = new_producer_id(cluster)
    with cluster.connect(leader(cluster, "retry")) as connection:
        first, second = (encoded(3, producer=(producer_id, 0, sequence)) for sequence in (0, 3))
        offsets = [produce(connection, "retry", batch).base_offset for batch in (first, second, first, second, second)]
        assert offsets == [0, 3, 0, 3, 3]
        gap = produce(connection, "retry", encoded(1, producer=(producer_id, 0, 9)))
        assert gap.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert "9" in gap.detail and "6" in gap.detail
        assert produce(connection, "retry", encoded(1, producer=(producer_id, 1, 0))).base_offset == 6
        fenced = produce(connection, "retry", encoded(1, producer=(producer_id, 0, 6)))
        assert fenced.code == ErrorCode.INVALID_PRODUCER_EPOCH
        assert list_offset(connection, "retry", LATEST).offset == 7
    assert new_producer_id(cluster) != producer_id


def test_a_killed_leader_loses_no_acknowledged_record(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "killed-leader")
    producer_id = new_producer_id(cluster)
    writer = writers("killed-leader")
    victim = leader(cluster, "killed-leader")
    epoch = partition(cluster, "killed-leader").leader_epoch
    killer = threading.Timer(0.3, cluster.kill, [victim])
    killer.start()
    sent = 0
    while sent < 40 or killer.is_alive() or not writer.retries:
        writer.write(encoded(1, f"m{sent}-", producer=(producer_id, 0, sent)))
        sent += 1
    killer.join()
    assert leader(cluster, "killed-leader") != victim
    assert partition(cluster, "killed-leader").leader_epoch > epoch
    for _ in range(20):
        writer.write(encoded(1, f"m{sent}-", producer=(producer_id, 0, sent)))
        sent += 1
    cluster.start_broker(victim)
    wait_isr(cluster, "killed-leader", ALL)
    wait_equal(cluster, "killed-leader", sent)
    for broker_id in ALL:
        with cluster.connect(broker_id) as connection:
            assert read_all(connection, "killed-leader") == [f"m{number}-0".encode() for number in range(sent)]


def test_a_killed_follower_leaves_the_isr_catches_up_and_returns(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "killed-follower", assignment=((0, 1, 2),))
    writer = writers("killed-follower")
    writer.write(encoded(5))
    cluster.kill(2)
    wait_isr(cluster, "killed-follower", {0, 1})
    for _ in range(20):
        writer.write(encoded(5))
    cluster.start_broker(2)
    wait_isr(cluster, "killed-follower", ALL)
    writer.write(encoded(5))
    wait_equal(cluster, "killed-follower", 110)


def test_a_paused_follower_delays_acks_all_until_it_leaves_the_isr(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "paused-follower", assignment=((0, 1, 2),), config={"replica.lag.time.max.ms": "1000"})
    writer = writers("paused-follower")
    writer.write(encoded(1))
    pid = cluster.pid(1)
    cluster.kill(1, signal.SIGSTOP)
    try:
        began = time.monotonic()
        writer.write(encoded(1))
        took = time.monotonic() - began
        assert took > 0.5, f"acknowledged after {took:.2f} s, while a member of the ISR did not have it"
        assert set(partition(cluster, "paused-follower").isr) == {0, 2}
    finally:
        cluster.kill(1, signal.SIGCONT)
    wait_isr(cluster, "paused-follower", ALL)
    wait_equal(cluster, "paused-follower", 2)
    assert cluster.pid(1) == pid and cluster.slots[1].running


def test_acks_all_below_min_insync_is_refused_and_writes_nothing(cluster: ProcessCluster) -> None:
    create_topic(cluster, "min-isr", assignment=((0, 1, 2),), config={"min.insync.replicas": "3"})
    cluster.kill(2)
    wait_isr(cluster, "min-isr", {0, 1})
    with cluster.connect(0) as connection:
        refused = produce(connection, "min-isr", encoded(1))
        assert refused.code == ErrorCode.NOT_ENOUGH_REPLICAS
        assert "2 in sync" in refused.detail and "3 needed" in refused.detail
        assert replica(cluster, 0, "min-isr").log_end_offset == 0
        assert produce(connection, "min-isr", encoded(1), acks=1).base_offset == 0
        assert list_offset(connection, "min-isr", LATEST).offset == 0, "below min.insync nothing is committed"
    cluster.start_broker(2)
    wait_equal(cluster, "min-isr", 1)


@pytest.mark.alone
def test_a_controlled_shutdown_moves_leaderships_first(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "controlled", assignment=((1, 0, 2),))
    producer_id = new_producer_id(cluster)
    writer = writers("controlled")
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(cluster.stop_broker(1)))
    began, sent, longest = time.monotonic(), 0, 0.0
    stopper.start()
    while stopper.is_alive() or sent < 20:
        before = time.monotonic()
        writer.write(encoded(1, producer=(producer_id, 0, sent)))
        longest = max(longest, time.monotonic() - before)
        sent += 1
    stopper.join()
    assert codes == [0]
    assert longest < 3, "writes must continue at the next leader"
    assert time.monotonic() - began < 8, "the broker must not wait until the timeout"
    assert 1 not in partition(cluster, "controlled").isr
    cluster.start_broker(1)
    wait_isr(cluster, "controlled", ALL)
    wait_equal(cluster, "controlled", sent)


def test_a_controlled_shutdown_loses_no_record_with_acks_1(cluster: ProcessCluster) -> None:
    """With acks=1 a stopping leader is the last to learn of the new leaders."""
    create_topic(cluster, "acks-1-stop", assignment=((1, 0, 2),) * 60)
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(cluster.stop_broker(1)))
    sent: list[tuple[bytes, Any]] = []
    with Producer(cluster.bootstrap, acks=1, linger_ms=0) as producer:
        producer.send("acks-1-stop", b"first").result(PATIENCE_S)
        stopper.start()
        while stopper.is_alive() or len(sent) < 1000:
            some = [b"%d" % number for number in range(len(sent), len(sent) + 60)]
            sent += [(value, producer.send("acks-1-stop", value, partition=int(value) % 60)) for value in some]
            sent[-1][1].result(PATIENCE_S)
        for _, sending in sent:
            sending.result(PATIENCE_S)
    stopper.join()
    assert codes == [0]
    cluster.start_broker(1)
    wait_isr(cluster, "acks-1-stop", ALL)
    with Consumer(cluster.bootstrap, "acks-1-stop") as consumer:
        ends = consumer.end_offsets()
        found: set[bytes] = set()
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            for batch in consumer.poll(1.0):
                found.update(batch.column("value").to_pylist())
    assert not {value for value, _ in sent} - found


def test_a_controlled_shutdown_keeps_records_the_followers_lack(cluster: ProcessCluster) -> None:
    """With acks=1 the next leader learns of its election after it has all records that the old leader acknowledged
    before the stop."""
    create_topic(cluster, "lagging", assignment=((1, 0, 2),))
    values = [b"first", *(b"%d" % number for number in range(20))]
    codes: list[int] = []
    stopper = threading.Thread(target=lambda: codes.append(cluster.stop_broker(1)))
    with Producer(cluster.bootstrap, acks=1, linger_ms=0) as producer:
        producer.send("lagging", values[0]).result(PATIENCE_S)
        followers = cluster.pid(0), cluster.pid(2)
        try:
            for pid in followers:
                os.kill(pid, signal.SIGSTOP)
            for value in values[1:]:
                producer.send("lagging", value).result(PATIENCE_S)
            stopper.start()
            wait_until(lambda: cluster.slots[1].command("status")["state"] == "stopping", PATIENCE_S, "the stop")
            # The time that the controller would need to move a leadership, and a tenth of the maximum wait.
            stopper.join(0.4)
            assert stopper.is_alive()
        finally:
            for pid in followers:
                os.kill(pid, signal.SIGCONT)
        stopper.join()
    assert codes == [0]
    cluster.start_broker(1)
    wait_isr(cluster, "lagging", ALL)
    wait_equal(cluster, "lagging", len(values))


@pytest.mark.alone
def test_a_cluster_stop_does_not_wait_for_successors(cluster: ProcessCluster) -> None:
    create_topic(cluster, "overtaken", assignment=((0, 1, 2),))
    slot = cluster.slots[0]
    cluster.stop_controller()  # no controller moves its leaderships
    try:
        slot.command("stop")
        assert slot.command("status")["leading"] > 0
        slot.command("finish")
        assert slot.process is not None
        assert slot.process.wait(4) == 0, "the wait raises if the broker waits for successors"
    finally:
        cluster.start_controller()
    cluster.start_broker(0)
    wait_equal(cluster, "overtaken", 0)


def test_sealed_segments_are_equal_arrow_files_on_all_replicas(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "sealed", config={"segment.bytes": "8192"})
    writer = writers("sealed")
    for number in range(60):
        writer.write(encoded(10, f"{number}-"))
    wait_equal(cluster, "sealed", 600)

    def sealed() -> bool:
        found = [segment_digests(cluster, broker_id, "sealed") for broker_id in sorted(ALL)]
        return len(found[0]) > 3 and found[0] == found[1] == found[2] and rows_of_arrow_files() > 400

    def rows_of_arrow_files() -> int:
        """Return the rows that an ordinary Arrow reader sees, or 0 while a footer is missing."""
        directory = replica(cluster, 0, "sealed").directory
        try:
            return sum(_rows(f"{directory}/{name}") for name in segment_digests(cluster, 0, "sealed"))
        except pa.ArrowInvalid:
            return 0

    wait_until(sealed, PATIENCE_S, "equal, sealed segments")


def test_a_stopped_cluster_returns_with_all_its_records(cluster: ProcessCluster, writers: Writers) -> None:
    create_topic(cluster, "restart", partitions=3)
    for number in range(3):
        writer = writers("restart", number)
        writer.write(encoded(7))
    assert cluster.stop_brokers() == {0: 0, 1: 0, 2: 0}

    async def left(store: ClusterStore) -> list[VersionedState | None]:
        return [await store.states.read(TopicPartition("restart", number)) for number in range(3)]

    for found in cluster.ask_zookeeper(left):
        assert found is not None and set(found.state.isr) == ALL, (
            "otherwise only the last broker to stop would be trusted"
        )
    cluster.start_controller()
    cluster.start_brokers()
    for number in range(3):
        wait_isr(cluster, "restart", ALL, number)
        wait_equal(cluster, "restart", 7, number)
        with cluster.connect(leader(cluster, "restart", number)) as connection:
            assert len(read_all(connection, "restart", partition=number)) == 7
    assert running(cluster) == sorted(ALL)


def _rows(path: str) -> int:
    with pa.memory_map(path) as source:
        rows: int = pa.ipc.open_file(source).read_all().num_rows
        return rows
