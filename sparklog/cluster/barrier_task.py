"""One task of the barrier job, which runs in an executor's Python worker.

All tasks of a generation (one run of the barrier job) take the same steps, and synchronize with ``allGather``. They
list the host's log directories, assign them to tasks, adopt or start the brokers, and report. Then they wait for the
driver's directive in ZooKeeper. All tasks stop their brokers together, because a broker may stop only when no other
broker needs it as leader or follower.

This module and all its imports are loaded at the start, because an executor's temporary directories, including a
shipped Python environment, disappear when the application ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from pyspark import BarrierTaskContext

from sparklog.broker.lifecycle.logging_setup import LineFormatter
from sparklog.cluster.directory_locks import claim_slot, is_live, survey_host
from sparklog.cluster.enrolment import enrol, no_request
from sparklog.cluster.generation import (
    DIRECTIVE,
    REPORT,
    Directive,
    GenerationReport,
    GenerationSpec,
    Phase,
    ServingBroker,
)
from sparklog.cluster.process import ProcessIdentity, boot_id, host_name
from sparklog.cluster.slots import HostSurvey, share_slots
from sparklog.cluster.supervisor import BrokerSupervisor, Retire
from sparklog.errors import ClusterError, StorageError
from sparklog.protocol.proof import KeyRing
from sparklog.storage.directory_meta import Claim
from sparklog.zk import codecs
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.errors import ZkNodeExists
from sparklog.zk.security import security_of
from sparklog.zk.session import Node, ZkSession

log = logging.getLogger(__name__)

#: The maximum wait until every broker of a generation serves or has failed.
SETTLE_TIMEOUT_S = 60.0
#: The maximum wait for followers to catch up after writes are refused.
CATCH_UP_S = 3.0
#: The maximum wait until a broker has flushed its logs, marked its directory as clean and exited.
FINISH_S = 20.0
#: The result of a task whose stop left brokers of its host running.
STOPPED_IN_PART = "stopped in part"

Gather = Callable[[str], Awaitable[list[str]]]


class _TaskReport(msgspec.Struct, frozen=True):
    brokers: tuple[ServingBroker, ...]
    problems: tuple[str, ...]


def run_task(spec: GenerationSpec, _rows: Iterator[object]) -> Iterator[str]:
    """Run one task of the barrier stage. Yield the result of ``supervise``."""
    context = BarrierTaskContext.get()
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[output], level=logging.INFO)
    logging.getLogger("kazoo").setLevel(logging.WARNING)

    async def gather(message: str) -> list[str]:
        return await asyncio.to_thread(context.allGather, message)

    yield asyncio.run(supervise(spec, task=context.partitionId(), gather=gather))


async def alone(message: str) -> list[str]:
    """Return the messages of all tasks in a job with only one task: a list of ``message``.

    A task outside Spark calls this function instead of ``allGather``.
    """
    return [message]


async def supervise(spec: GenerationSpec, *, task: int, gather: Gather) -> str:
    """Run one task of a generation, that is, of one run of the barrier job. Return how it ended.

    The result is the phase that the driver ordered (``Phase``), ``STOPPED_IN_PART`` if some brokers could not be
    stopped, or "superseded" if a newer generation has taken over. If a host needs a new certificate, the result is that
    of ``enrolment.enrol`` or ``enrolment.no_request``.

    Raises:
        ClusterError: ZooKeeper is not available. The job then fails, the driver submits it again, and the brokers keep
            serving.
    """
    host = spec.advertised_host or host_name()
    if spec.enrolment is not None:
        own = enrol(spec.enrolment, host)
        if any(await gather(own)):
            return own or no_request()
    session = await ZkSession.open(
        spec.zookeeper,
        session_timeout_ms=spec.session_timeout_ms,
        keys=KeyRing(spec.secrets),
        security=security_of(spec.settings),
    )
    phases = _PhaseWatch(session, spec)
    group = _TaskGroup(spec, ClusterStore(session), host=host)
    try:
        await group.form(task=task, gather=gather)
        await group.settle(phases)
        report = await group.report(gather)
        if task == 0:
            await _publish(session, spec, report)
        ending = await phases.changed(group)
        log.info("generation %d/%d: %s", spec.driver_epoch, spec.generation, ending)
        if ending == Phase.STOP.value and (left := await group.stop(gather)):
            log.warning("brokers that could not be stopped are still running in %s", ", ".join(left))
            return STOPPED_IN_PART
        return ending
    finally:
        await group.disband()
        phases.close()
        await session.close()


def retire_through(store: ClusterStore) -> Retire:
    """Return a function that deletes the registration of a broker and marks the broker as retired.

    Call the function after the broker's process has ended. It retries until ZooKeeper has responded.
    """

    async def retire(broker_id: int, process: ProcessIdentity) -> bool:
        return await store.session.patiently(
            lambda: store.retire_broker(broker_id, pid=process.pid, boot_id=process.boot_id)
        )

    return retire


class _PhaseWatch:
    """The watcher of the driver's directive, that is, of its order to the tasks of this generation."""

    def __init__(self, session: ZkSession, spec: GenerationSpec) -> None:
        self._own = (spec.driver_epoch, spec.generation)
        self._ending = ""
        self._event = asyncio.Event()
        self._unwatch = session.watch_data(DIRECTIVE, self._seen)

    def _seen(self, node: Node | None) -> None:
        if node is None:
            return
        directive = codecs.decode(DIRECTIVE, node.data, Directive)
        name = (directive.driver_epoch, directive.generation)
        if name > self._own:
            self._ending = "superseded"
        elif name == self._own and directive.course is not Phase.RUN:
            self._ending = directive.course.value
        if self._ending:
            self._event.set()

    @property
    def ended(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def changed(self, group: _TaskGroup) -> str:
        """Wait until the generation must end; return the cause: the directive's phase, or "superseded"."""
        waiting = {asyncio.create_task(self.wait()), asyncio.create_task(group.superseded())}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return self._ending or "superseded"

    def close(self) -> None:
        self._unwatch()


class _TaskGroup:
    """The group of all broker supervisors of one task, with their directory locks. They take each step together."""

    def __init__(self, spec: GenerationSpec, store: ClusterStore, *, host: str) -> None:
        self._spec = spec
        self._store = store
        self._host = host
        self._claims: list[Claim] = []
        self._supervisors: list[BrokerSupervisor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._problems: list[str] = []
        #: The directories whose brokers a stop must end: the directories of this task, and every other directory of
        #: this host with a running broker.
        self._to_stop: list[str] = []

    async def form(self, *, task: int, gather: Gather) -> None:
        """Find this task's log directories, lock each of them, and start a supervisor for it."""
        spec = self._spec
        survey = await survey_host(spec, task=task, host=f"{socket.gethostname()} {boot_id()}")
        surveys = [msgspec.json.decode(text, type=HostSurvey) for text in await gather(_text(survey))]
        if survey.problem and task == min(other.task for other in surveys if other.host == survey.host):
            self._problems.append(survey.problem)
        if spec.adopt_only:  # Adopt all running brokers, even if the cluster had more brokers before.
            shares = share_slots(surveys, brokers=sum(len(other.slots) for other in surveys), per_task=0)
        else:
            shares = share_slots(surveys, brokers=spec.brokers, per_task=spec.brokers_per_task)
        live = [found.path for found in survey.slots if found.live]
        self._to_stop = sorted({*live, *(found.path for found in shares[task].slots)})
        for found in shares[task].slots:
            try:
                slot, claim = await claim_slot(found, spec, next_broker_id=self._store.allocate_broker_id)
            except (ClusterError, StorageError, OSError) as error:
                self._problems.append(str(error))
                continue
            self._claims.append(claim)
            self._supervisors.append(BrokerSupervisor(slot, spec, host=self._host, retire=retire_through(self._store)))
        self._tasks = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]

    async def settle(self, phases: _PhaseWatch) -> None:
        """Wait until each broker serves or has failed once, or the generation must end."""

        async def all_settled() -> None:
            for supervisor in self._supervisors:
                await supervisor.settled.wait()

        waiting = {asyncio.create_task(all_settled()), asyncio.create_task(phases.wait())}
        _, pending = await asyncio.wait(waiting, timeout=SETTLE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def report(self, gather: Gather) -> GenerationReport:
        """Return the report about the brokers of all tasks. All tasks get the same report."""
        own = _TaskReport(
            brokers=tuple(broker for supervisor in self._supervisors if (broker := supervisor.serving) is not None),
            problems=(*self._problems, *(s.problem for s in self._supervisors if s.problem)),
        )
        parts = [msgspec.json.decode(text, type=_TaskReport) for text in await gather(_text(own))]
        return GenerationReport(
            driver_epoch=self._spec.driver_epoch,
            generation=self._spec.generation,
            brokers=tuple(sorted((b for part in parts for b in part.brokers), key=lambda b: b.broker_id)),
            problems=tuple(problem for part in parts for problem in part.problems),
        )

    async def superseded(self) -> None:
        """Wait until every broker of this task has a newer supervisor. A task without brokers waits forever."""
        if self._tasks:
            # Not asyncio.gather, which would cancel the supervisors if this is cancelled.
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # A failed supervisor fails the generation, and the next generation adopts its broker.
        if not self._supervisors or not all(supervisor.superseded for supervisor in self._supervisors):
            await asyncio.Event().wait()

    async def stop(self, gather: Gather) -> list[str]:
        """Make all brokers refuse writes, let followers catch up, and then stop all brokers at the same time.

        If brokers stopped one after the other, each would leave the in-sync sets of the rest, and the last one would be
        the only one in sync.

        Return the directories of this host whose brokers keep running, because no task locked them or because a newer
        supervisor has them.
        """
        await asyncio.gather(*(supervisor.quiesce() for supervisor in self._supervisors))
        await asyncio.gather(*(supervisor.caught_up(timeout_s=CATCH_UP_S) for supervisor in self._supervisors))
        await gather("caught up")
        await asyncio.gather(*(supervisor.finish(timeout_s=FINISH_S) for supervisor in self._supervisors))
        await gather("ended")
        return [path for path in self._to_stop if await is_live(Path(path))]

    async def disband(self) -> None:
        """End the supervision. Running brokers keep running."""
        for supervisor, task in zip(self._supervisors, self._tasks, strict=True):
            await supervisor.leave(task)
        for claim in self._claims:
            claim.release()


async def _publish(session: ZkSession, spec: GenerationSpec, report: GenerationReport) -> None:
    encoded = codecs.encode(report)
    with contextlib.suppress(ZkNodeExists):
        await session.create(REPORT, encoded)
        return
    await session.set(REPORT, encoded)


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
