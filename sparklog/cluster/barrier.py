"""The driver's side of the barrier job, whose tasks supervise the brokers.

A *generation* is one run of the barrier job. The driver submits one generation after the other until the cluster stops.
When an executor fails, the whole generation fails. The driver immediately submits the next one, with as many tasks as
slots are available. Brokers are separate processes that keep running, and the tasks of the next generation *adopt*
them, that is, supervise them from then on. When executors return and brokers are missing, the driver ends the
generation and submits a larger one. It never cancels a Spark job, because Spark would kill the tasks without notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from pyspark import SparkContext

from sparklog.cluster.barrier_task import STOPPED_IN_PART, alone, run_task, supervise
from sparklog.cluster.driver_registration import DriverRegistration
from sparklog.cluster.enrolment import CHECK_INTERVAL_S, CertificateSigner, has_ended_for_certificates
from sparklog.cluster.generation import Directive, GenerationReport, GenerationSpec, Phase, ServingBroker
from sparklog.cluster.options import Sizing
from sparklog.cluster.process import boot_id, identify
from sparklog.cluster.task_slots import cause_of, concurrent_tasks, never, require_fitting_python
from sparklog.errors import ClusterError
from sparklog.model import BrokerRegistration
from sparklog.zk.registration_holder import pid_namespace

log = logging.getLogger(__name__)

T = TypeVar("T")

POOL = "sparklog"
_TICK_S = 0.2
#: The run time of a failed generation below which the driver pauses before it submits the next generation.
_SHORT_LIFE_S = 5.0
_LONGEST_PAUSE_S = 10.0
#: The maximum wait for a job's thread after Spark has stopped. If the job was waiting for slots, Spark drops it and the
#: thread never ends.
_FAREWELL_S = 5.0
#: The bounds of a stop by tasks: the number of failed generations, and the time without a task slot. After either of
#: them the driver stops the brokers of this host itself.
_STOP_ATTEMPTS = 2
_SLOTS_FOR_STOP_S = 5.0
#: The wait, in addition to the session time-out, for the registrations of ended brokers to disappear. ZooKeeper ends a
#: session one or two ticks after the time-out of the session.
_EXPIRY_S = 2.0


class Generations:
    """A component that submits barrier jobs. It keeps one job, called a generation, running until ``stop``.

    A thread of this object submits the jobs. The driver calls ``start``, ``wait_ready`` and ``stop``.
    """

    def __init__(
        self,
        context: SparkContext,
        registration: DriverRegistration,
        spec: GenerationSpec,
        *,
        sizing: Sizing,
        signer: CertificateSigner | None = None,
    ) -> None:
        self._context = context
        self._registration = registration
        self._spec = spec
        self._sizing = sizing
        #: The signer of the hosts' certificates, with ``--secure`` on several hosts.
        self._signer = signer
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparklog-generations", daemon=True)
        self._report: GenerationReport | None = None
        self._known: dict[int, ServingBroker] = {}
        self._failure: BaseException | None = None
        #: The number of the last submitted generation.
        self.generation = 0
        #: The number of the newest generation that the driver has announced in ZooKeeper.
        self._called_for = 0
        #: Whether a generation's tasks have stopped the brokers cleanly.
        self._stopped_in_order = False

    @property
    def report(self) -> GenerationReport | None:
        """Return the report of the newest generation that has reported, or None if no generation has."""
        return self._report

    @property
    def brokers(self) -> tuple[ServingBroker, ...]:
        """Return all brokers that have served under this driver, as they were last reported. Some may be down."""
        return tuple(broker for _, broker in sorted(self._known.items()))

    @property
    def failure(self) -> BaseException | None:
        """Return the error that ended the submission of generations, or None.

        After such an error the brokers run without a supervisor.
        """
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, *, timeout_s: float, given_up: Callable[[], bool] = never) -> GenerationReport | None:
        """Wait for the first report of a generation and return it. Return None if ``given_up`` returns true meanwhile.

        Raises:
            ClusterError: no generation reported in time, or none can be submitted any more.
        """
        deadline = time.monotonic() + timeout_s
        while self._report is None:
            if given_up():
                return None
            if self._failure is not None:
                raise ClusterError(f"no generation of brokers formed: {self._failure}") from self._failure
            if time.monotonic() > deadline:
                raise ClusterError(f"no generation of brokers formed within {timeout_s:g} s")
            time.sleep(_TICK_S)
        return self._report

    def stop(self, *, timeout_s: float = 60.0) -> str:
        """Stop all brokers cleanly, and end the thread that submits generations.

        If Spark has stopped, the driver itself stops the brokers of this host.

        Return a message for the user about brokers that keep running, or an empty string.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._stopped_in_order:
            return self._missed_by_tasks()
        if self._registration.lost.is_set():
            return "another driver controls the brokers, and they keep running"
        return self._stop_from_here()

    def _missed_by_tasks(self) -> str:
        """Return a message about brokers on hosts without a task, or an empty string.

        A task stops only the brokers of its host, and Spark may have placed no task on a host.
        """
        try:
            left = self._still_there()
        except ClusterError as error:
            return f"brokers may still run on hosts where Spark placed no task: {error}"
        return f"brokers still run on hosts where Spark placed no task: {', '.join(map(str, left))}" if left else ""

    def _stop_from_here(self) -> str:
        self.generation += 1
        if not self._send_phase(Phase.STOP):
            return "the brokers keep running: they could not be stopped because ZooKeeper is not available"
        try:
            ended = in_loop(supervise(self._next_spec(adopt_only=True), task=0, gather=alone))
            left = self._still_there()
        except ClusterError as error:  # ZooKeeper was available when the driver ordered the stop
            return f"the stop was interrupted, and brokers may still run: {error}"
        if left:
            return f"brokers that the driver could not stop keep running: {', '.join(map(str, left))}"
        if ended != Phase.STOP.value:
            return "brokers of this host could not be stopped and keep running"
        self._stopped_in_order = True
        return ""

    def _still_there(self) -> list[int]:
        """Return the ids of brokers that still run after a stop.

        A broker that was killed on another host stays registered until its session expires. Therefore this waits up to
        that time, also for ZooKeeper to respond.

        Raises:
            ClusterError: ZooKeeper does not respond.
        """
        deadline = time.monotonic() + self._spec.session_timeout_ms / 1000 + _EXPIRY_S
        while True:
            is_last = time.monotonic() > deadline
            try:
                left = [live.broker_id for live in self._registration.live_brokers() if not _has_ended_here(live)]
                if is_last or not left:
                    return left
            except ClusterError:
                if is_last:
                    raise
            time.sleep(_TICK_S)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._submit_until_stopped()
        except ClusterError as error:
            self._failure = error
            log.error("no further generations are submitted: %s", error)
        except BaseException as error:
            self._failure = error
            log.exception("no further generations are submitted")

    def _submit_until_stopped(self) -> None:
        """Submit generations until the brokers are stopped cleanly, or until no generation can stop them.

        Raises:
            ClusterError: Spark stopped although no stop was requested, or its workers cannot run brokers.
        """
        pause_s = 0.0
        failed_stops = 0
        stop_by: float | None = None
        while not self._stopped_in_order and not self._registration.lost.is_set() and failed_stops < _STOP_ATTEMPTS:
            if self._stopping.is_set():
                stop_by = stop_by or time.monotonic() + _SLOTS_FOR_STOP_S
            if not self._spark_is_alive():
                if stop_by is None:
                    raise ClusterError("Spark has stopped")
                return
            tasks = self._tasks()
            if tasks < 1:
                self._call_for_next_generation()
                if stop_by is not None and time.monotonic() > stop_by:
                    return
                time.sleep(_TICK_S)
                continue
            began = time.monotonic()
            failed = self._one_generation(tasks)
            failed_stops += failed and self._stopping.is_set()
            if failed and time.monotonic() - began < _SHORT_LIFE_S:
                pause_s = min(max(2 * pause_s, _TICK_S), _LONGEST_PAUSE_S)
            else:
                pause_s = 0.0
            self._stopping.wait(pause_s)

    def _call_for_next_generation(self) -> None:
        """Announce the next generation while no slot is free.

        Brokers without a supervisor then know that a supervisor will follow.
        """
        if self._called_for <= self.generation:
            directive = Directive(self._registration.epoch, self.generation + 1, Phase.RUN)
            with contextlib.suppress(ClusterError):
                self._registration.direct(directive)
                self._called_for = directive.generation

    def _tasks(self) -> int:
        """Return the number of tasks of the next generation.

        Spark starts a barrier stage only if all of its tasks fit at once, and gives slots that become free one by one
        to other jobs. At the first generation slots are free; later, user jobs may occupy all of them.
        """
        wanted = self._sizing.tasks_later if self._report is not None else 0
        return min(wanted or self._sizing.tasks, self._slots())

    def _one_generation(self, tasks: int) -> bool:
        """Submit a job with ``tasks`` tasks and control it until it ends.

        Return whether it failed or left brokers running.
        """
        self.generation += 1
        sent = Phase.STOP if self._stopping.is_set() else Phase.RUN
        if not self._send_phase(sent):
            return True
        spec = self._next_spec(adopt_only=sent is Phase.STOP)
        job = _Job(self._context, self._signer.completed(spec) if self._signer is not None else spec, tasks)
        job.start()
        began = alive_at = time.monotonic()
        while job.is_alive():
            job.join(_TICK_S)
            if self._spark_is_alive():
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > _FAREWELL_S:
                log.warning("generation %d: Spark has stopped without ending the job", self.generation)
                return True
            self._read_report()
            wanted = self._wanted(tasks, sent, age_s=time.monotonic() - began)
            if wanted is not sent and self._send_phase(wanted):
                sent = wanted
        if job.error is not None:
            if self._report is None:
                require_fitting_python(job.error)
            if self._spark_is_alive() and not self._stopping.is_set():
                log.warning("generation %d ended: %s", self.generation, cause_of(job.error))
            return True
        if self._signer is not None and has_ended_for_certificates(job.endings):
            return not self._signed(self._signer, job.endings)
        if STOPPED_IN_PART in job.endings:
            log.warning("generation %d did not stop all brokers", self.generation)
            return True
        if Phase.STOP.value in job.endings:
            self._stopped_in_order = True
        return False

    def _signed(self, signer: CertificateSigner, endings: list[str]) -> bool:
        """Sign what the tasks of a generation have requested. Return whether all of it could be signed.

        Raises:
            ClusterError: it could not, and no generation has reported yet.
        """
        try:
            signer.sign(endings)
        except ClusterError as error:
            if self._report is None:
                raise
            log.warning("generation %d: %s", self.generation, error)
            return False
        return True

    def _wanted(self, tasks: int, sent: Phase, *, age_s: float) -> Phase:
        if self._stopping.is_set() and sent is not Phase.REGROUP:
            return Phase.STOP
        if sent is Phase.RUN and self._should_grow(tasks):
            log.info(
                "generation %d: %d brokers are missing, and slots are available for them",
                self.generation,
                self._missing,
            )
            return Phase.REGROUP
        if sent is Phase.RUN and self._signer is not None and age_s > CHECK_INTERVAL_S:
            return Phase.REGROUP
        return sent  # Let a generation that was ordered to regroup end. The stop then needs another generation.

    def _send_phase(self, phase: Phase) -> bool:
        """Write the phase for the tasks to ZooKeeper.

        Return False if ZooKeeper is not available; the caller then retries.
        """
        try:
            self._registration.direct(Directive(self._registration.epoch, self.generation, phase))
        except ClusterError as error:
            log.warning("generation %d: could not send %s: %s", self.generation, phase.value, error)
            return False
        return True

    def _next_spec(self, *, adopt_only: bool) -> GenerationSpec:
        return msgspec.structs.replace(self._spec, generation=self.generation, adopt_only=adopt_only)

    def _read_report(self) -> None:
        if self._report is not None and self._report.generation == self.generation:
            return
        report = self._registration.report(self.generation)
        if report is not None:
            self._known = {**self._known, **{broker.broker_id: broker for broker in report.brokers}}
            self._report = report
            log.info(
                "generation %d: brokers %s%s",
                self.generation,
                ", ".join(f"{b.broker_id} {'adopted' if b.adopted else 'started'}" for b in report.brokers) or "none",
                "".join(f"; {problem}" for problem in report.problems),
            )

    @property
    def _missing(self) -> int:
        report = self._report
        return self._spec.brokers - len(report.brokers) if report and report.generation == self.generation else 0

    def _should_grow(self, tasks: int) -> bool:
        """Return whether brokers are missing and the next generation could have more tasks."""
        return self._missing > 0 and self._tasks() > tasks

    def _slots(self) -> int:
        try:
            return concurrent_tasks(self._context)
        except Exception:
            # py4j's errors have no common base class. If the JVM is dead, there are no slots.
            if self._spark_is_alive():
                raise
            return 0

    def _spark_is_alive(self) -> bool:
        try:
            scala_context = self._context._jsc.sc()
            return not scala_context.isStopped()
        except Exception:
            return False


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in a new event loop and return its result.

    If this thread already runs an event loop, as in a notebook, the new loop runs in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, work).result()
    return asyncio.run(work)


def _has_ended_here(broker: BrokerRegistration) -> bool:
    """Return whether the process of a registered broker on this host has ended.

    A killed broker stays registered until its session expires. If the broker runs in another or unknown container, its
    pid has no meaning here.
    """
    is_here = (broker.boot_id, broker.pid_namespace) == (boot_id(), pid_namespace()) and broker.pid_namespace != 0
    return is_here and identify(broker.pid) is None


class _Job(threading.Thread):
    """One barrier job. It runs in its own thread, because ``collect`` blocks until the generation ends."""

    def __init__(self, context: SparkContext, spec: GenerationSpec, tasks: int) -> None:
        super().__init__(name=f"sparklog-generation-{spec.generation}", daemon=True)
        self._context = context
        self._spec = spec
        self._tasks = tasks
        self.error: BaseException | None = None
        self.endings: list[str] = []

    def run(self) -> None:
        context = self._context
        try:
            context.setLocalProperty("spark.scheduler.pool", POOL)
            context.setLocalProperty("spark.job.description", f"sparklog brokers, generation {self._spec.generation}")
            rows: Any = context.parallelize(range(self._tasks), self._tasks)
            self.endings = rows.barrier().mapPartitions(functools.partial(run_task, self._spec)).collect()
        except BaseException as error:
            self.error = error
