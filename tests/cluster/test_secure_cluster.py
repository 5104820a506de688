"""Tests of ``cluster start --secure``: what it makes, who may use the cluster, and where its password is."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import stat
import subprocess
import sys
import urllib.request
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
from sparklog.security.acls import binding
from sparklog.security.listeners import SecurityProtocol, broker_listeners
from tests.ports import FirstPort
from tests.waiting import wait_until

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


# --- Spark jobs -------------------------------------------------------------------------------------------------------

CANARY = "canary-password-of-anna"
#: A job whose executors are processes of their own. When its queries are done, it waits for a line.
SPARK_JOB = """
import json, sys
from pyspark.sql import SparkSession

options, master, events, checkpoint = json.loads(sys.argv[1]), *sys.argv[2:]
options["kafka.sasl.jaas.config"] = sys.stdin.readline().strip()
session = SparkSession.builder.master(master).config("spark.ui.port", "0")
session = session.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", events)
session = session.config("spark.eventLog.compress", "false")
spark = session.config("spark.python.authenticate.socketTimeout", "60s").getOrCreate()


def read(topic):
    return spark.read.format("sparklog").options(**options, subscribe=topic).load()


new = {**options, "createTopic": "true", "replicationFactor": "1"}
rows = spark.range(1000).selectExpr("cast(cast(id as string) as binary) as value")
rows.write.format("sparklog").options(**new, topic="anna-numbers", partitions="2").mode("append").save()
print("read", read("anna-numbers").count())
read("anna-numbers").createOrReplaceTempView("numbers")
spark.sql("select count(*) from numbers where partition = 1").collect()
stream = spark.readStream.format("sparklog").options(**options, subscribe="anna-numbers")
copies = stream.option("startingOffsets", "earliest").load().select("value").writeStream.format("sparklog")
copies = copies.options(**new, topic="anna-copies", checkpointLocation=checkpoint)
query = copies.trigger(availableNow=True).start()
query.awaitTermination()
print("copied", read("anna-copies").count())
print(query.lastProgress, read("anna-copies")._jdf.queryExecution().toString())
try:
    spark.read.format("sparklog").options(**options, subscribe="hidden").load().count()
except Exception as error:
    print("refused", error)
print("ui", spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId, flush=True)
sys.stdin.readline()
spark.stop()
"""
UI_PAGES = ("jobs", "stages", "storage", "environment", "executors", "SQL", "StreamingQuery")


def children_of(pid: int) -> dict[int, bytes]:
    """Return the processes that descend from a process, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: dict[int, bytes] = {}
    known = {pid}
    while grown := {child for child, parent in parents.items() if parent in known} - known:
        known |= grown
        for child in grown:
            with contextlib.suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes()
    return found


def executors_of(pid: int) -> set[int]:
    """Return the executors of a job and their Python workers."""
    jvms = [child for child, line in children_of(pid).items() if b"CoarseGrainedExecutorBackend" in line]
    return {*jvms, *(worker for jvm in jvms for worker in children_of(jvm))}


def has_in_memory(pid: int, texts: list[bytes]) -> set[bytes]:
    """Return the texts that are in the environment, the command line or the memory of a process."""
    found = {
        text for name in ("environ", "cmdline") for text in texts if text in Path(f"/proc/{pid}/{name}").read_bytes()
    }
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if not rights.startswith("rw") or "[v" in line:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            for at in range(start, end, 1 << 24):
                try:
                    memory.seek(at)
                    chunk = memory.read(min(end - at, (1 << 24) + 200))
                except (OSError, ValueError, OverflowError):
                    break
                found |= {text for text in texts if text in chunk}
    return found


def ui_of(url: str, application: str) -> str:
    """Return the pages of Spark's UI and the replies of its REST API."""

    def page(path: str) -> str:
        with urllib.request.urlopen(f"{url}/{path}", timeout=60) as reply:
            text: str = reply.read().decode()
        return text

    api = f"api/v1/applications/{application}"
    executions = json.loads(page(f"{api}/sql?details=true&planDescription=true&length=1000"))
    assert len(executions) > 5
    pages = [f"{name}/" for name in UI_PAGES] + [f"SQL/execution/?id={one['id']}" for one in executions]
    pages += [f"{api}/{name}" for name in ("environment", "jobs", "stages?details=true", "sql?planDescription=true")]
    return json.dumps(executions) + "".join(map(page, pages))


@pytest.fixture
def anna(cluster: SecureCluster) -> Iterator[Admin]:
    """Return a client that is logged in as anna, who may only read, write and create her topics."""
    allowed = [("topic", "anna-", name) for name in ("read", "write", "create")]
    allowed += [("transactionalid", prefix, "write") for prefix in ("write:", "query:")]
    with Admin(cluster.bootstrap, security=cluster.client_file) as admin:
        admin.create_topic("hidden", partitions=1, replication_factor=1)
        admin.set_password("anna", CANARY)
        admin.create_acls(
            [binding(kind, name, "User:anna", what, pattern_type="prefixed") for kind, name, what in allowed]
        )
        login = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(cluster.data_dir / "security" / "ca.pem"),
            "sasl.username": "anna",
            "sasl.password": CANARY,
        }
        with Admin(cluster.bootstrap, security=login) as found:
            yield found
        admin.delete_user("anna")
        for topic in ("anna-numbers", "anna-copies", "hidden"):
            admin.delete_topic(topic)


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(800)
@pytest.mark.parametrize("given", ["password", "password and conf", "reference and conf"])
def test_no_output_of_a_spark_job_and_no_executor_has_the_password(
    cluster: SecureCluster, anna: Admin, tmp_path: Path, given: str
) -> None:
    secret = tmp_path / "anna.password"
    secret.write_text(CANARY)
    password = CANARY if given.startswith("password") else f"${{file:{secret}}}"
    (tmp_path / "job.py").write_text(SPARK_JOB)
    (tmp_path / "events").mkdir()
    options = {
        "kafka.bootstrap.servers": cluster.bootstrap,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.ssl.truststore.location": str(cluster.data_dir / "security" / "ca.pem"),
        "kafka.ssl.truststore.type": "PEM",
    }
    words = (json.dumps(options), "local-cluster[1,2,1024]", tmp_path / "events", tmp_path / "check")
    # Spark's own redaction is enough, and so is that of conf.
    conf = ROOT / "conf" if given.endswith("conf") else tmp_path
    with (tmp_path / "stdout").open("w") as stdout, (tmp_path / "stderr").open("w") as stderr:
        job = subprocess.Popen(
            [sys.executable, str(tmp_path / "job.py"), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**cluster.environment, "SPARK_CONF_DIR": str(conf)},
        )
    assert job.stdin is not None
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    job.stdin.write(f'{module} required username="anna" password="{password}";\n')
    job.stdin.flush()
    try:
        output = tmp_path / "stdout"
        wait_until(lambda: job.poll() is not None or "\nui " in output.read_text(), "the queries", timeout_s=600)
        printed = output.read_text()
        assert "read 1000" in printed and "copied 1000" in printed, (tmp_path / "stderr").read_text()[-3000:]
        assert "refused" in printed and "TOPIC_AUTHORIZATION_FAILED" in printed
        tokens = anna.list_delegation_tokens()
        scopes = {frozenset((entry.operation, entry.name) for entry in token.scope) for token in tokens}
        of_write = {("Create", "anna-numbers"), ("Write", "anna-numbers"), ("Write", "write:")}
        of_stream = {("Create", "anna-copies"), ("Write", "anna-copies"), ("Write", "query:")}
        of_reads = ({("Read", "anna-numbers")}, {("Read", "anna-copies")})
        assert scopes == set(map(frozenset, (of_write, of_stream, *of_reads)))
        executors = executors_of(job.pid)
        assert len(executors) >= 3, "an executor and its Python workers"
        texts = [CANARY.encode(), str(secret).encode(), *(one.token_id.encode() for one in tokens)]
        found = set().union(*(has_in_memory(pid, texts) for pid in executors))
        assert found and found <= set(texts[2:]), "executors have tokens and nothing else"
        url, application = printed.split("\nui ")[1].split()
        seen = ui_of(url, application)
        assert "sparklog" in seen and CANARY not in seen and "ScramLoginModule" not in seen
    finally:
        job.communicate("\n", timeout=60)
    secret.unlink()
    logged = "".join(path.read_text() for path in (tmp_path / "events").rglob("events_*"))
    assert "SparkListenerSQLExecutionStart" in logged and "anna-numbers" in logged
    assert CANARY not in logged and "ScramLoginModule" not in logged
    written = [path for path in (*tmp_path.rglob("*"), *cluster.data_dir.rglob("*")) if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
