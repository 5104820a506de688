"""Kafka clients on a listener with TLS and logins: SCRAM, certificates, ACLs, delegation tokens and refusals."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sparklog.client.admin.admin import Admin
from sparklog.kafka.wire import ApiKey, RequestHeader, decode_response, decode_response_header, request_frame
from sparklog.kafka.wire.metadata import MetadataRequest
from sparklog.kafka.wire.security import SaslAuthenticateRequest, SaslHandshakeRequest
from sparklog.protocol.scram import ScramClient
from sparklog.security.acls import binding
from sparklog.testing.secure_cluster import SecureCluster
from sparklog.testing.settled_admin import SettledAdmin

pytestmark = pytest.mark.integration

PASSWORDS = {"anna": "a-password-of-anna", "bert": "a-password-of-bert"}
ISSUER, AUDIENCE = "https://issuer.example.com", "sparklog"
SIGNER = ec.generate_private_key(ec.SECP256R1())
#: The time after which a client must log in again.
SESSION_S = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    keys = tmp_path_factory.mktemp("keys") / "jwks.json"
    entry = json.loads(jwt.get_algorithm_by_name("ES256").to_jwk(SIGNER.public_key()))
    keys.write_text(json.dumps({"keys": [{**entry, "kid": "first"}]}))
    settings = {
        "kafka.listeners": "SASL_SSL://127.0.0.1:0,SSL://127.0.0.1:0",
        "ssl.client.auth": "required",
        "connections.max.reauth.ms": str(SESSION_S * 1000),
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
    }
    with SecureCluster(2, settings=settings) as running:
        for name, password in PASSWORDS.items():
            running.user(name, password)
        with SettledAdmin(running.bootstrap, security=running.client_security) as admin:
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
    from tests.integration.kafka_python_sockets import DIRECT

    admin = kafka.KafkaAdminClient(
        bootstrap_servers=cluster.kafka_bootstrap.split(","),
        proxy_url=DIRECT,
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


def test_a_token_of_an_identity_provider_logs_in(cluster: SecureCluster) -> None:
    def token(config: str) -> tuple[str, float]:
        ends_s = time.time() + 600
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "anna", "exp": int(ends_s)}
        return jwt.encode(claims, SIGNER, algorithm="ES256", headers={"kid": "first"}), ends_s

    settings = settings_of(cluster, "anna")
    for name in ("sasl.username", "sasl.password"):
        del settings[name]
    assert topics(cluster, **{**settings, "sasl.mechanism": "OAUTHBEARER", "oauth_cb": token}) == {"seen"}


def counters(cluster: SecureCluster) -> Counter[str]:
    with SettledAdmin(cluster.bootstrap, security=cluster.client_security) as admin:
        return sum((Counter(broker.counters) for broker in admin.describe_brokers()), Counter())


def test_a_client_logs_in_again_on_its_connections(cluster: SecureCluster) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    errors: list[Any] = []
    admin = confluent.AdminClient({**settings_of(cluster, "anna"), "error_cb": errors.append})
    admin.list_topics(timeout=60)
    before = counters(cluster)
    end_s = time.monotonic() + 2.5 * SESSION_S
    while time.monotonic() < end_s:
        assert set(admin.list_topics(timeout=60).topics) == {"seen"}
        time.sleep(0.05)
    after = counters(cluster)
    assert after["kafka.connections.closed"] == before["kafka.connections.closed"]
    # Of these logins one is that of the connection that reads the counters, to each broker.
    assert after["logins"] - before["logins"] > 2
    assert errors == []


def test_a_delegation_token_logs_in(cluster: SecureCluster) -> None:
    anna = cluster.user("anna", PASSWORDS["anna"])
    # The token is created by the broker that the client then logs in to: other brokers may learn of it a little later.
    with Admin(cluster.bootstrap.split(",")[0], security=anna) as admin:
        made = admin.create_delegation_token()
    login = ScramClient("SCRAM-SHA-256", made.token.token_id, made.secret.reveal(), "a-clients-nonce", token=True)
    context = ssl.create_default_context(cafile=cluster.ca)
    host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=60)
    with context.wrap_socket(plain, server_hostname=host) as connection:
        client = RawClient(connection)
        client.ask(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))
        challenge = client.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=login.first()))
        answer = login.step(challenge.auth_bytes)
        done = client.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=answer))
        assert (done.error_code, login.step(done.auth_bytes), login.complete) == (0, b"", True)
        listed = client.ask(ApiKey.METADATA, 12, MetadataRequest(topics=None))
        assert [topic.name for topic in listed.topics] == ["seen"]


class RawClient:
    """A client that sends single requests over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._replies = connection.makefile("rb")

    def ask(self, key: ApiKey, version: int, request: Any) -> Any:
        header = RequestHeader(key, version, 1, "test")
        self._connection.sendall(b"".join(map(bytes, request_frame(header, request))))
        frame = memoryview(self._replies.read(int.from_bytes(self._replies.read(4), "big")))
        return decode_response(key, version, decode_response_header(key, version, frame)[1])
