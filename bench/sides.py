"""The two systems that are compared, with their topics, processes, bytes on disk and Spark session for the rows.

Both run as long as the bench, since a restart for each run would compare cold systems. While one system is measured,
the other one is paused. Otherwise its idle work, and remaining work of its last run, would use processor time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.kafka import BROKERS, KafkaCluster, wait_for
from bench.kafka_jars import broker_jars, connector_jars
from bench.memory import PageCache
from sparklog import Admin
from sparklog.errors import ClusterError
from sparklog.testing.process_cluster import ProcessCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOPIC_TIMEOUT_S = 60.0
#: The time for postponed work after a pause: sessions have expired, and maintenance is due.
_SETTLE_S = 2.0
#: Settings that shorten the wait of a log for its cleaner's next pass, and the wait of a group for its first members.
#: No row measures these waits. ``KafkaCluster`` has the same settings: otherwise idle brokers use processor time on one
#: side only.
_SETTINGS = {
    "min.insync.replicas": "2",
    "log.cleaner.backoff.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
}


class Side(Protocol):
    """One of the two systems, which runs or is paused."""

    #: The name of the side. It is also the name of its format in Spark.
    name: str
    bootstrap: str
    #: The addresses for Kafka's clients.
    kafka_bootstrap: str

    def create(self, topic: str, *, partitions: int, replication_factor: int) -> None:
        """Create a topic; return when every partition has a leader that responds."""

    def delete(self, topic: str) -> None: ...

    def pids(self) -> list[int]:
        """Return the process ids of the brokers."""

    def disk_bytes(self, topic: str) -> int:
        """Return the bytes of the topic on the disks of all brokers."""

    def pause(self) -> None:
        """Pause all processes of the system."""

    def resume(self) -> None:
        """Resume; return when every partition has a leader and all replicas are in sync. Raises ClusterError."""


class Sparklog:
    """Sparklog's side: ZooKeeper, an active and a standby controller and three brokers, each a separate process."""

    name = "sparklog"

    def __init__(self, directory: Path) -> None:
        self.cluster = ProcessCluster(base_dir=directory, settings=_SETTINGS, controller_processes=True, kafka=True)

    def start(self) -> None:
        self.cluster.start()
        self.bootstrap = self.cluster.bootstrap
        self.kafka_bootstrap = self.cluster.kafka_bootstrap
        self.admin = Admin(self.bootstrap)

    def stop(self) -> None:
        if hasattr(self, "admin"):
            self.admin.close()
        self.cluster.stop()

    def create(
        self,
        topic: str,
        *,
        partitions: int,
        replication_factor: int = 3,
        schema: Any = None,
        key: str | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.admin.create_topic(
            topic,
            partitions=partitions,
            replication_factor=replication_factor,
            schema=schema,
            key=key,
            config=config,
        )
        self.admin.wait_until_in_sync([topic], timeout_s=_TOPIC_TIMEOUT_S)

    def delete(self, topic: str) -> None:
        """Delete a topic and wait until its files are gone.

        The disk's work for the deletion must not slow down the next turn, which may be sparklog's as well. (Kafka
        removes files after a minute, `file.delete.delay.ms`.)
        """
        self.admin.delete_topic(topic)
        found = [slot.log_dir for slot in self.cluster.slots.values()]
        wait_for(lambda: not any(map(any, (path.glob(f"{topic}-*") for path in found))), _TOPIC_TIMEOUT_S, "their end")

    def pids(self) -> list[int]:
        return [self.cluster.pid(broker_id) for broker_id in self.cluster.slots]

    def pause(self) -> None:
        self.cluster.pause()

    def resume(self) -> None:
        self.cluster.resume()
        time.sleep(_SETTLE_S)
        self.cluster.wait_ready()
        self.admin.wait_until_in_sync(timeout_s=_TOPIC_TIMEOUT_S)
        wait_for(lambda: not self.admin.elect_leaders(), _TOPIC_TIMEOUT_S, "the preferred leaders")

    def disk_bytes(self, topic: str) -> int:
        return sum(_bytes_below(slot.log_dir, topic) for slot in self.cluster.slots.values())


class Kafka:
    """Kafka's side."""

    name = "kafka"

    def __init__(self, jars: Path, directory: Path) -> None:
        from confluent_kafka.admin import AdminClient

        self.cluster = KafkaCluster(jars, directory)
        self.bootstrap = self.kafka_bootstrap = self.cluster.bootstrap
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})

    def start(self) -> None:
        self.cluster.start()
        wait_for(self._complete, _TOPIC_TIMEOUT_S, "Kafka's brokers to know each other")

    def stop(self) -> None:
        self.cluster.stop()

    def create(
        self, topic: str, *, partitions: int, replication_factor: int = 3, config: Mapping[str, str] | None = None
    ) -> None:
        from confluent_kafka.admin import NewTopic

        wanted = NewTopic(topic, partitions, replication_factor, config=dict(config or {}))
        for made in self.admin.create_topics([wanted]).values():
            made.result()
        wait_for(lambda: self.in_sync(topic, replication_factor), _TOPIC_TIMEOUT_S, f"the leaders of {topic}")

    def alter(self, topic: str, config: Mapping[str, str]) -> None:
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

        entries = [ConfigEntry(*one, incremental_operation=AlterConfigOpType.SET) for one in config.items()]
        wanted = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for changed in self.admin.incremental_alter_configs([wanted]).values():
            changed.result()

    def in_sync(self, topic: str, replicas: int) -> bool:
        """Return whether every partition has a leader and ``replicas`` replicas in sync."""
        found = self.admin.list_topics(topic, timeout=10).topics[topic].partitions
        return bool(found) and all(part.leader >= 0 and len(part.isrs) == replicas for part in found.values())

    def delete(self, topic: str) -> None:
        for gone in self.admin.delete_topics([topic]).values():
            gone.result()

    def pids(self) -> list[int]:
        return self.cluster.pids()

    def pause(self) -> None:
        self.cluster.pause()

    def resume(self) -> None:
        self.cluster.resume()
        time.sleep(_SETTLE_S)
        wait_for(self._led_as_preferred, _TOPIC_TIMEOUT_S, "Kafka's preferred leaders")

    def disk_bytes(self, topic: str) -> int:
        return sum(_bytes_below(self.cluster.data(node), topic) for node in BROKERS)

    def _led_as_preferred(self) -> bool:
        from confluent_kafka import ElectionType

        self.admin.elect_leaders(ElectionType.PREFERRED, None).result()
        topics = self.admin.list_topics(timeout=10).topics.values()
        parts = [part for topic in topics for part in topic.partitions.values()]
        return self._complete() and all(
            part.leader == part.replicas[0] and len(part.isrs) == len(part.replicas) for part in parts
        )

    def _complete(self) -> bool:
        return len(self.admin.list_topics(timeout=10).brokers) == len(BROKERS)


class Bench:
    """The systems and sessions that rows share, started at first use and ended by ``close``. Owner: the main thread.

    ``scale`` multiplies the numbers of records; ``quick`` makes them so small that only the programs are tried.
    ``with_kafka``: whether Kafka is measured. None means only if its jars are already on this machine. ``with_delta``:
    whether the session supports Delta.
    """

    def __init__(
        self, *, quick: bool = False, scale: float = 1.0, with_kafka: bool | None = True, with_delta: bool = False
    ) -> None:
        self.quick = quick
        self.scale = scale
        self._with_kafka = with_kafka
        self._with_delta = with_delta
        #: Whether the session can read and write Kafka. False until the session exists.
        self._has_connector = False
        #: The reason why Kafka is not available. It is empty if Kafka is available, or before the first use.
        self.missing = ""
        self._directory = Path(tempfile.mkdtemp(prefix="sparklog-bench-"))
        self._ends = ExitStack()
        self.started: list[Side] = []
        #: The side that was paused last. None once all its replicas are in sync again.
        self._paused: Side | None = None
        self._stands_still = False
        self._numbers = itertools.count()

    def close(self) -> None:
        try:
            self._ends.close()  # which ends what is paused as well
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def fill_memory(self) -> None:
        """Fill the free memory with page cache, from which runs allocate; see ``memory``."""
        if not self.quick:
            self._page_cache.fill()

    @cached_property
    def _page_cache(self) -> PageCache:
        cache = PageCache(self._directory / "holes")
        self._ends.callback(cache.close)
        return cache

    def count(self, records: int, quick: int) -> int:
        """Return the number of records of a run.

        ``quick`` is the number in a quick run, and the minimum in any other run.
        """
        return quick if self.quick else max(quick, round(records * self.scale))

    @cached_property
    def ours(self) -> Sparklog:
        side = Sparklog(self._directory / "sparklog")
        self._ends.callback(side.stop)
        side.start()
        self.started.append(side)
        return side

    @cached_property
    def kafka(self) -> Kafka | None:
        """Return Kafka's side, or None if Kafka is not available. ``missing`` then has the reason."""
        if self._with_kafka is False:
            self.missing = "not asked for"
            return None
        try:
            side = Kafka(broker_jars(fetch=self._with_kafka is True), self._directory / "kafka")
        except (ClusterError, ImportError, OSError) as error:
            self.missing = str(error)
            return None
        self._ends.callback(side.stop)
        side.start()
        self.started.append(side)
        return side

    def sides(self) -> Iterator[Side]:
        """Yield sparklog's side, and Kafka's if it is available."""
        yield self.ours
        if self.kafka is not None:
            yield self.kafka

    def give_machine_to(self, side: Side | None) -> None:
        """Pause the side that is not ``side``. With None, let both sides run.

        If ``side`` is paused, resume it first. If it is not in sync in time, this raises an error, and the next call
        for this side waits again.
        """
        other = None if side is None else next((found for found in self.started if found is not side), None)
        if self._paused is not None and self._paused is not other:
            self._stands_still = False
            self._paused.resume()
            self._paused = None
        if other is not None and not self._stands_still:
            self._paused = other
            other.pause()
            self._stands_still = True

    @cached_property
    def spark(self) -> SparkSession:
        """Return the session on two cores for both sides, with Kafka's connector if it is available."""
        from bench.spark_session import open_session

        jars: list[Path] = []
        if self.kafka is not None:
            try:
                jars = connector_jars(fetch=self._with_kafka is True)
            except (ClusterError, OSError) as error:
                self.missing = str(error)
        spark = open_session(jars, self._directory / "spark", with_delta=self._with_delta)
        self._has_connector = bool(jars)
        self._ends.callback(spark.stop)
        return spark

    @property
    def connector(self) -> bool:
        """Return whether the session can read and write Kafka."""
        return bool(self.spark) and self._has_connector

    @contextmanager
    def topic(self, side: Any, *, partitions: int, **options: Any) -> Iterator[str]:
        """Create a topic with a new name, and delete it at the end."""
        name = f"bench-{os.getpid()}-{next(self._numbers)}"
        side.create(name, partitions=partitions, **options)
        try:
            yield name
        finally:
            side.delete(name)

    def scratch(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))


def _bytes_below(directory: Path, topic: str) -> int:
    """Return the bytes of the topic's files; logs have one directory a partition, named ``<topic>-<number>``."""
    return sum(
        path.stat().st_blocks * 512
        for partition in directory.glob(f"{topic}-*")
        for path in partition.rglob("*")
        if path.is_file()
    )
