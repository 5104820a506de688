"""The supervisor of one broker process: it adopts or starts the process, detects its end, and restarts it.

It runs in a barrier task, but does not need Spark. The broker process is independent: it has its own process session
and output files and keeps running after its supervisor has ended. The next supervisor then adopts it over its control
socket.

Invariants: only the process that holds the directory's lock runs a supervisor. Before a process is signalled, its start
time is compared. A supervisor deletes the registration of a broker only after it has seen the process end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable

from sparklog.broker.lifecycle.process_config import EXIT_RESTART
from sparklog.cluster import runtime_directory
from sparklog.cluster.broker_process import BROKER_PROGRAM, LastWords, reap, spawn_broker
from sparklog.cluster.control import ControlConnection, ControlLink, Superseded
from sparklog.cluster.generation import GenerationSpec, ServingBroker
from sparklog.cluster.process import ProcessIdentity, exited, is_alive, send_signal
from sparklog.cluster.slots import Slot
from sparklog.errors import ClusterError

log = logging.getLogger(__name__)

#: The interval of checks of a broker's status.
STATUS_INTERVAL_S = 1.0
#: The time after which a process that does not serve yet counts as hung.
START_TIMEOUT_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 30.0
#: A broker that has served for this long restarts without a pause.
STEADY_S = 60.0
#: The time after which a broker restarts even if the end of its process is not recorded in ZooKeeper yet.
RETIRE_WAIT_S = 1.0
#: The interval of attempts to reach a broker that does not listen yet.
ASK_AGAIN_S = 0.1

#: A function that records in ZooKeeper that this process of the broker has ended. It retries as needed, and returns
#: False if another process has registered.
Retire = Callable[[int, ProcessIdentity], Awaitable[bool]]


class BrokerSupervisor:
    """The supervisor of one broker process. Not thread-safe: use it only on the event loop of one barrier task.

    The task starts ``run``. ``settled`` is set when the broker serves or has failed once. To stop the cluster, the task
    then calls ``quiesce``, ``caught_up`` and ``finish``. To leave the broker to another supervisor, it calls ``leave``.
    """

    def __init__(
        self,
        slot: Slot,
        spec: GenerationSpec,
        *,
        host: str,
        retire: Retire,
        program: tuple[str, ...] = BROKER_PROGRAM,
    ) -> None:
        self._program = program
        self._slot = slot
        self._spec = spec
        self._host = host
        self._retire = retire
        self._link = ControlLink(slot, spec)
        #: The broker's process, from the time it is found or started. A stop must end it even while it is starting.
        self._process: ProcessIdentity | None = None
        self._spawning: asyncio.Task[ProcessIdentity] | None = None
        self._retiring: asyncio.Task[bool] | None = None
        self._ending = False
        self._adopted = False
        #: Whether the process ended because a restart was requested. Then the restart needs no pause.
        self._restart_asked = False
        self._delay_s = 0.0
        self.settled = asyncio.Event()
        #: The reason why the broker does not serve, or an empty string.
        self.problem = "the broker has not started yet"

    @property
    def slot(self) -> Slot:
        return self._slot

    @property
    def superseded(self) -> bool:
        """Return whether another, newer supervisor controls the broker."""
        return self._link.superseded

    @property
    def serving(self) -> ServingBroker | None:
        status = self._link.status
        if status is None or self._process is None:
            return None
        return ServingBroker(
            broker_id=self._slot.broker_id,
            host=status.host or self._host,
            port=status.port,
            pid=self._process.pid,
            incarnation=status.incarnation,
            log_dir=str(self._slot.path),
            adopted=self._adopted,
            kafka=status.kafka,
        )

    async def run(self) -> None:
        """Supervise the broker until the generation ends or a newer supervisor takes over the broker."""
        try:
            while not self._ending:
                began = time.monotonic()
                try:
                    await self._one_life()
                except (OSError, ClusterError) as error:
                    if isinstance(error, Superseded):
                        raise
                    self._failed(str(error))
                if self._ending or self._spec.adopt_only:
                    return
                if self._restart_asked:
                    self._restart_asked, self._delay_s = False, 0.0
                else:
                    await asyncio.sleep(self._next_delay(time.monotonic() - began))
        except Superseded as newer:
            log.info("broker %d has a newer supervisor: %s", self._slot.broker_id, newer)
            self._link.superseded = True
        finally:
            self._stop_retiring()
            self.settled.set()

    def _next_delay(self, served_s: float) -> float:
        """Return the pause before a restart: none if the broker served for long, otherwise twice the last pause."""
        delay_s = 0.0 if served_s >= STEADY_S else self._delay_s
        self._delay_s = min(max(delay_s * 2, FIRST_DELAY_S), LONGEST_DELAY_S)
        return delay_s

    async def _one_life(self) -> None:
        """Adopt or start the broker, and return once it has ended."""
        self._adopted = await self._adopt()
        if self._link.peer is None:
            if self._spec.adopt_only or self._ending:
                return
            await self._start()
        self._process = process = self._link.peer
        assert process is not None
        self._stop_retiring()  # The new registration replaces the old one.
        self.problem = ""
        log.info(
            "broker %d %s: pid %d, port %d",
            self._slot.broker_id,
            "adopted" if self._adopted else "started",
            process.pid,
            self._slot.port,
        )
        self.settled.set()
        try:
            await self._watch(process)
        finally:
            await self._link.close()
        await self._retire_ended()

    # --- adopting and starting -----------------------------------------------------------------------------------

    async def _adopt(self) -> bool:
        """Adopt a running process. Return False if there is none, or if it hung and was killed."""
        noted = runtime_directory.noted_process(self._slot.path)
        if noted is not None and is_alive(noted):
            self._process = noted
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            connection = await self._link.open()
            if connection is not None:
                self._process = connection.peer
                if await self._greet(connection, connection.peer):
                    return True
                continue
            # There is no socket. If another supervisor has just started the broker, the socket will appear soon.
            if noted is None or not is_alive(noted):
                return False
            if time.monotonic() > deadline:
                await self._kill(noted, f"has had no control socket for {START_TIMEOUT_S:g} s")
                return False
            await asyncio.sleep(0.1)

    async def _start(self) -> None:
        """Start the broker. Raises ClusterError with its last output if it ends before it serves."""
        words = LastWords(self._slot.path)
        self._spawning = asyncio.create_task(
            asyncio.to_thread(spawn_broker, self._slot, self._spec, host=self._host, words=words, program=self._program)
        )
        try:
            self._process = process = await asyncio.shield(self._spawning)
        finally:
            self._spawning = None
        deadline = time.monotonic() + START_TIMEOUT_S
        while is_alive(process):
            connection = await self._link.open()
            if connection is not None and connection.peer == process:
                if await self._greet(connection, process):
                    return
            elif connection is not None:
                await connection.close()  # The socket is of another process. Ours will replace it.
            if time.monotonic() > deadline:
                await self._kill(process, f"did not serve within {START_TIMEOUT_S:g} s")
                break
            await asyncio.sleep(0.05)
        raise ClusterError(
            f"broker {self._slot.broker_id} exited with code {reap(process.pid)} before it was ready: {words}"
        )

    async def _greet(self, connection: ControlConnection, process: ProcessIdentity) -> bool:
        """Send ``hello``, wait until the broker serves, and keep the connection.

        Return False if the process ended or was killed.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            status = await self._link.hello(connection)
            while status.incarnation < 0:
                if time.monotonic() > deadline:
                    await connection.close()
                    await self._kill(process, f"did not serve within {START_TIMEOUT_S:g} s (state {status.state!r})")
                    return False
                await asyncio.sleep(0.05)
                status = await connection.call("status", timeout_s=self._link.hung_after_s)
        except asyncio.TimeoutError:
            await connection.close()
            await self._kill(process, f"did not respond for {self._link.hung_after_s:g} s")
            return False
        except ConnectionError:
            await connection.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(exited(process), 1.0)
            return False
        except BaseException:
            await connection.close()
            raise
        await self._link.keep(connection, status)
        return True

    # --- watching ------------------------------------------------------------------------------------------------

    async def _watch(self, process: ProcessIdentity) -> None:
        """Wait until the process has ended. Kill it if it hangs."""
        end = asyncio.create_task(exited(process))
        try:
            while not end.done():
                await asyncio.wait({end}, timeout=STATUS_INTERVAL_S)
                if not end.done():
                    await self._check(process)
        finally:
            end.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await end

    async def _check(self, process: ProcessIdentity) -> None:
        try:
            await self._link.poll()
        except asyncio.TimeoutError:
            await self._kill(process, f"did not respond for {self._link.hung_after_s:g} s")

    async def _retire_ended(self) -> None:
        """Record in ZooKeeper that the broker is dead, so that its partitions get new leaders at once.

        Otherwise the partitions would get new leaders only after the broker's session expires. If ZooKeeper is not
        available, retry until it is, or until another process of the broker serves.
        """
        status, process, self._link.status = self._link.status, self._process, None
        # An adopted process is not our child, so its exit code is unknown. The first restart has no pause anyway.
        code = reap(process.pid) if process is not None else None
        if code == EXIT_RESTART and not self._ending:
            self._restart_asked = True
            self.problem = f"broker {self._slot.broker_id} is restarting on request"
            log.info("%s", self.problem)
            return  # After a clean stop the broker has removed its registration.
        if status is None or process is None:
            return
        self._stop_retiring()
        self._retiring = asyncio.create_task(self._record_end(process), name=f"retire broker of {process.pid}")
        done, _ = await asyncio.wait({self._retiring}, timeout=RETIRE_WAIT_S)
        retired = bool(done) and self._retiring.result()
        if not self._ending:
            ended = f"process {process.pid} ended" + (f" with code {code}" if code is not None else "")
            self._failed(f"{ended}{', registration retired' if retired else ''}")

    async def _record_end(self, process: ProcessIdentity) -> bool:
        try:
            return await self._retire(self._slot.broker_id, process)
        except ClusterError as error:  # The registration disappears when the session expires.
            log.warning("broker %d: could not retire its registration: %s", self._slot.broker_id, error)
            return False

    def _stop_retiring(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()
            self._retiring = None

    def _failed(self, why: str) -> None:
        self.problem = f"broker {self._slot.broker_id} in {self._slot.path}: {why}"
        log.warning("%s", self.problem)
        self.settled.set()

    async def _kill(self, process: ProcessIdentity, why: str) -> None:
        log.error("broker %d: process %d %s: killed", self._slot.broker_id, process.pid, why)
        send_signal(process, signal.SIGKILL)
        await exited(process)

    # --- ending --------------------------------------------------------------------------------------------------

    async def quiesce(self) -> None:
        """Order the broker to refuse writes from now on. If it does not respond, log that and continue."""
        self._ending = True
        await self._link.send("quiesce")

    async def caught_up(self, *, timeout_s: float) -> bool:
        """Wait until every in-sync follower has caught up with the partitions that this broker leads.

        Return False if a follower has not caught up within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while (status := await self._link.send("status")) is not None and status.lagging > 0:
            if time.monotonic() > deadline:
                log.warning("broker %d: followers of %d partitions still lag", self._slot.broker_id, status.lagging)
                return False
            await asyncio.sleep(0.05)
        return True

    async def finish(self, *, timeout_s: float) -> None:
        """Order the broker to flush its logs, mark its directory as clean and exit. Kill it after ``timeout_s``.

        Do nothing if the broker has a newer supervisor.
        """
        self._ending = True
        if self._spawning is not None:
            with contextlib.suppress(OSError, ClusterError):
                self._process = await asyncio.shield(self._spawning)
        process = self._process
        if process is None:
            return
        if not await self._finished(process, timeout_s=timeout_s):
            if self.superseded:
                return
            await self._kill(process, f"had not finished after {timeout_s:g} s")
        runtime_directory.forget(self._slot.path)

    async def _finished(self, process: ProcessIdentity, *, timeout_s: float) -> bool:
        """Order the broker to finish and wait for its end. Retry while the broker is still starting."""
        deadline = time.monotonic() + timeout_s
        end = asyncio.create_task(exited(process))
        sent = False
        try:
            while not end.done() and not self.superseded and (left_s := deadline - time.monotonic()) > 0:
                sent = sent or await self._link.send("finish") is not None
                await asyncio.wait({end}, timeout=left_s if sent else min(left_s, ASK_AGAIN_S))
            return end.done()
        finally:
            end.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await end

    async def leave(self, run: asyncio.Task[None]) -> None:
        """End the supervision, which is the task ``run``. The broker keeps running."""
        self._ending = True
        while not run.done():
            # Repeat the cancellation, because ``asyncio.wait_for`` loses one that arrives together with its result.
            run.cancel()
            await asyncio.wait({run}, timeout=0.1)
        await asyncio.gather(run, return_exceptions=True)
        await self._link.close()
