"""Tests of transactions on real brokers with outdated knowledge.

A coordinator was deposed while it was stopped, requests arrive when the next transaction is open, or a log was restored
from another cluster.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from functools import partial

import pytest

from sparklog.config import broker_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import (
    Ack,
    AddToTransaction,
    BeginTransaction,
    BeginTransactionReply,
    EndTransaction,
    EndTransactionReply,
    FindCoordinator,
    FindCoordinatorReply,
    FindHanging,
    FindHangingReply,
    Request,
    TouchTransaction,
    VerifyTransaction,
    VerifyTransactionReply,
)
from sparklog.record.codec import encode_batch
from sparklog.storage.log_directory import LogDirectory
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.support import rows
from tests.broker.test_transactions import key_at, running_cluster  # noqa: F401 - a fixture
from tests.broker.topics import PATIENCE_S, create_topic, hosted, leader, partition, wait_isr
from tests.broker.transactions import Client, ask, find_coordinator, last_stable_offset, read

pytestmark = pytest.mark.integration

#: The id is not in a block that a broker has allocated.
STRANGER = 2**40


def test_a_coordinator_deposed_while_paused_admits_nothing(cluster: ProcessCluster) -> None:
    """The coordinator's successor ends the transaction, and the leader that had the marker dies. Only the
    coordinators can refuse the late batch, and the old one does not know of the end."""
    create_topic(cluster, "unknowing", assignment=((0, 1),))
    key = key_at(cluster, 2, "query:unknowing")
    first = Client(cluster, key, "first run", version=1)
    first.begin()
    first.add(("unknowing", 0))
    late = first.batch("unknowing", 0, 1, "late-")
    assert leader(cluster, "unknowing") == 0
    number = coordinating(cluster, key)
    epoch = partition(cluster, "__transaction_state", number).leader_epoch
    cluster.kill(2, signal.SIGSTOP)
    try:
        wait_until(lambda: find_coordinator(cluster, "transaction", key) != 2, PATIENCE_S, "another coordinator")
        second = Client(cluster, key, "second run", version=1)
        assert second.begin().run == 2
        cluster.kill(0)
        assert leader(cluster, "unknowing") == 1
    finally:
        cluster.kill(2, signal.SIGCONT)
    question = VerifyTransaction(0, key, first.producer_id, 0, "unknowing", 0)
    try:
        vouched = ask(cluster, 2, question, VerifyTransactionReply)
        assert vouched.coordinator_epoch == epoch, "it may confirm with its old epoch"
    except BrokerError as error:  # it has learned of its successor meanwhile
        assert error.retriable or error.code is ErrorCode.INVALID_TXN_STATE
    result = first.produce("unknowing", 0, 1, "late-")
    assert result.code == ErrorCode.INVALID_TXN_STATE, result
    assert first.send("unknowing", 0, late).code == ErrorCode.INVALID_TXN_STATE
    cluster.start_brokers()
    wait_isr(cluster, "unknowing", {0, 1})
    second.write("unknowing", 0, 1, "kept-")
    assert second.end(commit=True).complete
    assert last_stable_offset(cluster, "unknowing") == 3, "the first run's marker, a record, and its marker"
    assert read(cluster, "unknowing", isolation=0).values == [b"kept-0"]
    wait_isr(cluster, "__transaction_state", {0, 1, 2}, number)


@pytest.mark.extended
def test_a_coordinator_deposed_while_paused_refuses_nothing_permanently(cluster: ProcessCluster) -> None:
    """The old coordinator does not perform an abort either. It does not know its successor's open transactions, and
    clients ask again. It has coordinated earlier transactions of some keys."""
    create_topic(cluster, "unheard", assignment=((0, 1),))
    kinds = ["new add", "new commit", "new abort", "new verify", "old touch", "old abort", "old sink's abort"]
    clients = {kind: Client(cluster, key_at(cluster, 2, kind), version=0 if "sink" in kind else -1) for kind in kinds}
    for kind, client in clients.items():
        if kind.startswith("old"):
            client.begin()
            client.write("unheard", 0, 1, "kept-")
            assert client.end(commit=True).complete
        assert client.coordinator() == 2
    with ExitStack() as ends:
        other = cluster.as_broker(0)
        asked = {kind: ends.enter_context(cluster.connect(2, identity=other, timeout_s=PATIENCE_S)) for kind in kinds}
        cluster.kill(2, signal.SIGSTOP)
        try:
            for kind, client in clients.items():
                wait_until(partial(_is_elsewhere, client), PATIENCE_S, "another coordinator")
                client.version += "sink" in kind
                client.begin()
                client.write("unheard", 0, 1, "kept-")
                run = (client.key, client.run_id, client.version)
                own = (client.key, client.run_id, client.producer_id, 0)
                requests: dict[str, Request] = {
                    "add": AddToTransaction(0, *own, (("unheard", 0),), version=client.version, turn=client.turn),
                    "touch": TouchTransaction(0, *run, client.turn),
                    "commit": EndTransaction(0, *run, True, (client.producer_id,), 10_000, client.turn),
                    "abort": EndTransaction(0, *run, False, (), 10_000, client.turn),
                    "verify": VerifyTransaction(0, client.key, client.producer_id, 0, "unheard", 0),
                }
                asked[kind].send(requests[kind.split()[-1]])
        finally:
            cluster.kill(2, signal.SIGCONT)
        for kind, connection in asked.items():
            with pytest.raises(BrokerError) as refused:
                reply, _ = connection.receive()
                pytest.fail(f"{kind}: {reply}")
            assert refused.value.retriable, f"{kind}: {refused.value}"
    assert all(client.end(commit=True).complete for client in clients.values())
    assert len(read(cluster, "unheard", isolation=1).values) == len(kinds) + 3
    wait_isr(cluster, "__transaction_state", {0, 1, 2})


def _is_elsewhere(client: Client) -> bool:
    return client.coordinator() != 2


@pytest.mark.extended
def test_an_unconfirmed_transaction_is_not_refused_permanently(cluster: ProcessCluster) -> None:
    key = key_at(cluster, 2, "unconfirmed")
    touch, verify = TouchTransaction(0, key, "run"), VerifyTransaction(0, key, STRANGER, 0, "any", 0)
    number, other = coordinating(cluster, key), cluster.as_broker(0)
    with cluster.connect(2, identity=other, timeout_s=PATIENCE_S) as connection:
        for broker_id in (0, 1):
            cluster.kill(broker_id, signal.SIGSTOP)
        try:
            code_of(connection, verify, ErrorCode.COORDINATOR_NOT_AVAILABLE)  # its leader does not wait forever
        finally:
            for broker_id in (0, 1):
                cluster.kill(broker_id, signal.SIGCONT)
    wait_isr(cluster, "__transaction_state", {0, 1, 2}, number)
    key = key_at(cluster, 2, "unconfirmed")
    try:
        for broker_id in (0, 1):
            cluster.kill(broker_id)
        wait_isr(cluster, "__transaction_state", {2}, number)
        with cluster.connect(2, identity=other, timeout_s=PATIENCE_S) as connection:
            for question in (touch, verify, touch):
                code_of(connection, question, ErrorCode.COORDINATOR_NOT_AVAILABLE)
    finally:
        cluster.start_brokers()
    wait_isr(cluster, "__transaction_state", {0, 1, 2}, number)
    coordinator = find_coordinator(cluster, "transaction", key)
    with cluster.connect(coordinator, timeout_s=PATIENCE_S) as connection:
        end = hosted_end(cluster, coordinator, number)
        for _ in range(50):
            connection.send(touch)
        for _ in range(50):
            with pytest.raises(BrokerError, match="nothing is open"):
                connection.receive()
        assert 1 <= hosted_end(cluster, coordinator, number) - end < 50, "some refusals share one write"


@pytest.mark.extended
def test_refusals_do_not_fill_the_coordinators_log(cluster: ProcessCluster) -> None:
    key = key_at(cluster, 2, "hammered")
    number = coordinating(cluster, key)
    before = hosted(cluster, 2, "__transaction_state", number)
    assert before is not None
    with cluster.connect(2, timeout_s=PATIENCE_S) as connection:
        for _ in range(1100):
            code_of(connection, TouchTransaction(0, key, "run"), ErrorCode.INVALID_TXN_STATE)

    def rewritten() -> bool:
        found = hosted(cluster, 2, "__transaction_state", number)
        return found is not None and found.log_start_offset > before.log_end_offset + 900

    wait_until(rewritten, PATIENCE_S, "what refusals wrote to be gone")


def code_of(connection: BlockingConnection, question: Request, expected: ErrorCode) -> None:
    with pytest.raises(BrokerError) as refused:
        connection.request(question)
    assert refused.value.code is expected, refused.value


def hosted_end(cluster: ProcessCluster, broker_id: int, number: int) -> int:
    replica = hosted(cluster, broker_id, "__transaction_state", number)
    assert replica is not None
    return replica.log_end_offset


def coordinating(cluster: ProcessCluster, key: str) -> int:
    """Return the partition of the internal topic that the key belongs to."""
    return ask(cluster, 0, FindCoordinator(0, "transaction", key), FindCoordinatorReply).partition


def test_late_requests_end_no_other_transaction(cluster: ProcessCluster) -> None:
    create_topic(cluster, "tardy")
    client = Client(cluster, "tardy-key")
    ids = []
    for _ in range(2):
        client.begin()
        ids.append(client.producer_id)
        client.write("tardy", 0, 1, "v")
        if client.turn == 0:
            assert client.end(commit=True).complete
    key, run = client.key, client.run_id
    for late, kind in (
        (EndTransaction(0, key, run, -1, False, (), 1000, 0), EndTransactionReply),
        (BeginTransaction(0, key, run, -1, 60_000, 0), BeginTransactionReply),
        (AddToTransaction(0, key, run, ids[0], 0, (("tardy", 0),), "", (), -1, 0), Ack),
        (TouchTransaction(0, key, run, -1, 0), Ack),
    ):
        with pytest.raises(BrokerError) as refused:
            ask(cluster, client.coordinator(), late, kind)
        assert refused.value.code is ErrorCode.INVALID_TXN_STATE, late
    again = ask(cluster, client.coordinator(), BeginTransaction(0, key, run, -1, 60_000, 1), BeginTransactionReply)
    assert again.producer_id == ids[1], "a repeated begin"
    assert client.end(commit=True).complete
    assert read(cluster, "tardy", isolation=1).values == [b"v0", b"v0"]


def test_a_leader_ends_a_transaction_unknown_to_all_coordinators(cluster: ProcessCluster) -> None:
    """Such a log was restored from another cluster's. A live transaction is not ended, however long it takes."""
    create_topic(cluster, "restored", assignment=((0,),))
    create_topic(cluster, "lively", assignment=((0, 1),))
    alive = Client(cluster, "lively-key")
    alive.begin()
    alive.write("lively", 0, 1, "alive-")
    alive.write("restored", 0, 1, "alive-")
    cluster.stop_broker(0)
    append_stranger(cluster, 0, "restored")
    cluster.start_broker(0)
    assert leader(cluster, "restored") == 0

    def aborted() -> int:
        return cluster.describe(0).counters.get("transactions.hanging.aborted", 0)

    wait_until(aborted, PATIENCE_S, "the hanging transaction to be ended")
    begun_at = time.monotonic()
    wait_until(lambda: time.monotonic() - begun_at > 2.1, PATIENCE_S, "the live one to be old, too")
    found = ask(cluster, 0, FindHanging(0, 2000), FindHangingReply)
    assert not found.transactions, "a coordinator knows the live transaction"
    assert last_stable_offset(cluster, "restored") == 0 == last_stable_offset(cluster, "lively")
    alive.write("restored", 0, 1, "still-alive-")
    assert alive.end(commit=True).complete
    assert read(cluster, "restored", isolation=1).values == [b"alive-0", b"still-alive-0"]
    assert read(cluster, "lively", isolation=1).values == [b"alive-0"]
    assert read(cluster, "restored", isolation=0).values == [b"alive-0", b"strange0", b"still-alive-0"]
    wait_isr(cluster, "lively", {0, 1})


def append_stranger(cluster: ProcessCluster, broker_id: int, topic: str) -> None:
    """Write a batch of a transaction that no coordinator knows to the log of a stopped broker."""
    slot = cluster.slots[broker_id]
    directory = LogDirectory.open(
        slot.log_dir, cluster_id=cluster.cluster_id, broker_id=broker_id, port=slot.port,
        config=broker_config(cluster.settings),
    )  # fmt: skip
    try:
        directory.load()
        log = directory.get(TopicPartition(topic, 0))
        assert log is not None
        header, body = encode_batch(
            rows(1, "strange"), schema_id=0, compression=None, event_time="timestamp", producer_id=STRANGER,
            producer_epoch=0, first_sequence=0, transactional=True,
        )  # fmt: skip
        log.append_as_leader(
            [(header, memoryview(body))], leader_epoch=log.last_epoch, now_us=time.time_ns() // 1000 - 3_600_000_000
        )
        directory.write_clean_marker()
    finally:
        directory.close()
