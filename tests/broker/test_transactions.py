"""Tests of transactions on three real brokers, message by message: the view of a reader of committed records,
whichever broker dies."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import (
    AbortTransaction,
    Ack,
    AddToTransaction,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    DescribeBroker,
    DescribedTransaction,
    ElectLeaders,
    ElectLeadersReply,
    EndTransaction,
    EndTransactionReply,
    FindCoordinator,
    FindCoordinatorReply,
    GroupOffset,
    ListTransactions,
    ListTransactionsReply,
    ProduceReply,
    TransactionMarker,
    WriteMarkers,
    WriteMarkersReply,
)
from sparklog.record.marker import Marker
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.conftest import SETTINGS
from tests.broker.support import encoded, produce, produce_request
from tests.broker.topics import (
    PATIENCE_S,
    create_topic,
    leader,
    new_producer_id,
    partition,
    replica,
    running,
    wait_equal,
    wait_isr,
)
from tests.broker.transactions import Client, ask, find_coordinator, last_stable_offset, read

pytestmark = pytest.mark.integration
ALL = {0, 1, 2}


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[ProcessCluster]:
    """Start a separate cluster: in an empty one each broker coordinates some transactions."""
    with ProcessCluster(3, settings=SETTINGS) as cluster:
        yield cluster


def key_at(cluster: ProcessCluster, broker_id: int, name: str) -> str:
    """Return a key that this broker coordinates, and will: it is the preferred leader. Leaderships that moved when
    brokers died return first."""
    found: list[str] = []

    def is_there(key: str) -> bool:
        if find_coordinator(cluster, "transaction", key) != broker_id:
            return False
        found = ask(cluster, broker_id, FindCoordinator(0, "transaction", key), FindCoordinatorReply)
        return partition(cluster, "__transaction_state", found.partition).replicas[0] == broker_id

    def look() -> bool:
        keys = (f"{name}-{number}" for number in range(50))
        found.extend(itertools.islice((key for key in keys if is_there(key)), 1))
        if not found:
            ask(cluster, running(cluster)[0], ElectLeaders(0, "preferred", 10_000), ElectLeadersReply)
        return bool(found)

    wait_until(look, PATIENCE_S, f"broker {broker_id} to coordinate anything")
    return found[0]


def described(cluster: ProcessCluster, key: str) -> DescribedTransaction | None:
    at = find_coordinator(cluster, "transaction", key)
    found = ask(cluster, at, ListTransactions(0), ListTransactionsReply).transactions
    return next((one for one in found if one.key == key), None)


def test_a_transaction_is_visible_completely_or_not_at_all(cluster: ProcessCluster) -> None:
    create_topic(cluster, "whole", partitions=3)
    client = Client(cluster, "whole-key")
    for turn, commit in enumerate((True, False, True)):
        client.begin()
        for number in range(3):
            client.write("whole", number, 2, f"{turn}-")
            assert last_stable_offset(cluster, "whole", number) == 3 * turn
        assert client.end(commit=commit).complete
    for number in range(3):
        committed = read(cluster, "whole", number, isolation=1)
        assert committed.values == [b"0-0", b"0-1", b"2-0", b"2-1"]
        assert len(committed.markers) == 3
        everything = read(cluster, "whole", number, isolation=0)
        assert everything.values == [b"0-0", b"0-1", b"1-0", b"1-1", b"2-0", b"2-1"]
    wait_equal(cluster, "whole", 9)
    for broker_id in ALL:
        assert read(cluster, "whole", isolation=1, broker_id=broker_id).values == committed.values


def test_a_decision_survives_the_death_of_leader_and_coordinator(cluster: ProcessCluster) -> None:
    """The data's leader dies during the transaction, and the coordinator's broker between decision and markers."""
    create_topic(cluster, "kept", assignment=((0, 1, 2),))
    create_topic(cluster, "alone", assignment=((0,),))
    leader(cluster, "kept")
    client = Client(cluster, key_at(cluster, 1, "dying"))
    client.begin()
    client.write("kept", 0, 2, "before-")
    client.write("alone", 0, 2, "alone-")
    cluster.kill(0)
    asked = {broker_id: cluster.describe(broker_id).counters.get("verifications.asked", 0) for broker_id in (1, 2)}
    assert client.produce("kept", 0, 2, "after-").code == ErrorCode.NONE
    for broker_id, before in asked.items():
        assert cluster.describe(broker_id).counters.get("verifications.asked", 0) == before, (
            "an open transaction needs no verification"
        )
    decided = client.end(commit=True, timeout_ms=300)
    assert not decided.complete, "no marker can have been written, because the partition has no leader"
    assert read(cluster, "kept", isolation=1).values == [b"before-0", b"before-1", b"after-0", b"after-1"]
    cluster.kill(1)
    cluster.start_broker(0)
    wait_until(
        lambda: last_stable_offset(cluster, "alone") == 3, PATIENCE_S, "the next coordinator to write the marker"
    )
    assert read(cluster, "alone", isolation=1).values == [b"alone-0", b"alone-1"]
    assert client.end(commit=True).complete, "the decision is repeated"
    cluster.start_broker(1)
    wait_isr(cluster, "__transaction_state", ALL)


def test_an_aborted_attempt_appends_nothing_more(cluster: ProcessCluster) -> None:
    create_topic(cluster, "late", assignment=((0, 1, 2), (0, 2, 1)))
    key = key_at(cluster, 1, "query:late")
    dead = Client(cluster, key, "first run", version=7)
    dead.begin()
    dead.write("late", 0, 2, "dead-")
    dead.add(("late", 1))
    late = dead.batch("late", 0, 1, "late-")
    never_seen = dead.batch("late", 1, 1, "late-")
    alive = Client(cluster, key, "second run", version=7)
    began = alive.begin()
    assert (began.committed, began.run) == (False, 2)
    wait_until(lambda: last_stable_offset(cluster, "late") == 3, PATIENCE_S, "the first run's marker")
    for number, batch in ((0, late), (1, never_seen)):
        result = dead.send("late", number, batch)
        assert result.code == ErrorCode.INVALID_TXN_STATE, result
    cluster.kill(0)
    result = dead.send("late", 1, never_seen)
    assert result.code == ErrorCode.INVALID_TXN_STATE, "a new leader has no marker and must verify"
    cluster.start_broker(0)
    with pytest.raises(BrokerError) as refused:
        dead.end(commit=True)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    alive.write("late", 0, 2, "alive-")
    assert alive.end(commit=True).complete
    assert read(cluster, "late", isolation=1).values == [b"alive-0", b"alive-1"]
    assert read(cluster, "late", 1, isolation=0).values == []
    replay = Client(cluster, key, "third run", version=7).begin()
    assert (replay.committed, replay.last_version, replay.producer_id) == (True, 7, -1)


def test_a_marker_overtakes_the_verification_of_a_batch(cluster: ProcessCluster) -> None:
    create_topic(cluster, "guard", assignment=((0, 1),))
    client = Client(cluster, key_at(cluster, 2, "guarded"))
    client.begin()
    client.add(("guard", 0))
    batch = client.batch("guard", 0, 1, "v")
    at = leader(cluster, "guard")
    marker = TransactionMarker("guard", 0, (), ((client.producer_id, 0),))
    asked = cluster.describe(at).counters.get("verifications.asked", 0)
    with cluster.connect(at) as connection:
        cluster.kill(2, signal.SIGSTOP)
        try:
            connection.send(*client.request("guard", 0, batch))
            wait_until(
                lambda: cluster.describe(at).counters.get("verifications.asked", 0) > asked, PATIENCE_S, "the question"
            )
            written = ask(cluster, at, WriteMarkers(0, (marker,)), WriteMarkersReply)
            assert written.results[0].code == ErrorCode.NONE, "no transaction was open"
            reply, _ = connection.receive()
        finally:
            cluster.kill(2, signal.SIGCONT)
        assert isinstance(reply, ProduceReply)
        assert reply.results[0].code == ErrorCode.INVALID_TXN_STATE, "the marker must overtake the verification"
    assert client.send("guard", 0, batch).code == ErrorCode.INVALID_TXN_STATE, (
        "the coordinator still confirms the transaction"
    )
    assert read(cluster, "guard", isolation=0).values == []
    client.end(commit=False)


def test_batches_wait_for_the_coordinator_in_order_and_time_out(cluster: ProcessCluster) -> None:
    create_topic(cluster, "held", assignment=((0, 1),))
    client = Client(cluster, key_at(cluster, 2, "held"))
    client.begin()
    client.add(("held", 0))
    batches = [client.batch("held", 0, 2, f"{number}-") for number in range(3)]
    with cluster.connect(leader(cluster, "held")) as connection:
        cluster.kill(2, signal.SIGSTOP)
        try:
            hasty = client.send("held", 0, batches[0], timeout_ms=200)
            for batch in batches:
                connection.send(*client.request("held", 0, batch))
        finally:
            cluster.kill(2, signal.SIGCONT)
        replies = [connection.receive()[0] for _ in batches]
    assert hasty.code == ErrorCode.REQUEST_TIMED_OUT
    offsets = [reply.results[0].base_offset for reply in replies if isinstance(reply, ProduceReply)]
    assert offsets == [0, 2, 4], replies
    assert client.end(commit=True).complete
    assert len(read(cluster, "held", isolation=1).values) == 6


def test_a_repeated_marker_gets_a_response_when_the_first_is_committed(cluster: ProcessCluster) -> None:
    create_topic(cluster, "marked", assignment=((0, 1),))
    client = Client(cluster, key_at(cluster, 2, "marker"))
    client.begin()
    client.write("marked", 0, 1, "v")
    request = WriteMarkers(0, (TransactionMarker("marked", 0, (), ((client.producer_id, 0),)),))
    assert leader(cluster, "marked") == 0
    with cluster.connect(0, identity=cluster.as_broker(2)) as connection:
        cluster.kill(1, signal.SIGSTOP)
        try:
            sent = [connection.send(request), connection.send(request), connection.send(DescribeBroker(0))]
            first = [connection.receive()[0].cid]
        finally:
            cluster.kill(1, signal.SIGCONT)
        assert first == sent[2:], "a marker got a response before it was committed"
        replies = [connection.receive()[0] for _ in range(2)]
    assert all(isinstance(reply, WriteMarkersReply) and reply.results[0].code == 0 for reply in replies)
    seen = read(cluster, "marked", isolation=1)
    assert seen.values == []
    assert seen.markers == [Marker(aborted=((client.producer_id, 0),)), Marker()], "the second one ends nothing"
    client.end(commit=False)


def test_abandoned_transactions_time_out_and_operators_end_others(cluster: ProcessCluster) -> None:
    create_topic(cluster, "abandoned")
    abandoned = Client(cluster, "left-key")
    abandoned.begin(timeout_ms=6000)
    abandoned.write("abandoned", 0, 2, "lost-")
    patient = Client(cluster, "patient-key")
    patient.begin()
    patient.write("abandoned", 0, 1, "patient-")
    assert last_stable_offset(cluster, "abandoned") == 0
    found = described(cluster, "patient-key")
    assert found is not None and (found.state, found.participants) == (
        "open",
        ((patient.producer_id, 0, (("abandoned", 0),)),),
    )
    ask(cluster, patient.coordinator(), AbortTransaction(0, "patient-key"), Ack)
    wait_until(lambda: last_stable_offset(cluster, "abandoned") == 5, PATIENCE_S, "both markers")
    assert read(cluster, "abandoned", isolation=1).values == []
    with pytest.raises(BrokerError) as refused:
        abandoned.end(commit=True)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_EPOCH


@pytest.mark.extended
def test_two_hundred_transactional_keys_work_at_the_same_time(cluster: ProcessCluster) -> None:
    create_topic(cluster, "many-keys", partitions=4)

    def one(number: int) -> None:
        client = Client(cluster, f"many-{number}")
        client.begin()
        client.write("many-keys", number % 4, 1, f"{number}-")
        assert client.end(commit=number % 2 == 0).complete

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    values = [value for number in range(4) for value in read(cluster, "many-keys", number, isolation=1).values]
    assert sorted(values) == sorted(b"%d-0" % number for number in range(0, 200, 2))


def test_transactions_survive_a_restart_of_the_cluster(cluster: ProcessCluster) -> None:
    create_topic(cluster, "again", config={"segment.bytes": "2000"})
    done, opened = Client(cluster, "query:done", version=3), Client(cluster, "opened")
    for client in (done, opened):
        client.begin()
        for turn in range(4):
            client.write("again", 0, 2, f"{client.key}-{turn}-")
    assert done.end(commit=True).complete
    cluster.stop_brokers()
    cluster.start_controller()
    cluster.start_brokers()
    assert last_stable_offset(cluster, "again") == 8, "the open transaction still holds it back"
    assert done.begin().committed
    opened.write("again", 0, 1, "after-")
    assert opened.end(commit=False).complete
    assert read(cluster, "again", isolation=1).values == [
        b"query:done-%d-%d" % (turn, i) for turn in range(4) for i in range(2)
    ]
    wait_equal(cluster, "again", 19)
    _check_files(cluster, "again", 17)


def _check_files(cluster: ProcessCluster, topic: str, rows: int) -> None:
    """Sealed segments are Arrow files, with or without markers, and have as many rows as were written."""
    directory = Path(replica(cluster, leader(cluster, topic), topic).directory)

    def sealed() -> Sequence[Path]:
        found = sorted(directory.glob("*.arrow"))[:-1]
        return found if all(path.read_bytes().endswith(b"ARROW1") for path in found) else ()

    wait_until(lambda: len(sealed()) >= 4, PATIENCE_S, "sealed segments")
    with_markers = 0
    found_rows = 0
    for path in sealed():
        with pa.ipc.open_file(path) as file:
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        found_rows += sum(batch.num_rows for batch in batches)
        with_markers += any(batch.num_rows == 0 for batch in batches)
    assert with_markers, "a sealed segment must have a marker"
    assert found_rows <= rows


def test_requests_that_contradict_a_transaction_are_refused(cluster: ProcessCluster) -> None:
    create_topic(cluster, "strict")
    client = Client(cluster, "strict-key")
    client.begin()
    batch = client.batch("strict", 0, 1, "v")
    assert client.send("strict", 0, batch).code == ErrorCode.INVALID_TXN_STATE, "not registered"
    client.add(("strict", 0))
    assert client.send("strict", 0, batch, acks=1).code == ErrorCode.INVALID_REQUIRED_ACKS
    first, again = client.send("strict", 0, batch), client.send("strict", 0, batch)
    assert (first.code, first.base_offset, again.code, again.base_offset) == (0, 0, 0, 0), "a retry is a duplicate"
    with cluster.connect(leader(cluster, "strict")) as connection:
        assert produce(connection, "strict", batch).code == ErrorCode.INVALID_RECORD, "a batch outside a transaction"
        plain = encoded(1, producer=(client.producer_id, 0, 1))
        assert produce(connection, "strict", plain).code == ErrorCode.INVALID_TXN_STATE
        stranger = encoded(1, producer=(new_producer_id(cluster), 0, 0))
        assert produce(connection, "strict", stranger).code == ErrorCode.NONE
    assert client.send("strict", 0, encoded(1)).code == ErrorCode.INVALID_RECORD, "no transactional batch"
    with pytest.raises(BrokerError) as refused:
        unknown = AddToTransaction(0, client.key, "run", client.producer_id, 0, (("nowhere", 0),))
        ask(cluster, client.coordinator(), unknown, Ack)
    assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    with pytest.raises(BrokerError) as refused:
        client.add(group="g", offsets=(GroupOffset("strict", 0, -1),))
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    elsewhere = next(broker_id for broker_id in running(cluster) if broker_id != client.coordinator())
    with pytest.raises(BrokerError) as refused:
        ask(cluster, elsewhere, EndTransaction(0, client.key, "run", -1, False, (), 1000), EndTransactionReply)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    assert client.end(commit=False).complete


def test_internal_topics_are_not_for_clients(cluster: ProcessCluster) -> None:
    at = find_coordinator(cluster, "transaction", "any")
    assert not [topic.name for topic in cluster.metadata(at).topics if topic.name.startswith("__")]
    assert len(cluster.metadata(at, "__transaction_state").topics[0].partitions) == 16
    refused = []
    for request in (
        DeleteTopic(0, "__transaction_state", 1000),
        CreateTopic(0, "__mine", 1, 1, 1000),
        CreatePartitions(0, "__transaction_state", 32, 1000),
    ):
        with pytest.raises(BrokerError) as error:
            ask(cluster, at, request, Ack)
        refused.append(error.value.code)
    number = next(
        part.partition for part in cluster.metadata(at, "__transaction_state").topics[0].partitions if part.leader == at
    )
    with cluster.connect(at) as connection:
        reply, _ = connection.request(*produce_request("__transaction_state", [encoded(1)], partition=number))
    assert isinstance(reply, ProduceReply)
    refused.append(ErrorCode(reply.results[0].code))
    assert set(refused) == {ErrorCode.INVALID_TOPIC_EXCEPTION}
