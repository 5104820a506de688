"""One broker process from start to exit: in which order it opens and closes its parts.

``broker`` creates and connects the parts, ``broker_server`` has the sockets, and ``ending`` decides how the process
ends.

Start: lock the log directory, open the control socket, recover the logs, listen, register in ZooKeeper, serve.
Registration comes last, because clients connect once they see it. A started broker leads no partition until it receives
the controller's first update.

End: move leaderships (in a controlled shutdown), stop replication and requests, close the ZooKeeper session so that
other brokers take over, then fsync and write the clean-shutdown marker. Every wait has a limit, and a timer in a
separate thread limits the whole stop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.lifecycle.broker_server import BrokerServer
from sparklog.broker.lifecycle.control_socket import ControlSocket
from sparklog.broker.lifecycle.controlled_shutdown import ShutdownFlush, hand_over
from sparklog.broker.lifecycle.ending import EXIT_CANNOT_START, EXIT_STOP_TIMED_OUT, Ending, StopMode
from sparklog.broker.lifecycle.process_config import ProcessConfig
from sparklog.broker.lifecycle.supervisor_lease import LeaseName, OrphanStep, SupervisorLease, relief
from sparklog.broker.lifecycle.watchdog import Watchdog
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.errors import SparklogError
from sparklog.model import BrokerRegistration
from sparklog.protocol.proof import KeyRing, Secret
from sparklog.storage.directory_trust import read_boot_id
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory

_log = logging.getLogger(__name__)

#: The time for closing connections, fsync and ZooKeeper, in addition to the controlled shutdown.
_STOP_LIMIT_S = 20.0
_ORPHAN_CHECK_S = 1.0
#: The maximum wait for the write to ZooKeeper that marks the failed log directory as untrusted.
_DOUBT_LIMIT_S = 15.0
#: The shortest stall of the event loop after which the watchdog ends the process, even if the session timeout is
#: shorter: on a busy machine a restart costs more than a short stall.
_STALL_MS = 6000


class BrokerProcess:
    """The broker process from its start to its exit.

    ``__main__`` creates it. Everything runs on one event loop. The class implements
    ``control_socket.SupervisorCommands``.
    """

    def __init__(self, config: ProcessConfig, keys: KeyRing | None = None) -> None:
        self._config = config
        settings = config.broker_settings()
        self._context = BrokerContext(
            config.broker_id, config.cluster_id, log_dir=config.log_dir, config=settings, keys=keys
        )
        self._lease = SupervisorLease(
            LeaseName(config.driver_epoch, config.generation),
            supervised=config.driver_epoch > 0,
            orphan_timeout_ms=settings.orphan_timeout_ms,
            orphan_max_ms=settings.orphan_max_ms,
        )
        self._watchdog = Watchdog(max(settings.session_timeout_ms, _STALL_MS))
        self._control: ControlSocket | None = None
        self._directory: LogDirectory | None = None
        #: The parts of the broker; created after the logs have been opened.
        self._broker: Broker | None = None
        self._server: BrokerServer | None = None
        self._ending = Ending(self._context)

    async def run(self) -> int:
        """Run the broker until it ends and everything is closed, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.on_signal)
        starting = loop.create_task(self._start(), name="start")
        asked = loop.create_task(self._ending.begun.wait(), name="wait for the end")
        try:
            await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asked
            else:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        except (SparklogError, OSError) as error:
            _log.critical("broker %d cannot start: %s", self._config.broker_id, error)
            self._ending.begin(StopMode.AT_ONCE)
            await self._stop()
            return EXIT_CANNOT_START
        finally:
            asked.cancel()
        await self._stop()
        return self._ending.exit_code

    # --- start ---

    async def _start(self) -> None:
        config, context, loop = self._config, self._context, asyncio.get_running_loop()
        directory = self._directory = await loop.run_in_executor(None, self._open_directory)
        if config.control_socket:
            self._control = ControlSocket(config.control_socket, self._lease, self)
            await self._control.open()
            self._check_lease()
        for log in await self._load(directory):
            for finding in log.findings:
                _log.warning("%s: %s", log.tp, finding)
        registry = ZkRegistration(context, directory, self._ending.on_id_taken)
        broker = self._broker = Broker(
            context,
            Partitions(context, directory),
            registry,
            log_failed=self._log_failed,
            restart=self._restart,
        )
        server = self._server = BrokerServer(config, broker)
        await server.open()
        await registry.open(config.zookeeper, self._registration(directory, server))
        self._watchdog.start()
        broker.start()
        gc.freeze()  # as in ``_load``: the objects created so far live as long as the process
        _log.info(
            "broker %d serves at %s:%d as incarnation %d, %d logs in %s",
            context.broker_id,
            server.host,
            server.advertised_port,
            context.incarnation,
            len(directory.logs()),
            config.log_dir,
        )
        if not context.credentials.required:
            _log.warning(
                "broker %d has no cluster secret: it accepts any connection as a broker or the controller",
                context.broker_id,
            )
        self._report_ready(server.port)

    async def _load(self, directory: LogDirectory) -> list[Log]:
        """Open all logs, and exclude their objects from garbage collection.

        The objects live as long as the process. The collector would visit all of them again and again while logs are
        opened.
        """
        gc.collect()
        gc.disable()
        try:
            return await asyncio.get_running_loop().run_in_executor(None, directory.load)
        finally:
            gc.freeze()
            gc.enable()

    def _open_directory(self) -> LogDirectory:
        config = self._config
        return LogDirectory.open(
            Path(config.log_dir),
            cluster_id=config.cluster_id,
            broker_id=config.broker_id,
            port=config.port,
            config=self._context.config,
        )

    def _registration(self, directory: LogDirectory, server: BrokerServer) -> BrokerRegistration:
        config = self._config
        return BrokerRegistration(
            broker_id=config.broker_id,
            host=server.host,
            port=server.advertised_port,
            boot_id=read_boot_id(),
            cluster_id=config.cluster_id,
            trusted=directory.trusted,
            rack=config.rack,
            proves=self._context.credentials.required,
            endpoints=server.endpoints,
            kafka_endpoints=server.kafka_endpoints,
        )

    def _registered(self) -> Broker | None:
        """Return the broker, or None if it has not registered yet."""
        return self._broker if self._broker is not None and self._broker.registry.is_open else None

    def _report_ready(self, port: int) -> None:
        if self._config.ready_fd >= 0:
            try:
                os.write(self._config.ready_fd, f"ready {port}\n".encode())
                os.close(self._config.ready_fd)
            except OSError as error:
                _log.warning("no process waits for this broker: %s", error)

    # --- reasons to end ---

    def _restart(self) -> None:
        """Begin a controlled shutdown after which the supervisor starts the broker again: see ``Ending.restart``."""
        self._ending.restart(supervised=self._lease.held)

    def _log_failed(self, partition: Partition | None, error: Exception) -> None:
        """Take the log directory offline.

        The directory is on one disk, so an error in one replica's log concerns all replicas.
        """
        if partition is not None:
            partition.fail(error)
        if self._ending.log_error is None:
            self._ending.log_error = error
            self._context.counters["log.failures"] += 1
            _log.critical("log directory %s is offline: %s", self._config.log_dir, error)
            if self._directory is not None:
                self._directory.trust.fail(str(error))
            self._context.state = "failed"
            asyncio.get_running_loop().call_soon(self._fail_all, error)

    def _fail_all(self, error: Exception) -> None:
        for partition in self._broker.partitions if self._broker is not None else ():
            partition.fail(error)
        self._ending.begin(StopMode.CONTROLLED)

    def _check_lease(self) -> None:
        step = self._lease.check(self._context.now_ms())
        if step is OrphanStep.STOP:
            _log.warning("without a supervisor for too long: stopping")
            self._ending.begin(StopMode.CONTROLLED)
        elif (broker := self._registered()) is not None and self._ending.mode is None:
            if step is OrphanStep.ASK_RELIEF:
                self._context.spawn(self._ask_relief(broker), "orphan")
            elif broker.registry.announced:
                self._context.spawn(broker.registry.withdraw_stopping(), "adopted")
        if self._ending.mode is None:
            asyncio.get_running_loop().call_later(_ORPHAN_CHECK_S, self._check_lease)

    async def _ask_relief(self, broker: Broker) -> None:
        """Take the next step of a broker without a supervisor.

        The broker asks the controller to move its leaderships, stops, or continues to serve.
        """
        registry = broker.registry
        self._context.counters["orphan.looks"] += 1
        awaited, at_work = await registry.barrier_job()
        if awaited:
            self._lease.expect_supervisor()
            return
        generation = LeaseName(at_work.driver_epoch, at_work.generation) if at_work is not None else None
        step = relief(
            left_out=self._lease.left_out(generation),
            controller_lives=await registry.controller_lives(),
            announced=registry.announced,
            counted_on=broker.partitions.in_sync,
            held=self._lease.held,
        )
        if self._ending.mode is not None:
            return
        if step is OrphanStep.ASK_RELIEF:
            _log.warning("the driver does not supervise this broker: asking to give up its leaderships")
            await registry.announce_stopping()
        elif step is OrphanStep.SERVE_ON:
            _log.warning("no driver is registered: continuing to serve")
            await registry.withdraw_stopping()
        elif step is OrphanStep.STOP:
            self._ending.begin(StopMode.CONTROLLED)

    # --- the supervisor's commands ---

    def status(self) -> dict[str, Any]:
        context, broker = self._context, self._registered()
        return {
            "broker_id": context.broker_id,
            "incarnation": context.incarnation,
            "pid": os.getpid(),
            "host": self._server.host if self._server is not None else "",
            "port": self._server.advertised_port if self._server is not None else -1,
            "kafka": self._server.kafka_addresses if self._server is not None and broker is not None else "",
            "state": context.state if broker is not None else "starting",
            "quiesced": context.quiesced,
            "leading": broker.partitions.led if broker is not None else 0,
            "lagging": broker.partitions.lagging if broker is not None else 0,
        }

    def stop(self, *, controlled: bool) -> None:
        self._ending.begin(StopMode.CONTROLLED if controlled else StopMode.AT_ONCE)

    def learn(self, secrets: tuple[Secret, ...]) -> None:
        for secret in reversed(secrets):
            self._context.keys.add(secret)

    def adopted(self) -> None:
        if self._context.quiesced and self._ending.mode is None:
            _log.warning("adopted by a newer supervisor before the cluster stopped: continuing to serve")
            self._context.quiesced = False
            if self._broker is not None:
                self._broker.effects.perform_postponed()

    def quiesce(self) -> None:
        self._context.quiesced = True

    def finish(self) -> None:
        self.quiesce()
        self._ending.begin(StopMode.FINISH)

    # --- stop ---

    async def _stop(self) -> None:
        limit_s = self._context.config.controlled_stop_timeout_ms / 1000 + _STOP_LIMIT_S
        guard = threading.Timer(limit_s, _give_up, [limit_s, asyncio.get_running_loop()])
        guard.daemon = True
        guard.start()
        context, broker = self._context, self._registered()
        if context.state == "running":
            context.state = "stopping"
        context.moves_leaderships = True
        _log.info(
            "broker %d is stopping (%s)", context.broker_id, self._ending.mode.value if self._ending.mode else "?"
        )
        began_ms = context.now_ms()
        self._watchdog.stop()
        ahead: ShutdownFlush | None = None
        doubting: asyncio.Task[None] | None = None
        if broker is not None and self._ending.log_error is not None:
            doubting = asyncio.get_running_loop().create_task(self._doubt_directory(broker.registry), name="doubt")
        if broker is not None and self._ending.is_controlled:
            if self._ending.log_error is None:
                ahead = ShutdownFlush(context, broker.partitions)
            await hand_over(
                context, broker.partitions, broker.registry, may_continue=lambda: self._ending.is_controlled
            )
        relieved_ms = context.now_ms()
        if doubting is not None:
            await doubting
        await self._leave()
        left_ms = context.now_ms()
        if ahead is not None:
            await ahead.end()
        if self._directory is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._close_directory)
        if self._control is not None:
            await self._control.close()
        guard.cancel()
        _log.info(
            "broker %d stopped: leaderships moved in %d ms, deregistered in %d ms, logs closed in %d ms",
            context.broker_id,
            relieved_ms - began_ms,
            left_ms - relieved_ms,
            context.now_ms() - left_ms,
        )

    async def _doubt_directory(self, registry: ZkRegistration) -> None:
        """Record in ZooKeeper that the log directory's data is untrusted.

        A failed disk may not be able to record this. A file system that became read-only cannot, and seems intact after
        the next mount.
        """
        try:
            await asyncio.wait_for(registry.doubt_directory(), _DOUBT_LIMIT_S)
        except (SparklogError, asyncio.TimeoutError) as error:
            _log.error(
                "could not record in ZooKeeper that the logs in %s are untrusted: %s",
                self._config.log_dir,
                error or "no response in time",
            )

    async def _leave(self) -> None:
        """Respond to waiting requests, close connections, and end the ZooKeeper session."""
        self._context.quiesced = True
        broker, server = self._broker, self._server
        if server is not None:
            server.close_local_reads()
        if broker is not None:
            await broker.stop_replication()
        if server is not None:
            await server.close()
        if broker is not None:
            await broker.close()
        else:
            await self._context.end_tasks()

    def _close_directory(self) -> None:
        """Flush and close the logs. Runs in a thread, because the last fsyncs wait for the disk."""
        assert self._directory is not None
        try:
            if self._ending.log_error is None and (broker := self._registered()) is not None:
                broker.finish_logs()
        except SparklogError as error:
            _log.error("unclean shutdown: %s", error)
            self._ending.log_error = self._ending.log_error or error
        finally:
            self._directory.close(process_ends=self._ending.log_error is None)


def _give_up(limit_s: float, loop: asyncio.AbstractEventLoop) -> None:
    """Log the tasks that still run, and end the process, because its stop hangs. Runs in the timer's thread."""
    _log.critical("stopping took more than %.0f s: ending the process", limit_s)
    for task in asyncio.all_tasks(loop):
        _log.critical("still running: %s", task)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STOP_TIMED_OUT)
