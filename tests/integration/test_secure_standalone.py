"""Tests of ``--secure`` on a standalone Spark cluster of two Workers, which counts as several hosts."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from sparklog import Admin, Producer
from sparklog.cluster.client_file import client_file
from sparklog.cluster.spark_environment import PRIVATE_CHANNEL
from sparklog.testing.standalone_spark import StandaloneSpark
from tests.conftest import ROOT
from tests.integration.cluster_job import ClusterJob
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(300)]


class SecureStandalone:
    """A standalone Spark whose processes authenticate and encrypt, and the drivers that are submitted to it."""

    def __init__(self, directory: Path) -> None:
        settings = {**PRIVATE_CHANNEL, "spark.authenticate.secret": secrets.token_hex(32)}
        self.spark = StandaloneSpark(directory / "spark", workers=2, settings=settings)
        self.data_dir = directory / "data"
        #: What an operator adds to conf/spark-defaults.conf: the secret only.
        self.properties = directory / "spark.conf"
        self.properties.touch(0o600)
        shipped = (ROOT / "conf" / "spark-defaults.conf").read_text()
        secret = settings["spark.authenticate.secret"]
        self.properties.write_text(f"{shipped}\nspark.authenticate.secret {secret}\n")
        self.jobs: list[ClusterJob] = []

    def submit(self, *more: str) -> ClusterJob:
        words = ["--master", self.spark.url, "--total-executor-cores", "2", "--executor-memory", "512m"]
        words += ["--properties-file", str(self.properties), "--conf", "spark.ui.enabled=false"]
        words += ["--conf", f"spark.local.dir={self.data_dir}/local", *map(shlex.quote, more)]
        arguments = ["--secure", "--brokers", "2", "--port", str(FirstPort.SECURE_STANDALONE)]
        self.jobs.append(ClusterJob(self.data_dir, *arguments, "--advertised-host", "127.0.0.1", submit=words))
        return self.jobs[-1]

    def stop(self) -> None:
        for job in self.jobs:
            job.destroy()
        self.spark.stop()


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureStandalone]:
    found = SecureStandalone(tmp_path_factory.mktemp("standalone"))
    try:
        found.spark.start()
        yield found
    finally:
        found.stop()


def test_a_host_gets_its_certificate_over_sparks_channel(standalone: SecureStandalone) -> None:
    driver = standalone.submit()
    bootstrap = driver.ready()
    clients = client_file(standalone.data_dir)
    with Admin(bootstrap, security=clients) as admin:
        admin.create_topic("events", partitions=2, replication_factor=2)
        assert all(len(part.isr) == 2 for part in admin.describe_topic("events").partitions)
    with Producer(bootstrap, security=clients, acks="all") as producer:
        assert producer.send("events", b"hello").result().offset == 0
    sockets = f"/tmp/sparklog-{os.geteuid()}/."
    assert sockets in Path("/proc/net/unix").read_text(), "the sockets of Spark's Python workers"
    directory = clients.parent
    certificate = x509.load_pem_x509_certificate((directory / "broker.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(found) for found in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    key = (directory / "broker-key.pem").read_text()
    assert stat.S_IMODE((directory / "broker-key.pem").stat().st_mode) == 0o600
    secret_line = key.splitlines()[1]
    everywhere = [*standalone.spark.directory.rglob("*"), *standalone.data_dir.rglob("*")]
    found = [path for path in everywhere if path.is_file() and secret_line.encode() in path.read_bytes()]
    assert found == [directory / "broker-key.pem"], "the key of a host is in one file of the host"
    driver.stop(signal.SIGTERM)
    assert driver.process.returncode == 0, driver.output

    following = standalone.submit()
    assert following.ready() == bootstrap
    assert (directory / "broker-key.pem").read_text() == key, "the next driver finds a current certificate"
    following.stop(signal.SIGTERM)


def test_a_spark_without_encryption_gets_no_secret(standalone: SecureStandalone) -> None:
    driver = standalone.submit("--conf", "spark.network.crypto.cipher=AES/CTR/NoPadding")
    assert driver.wait_for(r"error: .*").group(0).startswith("error: --secure on several hosts needs a Spark")
    driver.process.wait(60)
    assert driver.process.returncode == 1 and driver.brokers() == {}
