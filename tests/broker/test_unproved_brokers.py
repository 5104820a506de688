"""Tests of a cluster with a broker that cannot authenticate, as one of release 0.1.0 that a new driver has adopted.

The broker takes part, and a stranger gets no further than its name. Both end when the broker has registered with a
proof.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.broker.lifecycle.secret_file import new_secret, read_secret_file, write_secret_file
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import (
    ControlUpdate,
    Fetch,
    FetchPartition,
    FetchReply,
    TransactionMarker,
    WriteMarkers,
    WriteMarkersReply,
)
from sparklog.protocol.proof import KeyRing
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk import paths
from sparklog.zk.cluster_store import ClusterStore
from tests.broker.support import encoded
from tests.broker.topics import Writer, create_topic, wait_equal, wait_isr
from tests.broker.transactions import Client, read

PATIENCE_S = 60.0
#: The broker without a secret.
OLD = 2
NOT_AUTHORIZED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


@pytest.fixture
def mixed() -> Iterator[ProcessCluster]:
    """Return a cluster in which all brokers were old at first, as a new driver finds them, and two have been
    restarted."""
    cluster = ProcessCluster(3)
    for slot in cluster.slots.values():
        slot.has_secret = False
    with cluster:
        for broker_id in (0, 1):
            cluster.slots[broker_id].has_secret = True
            cluster.restart(broker_id)
        cluster.wait_ready()
        yield cluster


def code_of(cluster: ProcessCluster, broker_id: int, request: Fetch | ControlUpdate | WriteMarkers) -> int:
    """Return the result of a stranger's request."""
    with cluster.connect(broker_id) as connection:
        try:
            reply, _ = connection.request(request)
        except BrokerError as error:
            return error.code
    if isinstance(reply, FetchReply):
        return reply.code or reply.partitions[0].code
    assert isinstance(reply, WriteMarkersReply)
    return reply.results[0].code


def follower_fetch(cluster: ProcessCluster, topic: str, replica_id: int, *, incarnation: int | None = None) -> Fetch:
    told = cluster.metadata(0, topic)
    (found,) = told.topics
    epoch = found.partitions[0].leader_epoch
    known = next(broker.incarnation for broker in told.brokers if broker.broker_id == replica_id)
    wanted = FetchPartition(topic, 0, found.topic_id, epoch, 0, 1 << 20)
    return Fetch(0, replica_id, known if incarnation is None else incarnation, 0, 1, 1 << 20, 0, 0, -1, (wanted,))


def marker(topic: str, epoch: int) -> WriteMarkers:
    return WriteMarkers(0, (TransactionMarker(topic, 0, (), ((10**12, 0),), "", 0, epoch),))


def test_a_broker_without_proofs_takes_part_until_it_has_them(mixed: ProcessCluster) -> None:
    for name, assignment in (("led", ((0, 1, OLD),)), ("leads", ((OLD, 0, 1),))):
        create_topic(mixed, name, assignment=assignment)
        wait_isr(mixed, name, {0, 1, 2})
        with Writer(mixed, name) as writer:
            writer.write(encoded(3))
        wait_equal(mixed, name, 3)
    client = Client(mixed, "key")
    client.begin()
    for name in ("led", "leads"):
        client.write(name, 0, 1, "kept-")
    assert client.end(commit=True).complete, "with a coordinator, a leader and a group of either kind"
    assert read(mixed, "leads", isolation=1).values[-1:] == [b"kept-0"]

    # A stranger gets no further than that broker's own name, and brings no number that the controller has not sent.
    assert code_of(mixed, 0, follower_fetch(mixed, "led", 1)) == NOT_AUTHORIZED
    assert code_of(mixed, 0, follower_fetch(mixed, "led", OLD, incarnation=2**31 - 1)) == ErrorCode.STALE_BROKER_EPOCH
    assert code_of(mixed, 0, marker("led", 2**31 - 1)) == ErrorCode.NOT_COORDINATOR
    epoch, incarnation = mixed.metadata(0).controller_epoch, mixed.describe(0).incarnation
    told = ControlUpdate(0, "stranger", epoch, incarnation, True, None, (), (), sequence=2**40)
    assert code_of(mixed, 0, told) == NOT_AUTHORIZED

    mixed.slots[OLD].has_secret = True
    mixed.restart(OLD)
    for broker_id in (0, 1):
        wait_until(
            lambda broker_id=broker_id: all(broker.proves for broker in mixed.metadata(broker_id).brokers),  # type: ignore[misc]
            PATIENCE_S,
            "the news that every broker proves itself",
        )
    wait_isr(mixed, "led", {0, 1, 2})
    assert code_of(mixed, 0, follower_fetch(mixed, "led", OLD)) == NOT_AUTHORIZED
    assert code_of(mixed, 0, marker("led", -1)) == NOT_AUTHORIZED
    with Writer(mixed, "led") as writer:
        writer.write(encoded(1))
    client = Client(mixed, "key", "later")
    client.begin()
    client.write("led", 0, 1, "later-")
    assert client.end(commit=True).complete

    # This is final: under the next controller as well, a registration without a proof does not count.
    mixed.stop_controller()
    mixed.start_controller()
    mixed.slots[OLD].has_secret = False
    mixed.stop_broker(OLD)
    mixed.start_broker(OLD)
    registered = mixed.ask_zookeeper(lambda store: store.live_brokers())
    assert {broker.broker_id: broker.proves for broker in registered} == {0: True, 1: True, OLD: False}
    with Writer(mixed, "leads") as writer:
        writer.write(encoded(1))
    for broker_id in (0, 1):
        wait_until(
            lambda broker_id=broker_id: {one.broker_id for one in mixed.metadata(broker_id).brokers} == {0, 1},  # type: ignore[misc]
            PATIENCE_S,
            "a table without the broker that proves nothing",
        )
    assert code_of(mixed, 0, follower_fetch(mixed, "led", 1)) == NOT_AUTHORIZED
    mixed.slots[OLD].has_secret = True
    mixed.restart(OLD)
    wait_isr(mixed, "led", {0, 1, 2})


def test_an_offline_broker_keeps_the_period_without_proofs_open(mixed: ProcessCluster) -> None:
    """The broker hosts replicas and may return without a secret: the period lasts until it returns, unless its end
    was seen."""
    create_topic(mixed, "kept", assignment=((0, 1, OLD),))
    wait_isr(mixed, "kept", {0, 1, 2})
    mixed.stop_controller()
    mixed.kill(OLD, retire=False)
    mixed.start_controller()
    wait_isr(mixed, "kept", {0, 1})
    assert not mixed.ask_zookeeper(proofs_required)
    mixed.start_broker(OLD)
    wait_isr(mixed, "kept", {0, 1, 2})
    assert not mixed.ask_zookeeper(proofs_required)
    mixed.slots[OLD].has_secret = True
    mixed.restart(OLD)
    wait_until(lambda: mixed.ask_zookeeper(proofs_required), PATIENCE_S, "the mark that every broker proves itself")


async def proofs_required(store: ClusterStore) -> bool:
    return await store.session.exists(paths.PROOF_REQUIRED)


def test_a_cluster_without_a_secret_works() -> None:
    with ProcessCluster(2, with_secret=False) as cluster:
        create_topic(cluster, "open", assignment=((0, 1),))
        wait_isr(cluster, "open", {0, 1})
        with Writer(cluster, "open") as writer:
            writer.write(encoded(3))
        wait_equal(cluster, "open", 3)
        assert not any(broker.proves for broker in cluster.metadata(0).brokers)
        assert "no cluster secret" in cluster.slots[0].log_file.read_text()


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_secret_file_is_readable_by_one_user_only(tmp_path: Path) -> None:
    path, keys = tmp_path / "cluster.secret", KeyRing([new_secret(), new_secret()])
    write_secret_file(path, keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret_file(path).secrets == keys.secrets
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_secret_file(path)
    assert [found.name for found in tmp_path.iterdir()] == ["cluster.secret"]


@pytest.mark.parametrize("content", ["", "secret", "00" * 31])
def test_a_secret_file_without_a_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.secret"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_secret_file(path)
