"""Tests of logins at real brokers: by password and by token, and what a changed or deleted user means for clients."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until

pytestmark = pytest.mark.integration

ISSUER, AUDIENCE = "https://issuer.example.com", "sparklog"
SIGNER = ec.generate_private_key(ec.SECP256R1())
PASSWORD, OTHER = "correct horse battery staple", "another password"


LISTENERS = {
    "listeners": "OPEN://127.0.0.1:0,CLIENT://127.0.0.1:0,BROKER://127.0.0.1:0",
    "listener.security.protocol.map": "OPEN:PLAINTEXT,CLIENT:SASL_PLAINTEXT,BROKER:PLAINTEXT",
    "inter.broker.listener.name": "BROKER",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    keys = tmp_path_factory.mktemp("keys") / "jwks.json"
    entry = json.loads(jwt.get_algorithm_by_name("ES256").to_jwk(SIGNER.public_key()))
    keys.write_text(json.dumps({"keys": [{**entry, "kid": "first"}]}))
    settings = {
        **LISTENERS,
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "sasl.oauthbearer.expected.audience": AUDIENCE,
    }
    with ProcessCluster(2, settings=settings) as running:
        yield running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    """Return an admin client of the listener without logins."""
    with Admin(cluster.bootstrap) as admin:
        yield admin


def addresses_with_logins(cluster: ProcessCluster) -> str:
    brokers = cluster.ask_zookeeper(lambda store: store.live_brokers())
    return ",".join(f"{found.host}:{found.port}" for broker in brokers for found in broker.endpoints[1:2])


@pytest.fixture(scope="module")
def bootstrap(cluster: ProcessCluster) -> str:
    return addresses_with_logins(cluster)


def by_password(user: str, password: str = PASSWORD, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }


def by_token(text: str) -> dict[str, str]:
    return {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER", "sasl.password": text}


def token(**changes: object) -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "loader", "exp": int(time.time()) + 600, **changes}
    return jwt.encode(claims, SIGNER, algorithm="ES256", headers={"kid": "first"})


def may_log_in(bootstrap: str, security: dict[str, str]) -> bool:
    """Return whether a new client can list topics."""
    try:
        with Admin(bootstrap, security=security) as client:
            client.list_topics()
    except BrokerError as error:
        assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED, error
        return False
    return True


def become(bootstrap: str, security: dict[str, str], *, admitted: bool = True) -> None:
    """Wait until every broker has learned that these settings are right, or no longer."""
    for address in bootstrap.split(","):
        wait_until(lambda at=address: may_log_in(at, security) == admitted, 30, f"{address}: {admitted}")  # type: ignore[misc]


def test_a_token_of_the_issuer_logs_in(bootstrap: str) -> None:
    assert may_log_in(bootstrap, by_token(token()))
    assert not may_log_in(bootstrap, by_token(token(aud="another")))


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_clients_of_a_user_write_and_read(admin: Admin, bootstrap: str, mechanism: str) -> None:
    admin.set_password("anna", PASSWORD)
    become(bootstrap, by_password("anna"))
    with Admin(bootstrap, security=by_password("anna", mechanism=mechanism)) as client:
        client.create_topic(f"of-{mechanism}", partitions=2, replication_factor=2)
        with Producer(bootstrap, security=by_password("anna", mechanism=mechanism)) as producer:
            producer.send(f"of-{mechanism}", b"value", partition=1).result(30)
        partition = TopicPartition(f"of-{mechanism}", 1)
        assert client.list_offsets([partition]) == {partition: 1}


def test_a_wrong_password_and_an_unknown_user_are_refused(admin: Admin, bootstrap: str) -> None:
    admin.set_password("anna", PASSWORD)
    become(bootstrap, by_password("anna"))
    assert not may_log_in(bootstrap, by_password("anna", "wrong"))
    assert not may_log_in(bootstrap, by_password("nemo"))


def test_a_changed_password_takes_effect_on_every_broker(admin: Admin, bootstrap: str) -> None:
    admin.set_password("otto", PASSWORD)
    become(bootstrap, by_password("otto"))
    admin.set_password("otto", OTHER)
    become(bootstrap, by_password("otto"), admitted=False)
    become(bootstrap, by_password("otto", OTHER))


def test_a_user_changes_its_own_password(admin: Admin, bootstrap: str) -> None:
    admin.set_password("anna", PASSWORD)
    become(bootstrap, by_password("anna"))
    with Admin(bootstrap, security=by_password("anna")) as client:
        client.set_password("anna", OTHER)
    become(bootstrap, by_password("anna", OTHER))


@pytest.mark.extended
def test_a_deleted_user_is_cut_off(admin: Admin, bootstrap: str) -> None:
    """Its open connections end, and its client cannot log in again."""
    admin.create_topic("cut-off", partitions=1, replication_factor=2)
    admin.set_password("olga", PASSWORD)
    become(bootstrap, by_password("olga"))
    with Producer(bootstrap, security=by_password("olga"), delivery_timeout_s=30) as producer:
        producer.send("cut-off", b"before").result(30)
        admin.delete_user("olga")

        def is_refused() -> bool:
            try:
                producer.send("cut-off", b"after").result(60)
            except SparklogError as error:
                assert "SASL_AUTHENTICATION_FAILED" in str(error), error
                return True
            return False

        wait_until(is_refused, 60, "the end of the connections")
    assert not may_log_in(bootstrap, by_password("olga"))
