"""One open transaction on a producer's I/O thread: the registration of its partitions, and its keep-alive.

A batch may be sent to a partition once the coordinator has registered the partition for this producer id. While one
registration request is in flight, new partitions are collected for the next request. Every registration keeps the
transaction alive. After a third of the transaction's timeout without a registration, a keep-alive request is sent.
Other modules decide when the transaction begins and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from sparklog.client.cluster.coordinator_search import GROUP
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import Attempts, LoopCoordinator
from sparklog.client.consumer.group_commits import FENCED
from sparklog.client.consumer.group_session import GroupMetadata
from sparklog.client.errors import ClientTimeout, CommitRefused, transaction_error
from sparklog.client.producer.partition_queues import ProducerIdentity
from sparklog.client.producer.transaction_run import MARKERS_WAIT_S, SERVER_SHARE, TransactionRun, end_error
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.fields import IN_ONE_REQUEST
from sparklog.protocol.messages import (
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


async def begin(coordinator: LoopCoordinator, run: TransactionRun, *, timeout_s: float) -> BeginTransactionReply:
    """Begin the transaction that ``run`` identifies, or join it if it has begun already.

    Each attempt creates a producer id. Only the producer id in the response is used.

    Raises:
        ProducerFenced: a later producer or query has begun a transaction with the same key.
        ClientTimeout: the coordinator did not respond in time.
    """
    request = BeginTransaction(0, run.key, run.run_id, run.version, max(1, int(run.timeout_s * 1000)), run.turn)
    try:
        return await Attempts(coordinator, timeout_s=timeout_s).ask(request, BeginTransactionReply)
    except BrokerError as error:
        raise transaction_error(error, str(run)) from error


async def end(
    coordinator: LoopCoordinator,
    run: TransactionRun,
    *,
    winners: tuple[int, ...],
    commit: bool,
    timeout_s: float,
    asked_before: bool = False,
) -> EndTransactionReply:
    """Ask the coordinator to commit or abort, and wait up to 30 s until all partitions have their markers.

    The decision is durable when this function returns. ``winners`` are the producer ids whose records are committed.
    ``asked_before``: an earlier call has requested this commit.

    Raises:
        ProducerFenced, TransactionStateError: the transaction is not committed, and will not be.
        CommitOutcomeUnknown: no coordinator was reachable in time, the broker had an unexpected error, or it refused
            the request after an earlier response was lost.
        ClientTimeout: an abort failed for one of the reasons listed for CommitOutcomeUnknown. The transaction's timeout
            aborts the transaction.
    """
    attempts = Attempts(coordinator, timeout_s=timeout_s)
    decided: EndTransactionReply | None = None
    markers_by = time.monotonic() + MARKERS_WAIT_S
    while decided is None or not decided.complete:
        server_ms = max(1, int(attempts.timeout_s * 1000 * SERVER_SHARE))
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
        _log.warning("%s: the decision is durable, but some partitions have no marker yet", run)
    return decided


class OngoingTransaction:
    """An open transaction: it registers its partitions with the coordinator, and sends keep-alive requests.

    Not thread-safe: use it only on the producer's event loop. ``close`` ends its tasks.
    """

    def __init__(
        self,
        cluster: LoopCluster,
        coordinator: LoopCoordinator,
        run: TransactionRun,
        identity: ProducerIdentity,
        *,
        changed: Callable[[], None],
    ) -> None:
        """Start the keep-alive.

        ``changed`` is called after each registration, and when the coordinator refuses the transaction.
        """
        self.run = run
        self.identity = identity
        #: The reason why no more records can be written in the transaction, or None.
        self.refused: BrokerError | None = None
        self.registered: set[TopicPartition] = set()
        #: True once a registration was requested, so that there may be records to commit.
        self.used = False
        #: True once a commit was requested.
        self.commit_asked = False
        self._cluster = cluster
        self._coordinator = coordinator
        self._changed = changed
        self._registering = False
        self._closed = False
        self._alive_at = time.monotonic()
        self._wake = asyncio.Event()
        cluster.start(self._stay_alive())

    def close(self) -> None:
        """End the tasks, because the transaction has ended or its timeout will abort it."""
        self._closed = True
        self._wake.set()

    def register(self, wanted: Callable[[], Iterable[TopicPartition]]) -> None:
        """Register the partitions that ``wanted`` returns. ``wanted`` is called again before each request."""
        if not self._registering and self.refused is None and not self._closed and self._missing(wanted):
            self._registering = True
            self._cluster.start(self._register(wanted))

    async def add_offsets(
        self, group: str | GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float
    ) -> None:
        """Add offsets of a group to the transaction.

        When this method returns, the coordinator has stored the offsets durably. A commit of the transaction commits
        the offsets.

        Raises:
            CommitRefused: the member may not commit these offsets. The transaction must be aborted.
            ProducerFenced: a later producer with this transactional id has begun a transaction, or the transaction was
                aborted.
            TransactionStateError: the transaction can only be aborted.
            ClientTimeout: a coordinator did not respond in time.
        """
        self.used = True
        name = group.group if isinstance(group, GroupMetadata) else group
        attempts = Attempts(self._coordinator, timeout_s=timeout_s)
        try:
            await attempts.ask(self._addition(group=name, offsets=offsets), Ack)
            # Before that, the partition of the group's offsets is registered: the group's coordinator checks it.
            if isinstance(group, GroupMetadata):
                await self._hold(group, offsets, timeout_s=attempts.left_s)
        except BrokerError as error:
            raise transaction_error(error, str(self.run)) from error
        self._alive_at = time.monotonic()

    async def _hold(self, group: GroupMetadata, offsets: Sequence[GroupOffset], *, timeout_s: float) -> None:
        member = (group.member_id, group.epoch)
        request = HoldOffsets(0, group.group, self.run.key, self.identity.producer_id, tuple(offsets), *member)
        try:
            await Attempts(self._coordinator.of(GROUP, group.group), timeout_s=timeout_s).ask(request, Ack)
        except BrokerError as error:
            raise CommitRefused(error.code, error.detail) if error.code in FENCED else error from None

    def _missing(self, wanted: Callable[[], Iterable[TopicPartition]]) -> tuple[TopicPartition, ...]:
        return tuple(tp for tp in wanted() if tp not in self.registered)[:IN_ONE_REQUEST]

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
        """Register partitions until none is missing. Other modules fail the batches that wait too long."""
        failures = 0
        try:
            while not self._closed and (partitions := self._missing(wanted)):
                self.used = True
                timeout_s = self._coordinator.timeout_s(failures)
                try:
                    await self._coordinator.ask_once(self._addition(partitions), Ack, timeout_s=timeout_s)
                except BrokerError as error:
                    if not error.retriable:
                        self._refuse(error)
                        return
                    self._cluster.last_problem = str(error)
                    if error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                        self._cluster.request_metadata({tp.topic for tp in partitions})
                    await asyncio.sleep(self._coordinator.pause_s(failures))
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
                await Attempts(self._coordinator, timeout_s=self.run.timeout_s).ask(touch, Ack)
            except BrokerError as error:
                if not self._closed:
                    self._refuse(error)
                return
            except ClientTimeout as error:
                self._cluster.last_problem = str(error)
            else:
                self._alive_at = time.monotonic()

    async def _sleep(self, wait_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), wait_s)

    def _refuse(self, error: BrokerError) -> None:
        self.refused = self.refused or transaction_error(error, str(self.run))
        self._changed()
