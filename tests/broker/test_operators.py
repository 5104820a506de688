"""Tests of operators' requests to real brokers and a real controller: partitions, moves, elections, a copy limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import ElectLeaders, ProduceReply
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded, produce, produce_request, read_all
from tests.broker.topics import (
    Writer,
    create_topic,
    hosted,
    leader,
    new_producer_id,
    partition,
    segment_digests,
    wait_equal,
    wait_isr,
)

PATIENCE_S = 60.0


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, timeout_s=PATIENCE_S) as client:
        yield client


def test_partitions_are_added_after_the_existing_ones(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "more-partitions", assignment=((0, 1), (1, 0)))
    create_topic(cluster, "heavy-on-2", assignment=((2, 0),) * 20)
    with Writer(cluster, "more-partitions", 1) as writer:
        writer.write(encoded(3))
    before = admin.describe_topic("more-partitions").partitions
    assert len(admin.create_partitions("more-partitions", 5).partitions) == 5
    after = admin.describe_topic("more-partitions").partitions
    assert [part.replicas for part in after[:2]] == [part.replicas for part in before]
    assert all(len(part.replicas) == 2 and part.leader is not None for part in after)
    # The topic as a whole is even, whatever else the brokers lead.
    leaders = Counter(part.replicas[0] for part in after)
    assert leaders[2] and sorted(leaders.values()) == [1, 2, 2]
    assert sorted(Counter(broker_id for part in after for broker_id in part.replicas).values()) == [3, 3, 4]
    admin.create_partitions("more-partitions", 7, assignment=[(2, 1), (0, 2)])
    assert [part.replicas for part in admin.describe_topic("more-partitions").partitions[5:]] == [(2, 1), (0, 2)]
    with Writer(cluster, "more-partitions", 6) as writer:
        assert writer.write(encoded(1)) == 0
    with Writer(cluster, "more-partitions", 1) as writer:
        assert writer.write(encoded(1)) == 3


def test_partitions_that_cannot_be_added_are_refused(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "as-many-as-before", partitions=2, replicas=2)
    refused = [
        (("as-many-as-before", 2, ()), ErrorCode.INVALID_PARTITIONS, "it has 2, expected 3"),
        (("as-many-as-before", 1_000_000, ()), ErrorCode.INVALID_PARTITIONS, "to 100000"),
        (("as-many-as-before", 3, ((0, 9),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT, r"\[9\]"),
        (("as-many-as-before", 3, ((0, 1), (1, 2))), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "2 partitions"),
        (("as-many-as-before", 3, ((0,),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT, "2 each"),
        (("absent", 3, ()), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "absent"),
    ]
    for (name, count, assignment), code, detail in refused:
        with pytest.raises(BrokerError, match=detail) as caught:
            admin.create_partitions(name, count, assignment=assignment)
        assert caught.value.code == code
    assert len(admin.describe_topic("as-many-as-before").partitions) == 2


def test_replicas_move_completely_and_leave_no_files(cluster: ProcessCluster, admin: Admin) -> None:
    config = {"segment.bytes": "65536"}
    create_topic(cluster, "moves", assignment=((0, 1), (1, 2)), config=config)
    producer_id = new_producer_id(cluster)
    written: list[int] = []

    def write() -> None:
        """Retries append no second copy: every leader knows the sequence numbers of its predecessor."""
        number = len(written)
        written.append(writer.write(encoded(200, f"{number}-", producer=(producer_id, 0, number * 200))))

    with Writer(cluster, "moves") as writer:
        for _ in range(40):
            write()
        begun = admin.reassign({TopicPartition("moves", 0): (2, 1)})
        assert "share a host" in begun.warning
        while partition(cluster, "moves").replicas != (2, 1):
            write()
    admin.wait_until_moved(begun.targets, timeout_s=PATIENCE_S)
    end = 200 * len(written)
    assert written == list(range(0, end, 200))
    assert leader(cluster, "moves") in {1, 2}
    wait_until(lambda: hosted(cluster, 0, "moves") is None, PATIENCE_S, "broker 0 to forget its replica")
    assert not list((cluster.slots[0].log_dir).glob("moves-0*/*.arrow"))
    wait_until(lambda: _ends(cluster, "moves", (1, 2)) == {end}, PATIENCE_S, "both replicas to have all of it")
    assert segment_digests(cluster, 2, "moves") == segment_digests(cluster, 1, "moves")
    with cluster.connect(leader(cluster, "moves")) as connection:
        expected = [b"%d-%d" % (number, row) for number in range(len(written)) for row in range(200)]
        assert read_all(connection, "moves", end=end) == expected
    assert admin.reassignments() == []
    assert admin.describe_topic("moves").partitions[1].replicas == (1, 2)


def _ends(cluster: ProcessCluster, name: str, brokers: tuple[int, ...]) -> set[int]:
    found = [hosted(cluster, broker_id, name) for broker_id in brokers]
    return {replica.high_watermark if replica is not None else -1 for replica in found}


def test_the_replication_factor_changes_and_a_broker_is_drained(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "factor", assignment=((0,), (1,)))
    with Writer(cluster, "factor") as writer:
        writer.write(encoded(10))
    admin.wait_until_moved(admin.reassign("factor", replication_factor=3).targets, timeout_s=PATIENCE_S)
    wait_isr(cluster, "factor", {0, 1, 2})
    wait_equal(cluster, "factor", 10)
    admin.wait_until_moved(admin.reassign("factor", replication_factor=2).targets, timeout_s=PATIENCE_S)
    with pytest.raises(BrokerError, match="may hold one") as caught:
        admin.reassign("factor", replication_factor=4)
    assert caught.value.code == ErrorCode.INVALID_REPLICATION_FACTOR
    with pytest.raises(BrokerError, match="the known brokers are"):
        admin.drain_broker(9)


def test_each_move_of_a_request_is_validated_separately(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "judged", assignment=((0, 1), (1, 2)))
    good, bad = TopicPartition("judged", 0), TopicPartition("judged", 1)
    for target, detail in [((), "no replica"), ((1, 1), "twice"), ((1, 7), r"\[7\]"), ((-1,), r"\[-1\]")]:
        with pytest.raises(BrokerError, match=detail) as caught:
            admin.reassign({bad: target})
        assert caught.value.code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    with pytest.raises(BrokerError, match="1 of 2 moves were refused; 1 others were accepted"):
        admin.reassign({bad: (9,), good: (1, 0)})
    admin.wait_until_moved({good: (1, 0)}, timeout_s=PATIENCE_S)
    with pytest.raises(BrokerError) as caught:
        admin.cancel_reassignment([bad])
    assert caught.value.code == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    with pytest.raises(BrokerError) as caught:
        admin.reassign({TopicPartition("judged", 2): (0,)})
    assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    with pytest.raises(BrokerError) as caught:
        admin.reassign({TopicPartition("absent", 0): (0,)})
    assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_leaders_are_elected_on_request(cluster: ProcessCluster, admin: Admin) -> None:
    tp = TopicPartition("led", 0)
    create_topic(cluster, "led", assignment=((0, 1, 2),))
    admin.wait_until_in_sync(["led"], timeout_s=PATIENCE_S)
    assert admin.elect_leaders([tp]) == {}
    cluster.stop_broker(0)
    wait_until(lambda: leader(cluster, "led") != 0, PATIENCE_S, "another leader")
    failed = admin.elect_leaders([tp])
    assert failed[tp].code == ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
    assert "broker 0 is not alive" in failed[tp].detail
    assert admin.elect_leaders([tp], unclean=True) == {}  # not needed: the partition has a leader
    cluster.start_broker(0)
    admin.wait_until_in_sync(["led"], timeout_s=PATIENCE_S)
    if leader(cluster, "led") != 0:  # unless leaderships return automatically
        assert admin.elect_leaders() == {}
    assert leader(cluster, "led") == 0
    missing = TopicPartition("led", 5)
    assert admin.elect_leaders([missing])[missing].code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_an_expired_election_is_not_held_later(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "late-election", assignment=((0, 1),))
    admin.reassign({TopicPartition("late-election", 0): (1, 0)})
    wait_until(lambda: partition(cluster, "late-election").replicas == (1, 0), PATIENCE_S, "another order")
    led_by = leader(cluster, "late-election")
    cluster.stop_controller()
    try:
        with cluster.connect(2) as connection, pytest.raises(BrokerError, match="no controller") as caught:
            connection.request(ElectLeaders(0, "preferred", 500, (("late-election", 0),)))
        assert caught.value.code == ErrorCode.REQUEST_TIMED_OUT

        async def open_requests(store: ClusterStore) -> tuple[str, ...]:
            return await store.session.children(paths.ELECTIONS)

        wait_until(lambda: cluster.ask_zookeeper(open_requests) == (), PATIENCE_S, "the request to be taken back")
    finally:
        cluster.start_controller()
    assert (led_by, leader(cluster, "late-election")) == (0, 0)


def test_a_broker_refuses_a_restart_without_a_supervisor(cluster: ProcessCluster, admin: Admin) -> None:
    pid = cluster.pid(1)
    with pytest.raises(BrokerError, match="no supervisor") as caught:
        admin.restart_broker(1)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    with pytest.raises(BrokerError, match="the live brokers are"):
        admin.restart_broker(7)
    assert cluster.describe(1).pid == pid


def test_the_commands_work_on_a_real_cluster(cluster: ProcessCluster, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        code = run([*arguments, "-b", cluster.bootstrap])
        out = capsys.readouterr()
        assert code == 0, out.err
        return out.out

    create_topic(cluster, "told", assignment=((0, 1), (0, 1), (0, 1)))
    there = "3 partitions are being moved\n3 partitions are moved and in sync\n"
    assert said("topics", "reassign", "told", "--to", "1,2", "--wait", "--throttle", "50MB", "--yes") == there
    with Admin(cluster.bootstrap) as admin:
        assert [part.replicas for part in admin.describe_topic("told").partitions] == [(1, 2), (2, 1), (1, 2)]
    assert said("topics", "reassign", "told:1", "-r", "3", "--wait", "--yes").startswith("1 partitions are being moved")
    assert said("topics", "elect-leaders", "told") == "every partition is led by its preferred leader\n"
    with Writer(cluster, "told") as writer:
        for _ in range(20):
            writer.write(encoded(1000))
    assert (
        said("topics", "reassign", "told:0", "--to", "1,0", "--throttle", "20kB", "-y")
        == "1 partitions are being moved\n"
    )
    wait_until(lambda: "told:0" in said("topics", "reassign", "--status"), PATIENCE_S, "the move to be shown")
    (row,) = [line for line in said("topics", "reassign", "told", "--status").splitlines() if "told:0" in line]
    assert row.split()[1:3] == ["1,2", "1,0"]
    assert row.endswith("19.5 KiB/s")
    assert said("topics", "reassign", "told", "--cancel", "--yes") == "1 moves cancelled\n"
    none = "no partition is being moved\n"
    wait_until(lambda: said("topics", "reassign", "told", "--status") == none, PATIENCE_S, "the cancel to be done")
    assert run(["brokers", "drain", "9", "--yes", "-b", cluster.bootstrap]) == 1
    assert "broker 9 is not known; the known brokers are [0, 1, 2]" in capsys.readouterr().err


def test_a_throttled_copy_does_not_delay_other_replicas(cluster: ProcessCluster, admin: Admin) -> None:
    """Broker 0 leads both topics and broker 2 follows them: one fetch session has both."""
    create_topic(cluster, "heavy", partitions=4, assignment=((0,),) * 4)
    create_topic(cluster, "light", assignment=((0, 2),))
    body = encoded(4000)
    for number in range(4):
        with Writer(cluster, "heavy", number) as writer:
            for _ in range(8):
                writer.write(body)
    targets = {TopicPartition("heavy", number): (0, 2) for number in range(4)}
    size = _stored_bytes(cluster, 0, "heavy")
    began, before = time.monotonic(), cluster.describe(2).counters

    # One batch is larger than the limit for an hour: a waiting fetch is still noticed.
    admin.reassign(targets, throttle_bytes=body.header.length // 3600)
    held = before.get("fetcher.throttled", 0) + len(targets)

    def all_held() -> bool:
        return cluster.describe(2).counters.get("fetcher.throttled", 0) >= held

    wait_until(all_held, PATIENCE_S, "all to be held back")
    copied = _stored_bytes(cluster, 2, "heavy")
    writes = 100
    with Writer(cluster, "light") as writer:
        deadline = time.monotonic() + PATIENCE_S
        for _ in range(writes):
            writer.write(encoded(1))
        assert time.monotonic() < deadline, "at most one request in a second: others wait for the throttled one"
    assert 0 < copied == _stored_bytes(cluster, 2, "heavy") <= size // 2
    counters = cluster.describe(2).counters
    own = 2 * writes  # one request fetches a record, and the next one acknowledges it
    most = own + 100 * (time.monotonic() - began)
    assert counters["fetcher.requests"] - before.get("fetcher.requests", 0) < most, "a loop is spinning"

    # The copy is never ahead of its limit. test_throttle shows with its own clock that the limit is used up.
    limit, began, first = size // 2, time.monotonic(), copied
    admin.reassign(targets, throttle_bytes=limit)

    def all_copied() -> bool:
        copied = _stored_bytes(cluster, 2, "heavy")
        # Half a second is granted for lost time, and one response counts only after its arrival.
        assert copied - first <= limit * (time.monotonic() - began + 0.7)
        return copied == size

    wait_until(all_copied, PATIENCE_S, "all to be copied")
    admin.wait_until_moved(targets, timeout_s=PATIENCE_S)


def _stored_bytes(cluster: ProcessCluster, broker_id: int, name: str) -> int:
    return sum(found.size_bytes for found in cluster.describe(broker_id).replicas if found.topic == name)


def test_an_in_sync_copy_is_not_throttled_without_a_controller(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "lone", assignment=((0,),))
    batch, limit = encoded(200), 20_000
    with cluster.connect(0) as connection:
        for _ in range(6):
            produce(connection, "lone", batch)
        admin.reassign({TopicPartition("lone", 0): (0, 2)}, throttle_bytes=limit)
        wait_until(lambda: hosted(cluster, 2, "lone") is not None, PATIENCE_S, "broker 2 to host the partition")
        cluster.stop_controller()
        try:

            def in_sync(broker_id: int) -> bool:
                (topic,) = cluster.metadata(broker_id, "lone").topics
                return 2 in topic.partitions[0].isr

            assert not in_sync(2), "without this the test proves nothing"
            wait_until(lambda: in_sync(0), PATIENCE_S, "the leader to add broker 2")
            began = time.monotonic()
            count = 20
            for _ in range(count):
                connection.send(*produce_request("lone", [batch]))
            for _ in range(count):
                reply, _ = connection.receive()
                assert isinstance(reply, ProduceReply)
                assert reply.results[0].code == ErrorCode.NONE
            took_s = time.monotonic() - began
            assert in_sync(0) and not in_sync(2)
        finally:
            cluster.start_controller()
    assert took_s < 0.5 * count * len(batch.body) / limit
    admin.wait_until_moved({TopicPartition("lone", 0): (0, 2)}, timeout_s=PATIENCE_S)


def test_a_cancelled_move_lifts_its_throttle(cluster: ProcessCluster, admin: Admin) -> None:
    create_topic(cluster, "back", assignment=((0, 1), (0, 1)))
    tps = [TopicPartition("back", number) for number in range(2)]
    for number in range(2):
        with Writer(cluster, "back", number) as writer:
            for _ in range(20):
                writer.write(encoded(1000))
    admin.reassign(dict.fromkeys(tps, (2, 1)), throttle_bytes=20_000)
    wait_until(lambda: len(admin.reassignments()) == 2, PATIENCE_S, "both moves to be seen")
    move = admin.reassignments()[0]
    assert (move.original, move.target, move.throttle_bytes) == ((0, 1), (2, 1), 20_000)
    assert set(move.copied_bytes) == {2}
    assert move.leader_bytes > 20_000
    assert 0 <= move.progress < 1
    admin.cancel_reassignment(tps[:1])
    admin.wait_until_moved({tps[0]: (0, 1)}, timeout_s=PATIENCE_S)
    admin.reassign({tps[1]: (2, 1)})
    admin.wait_until_moved({tps[1]: (2, 1)}, timeout_s=PATIENCE_S)
    assert admin.reassignments() == []
    wait_until(lambda: hosted(cluster, 2, "back", 0) is None, PATIENCE_S, "broker 2 to forget what it copied")
