"""Tests of a cluster whose clients log in over TLS, and whose brokers and controller have certificates."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest
from cryptography import x509

from sparklog import Producer
from sparklog.cluster.certificates import CertificateFiles, Subject, create_ca, issue
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.client_security import ClientSecurity
from sparklog.protocol.messages import ControlUpdate, Fetch, FetchPartition, Metadata, Request
from sparklog.protocol.proof import Identity
from sparklog.protocol.senders import SenderKind
from sparklog.security.listeners import SecurityProtocol
from sparklog.testing.process_cluster import wait_until
from sparklog.testing.secure_cluster import SecureCluster
from tests.broker.support import read_all
from tests.broker.topics import create_topic, leader, wait_isr

pytestmark = pytest.mark.integration

PATIENCE_S = 30.0
REFUSED = ErrorCode.CLUSTER_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def cluster() -> Iterator[SecureCluster]:
    with SecureCluster(3) as running:
        create_topic(running, "t", assignment=((0, 1, 2), (1, 2, 0)), config={"min.insync.replicas": "2"})
        yield running


def wait_in_sync(cluster: SecureCluster) -> None:
    for number in (0, 1):
        wait_isr(cluster, "t", {0, 1, 2}, number)


def values(cluster: SecureCluster, number: int) -> list[bytes]:
    with cluster.connect(leader(cluster, "t", number)) as connection:
        return read_all(connection, "t", partition=number)


def files(cluster: SecureCluster, name: str) -> CertificateFiles:
    return CertificateFiles(cluster.pki / f"{name}.pem", cluster.pki / f"{name}-key.pem")


def without_role(cluster: SecureCluster) -> CertificateFiles:
    return issue(cluster.pki, Subject("client", hosts=("127.0.0.1",)))


def code_of_connecting(cluster: SecureCluster, security: ClientSecurity) -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        cluster.connect(0, security=security).close()
    return caught.value.code


# --- clients ---


def test_a_logged_in_client_writes_and_reads_replicated_records(cluster: SecureCluster) -> None:
    wait_in_sync(cluster)
    sent = [f"{number}".encode() for number in range(100)]
    with Producer(cluster.bootstrap, security=cluster.client_security) as producer:
        for value in sent:
            producer.send("t", value=value, partition=0)
        producer.flush()
    assert values(cluster, 0) == sent
    wait_in_sync(cluster)


def test_a_wrong_password_and_a_missing_login_are_refused(cluster: SecureCluster) -> None:
    right = cluster.client_security
    for wrong in ("someone", "admin"):
        security = ClientSecurity.parse(
            {
                "security.protocol": "SASL_SSL",
                "ssl.ca.location": cluster.ca,
                "sasl.mechanism": right.mechanism,
                "sasl.username": wrong,
                "sasl.password": "wrong",
            }
        )
        assert code_of_connecting(cluster, security) is ErrorCode.SASL_AUTHENTICATION_FAILED
    anonymous = ClientSecurity(SecurityProtocol.SSL, ca=cluster.ca)
    assert code_of_connecting(cluster, anonymous) is ErrorCode.ILLEGAL_SASL_STATE


def test_plain_bytes_and_another_authority_are_refused(cluster: SecureCluster) -> None:
    assert code_of_connecting(cluster, ClientSecurity()) is ErrorCode.INVALID_REQUEST
    other = cluster.base_dir / "other"
    create_ca(other)
    stranger = ClientSecurity(SecurityProtocol.SSL, ca=str(other / "ca.pem"))
    assert code_of_connecting(cluster, stranger) is REFUSED


# --- brokers and the controller ---


def follower_fetch(cluster: SecureCluster) -> Fetch:
    told = cluster.metadata(0, "t")
    (topic,) = told.topics
    part = topic.partitions[0]
    incarnation = next(broker.incarnation for broker in told.brokers if broker.broker_id == 1)
    wanted = FetchPartition(
        "t", part.partition, topic.topic_id, part.leader_epoch, 0, 1 << 20, last_epoch=part.leader_epoch
    )
    return Fetch(0, 1, incarnation, 0, 1, 1 << 20, 0, 0, -1, (wanted,))


def control_update(cluster: SecureCluster) -> ControlUpdate:
    """Return an update that deletes every log of broker 0."""
    epoch = cluster.metadata(0).controller_epoch
    return ControlUpdate(0, "stranger", epoch, cluster.describe(0).incarnation, True, None, (), (), sequence=1 << 30)


def test_a_certificate_without_a_role_acts_as_no_broker(cluster: SecureCluster) -> None:
    client = without_role(cluster)
    requests: list[Request] = [follower_fetch(cluster), control_update(cluster)]
    with cluster.connect_as(0, None, client) as connection:
        for request in requests:
            with pytest.raises(BrokerError) as caught:
                connection.request(request)
            assert caught.value.code is REFUSED
    for identity in (Identity(SenderKind.BROKER, 1, 0), Identity(SenderKind.CONTROLLER, -1, 1)):
        with pytest.raises(BrokerError) as caught:
            cluster.connect_as(0, identity, client)
        assert caught.value.code is REFUSED
    assert cluster.slots[0].log_dir.joinpath("t-0").is_dir()


def test_a_certificate_acts_only_in_its_own_role(cluster: SecureCluster) -> None:
    with pytest.raises(BrokerError) as caught:
        cluster.connect_as(0, Identity(SenderKind.CONTROLLER, -1, 1), files(cluster, "broker"))
    assert caught.value.code is REFUSED
    broker = Identity(SenderKind.BROKER, 1, cluster.describe(1).incarnation)
    with cluster.connect_as(0, broker, files(cluster, "broker")) as connection:
        connection.request(follower_fetch(cluster))
        with pytest.raises(BrokerError) as caught:
            connection.request(control_update(cluster))
        assert caught.value.code is REFUSED


def test_the_listener_of_brokers_requires_a_certificate(cluster: SecureCluster) -> None:
    with pytest.raises(BrokerError):
        cluster.connect_as(0, None, None).request(Metadata(0, ()))
    other = cluster.base_dir / "forger"
    create_ca(other)
    forged = issue(other, Subject("broker", role="broker", cluster_id=cluster.cluster_id))
    with pytest.raises(BrokerError):
        cluster.connect_as(0, Identity(SenderKind.BROKER, 1, 0), forged)
    wait_until(lambda: {"allowed", "denied"} <= decisions_by_certificate(cluster), 30.0, "the logins in the audit log")


def decisions_by_certificate(cluster: SecureCluster) -> set[str]:
    """Return the decisions about logins by certificate in the audit log of broker 0."""
    written = (cluster.slots[0].log_dir / "audit.log").read_text("utf-8").splitlines()
    logins = [line for line in map(json.loads, written) if line["event"] == "login" and line["request"] == "SSL"]
    assert all(line["listener"] == "BROKER" for line in logins)
    return {line["decision"] for line in logins}


def test_another_broker_leads_after_a_crash(cluster: SecureCluster) -> None:
    wait_in_sync(cluster)
    with Producer(cluster.bootstrap, security=cluster.client_security) as producer:
        producer.send("t", value=b"before", partition=1).result(PATIENCE_S)
        cluster.kill(leader(cluster, "t", 1))
        producer.send("t", value=b"after", partition=1).result(PATIENCE_S)
    assert values(cluster, 1) == [b"before", b"after"]
    cluster.start_brokers()
    wait_in_sync(cluster)


# --- changes while clients write ---


class Load:
    """A producer that writes single records all the time, and others that connect for one record each."""

    def __init__(self, cluster: SecureCluster) -> None:
        self._cluster = cluster
        self._enough = threading.Event()
        self.written = self.connected = 0
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._write, self._connect)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors[0]

    def wait_for_more(self, count: int = 20) -> None:
        """Wait for ``count`` further records of the producer, and for a further connection."""
        written, connected = self.written + count, self.connected + 2

        def more() -> bool:
            return bool(self.errors) or (self.written >= written and self.connected >= connected)

        wait_until(more, PATIENCE_S, "further records")

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self) -> None:
        with self._producer() as producer:
            while not self._enough.wait(0.01):
                producer.send("t", value=b"x", partition=0).result(PATIENCE_S)
                self.written += 1

    def _connect(self) -> None:
        while not self._enough.wait(0.05):
            with self._producer() as producer:
                producer.send("t", value=b"y", partition=1).result(PATIENCE_S)
            self.connected += 1

    def _producer(self) -> Producer:
        return Producer(self._cluster.bootstrap, linger_ms=0, security=self._cluster.client_security)


def serial_of(cluster: SecureCluster, broker_id: int, listener: str) -> str:
    """Return the serial number of the certificate that a listener presents."""
    endpoint = cluster.endpoint(broker_id, listener)
    context = ssl.create_default_context(cafile=cluster.ca)
    if listener == "BROKER":
        context.load_cert_chain(*files(cluster, "broker"))
    with (
        socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=endpoint.host) as secured,
    ):
        return str((secured.getpeercert() or {})["serialNumber"])


def wait_for_serial(cluster: SecureCluster, expected: str) -> None:
    def presented() -> set[str]:
        return {serial_of(cluster, number, name) for number in (0, 1, 2) for name in ("CLIENT", "BROKER")}

    wait_until(lambda: presented() == {expected}, PATIENCE_S, "all listeners to present the new certificate")


@pytest.mark.extended
def test_certificates_are_replaced_under_load_without_a_failed_write(cluster: SecureCluster) -> None:
    wait_in_sync(cluster)
    with Load(cluster) as load:
        load.wait_for_more()
        before = serial_of(cluster, 0, "CLIENT")
        for role in ("broker", "controller"):
            cluster.issue(role)
        new = x509.load_pem_x509_certificate(files(cluster, "broker").certificate.read_bytes())
        wait_for_serial(cluster, f"{new.serial_number:X}".zfill(len(before)))
        load.wait_for_more()
        # New connections between brokers, and a new term of the controller, use the new certificates.
        cluster.restart(2)
        cluster.stop_controller()
        cluster.start_controller()
        wait_in_sync(cluster)
        load.wait_for_more()


@pytest.mark.extended
def test_a_new_authority_takes_over_under_load_without_a_failed_write(cluster: SecureCluster) -> None:
    """The steps of the operator's page: trust both authorities, change the certificates, trust the new one alone."""
    wait_in_sync(cluster)
    ca, old = cluster.pki / "ca.pem", (cluster.pki / "ca.pem").read_text()
    new_pki = cluster.base_dir / "new-pki"
    create_ca(new_pki)
    with Load(cluster) as load:
        for trusted in (old + (new_pki / "ca.pem").read_text(), (new_pki / "ca.pem").read_text()):
            replacement = cluster.pki / "ca.new"
            replacement.write_text(trusted)
            replacement.replace(ca)
            load.wait_for_more()
            for role in ("broker", "controller"):
                subject = Subject(role, hosts=("127.0.0.1",), role=role, cluster_id=cluster.cluster_id)
                issue(new_pki, subject, into=cluster.pki)
            load.wait_for_more()
        cluster.restart(1)
        wait_in_sync(cluster)
        load.wait_for_more()


@pytest.mark.extended
def test_a_rolling_restart_under_load_loses_no_write(cluster: SecureCluster) -> None:
    wait_in_sync(cluster)
    with Load(cluster) as load:
        for broker_id in cluster.slots:
            load.wait_for_more()
            assert cluster.stop_broker(broker_id) == 0
            cluster.start_broker(broker_id)
            wait_in_sync(cluster)
        load.wait_for_more()
