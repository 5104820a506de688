"""Tests of local reads on a broker with logins and ACLs: readers get files for a ticket, and others get nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.errors import LocalReadUnavailable
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.descriptors import DescriptorClient
from sparklog.protocol import messages as m
from sparklog.protocol.local_reads import FORMAT_VERSION, OpenSegment, decode_reply, encode
from sparklog.protocol.sasl import SCRAM_SHA_256
from sparklog.security.local_read_tickets import LIFETIME_MS
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.test_acls import PASSWORD, as_peer, create_users, log_in
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

CONTENT = pa.table({"x": pa.array(range(3000), pa.int64())})
REFUSED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
DENIED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
#: The time after which a client must log in again on the broker whose sessions expire.
SESSION_MS = 1500


def settings(**others: str) -> dict[str, str]:
    return {
        "super.users": "User:admin",
        "internal.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "1",
        "offsets.topic.num.partitions": "1",
        "listeners": "OPEN://127.0.0.1:0,USERS://127.0.0.1:0,BROKER://127.0.0.1:0",
        "listener.security.protocol.map": "OPEN:PLAINTEXT,USERS:SASL_PLAINTEXT,BROKER:PLAINTEXT",
        "inter.broker.listener.name": "BROKER",
        **others,
    }


class Guarded:
    """One broker whose clients log in, with the topics ``orders``, which anna may read, and ``secret``."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        create_users(cluster, "admin", "anna", "bert")
        [broker] = cluster.ask_zookeeper(lambda store: store.live_brokers())
        [users] = [endpoint for endpoint in broker.endpoints if endpoint.name == "USERS"]
        self.bootstrap = f"{users.host}:{users.port}"
        with Admin(self.bootstrap, security=self.security("admin")) as admin:
            for name in ("orders", "secret"):
                config = {"segment.bytes": "65536"}
                admin.create_topic(name, partitions=1, replication_factor=1, schema="x long", config=config)
        with Producer(self.bootstrap, security=self.security("admin"), batch_bytes=4096) as producer:
            for name in ("orders", "secret"):
                for number in range(10):
                    producer.write(name, CONTENT.slice(number * 300, 300)).result(30)
        self.allow("anna", "orders")

    @staticmethod
    def security(user: str) -> dict[str, str]:
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": SCRAM_SHA_256,
            "sasl.username": user,
            "sasl.password": PASSWORD,
        }

    def allow(self, user: str, topic: str) -> None:
        entries = [m.AclEntry("Topic", topic, "Literal", f"User:{user}", "*", "Read", "Allow")]
        assert isinstance(as_peer(self.cluster, m.CreateAcls(0, tuple(entries))), m.Ack)
        wait_until(lambda: self.ticket(user, topic) is not None, f"{user} may read {topic}")

    def forbid(self, user: str) -> None:
        as_peer(self.cluster, m.DeleteAcls(0, (m.AclCondition(principal=f"User:{user}"),)))

    def ticket(self, user: str, *topics: str) -> m.LocalReadsReply | None:
        """Return the ticket of a user, or None if the broker refuses one."""
        with log_in(self.cluster, user) as connection:
            try:
                reply, _ = connection.request(m.RequestLocalReads(0, topics))
            except BrokerError as error:
                assert error.code == DENIED, error
                return None
        assert isinstance(reply, m.LocalReadsReply) and reply.local_socket
        return reply

    def got(self, user: str, *topics: str) -> m.LocalReadsReply:
        found = self.ticket(user, *topics)
        assert found is not None
        return found

    def open(self, socket: str, ticket: bytes, topic: str = "orders", offset: int = 0) -> int:
        """Return the code of a request for a segment. Only a reply without an error has descriptors."""
        with DescriptorClient(socket, timeout_s=10) as client:
            payload, descriptors = client.request(request(ticket, topic, offset))
        reply = decode_reply(payload)
        for descriptor in descriptors:
            os.close(descriptor)
        assert bool(descriptors) == (reply.code == ErrorCode.NONE)
        return reply.code

    def tickets_issued(self) -> int:
        reply = as_peer(self.cluster, m.DescribeBroker(0))
        assert isinstance(reply, m.DescribeBrokerReply)
        return reply.counters.get("local.tickets", 0)

    def open_of_admin(self, topic: str) -> int:
        """Return the code of a request for a segment with a new ticket of the admin."""
        try:
            found = self.ticket("admin", topic)
        except AssertionError:  # The broker does not know the topic yet.
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert found is not None
        with DescriptorClient(found.local_socket, timeout_s=10) as client:
            return decode_reply(client.request(request(found.ticket, topic))[0]).code


def request(ticket: bytes, topic: str = "orders", offset: int = 0) -> bytes:
    return encode(OpenSegment(FORMAT_VERSION, topic, 0, "", -1, -1, offset, 0, ticket))


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with ProcessCluster(1, settings=settings()) as cluster:
        yield Guarded(cluster)


def test_a_reader_that_logs_in_maps_files(guarded: Guarded) -> None:
    security = guarded.security("anna")
    tp = TopicPartition("orders", 0)
    with PartitionReader(guarded.bootstrap, tp, 0, 3000, local="require", security=security) as reader:
        found = pa.Table.from_batches([batch for _, batch in reader])
        assert found.equals(CONTENT)
        assert reader.counters.fetches == 0 and reader.counters.local_batches > 1
    with PartitionReader(guarded.bootstrap, tp, 0, 3000, local="never", security=security) as reader:
        assert pa.Table.from_batches([batch for _, batch in reader]).equals(found)


def test_a_reader_gets_no_files_of_other_topics(guarded: Guarded) -> None:
    tp = TopicPartition("secret", 0)
    for user in ("anna", "bert"):
        for topics in (("secret",), ("missing",), ("orders", "secret")):
            assert guarded.ticket(user, *topics) is None
    security = guarded.security("admin")
    with PartitionReader(guarded.bootstrap, tp, 0, 3000, local="require", security=security) as reader:
        assert sum(batch.num_rows for _, batch in reader) == 3000
    with PartitionReader(guarded.bootstrap, tp, 0, 3000, local="auto", security=guarded.security("anna")) as reader:
        with pytest.raises(BrokerError) as caught:
            list(reader)
        assert caught.value.code is DENIED and reader.counters.local_batches == 0


def test_the_greeting_names_no_socket(guarded: Guarded) -> None:
    with guarded.cluster.connect(0) as peer:
        assert peer.hello.local_socket == ""


def test_the_socket_gives_nothing_without_a_valid_ticket(guarded: Guarded) -> None:
    mine = guarded.got("anna", "orders")
    assert guarded.open(mine.local_socket, mine.ticket) == ErrorCode.NONE
    assert 0 < mine.lifetime_ms <= LIFETIME_MS
    forged = bytearray(mine.ticket)
    forged[-1] ^= 1
    for ticket in (b"", b"x", bytes(forged), mine.ticket[:-1], bytes(32) + mine.ticket[32:]):
        assert guarded.open(mine.local_socket, ticket) == REFUSED
    assert guarded.open(mine.local_socket, mine.ticket, "secret") == DENIED
    assert guarded.open(mine.local_socket, mine.ticket, "missing") == DENIED
    # A principal that may read both topics needs a ticket that names the topic.
    admins = guarded.got("admin", "secret")
    assert guarded.open(mine.local_socket, admins.ticket, "orders") == REFUSED
    assert guarded.open(mine.local_socket, admins.ticket, "secret") == ErrorCode.NONE
    assert guarded.open(mine.local_socket, guarded.got("admin", "secret", "orders").ticket) == ErrorCode.NONE


def test_a_ticket_of_an_earlier_process_or_topic_is_refused(guarded: Guarded) -> None:
    with Admin(guarded.bootstrap, security=guarded.security("admin")) as admin:
        admin.create_topic("renewed", partitions=1, replication_factor=1, schema="x long")
        wait_until(lambda: guarded.open_of_admin("renewed") == ErrorCode.NONE, "the topic exists")
        mine = guarded.got("admin", "renewed")
        admin.delete_topic("renewed")
        admin.create_topic("renewed", partitions=1, replication_factor=1, schema="x long")
    wait_until(lambda: guarded.open_of_admin("renewed") == ErrorCode.NONE, "the topic exists again")
    assert guarded.open(mine.local_socket, mine.ticket, "renewed") == REFUSED


def test_a_ticket_ends_with_the_acl_and_with_the_user(guarded: Guarded) -> None:
    create_users(guarded.cluster, "carl")
    guarded.allow("carl", "orders")
    carls, annas = guarded.got("carl", "orders"), guarded.got("anna", "orders")
    guarded.forbid("carl")
    wait_until(lambda: guarded.open(carls.local_socket, carls.ticket) == DENIED, "the ACL is removed")
    guarded.allow("carl", "orders")
    carls = guarded.got("carl", "orders")
    assert guarded.open(carls.local_socket, carls.ticket) == ErrorCode.NONE
    with Admin(guarded.bootstrap, security=guarded.security("admin")) as admin:
        admin.delete_user("carl")
    wait_until(lambda: guarded.open(carls.local_socket, carls.ticket) == REFUSED, "the user is deleted")
    assert guarded.open(annas.local_socket, annas.ticket) == ErrorCode.NONE


#: Connects to the socket ``argv[1]`` as another user, sends each packet, and prints what happens.
STRANGER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
said = []
for packet in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.settimeout(30)
        try:
            one.connect(sys.argv[1])
            one.send(bytes.fromhex(packet))
            found, descriptors, _, _ = socket.recv_fds(one, 65536, 8)
            said.append(["reply" if found or descriptors else "closed", len(descriptors)])
        except OSError as error:
            said.append([type(error).__name__, 0])
print(json.dumps(said))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_another_user_of_the_host_gets_no_files(guarded: Guarded, tmp_path: Path) -> None:
    """A second uid gets nothing: without a ticket, with a forged or an expired one, or with the one of another user."""
    mine = guarded.got("anna", "orders")
    socket = Path(mine.local_socket)
    forged = bytes(32) + mine.ticket[32:]
    packets = [request(ticket).hex() for ticket in (b"", forged, mine.ticket)]

    def said() -> list[tuple[str, int]]:
        # The working directory spares the child the search of the directories above, which it may not enter either.
        command = [sys.executable, "-c", STRANGER, socket.name, *packets]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=socket.parent)
        return [tuple(one) for one in json.loads(done.stdout)]

    assert said() == [("PermissionError", 0)] * 3
    modes = [(path, path.stat().st_mode & 0o7777) for path in (socket.parent, socket)]
    try:  # Even if the directory and the socket were open to others, the broker serves only its own user.
        for path, _ in modes:
            path.chmod(0o777)
        assert {kind for kind, _ in said()} <= {"closed", "ConnectionResetError", "BrokenPipeError"}
        assert guarded.open(mine.local_socket, mine.ticket) == ErrorCode.NONE
    finally:
        for path, mode in modes:
            path.chmod(mode)


@pytest.mark.extended
def test_a_ticket_ends_with_the_session_and_is_renewed() -> None:
    with ProcessCluster(1, settings=settings(**{"connections.max.reauth.ms": str(SESSION_MS)})) as cluster:
        guarded = Guarded(cluster)
        mine = guarded.got("anna", "orders")
        assert mine.lifetime_ms <= SESSION_MS
        wait_until(lambda: guarded.open(mine.local_socket, mine.ticket) == REFUSED, "the ticket has expired")
        with Producer(guarded.bootstrap, security=guarded.security("admin"), batch_bytes=4096) as producer:
            producer.write("orders", pa.concat_tables([CONTENT] * 20)).result(30)  # about eight segments
        before = guarded.tickets_issued()
        tp, security, pauses = TopicPartition("orders", 0), guarded.security("anna"), 0
        with PartitionReader(guarded.bootstrap, tp, 0, 63_000, local="require", security=security) as reader:
            seen = 0
            for _, batch in reader:
                seen += batch.num_rows
                if seen // 15_000 > pauses:  # The next segment needs a new ticket.
                    pauses += 1
                    time.sleep(SESSION_MS / 1000)
            assert seen == 63_000 and reader.counters.fetches == 0 and pauses == 4
        assert guarded.tickets_issued() - before >= 4


def test_a_reader_without_a_ticket_fetches_or_fails(guarded: Guarded) -> None:
    """A consumer's quota forbids local reads, as without logins."""
    with Admin(guarded.bootstrap, security=guarded.security("admin")) as admin:
        admin.alter_quotas({"consumer_byte_rate": 10**9}, user="anna")
        tp, security = TopicPartition("orders", 0), guarded.security("anna")
        mine = guarded.got("anna", "orders")
        wait_until(lambda: guarded.open(mine.local_socket, mine.ticket) == ErrorCode.REPLICA_NOT_AVAILABLE, "the quota")
        with (
            PartitionReader(guarded.bootstrap, tp, 0, 3000, local="require", security=security) as reader,
            pytest.raises(LocalReadUnavailable),
        ):
            list(reader)
        with PartitionReader(guarded.bootstrap, tp, 0, 3000, security=security) as reader:
            assert sum(batch.num_rows for _, batch in reader) == 3000
            assert reader.counters.local_fallbacks == 1
        admin.alter_quotas({"consumer_byte_rate": None}, user="anna")
