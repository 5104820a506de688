"""Kafka clients on a listener with TLS and logins: SCRAM, certificates, ACLs, delegation tokens and refusals."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.security.acls import binding
from sparklog.testing.secure_cluster import SecureCluster

pytestmark = pytest.mark.integration

PASSWORDS = {"anna": "a-password-of-anna", "bert": "a-password-of-bert"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SecureCluster]:
    listeners = {"kafka.listeners": "SASL_SSL://127.0.0.1:0,SSL://127.0.0.1:0", "ssl.client.auth": "required"}
    with SecureCluster(2, settings=listeners) as running:
        for name, password in PASSWORDS.items():
            running.user(name, password)
        with Admin(running.bootstrap, security=running.client_security) as admin:
            admin.create_topic("seen", partitions=2, replication_factor=2)
            admin.create_topic("hidden", partitions=1, replication_factor=2)
            admin.create_acls([binding("topic", "seen", "User:anna", "describe")])
        yield running


def settings_of(cluster: SecureCluster, user: str, password: str = "") -> dict[str, Any]:
    """Return the settings of librdkafka for a user."""
    return {
        "bootstrap.servers": cluster.kafka_bootstrap,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": cluster.ca,
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": password or PASSWORDS[user],
    }


def topics(cluster: SecureCluster, **settings: Any) -> set[str]:
    confluent = pytest.importorskip("confluent_kafka.admin")
    return set(confluent.AdminClient(settings).list_topics(timeout=60).topics)


def test_a_user_sees_what_the_acls_allow(cluster: SecureCluster) -> None:
    assert topics(cluster, **settings_of(cluster, "anna")) == {"seen"}
    assert topics(cluster, **settings_of(cluster, "bert")) == set()


def test_kcat_logs_in(cluster: SecureCluster) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat is not installed")
    options = [word for name, value in settings_of(cluster, "anna").items() for word in ("-X", f"{name}={value}")]
    done = subprocess.run(
        [kcat, "-b", cluster.kafka_bootstrap, "-L", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = done.stdout
    assert "2 brokers:" in listed and 'topic "seen" with 2 partitions' in listed and "hidden" not in listed


def test_kafka_python_logs_in(cluster: SecureCluster) -> None:
    kafka = pytest.importorskip("kafka")
    admin = kafka.KafkaAdminClient(
        bootstrap_servers=cluster.kafka_bootstrap.split(","),
        security_protocol="SASL_SSL",
        ssl_cafile=cluster.ca,
        sasl_mechanism="SCRAM-SHA-256",
        sasl_plain_username="anna",
        sasl_plain_password=PASSWORDS["anna"],
    )
    try:
        assert admin.list_topics() == ["seen"]
    finally:
        admin.close()


def test_a_wrong_password_is_an_authentication_error(cluster: SecureCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    errors: list[Any] = []
    admin = pytest.importorskip("confluent_kafka.admin").AdminClient(
        {**settings_of(cluster, "anna", "wrong"), "error_cb": errors.append}
    )
    with pytest.raises(confluent.KafkaException):
        admin.list_topics(timeout=5)
    admin.poll(1)
    assert confluent.KafkaError._AUTHENTICATION in {error.code() for error in errors}


def test_a_certificate_is_a_login_on_an_ssl_listener(cluster: SecureCluster) -> None:
    (found,) = {
        endpoint.port
        for broker in cluster.ask_zookeeper(lambda store: store.live_brokers())
        for endpoint in broker.kafka_endpoints
        if endpoint.name == "SSL" and broker.broker_id == 0
    }
    settings = {
        "bootstrap.servers": f"127.0.0.1:{found}",
        "security.protocol": "SSL",
        "ssl.ca.location": cluster.ca,
        "ssl.certificate.location": str(cluster.pki / "broker.pem"),
        "ssl.key.location": str(cluster.pki / "broker-key.pem"),
    }
    # A Kafka client with the certificate of a broker is a client with this name, and no broker.
    assert topics(cluster, **settings) == set()


def test_plain_bytes_on_a_tls_listener_are_closed(cluster: SecureCluster) -> None:
    host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(bytes.fromhex("0000001a000300010000000100"))
        assert connection.recv(100) == b""


def test_metadata_names_only_addresses_of_the_same_listener(cluster: SecureCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    listed = confluent.AdminClient(settings_of(cluster, "anna")).list_topics(timeout=60)
    shown = {f"{broker.host}:{broker.port}" for broker in listed.brokers.values()}
    assert shown == set(cluster.kafka_bootstrap.split(","))
