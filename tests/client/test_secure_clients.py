"""Tests of the public clients against brokers with TLS and logins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.consumer.consumer import Consumer
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.client.producer.transaction_run import Joined
from sparklog.client.producer.two_phase_write import decide, join
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.client_security import CLIENT_CONFIG
from tests.client.fake_cluster import FakeCluster
from tests.net.certificates import Certificates
from tests.net.test_client_logins import PASSWORD, ScramLogins

SCHEMA = "carrier string, delay double"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["SASL_SSL", "SSL", "SASL_PLAINTEXT"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fake(certificates: Certificates, protocol: str) -> Iterator[FakeCluster]:
    logins = ScramLogins(0) if "SASL" in protocol else None
    tls = certificates.server() if "SSL" in protocol else None
    with FakeCluster(2, ListenerSecurity("SECURE", logins, tls)) as cluster:
        yield cluster


@pytest.fixture
def settings(certificates: Certificates, protocol: str) -> dict[str, str]:
    found = {"security.protocol": protocol}
    if "SSL" in protocol:
        found["ssl.ca.location"] = certificates.ca
    if "SASL" in protocol:
        found |= {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": "anna", "sasl.password": PASSWORD}
    return found


def rows(count: int) -> pa.Table:
    return pa.table({"carrier": ["UA"] * count, "delay": [float(number) for number in range(count)]})


def test_all_clients_get_through(
    fake: FakeCluster, settings: dict[str, str], protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Admin(fake.bootstrap, security=settings) as admin:
        admin.create_topic("flights", partitions=2, schema=SCHEMA)
        admin.create_topic("notes", partitions=2)
    with Producer(fake.bootstrap, security=settings) as producer:
        producer.write("flights", rows(50_000)).result(30)
        # After a few waits in sequence, the caller does the I/O itself, but only without TLS.
        for number in range(30):
            producer.send("notes", f"note {number}").result(30)
            if "SASL_SSL" in protocol or protocol == "SSL":
                assert not producer._sender.thread.handoff.lent
    file = tmp_path / "client.conf"
    file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()), "utf-8")
    file.chmod(0o600)
    monkeypatch.setenv(CLIENT_CONFIG, str(file))
    with Consumer(fake.bootstrap, ["flights", "notes"]) as consumer:
        found, end_s = 0, time.monotonic() + 30
        while found < 50_030 and time.monotonic() < end_s:
            found += sum(batch.num_rows for batch in consumer.poll(1.0))
    assert found == 50_030
    with PartitionReader(fake.bootstrap, TopicPartition("notes", 0), 0, 5, security=file) as reader:
        assert sum(batch.num_rows for _, batch in reader) == 5


def test_a_group_and_a_sink_get_through(fake: FakeCluster, settings: dict[str, str]) -> None:
    fake.create("notes", partitions=2)
    joined = join(fake.bootstrap, key="sink", version=1, run_id="run", security=settings)
    assert isinstance(joined, Joined)
    with Producer(fake.bootstrap, in_transaction=joined, security=settings) as producer:
        producer.send("notes", "one").result(30)
    assert decide(
        fake.bootstrap, key="sink", version=1, run_id="run", winners=[joined.producer_id], security=settings
    ).complete
    with (
        pytest.raises(BrokerError, match="UNKNOWN_API: Heartbeat"),  # a broker has received it, and has no groups
        Consumer(fake.bootstrap, "notes", group="readers", security=settings) as consumer,
    ):
        consumer.poll(10.0)


Use = Callable[[str, dict[str, str]], object]


def produce(bootstrap: str, settings: dict[str, str]) -> object:
    with Producer(bootstrap, security=settings) as producer:
        return producer.send("notes", "one").result(30)


def consume(bootstrap: str, settings: dict[str, str]) -> object:
    with Consumer(bootstrap, "notes", security=settings) as consumer:
        return consumer.poll(1.0)


def administer(bootstrap: str, settings: dict[str, str]) -> object:
    with Admin(bootstrap, security=settings) as admin:
        return admin.list_topics()


@pytest.mark.parametrize("use", [produce, consume, administer], ids=lambda use: use.__name__)
@pytest.mark.parametrize("protocol", ["SASL_SSL"], indirect=True)
@pytest.mark.parametrize("wrong", ["password", "authority", "protocol"])
def test_a_client_that_is_refused_fails_at_once(
    fake: FakeCluster, settings: dict[str, str], use: Use, wrong: str, tmp_path: Path
) -> None:
    fake.create("notes")
    code = ErrorCode.SASL_AUTHENTICATION_FAILED
    if wrong == "password":
        settings["sasl.password"] = "not-it"
    elif wrong == "authority":
        settings["ssl.ca.location"] = Certificates(tmp_path / "other").ca
        code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    else:
        settings["security.protocol"] = "SSL"
        code = ErrorCode.ILLEGAL_SASL_STATE
    began_s = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        use(fake.bootstrap, settings)
    assert caught.value.code is code and "not-it" not in str(caught.value)
    assert time.monotonic() - began_s < 10
