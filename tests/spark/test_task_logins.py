"""Tests of the login of Spark tasks at real brokers: what tasks get, and jobs that outlive their token."""

from __future__ import annotations

import io
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import BinaryType, StructType
from pyspark.sql.worker import plan_data_source_read, write_into_data_source
from pyspark.worker_util import pickleSer

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.delegation_tokens import DelegationTokenDescription
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.producer.producer import Producer
from sparklog.errors import BrokerError
from sparklog.net.client_security import ClientSecurity
from sparklog.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from sparklog.spark.source import SparklogSource
from sparklog.spark.token_renewal import TokenRenewal, renewing
from sparklog.testing.process_cluster import ProcessCluster
from tests.broker.test_user_logins import LISTENERS, addresses_with_logins, become, by_password
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

CANARY = "canary-password-of-anna"
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
LIFETIME_MS = 5000
VALUE = StructType().add("value", BinaryType())


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    settings = {
        **LISTENERS,
        "internal.topic.replication.factor": "1",
        "transaction.state.log.num.partitions": "1",
        "delegation.token.expiry.check.interval.ms": "200",
        # Clients log in again long before a token expires.
        "connections.max.reauth.ms": "2000",
    }
    with ProcessCluster(1, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    """Return a client of the listener without logins."""
    with Admin(cluster.bootstrap) as admin:
        admin.set_password("anna", CANARY)
        become(addresses_with_logins(cluster), by_password("anna", CANARY))
        yield admin


@pytest.fixture
def login(cluster: ProcessCluster, admin: Admin) -> dict[str, str]:
    """Return the options of a job that logs in with a password in its options."""
    return {
        "kafka.bootstrap.servers": addresses_with_logins(cluster),
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": f'{MODULE} required username="anna" password="{CANARY}";',
    }


@pytest.fixture
def filled(cluster: ProcessCluster, admin: Admin, topic: str) -> str:
    """Return a topic with 300 records of 10 kB in one partition."""
    admin.create_topic(topic, partitions=1, replication_factor=1)
    with Producer(cluster.bootstrap) as producer:
        for number in range(300):
            producer.send(topic, b"%d" % number + bytes(10_000))
    return topic


def tokens(login: dict[str, str]) -> list[DelegationTokenDescription]:
    with Admin(login["kafka.bootstrap.servers"], security=by_password("anna", CANARY)) as anna:
        return anna.list_delegation_tokens()


# --- what Spark sends to executors ------------------------------------------------------------------------------------


def dumped(value: object) -> bytes:
    found: bytes = pickleSer.dumps(value)  # type: ignore[no-untyped-call]
    return found


def loaded(pickled: bytes) -> DataSource:
    found: DataSource = pickleSer.loads(pickled)  # type: ignore[no-untyped-call]
    return found


class Input(io.BytesIO):
    """What the JVM sends to a planning process."""

    def object(self, value: object) -> Input:
        pickled = dumped(value)
        self.write(struct.pack("!i", len(pickled)) + pickled)
        return self

    def text(self, value: str) -> Input:
        self.write(struct.pack("!i", len(value.encode())) + value.encode())
        return self

    def number(self, value: int) -> Input:
        self.write(struct.pack("!i", value))
        return self

    def flags(self, *values: bool) -> Input:
        self.write(bytes(values))
        return self


def planned_read(source: DataSource, schema: StructType, *, streaming: bool) -> bytes:
    """Return what the planning process of a read sends to the JVM for the executors."""
    given = Input().object(source).text(VALUE.json()).text(schema.json()).number(1000)
    given.flags(False, streaming, True).seek(0)
    planned = io.BytesIO()
    plan_data_source_read._main(given, planned)
    return planned.getvalue()


def planned_write(options: dict[str, str], *, streaming: bool) -> bytes:
    given = Input().object(SparklogSource).text("sparklog").text(VALUE.json()).text(VALUE.json()).number(len(options))
    for key, value in options.items():
        given.text(key).text(value)
    given.flags(False, streaming, True).seek(0)
    planned = io.BytesIO()
    write_into_data_source._main(given, planned)
    return planned.getvalue()


def test_a_token_and_no_login_of_the_options_reaches_tasks(login: dict[str, str], filled: str) -> None:
    sent = dumped(SparklogSource({**login, "subscribe": filled}))
    assert CANARY.encode() in sent, "the planning process gets the options"
    source = loaded(sent)
    read = planned_read(source, VALUE, streaming=False)
    stream = planned_read(loaded(sent), VALUE, streaming=True)
    write = planned_write({**login, "topic": filled}, streaming=False)
    stream_write = planned_write({**login, "topic": filled}, streaming=True)
    for planned in (read, stream, write, stream_write):
        for secret in (CANARY, "ScramLoginModule", "anna"):
            assert secret.encode() not in planned
    by_scope = {token.scope: token.token_id.encode() for token in tokens(login)}
    for planned, operations in (
        (read, {("Read", filled)}),
        (write, {("Write", filled), ("Write", "write:")}),
        (stream_write, {("Write", filled), ("Write", "query:")}),
    ):
        [token_id] = [
            token_id
            for scope, token_id in by_scope.items()
            if {(entry.operation, entry.name) for entry in scope} == operations
        ]
        assert token_id in planned


def test_the_catalog_stores_no_password(
    plain_spark: SparkSession, login: dict[str, str], filled: str, fails: Callable[[Callable[[], object]], str]
) -> None:
    options = {**login, "subscribe": filled}
    listed = ", ".join(f"'{name}' '{text}'" for name, text in options.items())
    message = fails(lambda: plain_spark.sql(f"CREATE TABLE secrets USING sparklog OPTIONS ({listed})"))
    assert "a password in the options of a table is stored in Spark's catalog" in message and CANARY not in message


# --- jobs of several lifetimes ----------------------------------------------------------------------------------------


def test_a_task_renews_its_token_while_it_runs(login: dict[str, str]) -> None:
    bootstrap = login["kafka.bootstrap.servers"]
    with Admin(bootstrap, security=by_password("anna", CANARY)) as anna:
        created = anna.create_delegation_token(period_ms=4000, scope=[])
        token, now_ms = created.token, int(time.time() * 1000)
        settings = by_password(token.token_id, created.secret.reveal(), "SCRAM-SHA-256") | {"sasl.tokenauth": "true"}
        security = ClientSecurity.parse(settings)

        def expiry_ms() -> int:
            return next(one.expiry_ms for one in anna.list_delegation_tokens() if one.token_id == token.token_id)

        with renewing(bootstrap, security, TokenRenewal(now_ms + 500, token.period_ms)):
            wait_until(lambda: expiry_ms() > token.expiry_ms + 3000, "at least two renewals")
        anna.expire_delegation_token(token.token_id)
    with (
        pytest.raises(BrokerError, match="the delegation token of the task has expired or was ended"),
        renewing(bootstrap, security, TokenRenewal(now_ms, token.period_ms)),
        BlockingCluster(bootstrap, security=security) as link,
    ):
        link.refresh()


def read_slowly(spark: SparkSession, login: dict[str, str], topic: str) -> tuple[int, float]:
    frame = spark.read.format("sparklog").options(**login, subscribe=topic).option("token.lifetime.ms", LIFETIME_MS)
    began_s = time.monotonic()
    return frame.load().count(), (time.monotonic() - began_s) * 1000 / LIFETIME_MS


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_a_task_that_takes_three_lifetimes_of_its_token_reads_all(
    plain_spark: SparkSession, admin: Admin, login: dict[str, str], filled: str
) -> None:
    admin.alter_quotas({CONSUMER_BYTE_RATE: 110_000}, user="anna")
    try:
        count, lifetimes = read_slowly(plain_spark, login, filled)
    finally:
        admin.alter_quotas({CONSUMER_BYTE_RATE: None}, user="anna")
    assert count == 300 and lifetimes > 3


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_a_job_ends_with_its_user(
    plain_spark: SparkSession,
    admin: Admin,
    login: dict[str, str],
    filled: str,
    fails: Callable[[Callable[[], object]], str],
) -> None:
    admin.set_password("otto", CANARY)
    become(login["kafka.bootstrap.servers"], by_password("otto", CANARY))
    of_otto = {**login, "kafka.sasl.jaas.config": login["kafka.sasl.jaas.config"].replace('"anna"', '"otto"')}
    admin.alter_quotas({CONSUMER_BYTE_RATE: 100_000}, user="otto")

    def delete() -> None:
        with Admin(login["kafka.bootstrap.servers"], security=by_password("otto", CANARY)) as otto:
            wait_until(lambda: len(otto.list_delegation_tokens()) == 1, "the token of the job")
            time.sleep(2)  # The tasks are reading, which takes 30 s.
        admin.delete_user("otto")

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        message = fails(lambda: read_slowly(plain_spark, of_otto, filled))
    finally:
        deleting.join()
        admin.alter_quotas({CONSUMER_BYTE_RATE: None}, user="otto")
    assert "the delegation token of the task has expired or was ended with its user" in message
    assert CANARY not in message


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_short_tasks_over_three_lifetimes_of_their_token_read_all(
    plain_spark: SparkSession, login: dict[str, str], filled: str
) -> None:
    def pausing(rows: Iterable[Row]) -> Iterator[int]:
        count = sum(1 for _ in rows)
        time.sleep(1.5)
        yield count

    frame = plain_spark.read.format("sparklog").options(**login, subscribe=filled, maxRecordsPerPartition=12)
    rows = frame.option("token.lifetime.ms", LIFETIME_MS).load().rdd
    began_s = time.monotonic()
    assert rows.mapPartitions(pausing).sum() == 300
    assert time.monotonic() - began_s > 3 * LIFETIME_MS / 1000
    [token] = [token for token in tokens(login) if token.period_ms == LIFETIME_MS and token.scope[0].name == filled]
    assert token.expiry_ms > token.issue_ms + 3 * LIFETIME_MS, "one token, which tasks have renewed"


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_a_write_that_takes_two_lifetimes_of_its_token_commits(
    plain_spark: SparkSession, admin: Admin, login: dict[str, str], topic: str
) -> None:
    admin.create_topic(topic, partitions=1, replication_factor=1)
    rows = plain_spark.range(2000).selectExpr("cast(repeat(cast(id as string), 5000) as binary) as value").coalesce(1)
    admin.alter_quotas({PRODUCER_BYTE_RATE: 2_000_000}, user="anna")
    began_s = time.monotonic()
    try:
        rows.write.format("sparklog").options(topic=topic, **{**login, "token.lifetime.ms": str(LIFETIME_MS)}).mode(
            "append"
        ).save()
    finally:
        admin.alter_quotas({PRODUCER_BYTE_RATE: None}, user="anna")
    assert time.monotonic() - began_s > 2 * LIFETIME_MS / 1000
    assert plain_spark.read.format("sparklog").options(**login, subscribe=topic).load().count() == 2000


def test_a_stream_writes_with_a_token_for_its_topic(
    plain_spark: SparkSession, login: dict[str, str], filled: str, tmp_path: Path
) -> None:
    copy = f"{filled}-copy"
    limits = {"maxOffsetsPerTrigger": "150", "startingOffsets": "earliest"}
    rows = plain_spark.readStream.format("sparklog").options(**login, subscribe=filled, **limits).load().select("value")
    writer = rows.writeStream.format("sparklog").options(topic=copy, **login)
    writer = writer.options(createTopic="true", replicationFactor="1", checkpointLocation=str(tmp_path / "check"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination(120)
    assert query.exception() is None and len(query.recentProgress) == 2
    assert plain_spark.read.format("sparklog").options(**login, subscribe=copy).load().count() == 300
    scopes = [{(entry.operation, entry.name) for entry in token.scope} for token in tokens(login)]
    assert scopes.count({("Create", copy), ("Write", copy), ("Write", "query:")}) == 1, "micro-batches share a token"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(CANARY.encode() in found for found in written)
