"""One open transaction on a producer's I/O thread: what is registered for it, and that it is still alive.

A batch may go to a partition once the coordinator has registered the partition for this producer id; registrations are
collected: while one request is under way the next one gathers. Every registration is a sign of life, and where none
was needed for a third of the transaction's time-out a touch is sent. Who may begin and end it is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from sparklog.client.cluster.blocking_coordinator import GROUP
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import Attempts, LoopCoordinator
from sparklog.client.consumer.group_commits import FENCED
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import ClientTimeout, CommitRefused, transaction_error
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.transaction_run import MARKERS_WAIT_S, SERVER_SHARE, TransactionRun, end_error
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    MAX_ENTRIES,
    Ack,
    AddToTransaction,
    BeginTransaction,
    BeginTransactionReply,
    EndTransaction,
    EndTransactionReply,
    GroupOffset,
    HoldOffsets,
    TouchTransaction,
)

_log = logging.getLogger(__name__)


async def begin(coordination: LoopCoordinator, run: TransactionRun, *, timeout_s: float) -> BeginTransactionReply:
    """Begin a transaction, or join it. Each attempt gives a producer id; the answered one counts.

    Raises:
        ProducerFenced: a later run has come.
        ClientTimeout: the coordinator did not answer in time.
    """
    request = BeginTransaction(0, run.key, run.run_id, run.version, max(1, int(run.timeout_s * 1000)), run.turn)
    try:
        return await Attempts(coordination, timeout_s=timeout_s).ask(request, BeginTransactionReply)
    except BrokerError as error:
        raise transaction_error(error, str(run)) from error


async def end(
    coordination: LoopCoordinator,
    run: TransactionRun,
    *,
    winners: tuple[int, ...],
    commit: bool,
    timeout_s: float,
    asked_before: bool = False,
) -> EndTransactionReply:
    """Have it decided, and wait for the markers a while; a decision is durable when this returns. ``asked_before``: an
    earlier call has asked for this commit.

    Raises:
        ProducerFenced, TransactionStateError: it is not committed, and will not be.
        CommitOutcomeUnknown: nobody could be asked in time, the broker failed in a way it did not foresee, or it was
            refused after an answer was lost.
        ClientTimeout: as that, of an abort: the transaction's time-out does it.
    """
    attempts = Attempts(coordination, timeout_s=timeout_s)
    decided: EndTransactionReply | None = None
    markers_by = time.monotonic() + MARKERS_WAIT_S
    while decided is None or not decided.complete:
        server_ms = max(1, int(attempts.patience_s * 1000 * SERVER_SHARE))
        request = EndTransaction(0, run.key, run.run_id, run.version, commit, winners, server_ms, run.turn)
        try:
            decided = await attempts.ask(request, EndTransactionReply)
        except (BrokerError, ClientTimeout) as error:
            if decided is None:
                uncertain = attempts.uncertain
                raise end_error(error, run, commit=commit, uncertain=uncertain, asked_before=asked_before) from error
            break
        if time.monotonic() >= min(markers_by, attempts.deadline):
            break
    if not decided.complete:
        _log.warning("%s: it is decided, but some partitions do not show it yet", run)
    return decided


class OpenTransaction:
    """Owner: the sender's loop; ``close`` ends its tasks."""

    def __init__(
        self,
        link: LoopCluster,
        coordination: LoopCoordinator,
        run: TransactionRun,
        identity: ProducerIdentity,
        *,
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when partitions have been registered, or the transaction was refused."""
        self.run = run
        self.identity = identity
        #: Why nothing more can be written in it.
        self.refused: BrokerError | None = None
        self.registered: set[TopicPartition] = set()
        #: It has asked for something to be registered: there may be something to commit.
        self.used = False
        #: Somebody has asked for it to be committed.
        self.commit_asked = False
        self._link = link
        self._coordination = coordination
        self._changed = changed
        self._registering = False
        self._closed = False
        self._alive_at = time.monotonic()
        self._wake = asyncio.Event()
        link.start(self._stay_alive())

    def close(self) -> None:
        """It is over, or left to its time-out."""
        self._closed = True
        self._wake.set()

    def register(self, wanted: Callable[[], Iterable[TopicPartition]]) -> None:
        """See that what ``wanted`` names comes to be registered; it is asked again before each request."""
        if not self._registering and self.refused is None and not self._closed and self._missing(wanted):
            self._registering = True
            self._link.start(self._register(wanted))

    async def add_offsets(
        self, group: str | GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float
    ) -> None:
        """Let the group have these offsets when the transaction commits. Durable when this returns.

        Raises:
            CommitRefused: they are not the member's to commit; the transaction must be aborted.
            ProducerFenced, TransactionStateError, ClientTimeout.
        """
        self.used = True
        name = group.group if isinstance(group, GroupMetadata) else group
        attempts = Attempts(self._coordination, timeout_s=timeout_s)
        try:
            await attempts.ask(self._addition(group=name, offsets=offsets), Ack)
            if isinstance(group, GroupMetadata):  # its coordinator looks whether the transaction knows this producer
                await self._hold(group, offsets, timeout_s=attempts.left_s)
        except BrokerError as error:
            raise transaction_error(error, str(self.run)) from error
        self._alive_at = time.monotonic()

    async def _hold(self, group: GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float) -> None:
        member = (group.member_id, group.epoch)
        request = HoldOffsets(0, group.group, self.run.key, self.identity.producer_id, tuple(offsets), *member)
        try:
            await Attempts(self._coordination.of(GROUP, group.group), timeout_s=timeout_s).ask(request, Ack)
        except BrokerError as error:
            raise CommitRefused(error.code, error.detail) if error.code in FENCED else error from None

    def _missing(self, wanted: Callable[[], Iterable[TopicPartition]]) -> tuple[TopicPartition, ...]:
        return tuple(tp for tp in wanted() if tp not in self.registered)[:MAX_ENTRIES]

    def _addition(
        self,
        partitions: tuple[TopicPartition, ...] = (),
        *,
        group: str = "",
        offsets: Sequence[GroupOffset] = (),
    ) -> AddToTransaction:
        run, (producer_id, epoch) = self.run, self.identity
        named = tuple((tp.topic, tp.partition) for tp in partitions)
        return AddToTransaction(
            0, run.key, run.run_id, producer_id, epoch, named, group, tuple(offsets), run.version, run.turn
        )

    async def _register(self, wanted: Callable[[], Iterable[TopicPartition]]) -> None:
        """Goes on until nothing is missing: what waits too long is given up by who wants it."""
        failures = 0
        try:
            while not self._closed and (partitions := self._missing(wanted)):
                self.used = True
                patience_s = self._coordination.patience_s(failures)
                try:
                    await self._coordination.ask_once(self._addition(partitions), Ack, patience_s=patience_s)
                except BrokerError as error:
                    if not error.retriable:
                        self._refuse(error)
                        return
                    self._link.last_problem = str(error)
                    if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                        self._link.want_metadata({tp.topic for tp in partitions})
                    await asyncio.sleep(self._coordination.pause_s(failures))
                    failures += 1
                else:
                    failures = 0
                    self._alive_at = time.monotonic()
                    self.registered.update(partitions)
                    self._changed()
        finally:
            self._registering = False

    async def _stay_alive(self) -> None:
        interval_s = self.run.timeout_s / 3
        while not self._closed and self.refused is None:
            wait_s = self._alive_at + interval_s - time.monotonic()
            if wait_s > 0:
                await self._sleep(wait_s)
                continue
            touch = TouchTransaction(0, self.run.key, self.run.run_id, self.run.version, self.run.turn)
            try:
                await Attempts(self._coordination, timeout_s=self.run.timeout_s).ask(touch, Ack)
            except BrokerError as error:
                if not self._closed:
                    self._refuse(error)
                return
            except ClientTimeout as error:
                self._link.last_problem = str(error)
            else:
                self._alive_at = time.monotonic()

    async def _sleep(self, wait_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), wait_s)

    def _refuse(self, error: BrokerError) -> None:
        self.refused = self.refused or transaction_error(error, str(self.run))
        self._changed()
