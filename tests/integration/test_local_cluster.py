"""Tests of LocalCluster in a user's session: one barrier task supervises all brokers, and jobs run beside it."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

import sparklog
from sparklog.cluster import cluster_driver
from sparklog.cluster.cluster_secret import driver_keys, keep_on_host
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.errors import ClusterError
from sparklog.zk.broker_registry import BrokerRegistry
from tests.ports import FirstPort
from tests.zk.support import broker, opened

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def session(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    monkeypatch.delenv("PYSPARK_PYTHON")  # the setting that few users of a first trial have
    spark = (
        SparkSession.builder.master(request.param)
        .appName("LocalCluster tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # a quick start
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


@pytest.mark.parametrize("session", ["local[4]"], indirect=True)
def test_a_cluster_in_a_session_serves_its_jobs(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sparklog.LocalCluster(
        session, brokers=3, data_dir=tmp_path, port=FirstPort.LOCAL_CLUSTER, kafka=True
    ) as cluster:
        assert "can run programs as the user of this process" in caplog.text, "the session must not use authentication"
        assert session.sparkContext.pythonExec == sys.executable
        assert len(cluster.bootstrap.split(",")) == 3
        pids = cluster.broker_pids()
        assert sorted(pids) == [0, 1, 2]
        with cluster.admin() as admin:
            admin.create_topic("letters", partitions=2, replication_factor=3)
        rows = session.range(1000).selectExpr("cast(id as string) as key", "cast(id * 2 as string) as value")
        # No bootstrap servers are given here: the session knows its cluster.
        rows.write.format("sparklog").option("topic", "letters").mode("append").save()
        read = session.read.format("sparklog").option("subscribe", "letters").load()
        assert read.count() == 1000
        kafka = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap}).list_topics(timeout=60)
        assert (len(kafka.brokers), len(kafka.topics["letters"].partitions)) == (3, 2)

        # The same for a session that only has the brokers' addresses.
        session.sparkContext.pythonExec = "a Python without sparklog"
        sparklog.configure(session, bootstrap=cluster.bootstrap)
        assert session.sparkContext.pythonExec == sys.executable
        assert session.read.format("sparklog").option("subscribe", "letters").load().count() == 1000
        monkeypatch.setenv("PYSPARK_PYTHON", "the user's")
        session.sparkContext.pythonExec = "the user's"
        sparklog.configure(session, bootstrap=cluster.bootstrap)
        assert session.sparkContext.pythonExec == "the user's", "a given value must stay"
        monkeypatch.delenv("PYSPARK_PYTHON")
        sparklog.configure(session, bootstrap=cluster.bootstrap)

        killed = cluster.kill_broker(1)
        assert killed == pids[1]
        deadline = time.monotonic() + 60
        while cluster.broker_pids().get(1, killed) == killed:
            assert time.monotonic() < deadline, "the killed broker was not restarted"
            time.sleep(0.1)
        assert {broker: pid for broker, pid in cluster.broker_pids().items() if broker != 1} == {0: pids[0], 2: pids[2]}
        read = session.read.format("sparklog").option("subscribe", "letters").load()
        assert read.selectExpr("sum(cast(cast(value as string) as long))").first()[0] == 999 * 1000  # type: ignore[index]
    assert cluster.broker_pids() == {}
    assert session.range(3).count() == 3  # the session continues

    lacking = tmp_path / "python3"
    lacking.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # without installed packages
    lacking.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(lacking))
    session.sparkContext.pythonExec = str(lacking)  # as if it had been set before
    with pytest.raises(ClusterError, match=r"ModuleNotFoundError: .*set PYSPARK_PYTHON to one that has sparklog"):
        sparklog.LocalCluster(session, brokers=1).start()
    monkeypatch.delenv("PYSPARK_PYTHON")

    with sparklog.LocalCluster(session, brokers=3, data_dir=tmp_path) as again, again.admin() as admin:
        assert admin.list_topics() == ["letters"]


@pytest.mark.parametrize("session", ["local[1]"], indirect=True)
def test_without_a_slot_for_jobs_nothing_starts(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = sparklog.LocalCluster(session, brokers=3, data_dir=tmp_path)
    with pytest.raises(
        ClusterError, match=r"and 1 for user jobs, 2 in all; local\[1\] has 1: use --master 'local\[2\]'"
    ):
        cluster.start()
    assert cluster.broker_pids() == {}
    assert not list(tmp_path.glob("slot-*"))

    kept: list[Path] = []
    monkeypatch.setattr(cluster_driver, "keep_on_host", lambda *about: kept.append(keep_on_host(*about)))
    with pytest.raises(ClusterError, match="for user jobs"):
        sparklog.LocalCluster(session, brokers=3).start()
    assert [path.exists() for path in kept] == [False], "a temporary cluster leaves no secret"


@pytest.mark.parametrize("session", ["local[2]"], indirect=True)
@pytest.mark.extended
def test_a_stop_names_the_brokers_it_could_not_reach(session: SparkSession, tmp_path: Path) -> None:
    cluster = sparklog.LocalCluster(session, brokers=1, data_dir=tmp_path, port=FirstPort.LOCAL_CLUSTER)

    async def story() -> None:
        async with opened(cluster.zookeeper, keys=driver_keys(tmp_path)) as store:
            await BrokerRegistry(store.session, broker(7, host="elsewhere")).start()
            with pytest.raises(
                ClusterError, match=r"brokers still run on hosts where Spark placed no task: 7: start the clust"
            ):
                await asyncio.to_thread(cluster.stop)
            assert [live.broker_id for live in await store.live_brokers()] == [7], "ZooKeeper must still run as well"

    try:
        cluster.start()
        asyncio.run(story())
    finally:
        EmbeddedZookeeper.start(tmp_path / "zookeeper").stop()
