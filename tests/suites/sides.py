"""The two systems on which suites run: sparklog and Apache Kafka, each with three brokers on loopback.

Suites expect the defaults of Kafka: unknown topics are created on request. ``creates_topics=False`` turns this off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bench.kafka import KafkaCluster
from bench.kafka_jars import broker_jars
from sparklog.testing.process_cluster import ProcessCluster

SYSTEMS = ("sparklog", "kafka")
#: What librdkafka's and kafka-python's own set-ups of brokers have, with the names that both systems know.
_SETTINGS = {
    "num.partitions": "4",
    "default.replication.factor": "3",
    "min.insync.replicas": "1",
    "group.initial.rebalance.delay.ms": "100",
    # ACLs, with which the suites forbid single topics.
    "super.users": "User:admin",
    "allow.everyone.if.no.acl.found": "true",
}
_AUTHORIZER = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}


@contextlib.contextmanager
def running(system: str, directory: Path, *, creates_topics: bool) -> Iterator[str]:
    """Run a cluster of ``system`` with its files in ``directory``; give its bootstrap addresses.

    Raises:
        ClusterError: the jars of Kafka are missing, or the cluster did not start.
    """
    if system == "sparklog":
        settings = {**_SETTINGS, "kafka.auto.create.topics.enable": str(creates_topics).lower()}
        with ProcessCluster(3, base_dir=directory, settings=settings, kafka=True) as cluster:
            yield cluster.kafka_bootstrap
        return
    kafka = KafkaCluster(
        broker_jars(fetch=True),
        directory,
        settings={**_SETTINGS, **_AUTHORIZER, "auto.create.topics.enable": str(creates_topics).lower()},
    )
    try:
        kafka.start()
        yield kafka.bootstrap
    finally:
        kafka.stop()
