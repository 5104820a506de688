"""``sparklog.LocalCluster``: brokers in an existing Spark session, for the duration of a ``with`` block.

A barrier job in the user's Spark application supervises the brokers. It leaves at least one task slot for the user's
jobs.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its exit hook before ours, so that ours is called first
import logging
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.cluster.cluster_driver import ClusterDriver
from sparklog.cluster.options import DEFAULT_KAFKA_PORT, DEFAULT_PORT, ClusterOptions, create_data_dir
from sparklog.cluster.process import is_alive, send_signal
from sparklog.cluster.runtime_directory import noted_process
from sparklog.cluster.spark_access import exposure
from sparklog.errors import ClusterError
from sparklog.spark.configure import configure

log = logging.getLogger(__name__)


class LocalCluster:
    """A cluster of ``brokers`` brokers in the session ``spark``, on ``local[N]``, ``local-cluster`` or a Spark cluster.

    Without ``data_dir`` the data is in a temporary directory. The cluster deletes this directory, and this host's copy
    of the cluster's secret, at the end. Data in ``data_dir`` stays for the next cluster with this directory.
    ``zookeeper`` is the address of an existing server; by default the cluster starts one. ``settings`` are broker
    settings and topic defaults under Kafka's names. With ``kafka`` the brokers also have a listener for Kafka clients
    on this machine, at ``kafka_bootstrap``. Inside the ``with`` block ``spark.read.format("sparklog")`` needs no
    bootstrap servers.

    Only the thread that created the object may use it. It can be started once.
    """

    def __init__(
        self,
        spark: SparkSession,
        brokers: int = 3,
        *,
        data_dir: str | Path | None = None,
        zookeeper: str | None = None,
        settings: Mapping[str, str] | None = None,
        port: int = DEFAULT_PORT,
        advertised_host: str | None = None,
        kafka: bool = False,
    ) -> None:
        self._spark = spark
        self._temporary = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="sparklog-") if data_dir is None else data_dir)
        self._driver = ClusterDriver(
            ClusterOptions(
                data_dir=self.data_dir,
                brokers=brokers,
                port=port,
                kafka_port=DEFAULT_KAFKA_PORT if kafka else 0,
                advertised_host=advertised_host or "",
                zookeeper=zookeeper or "",
                settings=dict(settings or {}),
                spare_slots=1,
            )
        )

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(is_ended_otherwise=error is not None)

    def start(self) -> LocalCluster:
        """Start the cluster, and return it when every broker serves.

        Raises:
            ClusterError: there are too few task slots (the error says how many, and what to change), or a broker does
                not start.
        """
        # Brokers keep running without their supervisors. So stop them even if the program ends without a call of
        # ``stop``.
        _when_python_ends(lambda: self._stop(is_ended_otherwise=True))
        try:
            create_data_dir(self.data_dir)
            if found := exposure(self._spark.sparkContext):
                log.warning("%s", found)
            self._driver.register()
            self._driver.start_brokers(self._spark.sparkContext)
            configure(self._spark, bootstrap=self.bootstrap)
        except BaseException:
            self._stop(is_ended_otherwise=True)
            raise
        return self

    def stop(self) -> None:
        """Stop the cluster cleanly. The Spark session continues. Idempotent.

        Raises:
            ClusterError: brokers could not be stopped (the error has the reason). They keep running, and their
                ZooKeeper and ``data_dir`` stay, even a temporary one. The next cluster in this directory takes the
                brokers over. A further call does not retry, and raises until they have ended.
        """
        self._stop(is_ended_otherwise=False)

    def _stop(self, *, is_ended_otherwise: bool) -> None:
        """Stop the cluster.

        With ``is_ended_otherwise`` (an error in the block, or the end of the program) only log problems.
        """
        left = self._driver.stop()
        if left:
            self._temporary = False  # Running brokers still store their data in it.
            left = f"the cluster in {self.data_dir}: {left}"
            if not is_ended_otherwise:
                raise ClusterError(left)
            log.warning("%s", left)
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)
            self._driver.forget()

    @property
    def bootstrap(self) -> str:
        """Return the addresses of the brokers for clients, ``host:port,host:port``."""
        return self._driver.bootstrap

    @property
    def kafka_bootstrap(self) -> str:
        """Return the addresses of the brokers for Kafka clients.

        Return an empty string if no broker has a listener for Kafka clients.
        """
        return self._driver.kafka_bootstrap

    @property
    def zookeeper(self) -> str:
        return self._driver.zookeeper

    def admin(self) -> Admin:
        """Return a new admin client. The caller must close it."""
        return Admin(self.bootstrap)

    def broker_pids(self) -> dict[int, int]:
        """Return the process ids of the brokers on this machine, by broker id."""
        found = {}
        for broker in self._driver.brokers:
            process = noted_process(Path(broker.log_dir))
            if process is not None and is_alive(process):
                found[broker.broker_id] = process.pid
        return found

    def kill_broker(self, broker_id: int) -> int:
        """Kill a broker of this machine with SIGKILL, to simulate a crash. Return the pid of its process.

        The broker's supervisor then restarts the broker.

        Raises:
            ClusterError: the broker does not run on this machine.
        """
        for broker in self._driver.brokers:
            if broker.broker_id == broker_id:
                process = noted_process(Path(broker.log_dir))
                if process is not None and send_signal(process, signal.SIGKILL):
                    return process.pid
        raise ClusterError(f"broker {broker_id} does not run on this machine; running: {self.broker_pids()}")


def _when_python_ends(work: Callable[[], None]) -> None:
    """Call ``work`` when the program ends, before Python's thread pools shut down.

    A stop needs these pools, and when ``atexit`` handlers run they accept no more work. Python has this hook only for
    its own executors, under a private name.
    """
    getattr(threading, "_register_atexit", atexit.register)(work)
