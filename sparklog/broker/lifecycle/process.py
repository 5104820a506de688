"""One broker process from start to exit: the order in which it opens everything, and how it ends.

``broker`` creates and connects the parts.

Start: lock the log directory, open the control socket, recover the logs, listen, register in ZooKeeper, serve.
Registration comes last, because clients connect once they see it. A started broker leads no partition until the
controller's update.

End: move leaderships (in a controlled shutdown), stop replication and requests, close the ZooKeeper session so that
other brokers take over, then fsync and write the clean-shutdown marker. Every wait is bounded, and a timer in a
separate thread bounds the whole.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import threading
from enum import Enum
from pathlib import Path
from typing import Any

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.lifecycle.control_socket import ControlSocket
from sparklog.broker.lifecycle.controlled_shutdown import hand_over
from sparklog.broker.lifecycle.process_config import EXIT_RESTART, ProcessConfig
from sparklog.broker.lifecycle.request_table import request_handlers
from sparklog.broker.lifecycle.shutdown_flush import ShutdownFlush
from sparklog.broker.lifecycle.supervisor_lease import LeaseName, OrphanStep, SupervisorLease, relief
from sparklog.broker.lifecycle.watchdog import Watchdog
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.dispatch import ConnectionHandler
from sparklog.broker.requests.local_reads import LocalReads, readers_socket
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import BrokerRegistration
from sparklog.net.descriptors import boot_id
from sparklog.net.server import Server, serve
from sparklog.protocol.messages import HelloReply
from sparklog.protocol.proof import KeyRing, Secret
from sparklog.storage.directory_trust import read_boot_id
from sparklog.storage.log import Log
from sparklog.storage.log_directory import LogDirectory
from sparklog.storage.open_files import descriptors_for_clients

_log = logging.getLogger(__name__)

EXIT_OK = 0
#: Also the code of a broker that must end because its id is registered by another one.
EXIT_CANNOT_START = 69
EXIT_STOP_TIMED_OUT = 71
EXIT_LOG_FAILED = 74

#: The fraction and the most of connections that are reserved for brokers and the controller: a broker in a cluster of a
#: hundred opens about four to each other one.
_KEPT_PART, _MOST_KEPT = 10, 1000
#: Beyond the wait for new leaders: the time for closing connections, fsync and ZooKeeper.
_STOP_LIMIT_S = 20.0
_ORPHAN_CHECK_S = 1.0
#: The longest wait for the note in ZooKeeper that the disk has failed.
_DOUBT_LIMIT_S = 15.0
#: The watchdog does not end a shorter stall of the event loop, however short sessions are: on a busy machine a restart
#: costs more.
_STALL_MS = 6000


class StopMode(Enum):
    """The way in which the process ends."""

    #: The controller moves leaderships first.
    CONTROLLED = "controlled"
    #: The whole cluster stops: no leadership moves, and the ISRs stay as they are.
    FINISH = "finish"
    AT_ONCE = "at once"


class BrokerProcess:
    """The broker process. Owner: ``__main__``; everything runs on one event loop.

    It implements ``control_socket.SupervisorCommands``.
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
        self._local_reads: LocalReads | None = None
        self._directory: LogDirectory | None = None
        #: The parts, created once the logs are open.
        self._broker: Broker | None = None
        self._server: Server | None = None
        self._ending: StopMode | None = None
        self._ending_asked = asyncio.Event()
        self._log_error: Exception | None = None
        self._id_is_taken = False
        self._start_again = False

    async def run(self) -> int:
        """Run the broker and return the exit code once everything is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        starting = loop.create_task(self._start(), name="start")
        asked = loop.create_task(self._ending_asked.wait(), name="wait for the end")
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
            self._end(StopMode.AT_ONCE)
            await self._stop()
            return EXIT_CANNOT_START
        finally:
            asked.cancel()
        await self._stop()
        if self._log_error is not None:
            return EXIT_LOG_FAILED
        if self._id_is_taken:
            return EXIT_CANNOT_START
        return EXIT_RESTART if self._start_again else EXIT_OK

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
        registry = ZkRegistration(context, directory, self._id_taken)
        broker = self._broker = Broker(
            context,
            Partitions(context, directory),
            registry,
            log_failed=self._log_failed,
            restart=self._restart,
        )
        if config.control_socket:
            self._local_reads = LocalReads(context, broker.partitions, readers_socket(config.control_socket))
            self._local_reads.open()
        self._server = await self._listen(broker)
        await registry.open(config.zookeeper, self._registration(directory, self._server.port))
        self._watchdog.start()
        broker.start()
        gc.freeze()  # as for the logs: all objects so far live as long as the process
        _log.info(
            "broker %d serves at %s:%d as incarnation %d, %d logs in %s",
            context.broker_id,
            config.host,
            self._server.port,
            context.incarnation,
            len(directory.logs()),
            config.log_dir,
        )
        if not context.keys:
            _log.warning(
                "broker %d has no cluster secret: it accepts any connection as a broker or the controller",
                context.broker_id,
            )
        self._report_ready()

    async def _load(self, directory: LogDirectory) -> list[Log]:
        """Open all logs, and take their objects out of the garbage collector.

        They live as long as the process. The collector would visit them all again and again while their number grows.
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

    async def _listen(self, broker: Broker) -> Server:
        config, settings, context = self._config, self._context.config, self._context
        handlers, on_lost = request_handlers(broker), broker.fetches.connection_lost
        max_connections = min(settings.max_connections, descriptors_for_clients())
        return await serve(
            lambda connection: ConnectionHandler(handlers, context.counters, connection, on_lost),
            host=config.bind_host or config.host,
            port=config.port,
            describe=self._describe,
            max_frame_bytes=settings.max_frame_bytes,
            max_in_flight=settings.max_in_flight,
            queued_max_bytes=settings.queued_max_bytes,
            max_connections=max_connections,
            kept_connections=min(_MOST_KEPT, max(1, max_connections // _KEPT_PART)),
            idle_s=settings.connections_max_idle_ms / 1000,
            within_host=settings.unix_sockets,
            credentials=context.credentials,
        )

    def _describe(self, cid: int, version: int) -> HelloReply:
        context = self._context
        return HelloReply(
            cid,
            version,
            context.broker_id,
            context.incarnation,
            context.cluster_id,
            context.config.max_frame_bytes,
            boot_id=boot_id(),
            local_socket=self._local_reads.address if self._local_reads is not None else "",
        )

    def _registration(self, directory: LogDirectory, port: int) -> BrokerRegistration:
        config = self._config
        return BrokerRegistration(
            broker_id=config.broker_id,
            host=config.host,
            port=port,
            boot_id=read_boot_id(),
            cluster_id=config.cluster_id,
            trusted=directory.trusted,
            rack=config.rack,
            proves=bool(self._context.keys),
        )

    def _registered(self) -> Broker | None:
        """Return the broker once it has registered."""
        return self._broker if self._broker is not None and self._broker.registry.is_open else None

    def _report_ready(self) -> None:
        if self._config.ready_fd >= 0 and self._server is not None:
            try:
                os.write(self._config.ready_fd, f"ready {self._server.port}\n".encode())
                os.close(self._config.ready_fd)
            except OSError as error:
                _log.warning("no process waits for this broker: %s", error)

    # --- reasons to end ---

    def _signalled(self) -> None:
        """Stop on a signal: controlled at the first one, at once at a further one.

        A signal during the controlled shutdown of a restart counts as the first one: the restart becomes a stop.
        """
        stopping = self._ending is not None and not self._start_again
        self._end(StopMode.AT_ONCE if stopping else StopMode.CONTROLLED)

    def _end(self, ending: StopMode) -> None:
        """Begin to end the process in this way, unless it ends in a quicker way already.

        If the whole cluster stops, there is no new leader to wait for. An end during a restart cancels the restart.
        """
        overtakes = ending is StopMode.AT_ONCE or (ending is StopMode.FINISH and self._ending is StopMode.CONTROLLED)
        if self._ending is None or overtakes:
            self._ending = ending
        self._start_again = False
        self._ending_asked.set()
        self._context.roles_changed()

    def _restart(self) -> None:
        """Begin a restart. It needs a supervisor, which starts the broker again, and a cluster that is not stopping.

        Raises:
            BrokerError: INVALID_REQUEST, BROKER_STOPPING.
        """
        context = self._context
        if self._start_again:
            return  # a second request
        if self._ending is not None or context.quiesced:
            raise BrokerError(ErrorCode.BROKER_STOPPING, f"broker {context.broker_id} is stopping")
        if not self._lease.held:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"broker {context.broker_id} has no supervisor that could restart it"
            )
        self._end(StopMode.CONTROLLED)
        self._start_again = True

    def _log_failed(self, partition: Partition | None, error: Exception) -> None:
        """Take the log directory offline. It is one disk: a failure of one replica is a failure of all."""
        if partition is not None:
            partition.fail(error)
        if self._log_error is None:
            self._log_error = error
            self._context.counters["log.failures"] += 1
            _log.critical("log directory %s is offline: %s", self._config.log_dir, error)
            if self._directory is not None:
                self._directory.trust.fail(str(error))
            self._context.state = "failed"
            asyncio.get_running_loop().call_soon(self._fail_all, error)

    def _fail_all(self, error: Exception) -> None:
        for partition in self._broker.partitions if self._broker is not None else ():
            partition.fail(error)
        self._end(StopMode.CONTROLLED)

    def _id_taken(self, error: Exception) -> None:
        """End because another broker is registered under this id. The supervisor, if there is one, tries again."""
        _log.critical("broker %d ends: %s", self._config.broker_id, error)
        self._context.state = "failed"
        self._id_is_taken = True
        self._end(StopMode.AT_ONCE)

    def _check_lease(self) -> None:
        step = self._lease.check(self._context.now_ms())
        if step is OrphanStep.STOP:
            _log.warning("without a supervisor for too long: stopping")
            self._end(StopMode.CONTROLLED)
        elif (broker := self._registered()) is not None and self._ending is None:
            if step is OrphanStep.ASK_RELIEF:
                self._context.spawn(self._ask_relief(broker), "orphan")
            elif broker.registry.announced:
                self._context.spawn(broker.registry.withdraw_stopping(), "adopted")
        if self._ending is None:
            asyncio.get_running_loop().call_later(_ORPHAN_CHECK_S, self._check_lease)

    async def _ask_relief(self, broker: Broker) -> None:
        """Take the next step of a broker without a supervisor: ask to move its leaderships, stop, or serve on."""
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
        if self._ending is not None:
            return
        if step is OrphanStep.ASK_RELIEF:
            _log.warning("the driver does not supervise this broker: asking to give up its leaderships")
            await registry.announce_stopping()
        elif step is OrphanStep.SERVE_ON:
            _log.warning("the driver is gone: continuing to serve")
            await registry.withdraw_stopping()
        elif step is OrphanStep.STOP:
            self._end(StopMode.CONTROLLED)

    # --- the supervisor's commands ---

    def status(self) -> dict[str, Any]:
        context, broker = self._context, self._registered()
        return {
            "broker_id": context.broker_id,
            "incarnation": context.incarnation,
            "pid": os.getpid(),
            "port": self._server.port if self._server is not None else -1,
            "state": context.state if broker is not None else "starting",
            "quiesced": context.quiesced,
            "leading": broker.partitions.led if broker is not None else 0,
            "lagging": broker.partitions.lagging if broker is not None else 0,
        }

    def stop(self, *, controlled: bool) -> None:
        self._end(StopMode.CONTROLLED if controlled else StopMode.AT_ONCE)

    def learn(self, secrets: tuple[Secret, ...]) -> None:
        for secret in reversed(secrets):
            self._context.keys.add(secret)

    def adopted(self) -> None:
        if self._context.quiesced and self._ending is None:
            _log.warning("adopted by a newer supervisor before the cluster stopped: continuing to serve")
            self._context.quiesced = False
            if self._broker is not None:
                self._broker.effects.perform_postponed()

    def quiesce(self) -> None:
        self._context.quiesced = True

    def finish(self) -> None:
        self.quiesce()
        self._end(StopMode.FINISH)

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
        _log.info("broker %d is stopping (%s)", context.broker_id, self._ending.value if self._ending else "?")
        began_ms = context.now_ms()
        self._watchdog.stop()
        ahead: ShutdownFlush | None = None
        doubting: asyncio.Task[None] | None = None
        if broker is not None and self._log_error is not None:
            doubting = asyncio.get_running_loop().create_task(self._doubt_directory(broker.registry), name="doubt")
        if broker is not None and self._ending is StopMode.CONTROLLED:
            if self._log_error is None:
                ahead = ShutdownFlush(context, broker.partitions)
            await hand_over(
                context, broker.partitions, broker.registry, may_continue=lambda: self._ending is StopMode.CONTROLLED
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
        """Note in ZooKeeper that the log directory's data is untrusted.

        A failed disk may not store that itself: a read-only file system does not, and is as before after the next
        mount.
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
        broker = self._broker
        if self._local_reads is not None:
            self._local_reads.close()
        if broker is not None:
            await broker.stop_replication()
        if self._server is not None:
            await self._server.close()
        if broker is not None:
            await broker.close()
        else:
            await self._context.end_tasks()

    def _close_directory(self) -> None:
        """Flush and close the logs. Runs in a thread, because the last fsyncs take the disk's time."""
        assert self._directory is not None
        try:
            if self._log_error is None and (broker := self._registered()) is not None:
                broker.finish_logs()
        except SparklogError as error:
            _log.error("unclean shutdown: %s", error)
            self._log_error = self._log_error or error
        finally:
            self._directory.close(process_ends=self._log_error is None)


def _give_up(limit_s: float, loop: asyncio.AbstractEventLoop) -> None:
    """End the process after a stop that hangs; log what hangs first. Runs in the timer's thread."""
    _log.critical("stopping took more than %.0f s: ending the process", limit_s)
    for task in asyncio.all_tasks(loop):
        _log.critical("still running: %s", task)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STOP_TIMED_OUT)
