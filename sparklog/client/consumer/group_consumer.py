"""The partitions of a consumer in a group, and its commits.

This code runs in the user's thread while the consumer waits for records. So user code is never interrupted, and the
user's callbacks run in this thread. The positions of revoked partitions are committed before another member gets the
partitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Protocol

from sparklog.client.cluster.offsets import checked_offset
from sparklog.client.consumer.group_commits import AssignedPartition
from sparklog.client.consumer.group_session import GroupMetadata, GroupNotice, GroupSession
from sparklog.client.errors import CommitRefused
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.model import TopicPartition

_log = logging.getLogger(__name__)

#: The delay of a retry when the coordinator or a leader could not return a start position.
_RETRY_S = 0.1
#: The maximum wait while new partitions wait for their committed offsets.
_SLICE_S = 0.1

#: A future of the committed offsets of partitions. The offset is None if the partition has no committed offset.
CommittedOffsets = Future[dict[AssignedPartition, int | None]]
OnPartitions = Callable[[list[TopicPartition]], object]


class Reader(Protocol):
    """The part of the consumer that ``GroupConsumer`` uses: it starts and stops reading partitions."""

    def positions(self) -> dict[TopicPartition, int]: ...

    def start_reading(self, starts: Mapping[AssignedPartition, int | None]) -> None:
        """Start to read partitions at these offsets. None means that there is no committed offset.

        Raises BrokerError or ClientTimeout. Then none of the partitions is read.
        """

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None: ...


class GroupConsumer:
    """A part of ``Consumer`` for a member of a group: it follows the assignment, and commits positions.

    Not thread-safe: use it only in the user's thread.
    """

    def __init__(
        self,
        reader: Reader,
        session: GroupSession,
        *,
        auto_commit_s: float | None,
        on_assign: OnPartitions | None,
        on_revoke: OnPartitions | None,
        on_lost: OnPartitions | None,
        commit_timeout_s: float,
        start_moves: bool = False,
    ) -> None:
        """Create the state without partitions.

        ``start_moves`` means that a later start would be at a higher offset (``start="latest"``). Then the start of a
        partition without a committed offset is committed as a position. Otherwise the partition's next owner would
        start at a higher offset and skip records.
        """
        self._reader = reader
        self._session = session
        self._auto_commit_s = auto_commit_s
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._on_lost = on_lost or on_revoke
        self._commit_timeout_s = commit_timeout_s
        self._start_moves = start_moves
        self._incarnation = 0
        self._assigned: dict[TopicPartition, AssignedPartition] = {}
        #: The offset and the future of the last commit, by partition. Before the first commit it is the start position.
        #: Only a commit whose future has succeeded counts: any other commit may still take effect after the user has
        #: moved the position back.
        self._last: dict[TopicPartition, tuple[int, Future[None]]] = {}
        self._commit_at = time.monotonic() + (auto_commit_s or 0.0)
        self._offsets_request: tuple[frozenset[AssignedPartition], CommittedOffsets] | None = None
        self._request_offsets_at = 0.0
        self._awaits_start = False

    @property
    def slice_s(self) -> float:
        """Return the maximum wait before the next call of ``advance``, in seconds."""
        waits = [_SLICE_S] if self._awaits_start else []
        if self._auto_commit_s is not None:
            waits.append(max(0.0, self._commit_at - time.monotonic()))
        return max(0.001, min(waits, default=3600.0))

    def advance(self) -> None:
        """Apply changes of the assignment. All records that were returned before count as processed.

        Raises:
            BrokerError: the group refuses this consumer: FENCED_INSTANCE_ID, INVALID_REGULAR_EXPRESSION,
                INVALID_SESSION_TIMEOUT, GROUP_MAX_SIZE_REACHED; or an error of ``Reader.start_reading``.
        """
        notice = self._session.accept_assignment(self._incarnation)
        if notice.incarnation != self._incarnation:
            self._incarnation = notice.incarnation
            self._on_removed()
            notice = self._session.accept_assignment(self._incarnation)
        if self._auto_commit_s is not None and time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._auto_commit_s
            self.commit().add_done_callback(_log_failure)
        if notice.revoked:
            self._revoke(notice.revoked)
        new = notice.assigned.difference(self._assigned.values())
        self._awaits_start = bool(new)
        if new:
            self._start_assigned(new, notice)

    # --- commits ---

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> Future[None]:
        """Commit the positions, or ``offsets``, and return a future that is done after the response.

        Raises:
            CommitRefused: a partition is not assigned to this consumer.
            TypeError, ValueError: an offset is invalid. This method checks it, because the coordinator would refuse the
                whole request, together with other commits.
        """
        positions = self._uncommitted() if offsets is None else offsets
        if not positions:
            return _done()
        positions = {tp: checked_offset(tp, offset) for tp, offset in positions.items()}
        missing = sorted(positions.keys() - self._assigned.keys())
        if missing:
            raise CommitRefused(ErrorCode.STALE_MEMBER_EPOCH, f"{missing[0]} is not assigned to this consumer")
        named = {self._assigned[tp]: offset for tp, offset in positions.items()}
        # Do this first: a KeyboardInterrupt may come between the next two lines, when the commit is already in flight.
        for tp in positions:
            self._last.pop(tp, None)
        future = self._session.commit(self._incarnation, named)
        self._last.update((tp, (offset, future)) for tp, offset in positions.items())
        return future

    def metadata(self) -> GroupMetadata:
        """Return the member's identity for transactions. Raises CommitRefused if it was removed since its last poll."""
        return self._session.metadata(self._incarnation, {one.topic: one.topic_id for one in self._assigned.values()})

    def committed(self, partitions: Iterable[TopicPartition]) -> CommittedOffsets:
        """Return the committed offsets of assigned partitions. See ``GroupSession.offsets``."""
        return self._session.offsets([self._assigned[tp] for tp in partitions])

    def _uncommitted(self) -> dict[TopicPartition, int]:
        return {tp: at for tp, at in self._reader.positions().items() if not self._is_committed(tp, at)}

    def _is_committed(self, tp: TopicPartition, at: int) -> bool:
        offset, ended = self._last.get(tp, (None, None))
        return offset == at and ended is not None and _took_effect(ended)

    def _commit_now(self, partitions: Sequence[TopicPartition]) -> None:
        """Commit the final positions of these partitions, and wait for the response.

        If this fails, the next owner of a partition reads some records again.
        """
        moved = self._uncommitted()
        try:
            self.commit({tp: moved[tp] for tp in partitions if tp in moved}).result(self._commit_timeout_s)
        except (SparklogError, futures.TimeoutError) as error:  # Python 3.10 has a separate TimeoutError
            _log.warning("the positions were not committed: %s", error)

    # --- partitions ---

    def _on_removed(self) -> None:
        lost = sorted(self._assigned)
        self._offsets_request = None
        self._drop(lost)
        if lost and self._on_lost is not None:
            self._on_lost(lost)

    def _revoke(self, revoked: frozenset[AssignedPartition]) -> None:
        partitions = sorted(tp for tp, one in self._assigned.items() if one in revoked)
        try:
            if partitions:
                if self._on_revoke is not None:
                    self._on_revoke(partitions)
                if self._auto_commit_s is not None:
                    self._commit_now(partitions)
        finally:
            if self._offsets_request is not None and not self._offsets_request[0].isdisjoint(revoked):
                self._offsets_request = None  # Its result would be out of date if the partitions are assigned again.
            self._drop(partitions)
            self._session.release(revoked)

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        self._reader.stop_reading(partitions)
        for tp in partitions:
            del self._assigned[tp]
            self._last.pop(tp, None)

    def _start_assigned(self, new: frozenset[AssignedPartition], notice: GroupNotice) -> None:
        """Request the committed offsets of new partitions, and start to read after the response."""
        if self._offsets_request is None:
            if time.monotonic() >= self._request_offsets_at:
                self._offsets_request = (new, self._session.offsets(new))
            return
        asked, answer = self._offsets_request
        if not answer.done():
            if not new <= asked:  # The old request may wait for a transaction that does not concern the new partitions.
                self._offsets_request = (new, self._session.offsets(new))
            return
        self._offsets_request = None
        try:
            offsets = answer.result()
            starts = {one: offsets[one] for one in sorted(asked & new) if one in offsets}
            if len(offsets) < len(asked):  # The other partitions wait for the end of a transaction. Request them later.
                self._request_offsets_at = time.monotonic() + _RETRY_S
            self._reader.start_reading(starts)
        except SparklogError as error:
            self._defer_start(error)
            return
        partitions = [one.tp for one in starts]
        self._assigned.update(zip(partitions, starts, strict=True))
        positions = self._reader.positions()
        for tp, at in zip(partitions, starts.values(), strict=True):
            if at is not None or not self._start_moves:
                self._last[tp] = positions[tp], _done()
        self._awaits_start = bool(notice.assigned.difference(self._assigned.values()))
        if partitions and self._on_assign is not None:
            self._on_assign(partitions)

    def _defer_start(self, error: SparklogError) -> None:
        """Retry later if the error is retriable. Otherwise raise it.

        After some other errors also wait, because the coordinator will soon revoke the partitions: another member has
        them, or their topics were deleted.
        """
        known = {ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.INCONSISTENT_TOPIC_ID}
        if isinstance(error, BrokerError) and not (error.retriable or error.code in known):
            raise error
        _log.info("the start of new partitions is delayed: %s", error)
        self._request_offsets_at = time.monotonic() + _RETRY_S

    def close(self, *, processed: bool = True) -> None:
        """Call ``on_revoke``, commit the positions if auto-commit is on, and leave the group.

        If ``processed`` is False, commit nothing automatically, so that the last returned records are read again.
        """
        if not processed:
            self._auto_commit_s = None
        try:
            if self._session.accept_assignment(self._incarnation).incarnation == self._incarnation and self._assigned:
                self._revoke(frozenset(self._assigned.values()))
        except SparklogError as error:
            _log.info("the partitions were not given up: %s", error)
        finally:
            self._session.close()


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _took_effect(ended: Future[None]) -> bool:
    return ended.done() and not ended.cancelled() and ended.exception() is None


def _log_failure(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None:
        _log.warning("the positions were not committed: %s", error)
