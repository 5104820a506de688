"""Tests of ``sparklog zookeeper secure`` and ``open`` while brokers and clients use the cluster, over TLS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from sparklog.cli.main import run
from sparklog.client.admin.admin import Admin
from sparklog.client.producer.producer import Producer
from sparklog.cluster.certificates import Subject, create_ca, issue
from sparklog.cluster.cluster_driver import ClusterDriver
from sparklog.cluster.options import ClusterOptions
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.zk import paths

pytestmark = pytest.mark.integration

SETTINGS = {"default.replication.factor": "2", "min.insync.replicas": "2"}
CANARY = "canary-0815"


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the settings of a cluster whose ZooKeeper has TLS, and which proves a digest."""
    create_ca(tmp_path)
    files = issue(tmp_path, Subject("cluster", ("127.0.0.1",)))
    digest = tmp_path / "digest"
    digest.write_text(f"sparklog:{CANARY}\n")
    digest.chmod(0o600)
    yield {
        **SETTINGS,
        "zookeeper.ssl.client.enable": "true",
        "zookeeper.ssl.truststore.location": str(tmp_path / "ca.pem"),
        "zookeeper.ssl.keystore.location": str(files.certificate),
        "zookeeper.ssl.key.location": str(files.key),
        "zookeeper.digest.file": str(digest),
    }


def restart_with(cluster: ProcessCluster, set_acl: str) -> None:
    """Restart the controller and the brokers one by one with the setting ``zookeeper.set.acl``."""
    cluster.settings["zookeeper.set.acl"] = set_acl
    cluster.stop_controller()
    cluster.start_controller()
    for broker_id in cluster.slots:
        cluster.restart(broker_id)


def use(cluster: ProcessCluster, topic: str) -> None:
    """Create a topic, write to it, and wait until its replicas are in sync."""
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=2, replication_factor=2)
        admin.wait_until_in_sync([topic], timeout_s=60)
    with Producer(cluster.bootstrap, acks="all", linger_ms=0) as producer:
        producer.write(topic, pa.table({"value": [b"one"]}), partition=1).result()


def stranger_may_write(cluster: ProcessCluster, topic: str = "before") -> bool:
    return stranger_may_write_to(cluster.zookeeper, cluster.settings, paths.topic(topic))


def stranger_may_write_to(zookeeper: str, settings: Mapping[str, str], path: str) -> bool:
    """Return whether a client with a certificate of its own, but without the digest, may change a node."""
    authority = Path(settings["zookeeper.ssl.truststore.location"])
    files = issue(authority.parent, Subject("stranger"))
    client = KazooClient(
        zookeeper,
        use_ssl=True,
        ca=str(authority),
        certfile=str(files.certificate),
        keyfile=str(files.key),
    )
    client.start()
    try:
        client.create(f"{path}/stranger")
        client.delete(f"{path}/stranger")
    except NoAuthError:
        return False
    finally:
        client.stop()
        client.close()
    return True


@pytest.mark.extended
def test_a_running_cluster_is_closed_and_opened_again(
    tmp_path: Path, settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessCluster(2, base_dir=tmp_path / "data", settings=settings, with_secret=False) as cluster:
        config = tmp_path / "zookeeper.conf"
        config.write_text("".join(f"{key} = {value}\n" for key, value in cluster.settings.items()))
        target = ["--zookeeper", cluster.zookeeper, "--zookeeper-config", str(config)]
        use(cluster, "before")
        assert stranger_may_write(cluster)
        assert run(["zookeeper", "secure", *target]) == 1
        assert "broker 0, broker 1, the controller: zookeeper.set.acl is not true" in capsys.readouterr().err

        restart_with(cluster, "true")
        standby = ["controller", "--zookeeper", cluster.zookeeper, "--broker-conf", str(config)]
        assert run(standby) == 1
        assert "another controller is active" in capsys.readouterr().err
        assert run(["zookeeper", "secure", *target, "--json"]) == 0
        assert '"changed":0' not in capsys.readouterr().out
        assert not stranger_may_write(cluster)
        use(cluster, "closed")
        assert not stranger_may_write(cluster, "closed")
        assert run(["zookeeper", "open", *target, "--yes"]) == 1
        assert "zookeeper.set.acl is true there" in capsys.readouterr().err
        restart_with(cluster, "false")
        assert run(["zookeeper", "open", *target, "--yes"]) == 0
        assert stranger_may_write(cluster) and stranger_may_write(cluster, "closed")
        use(cluster, "after")
        output = capsys.readouterr()
        told = [path.read_text(errors="replace") for path in (tmp_path / "data").rglob("*") if _is_text(path)]
        assert len(told) > 4 and not any(CANARY in text for text in [output.out, output.err, *told])


def test_a_driver_starts_its_zookeeper_with_tls(tmp_path: Path, settings: dict[str, str]) -> None:
    options = ClusterOptions(data_dir=tmp_path / "data", settings=settings)
    options.data_dir.mkdir()
    cluster = ClusterDriver(options)
    cluster.register()
    try:
        assert (tmp_path / "data" / "zookeeper" / "zoo.cfg").read_text().count("secureClientPort=") == 1
        assert cluster.registration.live_brokers() == ()
        assert not stranger_may_write_to(cluster.zookeeper, settings, "/cluster")
    finally:
        assert cluster.stop() == ""


def _is_text(path: Path) -> bool:
    return path.is_file() and path.suffix in {".log", ".json", ".cfg"}


def test_the_embedded_zookeeper_is_opened_only_while_the_cluster_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    with ProcessCluster(2, base_dir=data_dir, settings=SETTINGS) as cluster:
        use(cluster, "before")
        target = ["--data-dir", str(data_dir)]
        assert run(["zookeeper", "secure", *target, "--json"]) == 0
        assert '"changed":0' in capsys.readouterr().out, "the driver has closed the nodes"
        assert run(["zookeeper", "secure", "--zookeeper", cluster.zookeeper]) == 2
        assert run(["zookeeper", "open", *target, "--yes"]) == 1
        assert "stop it before" in capsys.readouterr().err
        use(cluster, "still")
        cluster.stop_brokers()
        assert run(["zookeeper", "open", *target, "--yes"]) == 0
        client = KazooClient(cluster.zookeeper)
        client.start()
        try:
            assert client.exists(paths.PROTECTED) is None
            client.set(paths.topic("before"), b"open")
        finally:
            client.stop()
            client.close()
