"""The driver's side of the barrier job: one generation of tasks after the other, until the cluster stops.

A generation fails as a whole when one executor goes. The next one is submitted at once and sized to what is there; the
brokers run on meanwhile and are adopted. When executors return and brokers are missing, the generation is asked to end
and a larger one follows. Nothing here cancels a Spark job: Spark would kill the tasks without a word.
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
#: A generation that lived shorter than this failed for a reason that another try at once would not mend.
_SHORT_LIFE_S = 5.0
_LONGEST_PAUSE_S = 10.0
#: Spark ends its jobs when it stops. It forgets one that waits for slots, whose thread then waits for ever.
_FAREWELL_S = 5.0
#: Generations that may fail, and seconds without any slot, before the brokers of this host are stopped from here.
_STOP_ATTEMPTS = 2
_SLOTS_FOR_STOP_S = 5.0
#: ZooKeeper ends a session with a tick or two more than its time-out.
_EXPIRY_S = 2.0


class Generations:
    """Owner: the driver. Life cycle: ``start``, ``wait_ready``, ``stop``. Its thread submits the jobs."""

    def __init__(
        self, context: SparkContext, seat: DriverRegistration, spec: GenerationSpec, *, sizing: Sizing
    ) -> None:
        self._context = context
        self._seat = seat
        self._spec = spec
        self._sizing = sizing
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparklog-generations", daemon=True)
        self._report: GenerationReport | None = None
        self._known: dict[int, ServingBroker] = {}
        self._failure: BaseException | None = None
        #: Number of the generation submitted last.
        self.generation = 0
        #: Number of the newest generation that the directive has named.
        self._called_for = 0
        #: The brokers were stopped in order by a generation's tasks.
        self._stopped_in_order = False

    @property
    def report(self) -> GenerationReport | None:
        """What the newest generation that has formed reported."""
        return self._report

    @property
    def brokers(self) -> tuple[ServingBroker, ...]:
        """Every broker that has served under this driver, as it was when last reported; some may be down."""
        return tuple(broker for _, broker in sorted(self._known.items()))

    @property
    def failure(self) -> BaseException | None:
        """Why no more generations are submitted, though nobody asked for a stop: the brokers run on without a
        supervisor."""
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, *, timeout_s: float, given_up: Callable[[], bool] = never) -> GenerationReport | None:
        """The first report; None when the start was given up.

        Raises:
            ClusterError: no generation formed in time, or the thread ended.
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
        """Stop all brokers in order and end the thread. Without Spark, those of this host are stopped from here.

        Returns which brokers run on, and why, for the user; empty when none does.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._stopped_in_order:
            return self._missed_by_tasks()
        if self._seat.lost.is_set():
            return "another driver has the brokers, and they run on"
        return self._stop_from_here()

    def _missed_by_tasks(self) -> str:
        """A task stops the brokers of the host that it is on, and Spark may have put none on some host."""
        try:
            left = self._still_there()
        except ClusterError as error:
            return f"brokers may run on where no task of the stop was: {error}"
        return f"brokers run on where no task of the stop was: {', '.join(map(str, left))}" if left else ""

    def _stop_from_here(self) -> str:
        self.generation += 1
        if not self._say(Phase.STOP):
            return "the brokers could not be told to stop, as ZooKeeper is away, and run on"
        try:
            ended = in_loop(supervise(self._next_spec(adopt_only=True), task=0, gather=alone))
            left = self._still_there()
        except ClusterError as error:  # it was there when they were told
            return f"the stop was broken off, and brokers may run on: {error}"
        if left:
            return f"brokers run on that could not be stopped from here: {', '.join(map(str, left))}"
        if ended != Phase.STOP.value:
            return "brokers of this host run on, as they could not be stopped"
        self._stopped_in_order = True
        return ""

    def _still_there(self) -> list[int]:
        """Ids of the brokers that a stop has left. One that had to be killed on another host stays registered until its
        session ends: that long it is waited for, and for ZooKeeper to answer.

        Raises:
            ClusterError: it does not.
        """
        deadline = time.monotonic() + self._spec.session_timeout_ms / 1000 + _EXPIRY_S
        while True:
            is_last = time.monotonic() > deadline
            try:
                left = [live.broker_id for live in self._seat.live_brokers() if not _has_ended_here(live)]
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
            log.error("no more generations are submitted: %s", error)
        except BaseException as error:
            self._failure = error
            log.exception("no more generations are submitted")

    def _submit_until_stopped(self) -> None:
        """Return when the brokers were stopped in order, or when no generation can do that any more.

        Raises:
            ClusterError: Spark has ended, though nobody asked for a stop; or its workers cannot run brokers.
        """
        pause_s = 0.0
        failed_stops = 0
        stop_by: float | None = None
        while not self._stopped_in_order and not self._seat.lost.is_set() and failed_stops < _STOP_ATTEMPTS:
            if self._stopping.is_set():
                stop_by = stop_by or time.monotonic() + _SLOTS_FOR_STOP_S
            if not self._spark_is_alive():
                if stop_by is None:
                    raise ClusterError("Spark has ended")
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
        """While no slot is free, brokers without a supervisor must know that one is on its way."""
        if self._called_for <= self.generation:
            directive = Directive(self._seat.epoch, self.generation + 1, Phase.RUN)
            with contextlib.suppress(ClusterError):
                self._seat.direct(directive)
                self._called_for = directive.generation

    def _tasks(self) -> int:
        """Tasks of the next generation.

        Spark starts a barrier stage only when all of its tasks fit at once, and gives slots that become free one by one
        to other jobs meanwhile. The first generation finds slots; a later one may meet user jobs that hold them all.
        """
        wanted = self._sizing.tasks_later if self._report is not None else 0
        return min(wanted or self._sizing.tasks, self._slots())

    def _one_generation(self, tasks: int) -> bool:
        """Submit a job of ``tasks`` and steer it until it ends. True when it failed, or has not stopped all brokers."""
        self.generation += 1
        told = Phase.STOP if self._stopping.is_set() else Phase.RUN
        if not self._say(told):
            return True
        job = _Job(self._context, self._next_spec(adopt_only=told is Phase.STOP), tasks)
        job.start()
        alive_at = time.monotonic()
        while job.is_alive():
            job.join(_TICK_S)
            if self._spark_is_alive():
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > _FAREWELL_S:
                log.warning("generation %d: Spark has ended and has not ended the job", self.generation)
                return True
            self._look_for_report()
            wanted = self._wanted(tasks, told)
            if wanted is not told and self._say(wanted):
                told = wanted
        if job.error is not None:
            if self._report is None:
                require_fitting_python(job.error)
            if self._spark_is_alive() and not self._stopping.is_set():
                log.warning("generation %d ended: %s", self.generation, cause_of(job.error))
            return True
        if STOPPED_IN_PART in job.endings:
            log.warning("generation %d has not stopped all brokers", self.generation)
            return True
        if Phase.STOP.value in job.endings:
            self._stopped_in_order = True
        return False

    def _wanted(self, tasks: int, told: Phase) -> Phase:
        if self._stopping.is_set() and told is not Phase.REGROUP:
            return Phase.STOP
        if told is Phase.RUN and self._should_grow(tasks):
            log.info(
                "generation %d: %d brokers are missing and there are slots for them", self.generation, self._missing
            )
            return Phase.REGROUP
        return told  # a generation that regroups is let end; a stop then takes one of its own

    def _say(self, course: Phase) -> bool:
        """False when ZooKeeper is away: to be tried again, as the tasks could not hear it either."""
        try:
            self._seat.direct(Directive(self._seat.epoch, self.generation, course))
        except ClusterError as error:
            log.warning("generation %d cannot be told to %s: %s", self.generation, course.value, error)
            return False
        return True

    def _next_spec(self, *, adopt_only: bool) -> GenerationSpec:
        return msgspec.structs.replace(self._spec, generation=self.generation, adopt_only=adopt_only)

    def _look_for_report(self) -> None:
        if self._report is not None and self._report.generation == self.generation:
            return
        report = self._seat.report(self.generation)
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
        """Only where the tasks were too few: a broker that fails for its own reasons is not mended by another task."""
        return self._missing > 0 and self._tasks() > tasks

    def _slots(self) -> int:
        try:
            return concurrent_tasks(self._context)
        except Exception:
            # py4j's errors share no base class with anything; a dead JVM has no slots.
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
    """What ``work`` returns or raises, from a loop of its own: in a notebook this thread has one that runs already, and
    another thread's has to do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, work).result()
    return asyncio.run(work)


def _has_ended_here(broker: BrokerRegistration) -> bool:
    """One that had to be killed stays registered until its session ends. Of one in another container of this machine,
    or where nobody knows in which, its pid tells nothing here."""
    is_here = (broker.boot_id, broker.pid_namespace) == (boot_id(), pid_namespace()) and broker.pid_namespace != 0
    return is_here and identify(broker.pid) is None


class _Job(threading.Thread):
    """One barrier job, in a thread of its own because ``collect`` blocks for as long as the generation lives."""

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
