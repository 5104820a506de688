"""One hosted replica: its state machine, its log, and the code that performs the state machine's effects.

The state machine (``replica.Replica``) decides. ``Partition`` gives it one event at a time, performs the resulting
effects in order, and passes their results to the state machine before the next event. Everything in this module runs on
the broker's event loop and never waits. Work that takes time (ZooKeeper, fetches, fsync) is done by the
``PartitionHost``, whose results arrive as events.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from sparklog.broker.lifecycle.logging_setup import Lines
from sparklog.errors import BrokerError, ErrorCode, StorageError
from sparklog.model import NO_LEADER, TopicPartition
from sparklog.record.codec import out_of_memory
from sparklog.record.header import BatchHeader
from sparklog.record.validate import validate_batch, validate_placed_batch
from sparklog.replica.effects import (
    AnswerDiverging,
    AppendAsFollower,
    AppendAsLeader,
    HighWatermarkMoved,
    IsrChanged,
    LogEndMoved,
    RefuseFetch,
    RefuseTruncation,
    ReportBadDecision,
    RespondToProduce,
    RestartLog,
    RoleChanged,
    ServeFetch,
    StartFetching,
    StopFetching,
    TruncateLog,
    TruncationAccepted,
    WriteIsr,
)
from sparklog.replica.events import (
    Event,
    FollowerAppended,
    FollowerFetched,
    LeaderAppended,
    LeaderAppendFailed,
    LeaderResponded,
    LogFailed,
    LogNamed,
    ProduceArrived,
    Stopped,
    Truncated,
    TruncationFailed,
)
from sparklog.replica.purgatory import NEVER
from sparklog.replica.replica import Replica
from sparklog.storage.log import Log
from sparklog.storage.truncation_job import TruncationJob

_log = logging.getLogger(__name__)
_role_lines = Lines(_log)
_truncation_lines = Lines(_log)

Batches = Sequence[tuple[BatchHeader, memoryview]]
FetchVerdict = ServeFetch | RefuseFetch | AnswerDiverging
_UNJUDGED: FetchVerdict = RefuseFetch(ErrorCode.NOT_LEADER_OR_FOLLOWER, "")


class AppendRules(msgspec.Struct, frozen=True, eq=False):
    """The rules of a topic that a batch must satisfy before it is appended."""

    schema: pa.Schema
    schema_id: int
    max_message_bytes: int
    event_time: str | None
    key_columns: tuple[str, ...] = ()
    #: whether the topic is compacted, so that each record must have a key
    compacted: bool = False
    #: whether readers see the time of the append instead of the content of the event-time column
    stamped_by_log: bool = False
    #: whether Kafka clients write and read the rows as JSON documents
    kafka_json: bool = False
    #: whether the topic is being restored, so that it accepts only batches with offsets
    restoring: bool = False


class CheckedBatches(NamedTuple):
    """The errors that an early check found in a request's batches, before the append.

    The result is valid until the partition's rules differ from ``rules``.

    ``refusals`` maps the index of each refused batch to the error of the batch.
    """

    rules: AppendRules
    refusals: Mapping[int, BrokerError]


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The result of a produce to one partition: an error, or the base offset and the time of the append.

    ``original_us`` is None if the produce has appended a batch. If the produce is a retry and the log already had all
    batches, ``original_us`` is the time at which the first batch was appended, or -1 if this time is unknown. In this
    case ``append_time_us`` is the time of the retry. All times are microseconds since the Unix epoch.
    """

    code: ErrorCode
    base_offset: int
    append_time_us: int
    detail: str
    original_us: int | None = None


class PendingProduce(msgspec.Struct):
    """A produce to one partition: its batches, and the callback for the result.

    ``own`` is true if this broker created the batches (a marker). ``placed`` is true if the batches come from a restore
    and keep their offsets. ``roll`` is true if the batches begin a new segment. ``begins_anywhere`` is true for the
    batches of a Kafka client: the first batch of an unknown producer id may have any sequence.

    The partition drops the batches once they are appended. Otherwise a request that waits for the high watermark would
    keep their memory after its connection was closed. The connection's memory limit would no longer count this memory.
    """

    batches: Batches
    on_result: Callable[[Answer], None]
    own: bool = False
    placed: bool = False
    roll: bool = False
    append_time_us: int = -1  #: the time of the append
    checked: CheckedBatches | None = None  #: None: the append checks the batches
    begins_anywhere: bool = False
    original_us: int | None = None  #: see ``Answer``


class PartitionHost(Protocol):
    """The part of a broker that a partition uses to perform its effects.

    No method blocks, and no method calls ``Partition.step``.
    """

    def now_ms(self) -> int: ...

    def write_isr(self, partition: Partition, effect: WriteIsr) -> None: ...

    def isr_changed(self, partition: Partition, isr: tuple[int, ...]) -> None: ...

    def start_fetching(self, partition: Partition, leader: int, leader_epoch: int) -> None: ...

    def stop_fetching(self, partition: Partition) -> None: ...

    def truncation_refused(self, partition: Partition, effect: RefuseTruncation) -> None: ...

    def truncation_accepted(self, partition: Partition) -> None: ...

    def prepare_truncation(self, partition: Partition, job: TruncationJob) -> None:
        """Run ``job`` in a thread, then call ``Partition.truncation_prepared``.

        The job copies the part of a segment that the truncation keeps.

        If the disk is full or an unexpected error occurs, pause, and then call ``Partition.truncation_failed``.
        """

    def role_changed(self, partition: Partition) -> None: ...

    def log_end_moved(self, partition: Partition) -> None: ...

    def high_watermark_moved(self, partition: Partition) -> None: ...

    def bad_decision(self, partition: Partition, detail: str) -> None: ...

    def log_failed(self, partition: Partition, error: Exception) -> None: ...

    def deadline_moved(self, partition: Partition) -> None: ...


class OnLogFailed(Protocol):
    """The callback for an error of the log directory.

    ``partition`` is the partition that found the error, or None if no single partition found it.
    """

    def __call__(self, partition: Partition | None, error: Exception, /) -> None: ...


class Partition:
    """One hosted replica, which joins its state machine and its log.

    Not thread-safe: use it only on the broker's event loop. It exists from the controller's first decision about the
    replica until ``stop``.
    """

    def __init__(
        self,
        tp: TopicPartition,
        topic_id: str,
        *,
        log: Log,
        replica: Replica,
        rules: AppendRules,
        host: PartitionHost,
    ) -> None:
        self.tp = tp
        self.topic_id = topic_id
        self.log = log
        self.replica = replica
        self.rules = rules
        #: The cached topic whose schemas and settings this replica has applied.
        self.configured_for: object = None
        #: Why this replica is offline, or None.
        self.offline: str | None = None
        self.stopped = False
        #: The deadline for which the timer is set; see ``Partitions.deadline_moved``.
        self.timer_ms = NEVER
        self._host = host
        self._events: deque[Event] = deque()
        self._stepping = False
        self._pending: dict[int, PendingProduce] = {}
        self._incoming: tuple[memoryview, memoryview] | None = None
        self._append_refused: BrokerError | None = None
        self._verdict: FetchVerdict = _UNJUDGED
        self._next_ticket = 0
        #: the copy that a truncation waits for, and the offset of the truncation
        self._truncation: tuple[TruncationJob, int] | None = None
        self._refused = False  #: whether a refused truncation was reported, or will be, to the controller
        self.failed_truncations = (
            0  #: consecutive failed truncations in this role; each one makes the next pause longer
        )

    # --- events from the broker ---

    def step(self, event: Event) -> None:
        """Give the state machine one event, and perform all effects that result from it."""
        events, replica = self._events, self.replica
        if self._stepping:
            events.append(event)
            return
        self._stepping = True
        try:
            now_ms = self._host.now_ms()
            while True:
                for effect in replica.step(event, now_ms):
                    _PERFORM[type(effect)](self, effect)
                if not events:
                    break
                event, now_ms = events.popleft(), self._host.now_ms()
        except Exception as error:
            # The state machine and the log may disagree now, so the replica must stop.
            self._stepping = False
            self._fail(error)
        finally:
            self._stepping = False
        if replica.deadline_ms() < self.timer_ms:
            self._host.deadline_moved(self)

    def produce(self, pending: PendingProduce, *, acks: int, deadline_ms: int) -> None:
        """Append batches if this replica is the leader, and call ``pending.on_result`` once, now or later."""
        self._next_ticket += 1
        ticket = self._next_ticket
        self._pending[ticket] = pending
        self.step(ProduceArrived(ticket, acks, deadline_ms))

    def follower_fetched(self, event: FollowerFetched) -> FetchVerdict:
        """Handle a follower's fetch. Return what the response contains: records, an error, or the divergence point."""
        self._verdict = _UNJUDGED  # the step replaces this value
        self.step(event)
        verdict = self._verdict
        if verdict is _UNJUDGED:
            return RefuseFetch(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.tp}: this replica is {self.replica.role}")
        return verdict

    def on_leader_response(self, event: LeaderResponded, headers: memoryview, bodies: memoryview) -> BrokerError | None:
        """Apply the leader's response for this partition.

        Return the error for which the batches of the response were refused, or None.
        """
        log = self.log
        if event.batch_count and log.is_outdated_for(headers, time.time_ns() // 1000):
            _log.warning("%s: offline for longer than tombstones are kept: copying the log again", self.tp)
            event = msgspec.structs.replace(
                event, code=ErrorCode.OFFSET_OUT_OF_RANGE, batch_count=0, log_start_offset=0, outdated=True
            )
        self._incoming = (headers, bodies)
        self._append_refused = None
        self.step(event)
        self._incoming = None
        if event.code == ErrorCode.NONE and self._truncation is None:
            log.caught_up(event.high_watermark)
        return self._append_refused

    @property
    def is_truncating(self) -> bool:
        """Return whether a truncation is being prepared.

        Until the truncation is done, the replica ignores the leader's responses.
        """
        return self._truncation is not None

    def truncation_prepared(self, job: TruncationJob) -> None:
        """Truncate the log and resume fetching, after ``job.run`` has returned.

        The job has copied the part of a segment that the truncation keeps. Do nothing if the role has changed since the
        job began.
        """
        if self._truncation is None or self._truncation[0] is not job or self.stopped:
            return
        offset, self._truncation = self._truncation[1], None
        self.failed_truncations = 0
        try:
            self.step(self._truncate_at(offset, job))
            if self.offline is None:
                self._host.start_fetching(self, self.replica.leader, self.replica.leader_epoch)
        except Exception as error:  # handle it as an error in ``step``
            self._fail(error)

    def truncation_failed(self, job: TruncationJob) -> None:
        """Cancel a truncation because its job has failed, and fetch from the leader again.

        Do nothing if the role has changed since the job began.
        """
        if self._truncation is not None and self._truncation[0] is job and not self.stopped:
            self._drop_truncation()
            self.failed_truncations += 1
            self.step(TruncationFailed())

    def log_named(self) -> None:
        """Record that a durable checkpoint contains this log. If this replica is a follower, fetch again.

        From now on the log counts as durable.
        """
        if self.stopped or self.offline is not None:
            return
        self.step(LogNamed())
        replica = self.replica
        if replica.role == "follower" and replica.leader != NO_LEADER and not self.is_truncating:
            self._host.start_fetching(self, replica.leader, replica.leader_epoch)

    @property
    def awaits_name(self) -> bool:
        """Return whether the log has files on disk, but no durable checkpoint contains it yet.

        A follower with such a log must not fetch, because a fetch would confirm records that are not durable.
        """
        return not self.log.named and self.log.on_disk

    def advance_log_start(self, offset: int) -> None:
        """Move the log start to ``offset``, the leader's log start offset, and delete the records below it."""
        try:
            self.log.advance_log_start(offset)
        except StorageError as error:
            self.storage_failed(error)

    def stop(self) -> None:
        """Stop the replica, because it is no longer assigned to this broker or the broker stops.

        Further calls have no effect.
        """
        if not self.stopped:
            self.step(Stopped())
            self.stopped = True
            self._respond_all(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"{self.tp}: the replica was stopped")
            self._host.role_changed(self)

    def stop_at_exit(self) -> None:
        """Stop the replica because the process ends.

        A follower without waiting requests sends no notifications. For ten thousand followers, the notifications
        took a tenth of a second.
        """
        if self.replica.is_leader or self._pending:
            self.stop()
        self._drop_truncation()  # otherwise the process would wait for the copy
        self.stopped = True

    def fail(self, error: Exception) -> None:
        """Take the replica offline, because the log directory has failed."""
        if self.offline is None:
            self.offline = str(error)
            self.step(LogFailed(self.offline))
            self._respond_all(ErrorCode.KAFKA_STORAGE_ERROR, self.offline)
            self._host.role_changed(self)

    def storage_failed(self, error: StorageError) -> BrokerError:
        """Take the replica offline because the storage has failed. Return the error for the client."""
        self._fail(error)
        return BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: {error}")

    def check_usable(self) -> None:
        """Raise BrokerError KAFKA_STORAGE_ERROR if the log directory is offline."""
        if self.offline is not None:
            raise BrokerError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self.tp}: {self.offline}")

    def require_leader(self, leader_epoch: int) -> None:
        """Raise BrokerError unless this replica leads in ``leader_epoch``; -1 matches any epoch.

        The error is NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH.
        """
        replica = self.replica
        if not replica.leads_in(leader_epoch):
            code = replica.check_epoch(leader_epoch) or ErrorCode.NOT_LEADER_OR_FOLLOWER
            raise BrokerError(code, self.describe_role(leader_epoch))

    def describe_role(self, leader_epoch: int) -> str:
        """Return an error text with this replica's role and leader epoch, and the leader epoch that was requested."""
        replica = self.replica
        return (
            f"{self.tp}: leader epoch {leader_epoch} requested, this replica is {replica.role} in epoch "
            f"{replica.leader_epoch}, leader {replica.leader}"
        )

    # --- effects ---

    def _append_as_leader(self, effect: AppendAsLeader) -> None:
        """Append the batches that wait under the effect's ticket, or refuse them and respond to the producer."""
        ticket, log = effect.ticket, self.log
        pending = self._pending[ticket]
        batches, placed = pending.batches, pending.placed
        now_us = time.time_ns() // 1000
        try:
            known = None
            # Batches that are already in the log are not checked again: a retry of them succeeds, even if the schema
            # has changed since.
            if not pending.own:
                if placed or self.rules.restoring:
                    self._check_restoring(placed=placed)
                known = log.known(batches, begins_anywhere=pending.begins_anywhere)
                if pending.checked is not None and pending.checked.rules is self.rules:
                    _raise_refusal(pending.checked, len(known), len(batches))
                else:
                    for header, body in batches[len(known) :] if known else batches:
                        check_batch(self.tp, self.rules, header, body, placed=placed)
            start, end = log.append_as_leader(
                batches, leader_epoch=effect.leader_epoch, now_us=now_us, known=known, placed=placed, roll=pending.roll
            )
        except BrokerError as error:
            self._respond(ticket, error.code, detail=f"{self.tp}: {error.detail}")
        except StorageError as error:
            # Take the replica offline before the response. The response may let waiting requests proceed, and these
            # must find the replica offline.
            self._fail(error)
            self._respond(ticket, ErrorCode.KAFKA_STORAGE_ERROR, detail=f"{self.tp}: {error}")
        else:
            pending.append_time_us = now_us
            if known and len(known) == len(batches):
                pending.original_us = log.original_append_us(batches[0][0].producer_id, start)
            pending.batches = ()
            self._events.append(LeaderAppended(ticket, start, end))
            return
        self._events.append(LeaderAppendFailed(ticket))

    def _check_restoring(self, *, placed: bool) -> None:
        """Raise BrokerError if a topic in restore gets ordinary batches, or another topic gets batches with offsets."""
        if self.rules.restoring and not placed:
            raise BrokerError(ErrorCode.TOPIC_RESTORING, "the topic accepts no writes until its restore completes")
        if placed and not self.rules.restoring:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, "the topic is not being restored: only its leader assigns offsets"
            )

    def _respond_to_produce(self, effect: RespondToProduce) -> None:
        pending = self._pending.pop(effect.ticket, None)
        if pending is not None:
            pending.on_result(
                Answer(effect.code, effect.base_offset, pending.append_time_us, effect.detail, pending.original_us)
            )

    def _append_as_follower(self, effect: AppendAsFollower) -> None:
        assert self._incoming is not None
        headers, bodies = self._incoming
        try:
            end_offset = self.log.append_as_follower(headers, bodies)
        except BrokerError as error:
            _log.error("%s: batches from the leader refused: %s", self.tp, error)
            self._append_refused = error
            self._events.append(FollowerAppended(self.log.log_end_offset))
        except StorageError as error:
            self._fail(error)
        else:
            self._events.append(FollowerAppended(end_offset))

    def _truncate_log(self, effect: TruncateLog) -> None:
        job = self.log.truncation.begin(effect.offset)
        if job is None:
            self._events.append(self._truncate_at(effect.offset, None))
        else:  # the copy and its fsync run in a thread, because they would block the event loop
            self._truncation = job, effect.offset
            self._host.prepare_truncation(self, job)

    def _truncate_at(self, offset: int, job: TruncationJob | None) -> Truncated:
        before = self.log.log_end_offset
        end_offset = self.log.truncate(offset, job)
        _truncation_lines.info("%s: log truncated from %d to %d", self.tp, before, end_offset)
        return Truncated(end_offset)

    def _restart_log(self, effect: RestartLog) -> None:
        before = self.log.log_end_offset
        self.log.restart_at(effect.offset)
        _log.warning("%s: discarded the log with end offset %d, restarting it at %d", self.tp, before, effect.offset)
        self._events.append(Truncated(effect.offset))

    def _refuse_truncation(self, effect: RefuseTruncation) -> None:
        _log.error(
            "%s: broker %d, leader in epoch %d, lacks committed records from offset %d to %d: not truncating them",
            self.tp,
            effect.leader,
            effect.leader_epoch,
            effect.offset,
            effect.high_watermark,
        )
        self._refused = True
        self._host.truncation_refused(self, effect)

    def _truncation_accepted(self, effect: TruncationAccepted) -> None:
        self._withdraw_refusal()

    def _withdraw_refusal(self) -> None:
        if self._refused:
            self._refused = False
            self._host.truncation_accepted(self)

    def _write_isr(self, effect: WriteIsr) -> None:
        self._host.write_isr(self, effect)

    def _isr_changed(self, effect: IsrChanged) -> None:
        self._host.isr_changed(self, effect.isr)

    def _high_watermark_moved(self, effect: HighWatermarkMoved) -> None:
        self.log.set_high_watermark(effect.high_watermark)
        self._host.high_watermark_moved(self)

    def _log_end_moved(self, effect: LogEndMoved) -> None:
        self._host.log_end_moved(self)

    def _set_verdict(self, effect: FetchVerdict) -> None:
        self._verdict = effect

    def _report_bad_decision(self, effect: ReportBadDecision) -> None:
        self._host.bad_decision(self, effect.detail)

    def _start_fetching(self, effect: StartFetching) -> None:
        self._host.start_fetching(self, effect.leader, effect.leader_epoch)

    def _stop_fetching(self, effect: StopFetching) -> None:
        self._host.stop_fetching(self)

    def _role_changed(self, effect: RoleChanged) -> None:
        _role_lines.info("%s: %s in leader epoch %d", self.tp, effect.role, effect.leader_epoch)
        self._drop_truncation()
        self._withdraw_refusal()
        self.failed_truncations = 0
        self._host.role_changed(self)

    def _drop_truncation(self) -> None:
        """Cancel the pending truncation. The replica learns from its next leader where to truncate."""
        if self._truncation is not None:
            self._truncation = None
            self.log.truncation.cancel()

    # --- responses ---

    def _respond(self, ticket: int, code: ErrorCode, *, detail: str) -> None:
        self._respond_to_produce(RespondToProduce(ticket, code, -1, detail))

    def _respond_all(self, code: ErrorCode, detail: str) -> None:
        for ticket in list(self._pending):
            self._respond(ticket, code, detail=detail)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, StorageError):
            _log.exception("%s: step failed", self.tp, exc_info=error)
        self._events.clear()
        self._host.log_failed(self, error)


def check_batch(tp: TopicPartition, rules: AppendRules, header: BatchHeader, body: memoryview, *, placed: bool) -> None:
    """Check one batch of a producer or of a restore. Any thread may call this, because it reads no shared state.

    Raises:
        BrokerError: the batch is invalid. An unexpected error becomes a BrokerError too, so that malformed bytes fail
            only their own request.
    """
    try:
        check = validate_placed_batch if placed else validate_batch
        check(
            header,
            body,
            schema=rules.schema,
            schema_id=rules.schema_id,
            max_message_bytes=rules.max_message_bytes,
            event_time=None if placed and rules.stamped_by_log else rules.event_time,
            required_key=rules.key_columns if rules.compacted else (),
        )
    except BrokerError:
        raise
    except MemoryError:
        raise out_of_memory("cannot validate a batch") from None
    except Exception as error:
        _log.exception("%s: could not validate a batch", tp)
        raise BrokerError(
            ErrorCode.CORRUPT_MESSAGE, f"could not validate the batch: {type(error).__name__}: {error}"
        ) from None


def _raise_refusal(checked: CheckedBatches, first: int, end: int) -> None:
    """Raise the first refusal among the batches with numbers in ``[first, end)``."""
    for number in range(first, end):
        if number in checked.refusals:
            raise checked.refusals[number]


_PERFORM: dict[type, Callable[[Partition, Any], None]] = {
    AppendAsLeader: Partition._append_as_leader,
    RespondToProduce: Partition._respond_to_produce,
    AppendAsFollower: Partition._append_as_follower,
    TruncateLog: Partition._truncate_log,
    RestartLog: Partition._restart_log,
    RefuseTruncation: Partition._refuse_truncation,
    TruncationAccepted: Partition._truncation_accepted,
    WriteIsr: Partition._write_isr,
    IsrChanged: Partition._isr_changed,
    HighWatermarkMoved: Partition._high_watermark_moved,
    LogEndMoved: Partition._log_end_moved,
    ServeFetch: Partition._set_verdict,
    RefuseFetch: Partition._set_verdict,
    AnswerDiverging: Partition._set_verdict,
    StartFetching: Partition._start_fetching,
    StopFetching: Partition._stop_fetching,
    RoleChanged: Partition._role_changed,
    ReportBadDecision: Partition._report_bad_decision,
}
