"""Tests of ``cluster start --secure``: what it makes, who may use the cluster, and where its password is."""

from __future__ import annotations

import datetime as dt
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from msgspec import structs

from sparklog import Admin, Producer
from sparklog.cluster import certificates
from sparklog.cluster.certificates import Subject
from sparklog.cluster.client_file import client_file
from sparklog.cluster.options import TRUSTED_NETWORK, ClusterOptions, check_network
from sparklog.cluster.spark_access import require_private_channel
from sparklog.cluster.spark_environment import PRIVATE_CHANNEL
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.security.listeners import SecurityProtocol, broker_listeners
from tests.ports import FirstPort

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "sparklog.cli.main"]


def options(data_dir: Path, **more: object) -> ClusterOptions:
    return ClusterOptions(data_dir=data_dir, secure=True, **more)  # type: ignore[arg-type]


# --- files and settings -----------------------------------------------------------------------------------------------


def test_secure_sets_listeners_with_tls_and_a_super_user(tmp_path: Path) -> None:
    chosen = options(tmp_path).checked()
    assert chosen.checked() == chosen
    config = broker_config(chosen.settings)
    listeners = broker_listeners(config, host="127.0.0.1", port=9092)
    assert {listener.protocol for listener in listeners.all} == {SecurityProtocol.SASL_SSL, SecurityProtocol.SSL}
    assert listeners.client.protocol is SecurityProtocol.SASL_SSL
    assert config.super_users == "User:admin"


def test_secure_refuses_settings_that_it_sets_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--secure sets listeners itself"):
        options(tmp_path, settings={"listeners": "PLAINTEXT://127.0.0.1:9092"}).checked()


def test_several_hosts_need_a_zookeeper_with_tls(tmp_path: Path) -> None:
    given = options(tmp_path, zookeeper="zk1:2181/log")
    with pytest.raises(ConfigError, match="needs a ZooKeeper with TLS"):
        check_network(given.checked(), "spark://host:7077")
    check_network(given.checked(), "local[2]")
    check_network(structs.replace(given, settings=TRUSTED_NETWORK).checked(), "spark://host:7077")
    check_network(options(tmp_path).checked(), "spark://host:7077")


def context_of(settings: dict[str, str]) -> Any:
    """Return a stand-in for a Spark context, with a configuration only."""
    return SimpleNamespace(getConf=lambda: settings)


@pytest.mark.parametrize("missing", [name for name in PRIVATE_CHANNEL if not name.startswith(("spark.io", "spark.ui"))])
def test_several_hosts_need_an_encrypted_spark(missing: str) -> None:
    require_private_channel(context_of(PRIVATE_CHANNEL))
    open_channel = context_of({name: text for name, text in PRIVATE_CHANNEL.items() if name != missing})
    with pytest.raises(ConfigError, match=re.escape(missing)):
        require_private_channel(open_channel)


def test_tls_of_spark_replaces_its_own_encryption() -> None:
    require_private_channel(context_of({"spark.authenticate": "true", "spark.ssl.rpc.enabled": "true"}))
    without_login = context_of({"spark.ssl.rpc.enabled": "true"})
    with pytest.raises(ConfigError, match=r"spark\.authenticate"):
        require_private_channel(without_login)


def test_hosts_get_no_paths_of_the_drivers_own_files(tmp_path: Path) -> None:
    chosen = options(tmp_path).checked()
    found = chosen.security().host_settings(chosen.settings)
    names = {Path(text).name for text in found.values() if text.endswith(".pem")}
    assert names == {"ca.pem", "broker.pem", "broker-key.pem"}


def test_a_directory_of_secrets_is_for_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "security").mkdir(mode=0o755)
    options(tmp_path).security().prepare()
    assert stat.S_IMODE((tmp_path / "security").stat().st_mode) == 0o700
    open_to_others = [path for path in (tmp_path / "security").glob("*-key.pem") if path.stat().st_mode & 0o077]
    assert not open_to_others


def test_a_second_start_keeps_what_the_first_has_made(tmp_path: Path) -> None:
    options(tmp_path).security().prepare()
    before = {path.name: path.read_bytes() for path in (tmp_path / "security").iterdir()}
    options(tmp_path).security().prepare()
    assert {path.name: path.read_bytes() for path in (tmp_path / "security").iterdir()} == before


def test_a_certificate_is_current_for_its_own_subject_only(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path)
    subject = Subject("broker", ("localhost",), "broker", "one")
    assert not certificates.is_current(tmp_path, subject)
    files = certificates.issue(tmp_path, subject, days=40)
    assert certificates.is_current(tmp_path, subject)
    assert not certificates.is_current(tmp_path, subject, days=41), "it expires too early"
    assert not certificates.is_current(tmp_path, subject._replace(cluster_id="two"))
    assert not certificates.is_current(tmp_path, subject._replace(hosts=("localhost", "other")))
    found = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    assert found.not_valid_after_utc < dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=41)
    for name in ("ca.pem", "ca-key.pem"):
        (tmp_path / name).unlink()
    certificates.create_ca(tmp_path)
    assert not certificates.is_current(tmp_path, subject), "another CA has issued it"


# --- a running cluster ------------------------------------------------------------------------------------------------


class SecureCluster:
    """A cluster that the command line has started, with everything that its commands have printed."""

    def __init__(self, directory: Path) -> None:
        self.data_dir = directory / "data"
        self.bootstrap = f"127.0.0.1:{FirstPort.SECURE_CLUSTER}"
        self.client_file = client_file(self.data_dir)
        self.output = ""
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith("SPARKLOG_C")}

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            cwd=self.data_dir.parent,
            env=self.environment,
        )
        self.output += done.stdout + done.stderr
        return done

    def start(self) -> None:
        port = self.bootstrap.rpartition(":")[2]
        words = ("cluster", "start", "--secure", "--brokers", "1", "--data-dir", str(self.data_dir), "--port", port)
        started = self.run(*words, "--detach")
        assert started.returncode == 0, started.stderr
        assert str(self.client_file) in started.stdout

    def stop(self) -> None:
        self.run("cluster", "stop", "--data-dir", str(self.data_dir), "--yes")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    found = SecureCluster(tmp_path_factory.mktemp("secure"))
    found.start()
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_the_client_file_opens_the_cluster_to_commands_and_programs(cluster: SecureCluster) -> None:
    config = ("--client-config", str(cluster.client_file))
    created = cluster.run(*config, "topics", "create", "events", "--bootstrap", cluster.bootstrap)
    assert created.returncode == 0, created.stderr
    with Producer(cluster.bootstrap, security=cluster.client_file) as producer:
        assert producer.send("events", b"hello").result().offset == 0
    consumed = cluster.run(*config, "consume", "events", "--from", "earliest", "--bootstrap", cluster.bootstrap)
    assert "hello" in consumed.stdout, consumed.stderr
    status = cluster.run("cluster", "status", "--data-dir", str(cluster.data_dir))
    assert status.returncode == 0, status.stderr


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_a_secure_cluster_serves_no_client_without_the_login(cluster: SecureCluster) -> None:
    refused = cluster.run("topics", "list", "--bootstrap", cluster.bootstrap)
    assert refused.returncode == 1 and "security.protocol" in refused.stderr
    wrong = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(cluster.data_dir / "security" / "ca.pem"),
        "sasl.username": "admin",
        "sasl.password": "wrong",
    }
    with pytest.raises(BrokerError) as caught, Admin(cluster.bootstrap, security=wrong, timeout_s=20) as admin:
        admin.list_topics()
    assert caught.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_the_admins_password_is_in_its_file_only(cluster: SecureCluster) -> None:
    secret = cluster.data_dir / "security" / "admin.password"
    password = secret.read_text().strip().encode()
    assert len(password) >= 20 and stat.S_IMODE(secret.stat().st_mode) == 0o600
    found = [path for path in cluster.data_dir.rglob("*") if path.is_file() and password in path.read_bytes()]
    assert found == [secret]
    assert password.decode() not in cluster.output
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            for name in ("cmdline", "environ"):
                try:
                    text = (process / name).read_bytes()
                except OSError:  # It has ended, or it is another user's.
                    continue
                assert password not in text, f"{name} of process {process.name}"


SPARK_JOB = """
import sys
from pyspark.sql import SparkSession

bootstrap, ca, password, log_dir, checkpoint = sys.argv[1:]
module = "org.apache.kafka.common.security.scram.ScramLoginModule"
secure = {
    "kafka.bootstrap.servers": bootstrap,
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": f'{module} required username="admin" password="${{file:{password}}}";',
    "kafka.ssl.truststore.location": ca,
    "kafka.ssl.truststore.type": "PEM",
}
session = SparkSession.builder.master("local[2]").config("spark.eventLog.enabled", "true")
spark = session.config("spark.eventLog.dir", log_dir).config("spark.ui.enabled", "false").getOrCreate()
rows = spark.range(1000).selectExpr("cast(cast(id as string) as binary) as value")
rows.write.format("sparklog").options(**secure).option(
    "topic", "numbers").option("createTopic", "true").option("partitions", "2").mode("append").save()
source = spark.read.format("sparklog").options(**secure).option("subscribe", "numbers").load()
print("read", source.count())
stream = spark.readStream.format("sparklog").options(**secure).option("subscribe", "numbers").option(
    "startingOffsets", "earliest").load()
query = stream.select("value").writeStream.format("sparklog").options(**secure).option("topic", "copies").option(
    "createTopic", "true").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
query.awaitTermination()
copies = spark.read.format("sparklog").options(**secure).option("subscribe", "copies").load()
print("copied", copies.count())
spark.stop()
"""


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(240)
def test_spark_reads_and_writes_with_the_kafka_sources_options(cluster: SecureCluster, tmp_path: Path) -> None:
    secret = cluster.data_dir / "security" / "admin.password"
    (tmp_path / "job.py").write_text(SPARK_JOB)
    (tmp_path / "events").mkdir()
    words = (
        cluster.bootstrap,
        cluster.data_dir / "security" / "ca.pem",
        secret,
        tmp_path / "events",
        tmp_path / "check",
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**cluster.environment, "SPARK_CONF_DIR": str(ROOT / "conf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "read 1000" in done.stdout and "copied 1000" in done.stdout
    with Admin(cluster.bootstrap, security=cluster.client_file) as admin:
        owners = [token.owner for token in admin.list_delegation_tokens()]
    assert owners == ["User:admin"], "two reads, a batch write and a stream have shared a token for their tasks"
    password = secret.read_text().strip()
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert password not in written + done.stdout + done.stderr
    assert "ScramLoginModule" not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "events").rglob("*") if path.is_file()
    ), "the event log masks the option"
