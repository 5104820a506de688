"""Tests of delegation tokens at real brokers: who creates and changes them, and how they end."""

from __future__ import annotations

import contextlib
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.delegation_tokens import CreatedToken
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.consumer.partition_reader import PartitionReader
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.metadata import DescribeTopicPartitionsRequest
from sparklog.model import TopicPartition
from sparklog.protocol.token_messages import ScopeEntry
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.token_store import TokenStore
from sparklog.zk.unreadable import Unreadable
from tests.broker.support import encoded, fetch, produce
from tests.broker.test_user_logins import (
    LISTENERS,
    PASSWORD,
    addresses_with_logins,
    become,
    by_password,
    may_log_in,
)
from tests.cli.test_page import lines_of, run_line
from tests.integration.kafka_calls import KafkaCalls
from tests.integration.test_kafka_data_limits import fetch_request, plain_batch, produce_request

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {
        **LISTENERS,
        "listener.security.protocol.map": LISTENERS["listener.security.protocol.map"] + ",KAFKA:SASL_PLAINTEXT",
        "kafka.listeners": "KAFKA://127.0.0.1:0",
        "delegation.token.expiry.check.interval.ms": "200",
    }
    with ProcessCluster(2, settings=settings) as running:
        yield running


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as admin:
        yield admin


@pytest.fixture(scope="module")
def bootstrap(cluster: ProcessCluster) -> str:
    return addresses_with_logins(cluster)


def by_delegation(created: CreatedToken) -> dict[str, str]:
    security = by_password(created.token.token_id, created.secret.reveal(), "SCRAM-SHA-256")
    return {**security, "sasl.tokenauth": "true"}


def code_of(call: Callable[..., object], *arguments: Any, **more: Any) -> ErrorCode:
    with pytest.raises(BrokerError) as error:
        call(*arguments, **more)
    return error.value.code


@pytest.fixture
def users(admin: Admin, bootstrap: str) -> Iterator[dict[str, Admin]]:
    """Return the admin clients of three users that have logged in."""
    clients = {}
    for name in ("anna", "otto", "olga"):
        admin.set_password(name, PASSWORD)
        become(bootstrap, by_password(name))
        clients[name] = Admin(bootstrap, security=by_password(name))
    yield clients
    for client in clients.values():
        client.close()


def test_a_delegation_token_acts_for_its_owner(users: dict[str, Admin], bootstrap: str) -> None:
    created = users["anna"].create_delegation_token(renewers=["User:otto"])
    assert created.secret.reveal() not in repr(created)
    become(bootstrap, by_delegation(created))
    with Admin(bootstrap, security=by_delegation(created)) as helper:
        assert helper.describe_cluster().brokers
        for request in (helper.create_delegation_token, helper.list_delegation_tokens):
            assert code_of(request) is ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    assert users["anna"].list_delegation_tokens() == users["otto"].list_delegation_tokens() == [created.token]
    assert users["olga"].list_delegation_tokens() == []
    assert not may_log_in(bootstrap, by_password(created.token.token_id, created.secret.reveal())), "no user"


def test_a_token_may_do_only_what_its_scope_allows(users: dict[str, Admin], bootstrap: str) -> None:
    for topic in ("orders", "hidden"):
        users["anna"].create_topic(topic, partitions=1, replication_factor=1)
    created = users["anna"].create_delegation_token(scope=[("read", "topic", "orders")])
    assert (created.token.scope_size, created.token.scope) == (1, (ScopeEntry("Read", "Topic", "orders"),))
    become(bootstrap, by_delegation(created))
    with Producer(bootstrap, security=by_password("anna")) as producer:
        for topic in ("orders", "hidden"):
            producer.send(topic, b"value").result(30)
    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    with BlockingCluster(bootstrap, security=by_delegation(created)) as link:
        assert [topic.name for topic in link.refresh(None).topics] == ["orders"]
        with PartitionReader(link, TopicPartition("orders", 0), 0, 1) as reader:
            assert sum(found.batch.num_rows for found in reader.fetched()) == 1
        assert code_of(link.topic, "hidden") is refused
        # A client that knows the leader need not ask for metadata.
        with link.open_connection(link.leader(TopicPartition("orders", 0)).broker_id) as connection:
            assert produce(connection, "orders", encoded(1)).code == refused
            assert fetch(connection, "hidden", 0)[0].code == refused
    with Admin(bootstrap, security=by_delegation(created)) as helper:
        assert code_of(helper.create_topic, "own") is refused
        assert code_of(helper.delete_topic, "orders") is refused
        assert code_of(helper.delete_user, "anna") is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_the_scope_of_a_token_counts_for_kafka_clients(
    users: dict[str, Admin], cluster: ProcessCluster, bootstrap: str
) -> None:
    for topic in ("seen", "unseen"):
        users["anna"].create_topic(topic, partitions=1, replication_factor=1)
    created = users["anna"].create_delegation_token(scope=[("Read", "Topic", "seen")])
    become(bootstrap, by_delegation(created))
    with KafkaCalls(cluster.slots[0].kafka_address) as calls:
        assert calls.log_in(created.token.token_id, created.secret.reveal(), token=True) == 0
        listed = calls.ask(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, DescribeTopicPartitionsRequest()).topics
        assert [topic.name for topic in listed] == ["seen"]
        refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        fetched = calls.ask(ApiKey.FETCH, 12, fetch_request("seen", "unseen")).responses
        codes = {topic.topic: topic.partitions[0].error_code for topic in fetched}
        assert codes["unseen"] == refused and codes["seen"] != refused
        produced = calls.ask(ApiKey.PRODUCE, 9, produce_request({"seen": plain_batch(b"value")})).responses
        assert produced[0].partition_responses[0].error_code == refused


def test_the_holder_of_a_token_renews_it(users: dict[str, Admin], bootstrap: str) -> None:
    created = users["anna"].create_delegation_token(period_ms=60_000, scope=[])
    other = users["anna"].create_delegation_token()
    assert created.token.expiry_ms == created.token.issue_ms + 60_000
    users["anna"].renew_delegation_token(created.token.token_id, period_ms=30_000)
    become(bootstrap, by_delegation(created))
    with Admin(bootstrap, security=by_delegation(created)) as helper:
        renewed_ms = helper.renew_delegation_token(created.token.token_id, period_ms=10**9)
        assert created.token.expiry_ms < renewed_ms < created.token.issue_ms + 120_000, "for its own period"
        assert helper.renew_delegation_token(created.token.token_id) == renewed_ms, "it has changed just now"
        not_allowed = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
        assert code_of(helper.renew_delegation_token, other.token.token_id) is not_allowed
        assert code_of(helper.expire_delegation_token, created.token.token_id) is not_allowed
        assert code_of(helper.create_delegation_token) is not_allowed


def test_only_the_owner_and_renewers_change_a_token(users: dict[str, Admin], admin: Admin) -> None:
    token = users["anna"].create_delegation_token(renewers=["User:otto"], max_lifetime_ms=3_600_000).token
    assert token.expiry_ms == token.max_ms == token.issue_ms + 3_600_000
    soon = users["otto"].renew_delegation_token(token.token_id, period_ms=60_000)
    assert token.issue_ms < soon < token.max_ms
    assert users["anna"].renew_delegation_token(token.token_id, period_ms=10**9) == token.max_ms
    mismatch = ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    assert code_of(users["olga"].renew_delegation_token, token.token_id) is mismatch
    assert code_of(users["olga"].expire_delegation_token, token.token_id) is mismatch
    assert code_of(users["anna"].renew_delegation_token, "none") is ErrorCode.DELEGATION_TOKEN_NOT_FOUND
    assert code_of(admin.create_delegation_token) is ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED


@pytest.mark.extended
def test_an_ended_or_expired_token_is_cut_off(users: dict[str, Admin], bootstrap: str) -> None:
    created = users["anna"].create_delegation_token()
    become(bootstrap, by_delegation(created))
    users["anna"].expire_delegation_token(created.token.token_id)
    become(bootstrap, by_delegation(created), admitted=False)
    expired = users["anna"].create_delegation_token(max_lifetime_ms=1)
    assert not may_log_in(bootstrap, by_delegation(expired))
    assert expired.token not in users["anna"].list_delegation_tokens()


@pytest.mark.extended
def test_the_tokens_of_a_deleted_user_end(users: dict[str, Admin], admin: Admin, bootstrap: str) -> None:
    created = users["olga"].create_delegation_token()
    become(bootstrap, by_delegation(created))
    admin.delete_user("olga")
    become(bootstrap, by_delegation(created), admitted=False)


@pytest.mark.extended
def test_a_deleted_user_cannot_leave_a_token(users: dict[str, Admin], admin: Admin, bootstrap: str) -> None:
    created: list[CreatedToken] = []

    def create() -> None:
        with contextlib.suppress(BrokerError):
            while True:
                created.append(users["otto"].create_delegation_token())

    creating = threading.Thread(target=create, daemon=True)
    creating.start()
    wait_until(lambda: len(created) > 2, 30, "some tokens")
    admin.delete_user("otto")
    creating.join(60)
    become(bootstrap, by_delegation(created[-1]), admitted=False)


def test_expired_tokens_are_removed_from_zookeeper(users: dict[str, Admin], cluster: ProcessCluster) -> None:
    lasting = users["anna"].create_delegation_token().token.token_id
    expired = users["anna"].create_delegation_token(max_lifetime_ms=1).token.token_id

    async def stored(store: ClusterStore) -> set[str]:
        return set(await TokenStore(store.session, Unreadable()).all_tokens())

    wait_until(lambda: expired not in cluster.ask_zookeeper(stored), 30, "the removal of the expired token")
    assert lasting in cluster.ask_zookeeper(stored)


def test_the_commands_about_tokens_run_as_printed(
    users: dict[str, Admin], bootstrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", bootstrap)
    monkeypatch.setenv("SPARKLOG_CLIENT_CONFIG", "anna.conf")
    Path("anna.conf").write_text("".join(f"{name} = {value}\n" for name, value in by_password("anna").items()))
    lines = lines_of("Tokens")
    [printed] = set(re.findall(r"\b[\w-]{22}\b", " ".join(lines)))
    assert len(lines) == 10
    token_id = secret = "none yet"
    for line in lines:
        result = run_line(line.replace(printed, token_id))
        assert result.code == (1 if "exits with 1" in line else 0), f"{line}\n{result.text}\n{result.err}"
        if "--client-file" in line:
            token_id = result.text.split()[2].rstrip(",")
            reader = Path("reader.conf")
            assert stat.S_IMODE(reader.stat().st_mode) == 0o600
            secret = reader.read_text().split("sasl.password = ")[1].strip()
            become(bootstrap, dict(line.split(" = ") for line in reader.read_text().splitlines()))
        if "tokens list" in line and result.code == 0:
            assert token_id in result.text and "orders" in result.text
        assert secret not in result.text + result.err
    assert token_id not in {token.token_id for token in users["anna"].list_delegation_tokens()}
