"""The driver's part of a cluster: ZooKeeper, the driver's registration, the controller, and the barrier job.

The order matters. ZooKeeper starts first, then the driver registers, then the controller and the brokers start. The
controller stops first, so that it does not treat a stopping broker as dead; then all brokers stop together; ZooKeeper
stops last, because brokers need it until they end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pyspark import SparkContext

from sparklog.cluster.barrier import Generations, in_loop
from sparklog.cluster.cluster_secret import driver_keys, forget_on_host, keep_on_host
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.enrolment import CertificateSigner
from sparklog.cluster.generation import GenerationReport, GenerationSpec, ServingBroker
from sparklog.cluster.options import (
    LOOPBACK,
    ClusterOptions,
    brokers_per_task,
    check_network,
    is_one_machine,
    listen_host,
    sizing,
    with_kafka,
)
from sparklog.cluster.spark_access import executor_hosts, require_private_channel
from sparklog.cluster.task_slots import master_of, never, require_slots
from sparklog.cluster.zookeeper_supervisor import ZookeeperSupervisor
from sparklog.config import broker_config
from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration, host_and_port
from sparklog.protocol.proof import KeyRing
from sparklog.spark.worker_python import choose_worker_python
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.security import ZooKeeperSecurity, zookeeper_security
from sparklog.zk.session import ZkSession

log = logging.getLogger(__name__)

#: The maximum wait for brokers. On a busy machine executors may take over a minute to start.
SLOTS_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
#: The maximum wait at the start until each broker knows all live brokers.
INFORMED_TIMEOUT_S = 10.0
_AGAIN = "start the cluster again to adopt or stop them"


class ClusterDriver:
    """The driver of a cluster. It starts and stops ZooKeeper, the controller and the brokers.

    Not thread-safe: one thread calls ``register`` (which does not need Spark), ``start_brokers``, and then ``stop``.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options.checked()
        config = broker_config(options.settings)
        self._session_timeout_ms = config.session_timeout_ms
        self._security = zookeeper_security(broker_config(self._options.settings))
        self._embedded: ZookeeperSupervisor | None = None
        self._registration: DriverRegistration | None = None
        #: The id of the cluster whose secrets this driver has written to the host; empty if it wrote none.
        self._kept_for = ""
        self._controller: ControllerLoop | None = None
        self._generations: Generations | None = None
        #: The message about what the last ``stop`` left running, and the embedded ZooKeeper that it left running.
        self._left = ""
        self._left_zookeeper: EmbeddedZookeeper | None = None
        #: The cluster's secrets. They are set when the driver registers.
        self._keys = KeyRing()
        self.zookeeper = options.zookeeper

    @property
    def data_dir(self) -> Path:
        return self._options.data_dir

    @property
    def registration(self) -> DriverRegistration:
        assert self._registration is not None
        return self._registration

    @property
    def report(self) -> GenerationReport | None:
        return self._generations.report if self._generations is not None else None

    def register(self, *, zookeeper_host: str = LOOPBACK) -> None:
        """Start the embedded ZooKeeper, or take over a running one, and register as the cluster's driver.

        If the options name a ZooKeeper, the driver uses that ZooKeeper instead of the embedded one.

        Raises:
            ClusterError: ZooKeeper does not respond, or another driver runs the cluster.
        """
        self._left = ""  # A new start takes the embedded ZooKeeper over again.
        if self._options.secure:
            self._options.security().prepare()
        if not self._options.zookeeper:
            server = EmbeddedZookeeper.start(
                self.data_dir.resolve() / "zookeeper",
                host=zookeeper_host,
                settings=self._options.zookeeper_settings,
                security=self._security,
            )
            self._embedded = ZookeeperSupervisor(server)
            self.zookeeper = server.connect
        try:
            self._keys = driver_keys(self.data_dir)
            self._registration = DriverRegistration.take(
                self.zookeeper,
                session_timeout_ms=self._session_timeout_ms,
                keys=self._keys,
                owns_zookeeper=self._embedded is not None,
                security=self._security,
            )
            if self._options.secure:
                secured = self._options.security()
                secured.complete(self._registration.cluster_id)
                in_loop(secured.make_admin(self.zookeeper, keys=self._keys, security=self._security))
        except BaseException:
            # If the server was already running, another driver needs it. If this driver has just started it, no process
            # needs it.
            self._end_zookeeper(leave=self._embedded is not None and self._embedded.server.adopted)
            raise

    def start_brokers(self, context: SparkContext, *, given_up: Callable[[], bool] = never) -> GenerationReport | None:
        """Start the brokers, or take over running brokers, and wait until all brokers serve.

        Return None if ``given_up`` returns true meanwhile.

        Raises:
            ClusterError: there are too few task slots, or a broker does not start (with the reason). Call ``stop`` in
                this case as well.
            ConfigError: brokers would listen on the network without TLS and authentication, or ``secure`` is set and
                Spark would send the cluster's secrets between hosts without encryption.
        """
        options, master = self._options, master_of(context)
        check_network(options, master)
        signer = self._signer(context, master) if options.secure else None
        choose_worker_python(context)
        # A standby controller on this host reads this copy.
        self._kept_for = self.registration.cluster_id
        keep_on_host(self._kept_for, self._keys)
        spec = self._spec(master)
        size = sizing(options, master)
        require_slots(context, size, brokers=options.brokers, timeout_s=SLOTS_TIMEOUT_S, given_up=given_up)
        self._controller = ControllerLoop(
            self.zookeeper,
            self.registration.cluster_id,
            session_timeout_ms=self._session_timeout_ms,
            settings=options.settings,
            keys=self._keys,
        )
        self._controller.start()
        self._generations = Generations(context, self.registration, spec, sizing=size, signer=signer)
        self._generations.start()
        report = self._generations.wait_ready(timeout_s=READY_TIMEOUT_S, given_up=given_up)
        if report is None:
            return None
        if report.problems:
            raise ClusterError("; ".join(report.problems))
        self._controller.wait_ready(READY_TIMEOUT_S)
        if len(report.brokers) < options.brokers:
            raise ClusterError(
                f"{options.brokers} brokers were requested, but there are log directories for {len(report.brokers)}:"
                " add log directories, or request fewer brokers"
            )
        if not self._controller.wait_informed({one.broker_id for one in report.brokers}, INFORMED_TIMEOUT_S):
            log.warning("the cluster is ready, but not every broker knows all other brokers yet")
        return report

    def _signer(self, context: SparkContext, master: str) -> CertificateSigner | None:
        """Issue the certificate of this machine's brokers, or return the signer of the certificates of several hosts.

        Raises:
            ConfigError: a file cannot be used, or Spark does not encrypt and authenticate what its processes send.
        """
        secured, cluster_id = self._options.security(), self.registration.cluster_id
        if is_one_machine(master):
            secured.issue_brokers(cluster_id)
            return None
        require_private_channel(context)
        return secured.signer(cluster_id, self._options.settings, executor_hosts=lambda: executor_hosts(context))

    def _spec(self, master: str) -> GenerationSpec:
        options = self._options
        here = is_one_machine(master) and not options.advertised_host
        return GenerationSpec(
            cluster_id=self.registration.cluster_id,
            zookeeper=self.zookeeper,
            driver_epoch=self.registration.epoch,
            generation=0,
            brokers=options.brokers,
            brokers_per_task=brokers_per_task(options, master),
            log_dirs=tuple(str(path.resolve() if is_one_machine(master) else path) for path in options.log_dirs),
            data_dir=str(self.data_dir.resolve()),
            port=options.port,
            advertised_host=LOOPBACK if here else options.advertised_host,
            bind_host=listen_host(options, master),
            settings=with_kafka(options, master),
            session_timeout_ms=self._session_timeout_ms,
            secrets=self._keys.secrets,
        )

    @property
    def bootstrap(self) -> str:
        """Return the addresses of the brokers for clients."""
        return ",".join(host_and_port(broker.host, broker.port) for broker in self.brokers)

    @property
    def kafka_bootstrap(self) -> str:
        """Return the addresses of the brokers for Kafka clients.

        Return an empty string if no broker has a listener for Kafka clients.
        """
        return ",".join(broker.kafka for broker in self.brokers if broker.kafka)

    @property
    def brokers(self) -> tuple[ServingBroker, ...]:
        """Return all brokers that have served under this driver, as they were last reported. Some may be down."""
        return self._generations.brokers if self._generations is not None else ()

    @property
    def failure(self) -> str:
        """Return why this driver can no longer manage its brokers, or an empty string.

        The brokers keep running after such a failure.
        """
        if self._registration is not None and self._registration.lost.is_set():
            return "another driver has taken over the cluster"
        if self._controller is not None and (status := self._controller.status).state == "failed":
            return f"the controller failed: {status.detail}"
        failure = self._generations.failure if self._generations is not None else None
        return str(failure or type(failure).__name__) if failure is not None else ""

    def stop(self) -> str:
        """Stop the cluster cleanly. Idempotent.

        If another driver has taken over the cluster, stop only the threads and the registration of this driver.

        Return a message for the user about what keeps running and why, or an empty string. A later call does not retry
        the stop, because another driver may manage the remaining processes at that time. It returns the same message
        until these processes have ended.
        """
        if self._left:
            self._left = self._left if self._runs_on() else ""
        else:
            self._left = self._stop()
        return self._left

    def _stop(self) -> str:
        is_needed = self._generations is None and self._brokers_may_run()
        self._end_controller()
        left = self._generations.stop() if self._generations is not None else ""
        self._generations = None
        is_lost = (
            self._registration is not None and self._registration.lost.is_set()
        )  # The attempt to stop may have set this event.
        self._end_registration()
        self._end_zookeeper(leave=is_lost or is_needed or bool(left))
        if is_lost:
            return "another driver has taken over the cluster: its brokers and ZooKeeper keep running"
        if is_needed:
            return f"ZooKeeper and any running brokers were left unchanged: {_AGAIN}"
        return f"{left}: {_AGAIN}" if left else ""

    def _brokers_may_run(self) -> bool:
        """Return whether brokers of an earlier driver may run. Only a generation of tasks can stop them.

        They are registered, or may register again if ZooKeeper was already running.
        """
        if self._embedded is not None and self._embedded.server.adopted:
            return True
        try:
            return self._registration is not None and bool(self._registration.live_brokers())
        except ClusterError:
            return True

    def _runs_on(self) -> bool:
        """Return whether processes that ``stop`` left running may still run.

        The embedded ZooKeeper is always stopped after the brokers. So if it was stopped deliberately, the brokers have
        ended. A server that crashed or does not respond proves nothing.
        """
        try:
            if self._left_zookeeper is not None:
                return not self._left_zookeeper.has_been_stopped
            return bool(
                in_loop(
                    _registered(self.zookeeper, session_timeout_ms=self._session_timeout_ms, security=self._security)
                )
            )
        except ClusterError:
            return True

    def forget(self) -> None:
        """Delete this host's copy of the secrets of a stopped cluster whose data is deleted. Idempotent.

        Keep the copy if the options name a ZooKeeper, because the cluster may run again with this ZooKeeper.
        """
        if self._kept_for and not self._options.zookeeper:
            forget_on_host(self._kept_for)

    def leave(self) -> None:
        """End this driver's threads and registration. Brokers and ZooKeeper keep running for the next driver."""
        self._end_controller()
        self._generations = None
        self._end_registration()
        self._end_zookeeper(leave=True)

    def _end_controller(self) -> None:
        if self._controller is not None:
            self._controller.stop()
            self._controller = None

    def _end_registration(self) -> None:
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def _end_zookeeper(self, *, leave: bool) -> None:
        supervisor, self._embedded = self._embedded, None
        if supervisor is None:
            return
        if leave:
            supervisor.leave()
            self._left_zookeeper = supervisor.server
        else:
            supervisor.stop()


async def _registered(
    zookeeper: str, *, session_timeout_ms: int, security: ZooKeeperSecurity
) -> tuple[BrokerRegistration, ...]:
    """Return the registered brokers. Raises ClusterError if ZooKeeper does not respond within a session time-out."""
    session = await ZkSession.open(
        zookeeper, session_timeout_ms=session_timeout_ms, connect_timeout_ms=session_timeout_ms, security=security
    )
    try:
        return await ClusterStore(session).live_brokers()
    finally:
        await session.close()
