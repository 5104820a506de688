"""The session of a group member with its coordinator: heartbeats, commits and committed offsets.

A thread of the session sends these requests, so that they do not stop while user code works. The session's thread and
the consumer share little state, under one lock: the assignment by the coordinator, and the partitions that the consumer
reads (``owned``). When the consumer polls, it starts to read new partitions and gives up revoked partitions. The next
heartbeat reports both. Only the response to the last heartbeat counts: a late response to an earlier heartbeat might
assign partitions that another member has got in the meantime.

A member that was removed from the group joins again with a new member id. The member loses the partitions that it had
before, and its unsent commits are refused. ``GroupNotice.incarnation`` counts these removals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from sparklog.client.cluster.coordinator_search import GROUP
from sparklog.client.cluster.loop_cluster import LoopCluster
from sparklog.client.cluster.loop_coordinator import Attempts, LoopCoordinator
from sparklog.client.cluster.request_pieces import pieces
from sparklog.client.consumer.group_commits import REMOVED, REMOVED_SINCE, AssignedPartition, Commit, GroupCommits
from sparklog.client.errors import ClientTimeout, CommitRefused
from sparklog.errors import BrokerError, ErrorCode, SparklogError
from sparklog.net.client_security import Security
from sparklog.net.loop import new_event_loop
from sparklog.protocol.messages import (
    JOIN,
    LEAVE,
    LEAVE_STATIC,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    Heartbeat,
    HeartbeatReply,
    TopicPartitions,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAST_PAUSE_S = 0.05
_LEAVE_S = 3.0


class MemberSettings(NamedTuple):
    """The settings of a member, with times in milliseconds; see ``Consumer``."""

    group: str
    topics: tuple[str, ...]
    pattern: str
    instance_id: str
    rack: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_poll_interval_ms: int


class GroupMetadata(NamedTuple):
    """The identity of a member that sends offsets with a transaction.

    ``topic_ids`` has the ids of the topics that the member reads, by name.
    """

    group: str
    member_id: str
    epoch: int
    topic_ids: Mapping[str, str]


class GroupNotice(NamedTuple):
    """The assignment of a member since its last join, and the partitions that the consumer must stop reading.

    ``incarnation`` counts the times that the member was removed from the group or left it.
    """

    incarnation: int
    epoch: int
    assigned: frozenset[AssignedPartition]
    revoked: frozenset[AssignedPartition]


class GroupSession:
    """The session of one group member, whose own thread sends the heartbeats and commits.

    The user's thread calls the methods. ``close`` ends the session's thread.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        settings: MemberSettings,
        *,
        client_id: str,
        timeout_s: float,
        security: Security = None,
    ) -> None:
        """Start the thread. Raises ConfigError if the bootstrap servers are not addresses."""
        self._settings = settings
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._member_id = str(uuid.uuid4())
        self._incarnation = 0
        self._epoch = JOIN
        self._sequence = 0
        self._assigned: frozenset[AssignedPartition] = frozenset()
        self._owned: frozenset[AssignedPartition] = frozenset()
        self._error: SparklogError | None = None
        self._polled_at = time.monotonic()
        self._polling = False
        self._has_left = False
        self._closing = False
        self._ended = False
        #: A pipe that becomes readable when the assignment has changed or a request of the consumer is done.
        self.wake_fd, self._write_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._write_fd, False)
        self._loop = new_event_loop()
        try:
            self._cluster = LoopCluster(
                bootstrap, client_id=client_id, changed=lambda: None, request_timeout_s=10.0, security=security
            )
        except BaseException:
            self._loop.close()
            self._close_pipe()
            raise
        self._coordinator = LoopCoordinator(self._cluster, GROUP, settings.group, request_timeout_s=10.0)
        self._commits = GroupCommits(
            self._coordinator, settings.group, timeout_s=timeout_s, member=lambda: (self._incarnation, self._member_id)
        )
        self._woken = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sparklog-group", daemon=True)
        self._thread.start()

    # --- the consumer's side ---

    @property
    def member_id(self) -> str:
        return self._member_id

    @property
    def epoch(self) -> int:
        """Return the last known member epoch, or 0 before the member has joined."""
        return self._epoch

    def polling(self, now: bool) -> None:
        """Record that the consumer begins to wait for records (``now`` is true), or returns to user code."""
        self._polled_at = time.monotonic()
        self._polling = now
        if self._has_left:
            self._wake()

    def accept_assignment(self, incarnation: int) -> GroupNotice:
        """Return the current assignment, and count its partitions as owned by the consumer from now on.

        ``incarnation`` is the number in the consumer's last ``GroupNotice``, or 0 if the consumer has none. If the
        member has been removed from the group since then, no partition counts as owned: the consumer must first drop
        all of its partitions.

        Raises:
            BrokerError: the reason why the group refuses this member.
        """
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake_fd, 1024):
                pass
        with self._lock:
            if self._incarnation == incarnation:
                if self._error is not None:
                    raise self._error
                self._owned |= self._assigned
            return GroupNotice(self._incarnation, self._epoch, self._assigned, self._owned - self._assigned)

    def metadata(self, incarnation: int, topic_ids: Mapping[str, str]) -> GroupMetadata:
        """Return the identity of the member for transactions.

        ``incarnation`` is the number in the consumer's last ``GroupNotice``. Raises CommitRefused if the member has
        been removed from the group since then.
        """
        with self._lock:
            if self._incarnation != incarnation:
                raise CommitRefused(ErrorCode.UNKNOWN_MEMBER_ID, REMOVED_SINCE)
            return GroupMetadata(self._settings.group, self._member_id, self._epoch, topic_ids)

    def release(self, partitions: Collection[AssignedPartition]) -> None:
        """Give up partitions that the consumer no longer reads. Send their last commits before this call."""
        with self._lock:
            self._owned -= frozenset(partitions)
        self._wake()

    def commit(self, incarnation: int, offsets: Mapping[AssignedPartition, int]) -> Future[None]:
        """Commit offsets after all earlier commits. The future raises CommitRefused, BrokerError or ClientTimeout."""
        done: Future[None] = Future()
        with self._lock:
            if not self._ended:
                self._commits.put(Commit(incarnation, self._epoch, offsets, done))
                self._call(self._commits.wake)
                return done
        done.set_exception(_closed())
        return done

    def offsets(self, partitions: Collection[AssignedPartition]) -> Future[dict[AssignedPartition, int | None]]:
        """Return a future of the committed offsets of partitions that are assigned to the member.

        The offset is None if there is no committed offset. The result has no entry for a partition whose offsets are
        part of an open transaction. If this is true of all partitions, the coordinator delays the response until a
        transaction has ended. The future raises BrokerError (STALE_MEMBER_EPOCH if a partition is not assigned to the
        member) or ClientTimeout.
        """
        return self._start(self._fetch_offsets(frozenset(partitions)))

    def close(self) -> None:
        """Leave the group and end the thread. A second call does nothing."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._call(self._commits.end)
            self._thread.join(_LEAVE_S + 10)
            if not self._thread.is_alive():  # Otherwise the thread could write to a file that reuses the descriptor.
                self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self.wake_fd)
        os.close(self._write_fd)

    def _wake(self) -> None:
        self._call(self._woken.set)

    def _call(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(work)

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        done: Future[T] = Future()

        async def run() -> None:
            try:
                done.set_result(await work)
            except asyncio.CancelledError:
                done.set_exception(_closed())
            except Exception as error:
                done.set_exception(error)
            self._wake_consumer()

        with self._lock:
            if not self._ended:
                self._call(lambda: self._cluster.start(run()))
                return done
        work.close()
        done.set_exception(_closed())
        return done

    # --- the thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run_session())
        except Exception as error:
            _log.exception("the thread of a group's member failed")
            self._fail(BrokerError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the group's thread ended: {error!r}"))
        finally:
            with self._lock:
                self._ended = True
            self._loop.run_until_complete(asyncio.sleep(0))  # runs callbacks that were added just before
            self._cluster.close()
            self._loop.run_until_complete(self._cluster.closed())
            self._loop.run_until_complete(asyncio.sleep(0))
            asyncio.set_event_loop(None)
            self._loop.close()
            self._commits.refuse_rest(_closed())

    async def _run_session(self) -> None:
        commits = asyncio.ensure_future(self._commits.send_all())
        try:
            failures = 0
            while not self._closing and self._error is None:
                if self._is_poll_overdue():
                    await self._leave_until_poll()
                    continue
                began = time.monotonic()
                try:
                    has_response = await self._send_heartbeat(failures)
                except BrokerError as error:
                    self._refused(error)
                    await self._pause(self._coordinator.pause_s(failures))
                    failures += 1
                    continue
                failures = 0
                if has_response:
                    await self._wait_for_next_heartbeat(began)
            while not self._closing:  # After an error, go on until ``close``, so that ``send_all`` handles all commits.
                await self._wait_until_woken()
        finally:
            _, unfinished = await asyncio.wait({commits}, timeout=_LEAVE_S)
            if unfinished:
                commits.cancel()
                await asyncio.wait({commits})
        if self._error is None:
            await self._leave()

    async def _wait_until_woken(self) -> None:
        self._woken.clear()
        if not self._closing:
            await self._woken.wait()

    async def _send_heartbeat(self, failures: int) -> bool:
        """Send one heartbeat. Raises BrokerError.

        Return False if the member's state has changed before the response. Then the next heartbeat is sent at once.
        """
        self._woken.clear()
        request = self._heartbeat()
        timeout_s = self._settings.heartbeat_interval_ms / 1000 + self._coordinator.timeout_s(failures)
        asked = asyncio.ensure_future(self._coordinator.ask_once(request, HeartbeatReply, timeout_s=timeout_s))
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({asked, woken}, return_when=asyncio.FIRST_COMPLETED, timeout=self._poll_time_left_s())
            if not asked.done():
                return False
            self._on_response(asked.result())
            return True
        finally:
            for task in (asked, woken):
                if not task.done():
                    task.cancel()
            await asyncio.wait({asked, woken})
            if not asked.cancelled():
                asked.exception()

    def _heartbeat(self, epoch: int | None = None) -> Heartbeat:
        settings = self._settings
        with self._lock:
            self._sequence += 1
            return Heartbeat(
                0,
                settings.group,
                self._member_id,
                self._epoch if epoch is None else epoch,
                self._sequence,
                _by_topic(self._owned | self._assigned),
                settings.topics,
                settings.pattern,
                settings.instance_id,
                settings.rack,
                settings.session_timeout_ms,
                settings.max_poll_interval_ms,
                settings.heartbeat_interval_ms,
            )

    def _on_response(self, reply: HeartbeatReply) -> None:
        assigned = frozenset(
            AssignedPartition(found.topic, found.topic_id, number)
            for found in reply.assigned
            for number in found.partitions
        )
        with self._lock:
            changed = assigned != self._assigned
            self._epoch, self._assigned = reply.member_epoch, assigned
        if changed:
            self._wake_consumer()

    async def _wait_for_next_heartbeat(self, began: float) -> None:
        """Wait until the next heartbeat is due.

        While the consumer is giving up partitions, the next heartbeat is sent when it has done so, but at the latest
        after the heartbeat interval. Otherwise it is sent at once, because the coordinator delays its response.
        """
        with self._lock:
            giving_up = not self._owned <= self._assigned
        if giving_up:
            await self._pause(self._settings.heartbeat_interval_ms / 1000)
        elif time.monotonic() - began < _LEAST_PAUSE_S:
            await self._pause(_LEAST_PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        """Wait for a number of seconds, or until the session is woken."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), max(0.001, min(seconds, self._poll_time_left_s())))

    def _refused(self, error: BrokerError) -> None:
        if error.code in REMOVED:
            _log.warning("group %s: %s; joining again", self._settings.group, error)
            self._begin_incarnation()
        elif not error.retriable:
            self._fail(error)

    def _begin_incarnation(self) -> None:
        with self._lock:
            self._incarnation += 1
            self._member_id = str(uuid.uuid4())
            self._epoch = JOIN
            self._assigned = self._owned = frozenset()
        self._wake_consumer()

    def _fail(self, error: SparklogError) -> None:
        self._begin_incarnation()
        self._error = error
        self._wake_consumer()

    # --- user code that takes too long ---

    def _poll_time_left_s(self) -> float:
        if self._polling:
            return self._settings.max_poll_interval_ms / 1000
        return max(0.001, self._polled_at + self._settings.max_poll_interval_ms / 1000 - time.monotonic())

    def _is_poll_overdue(self) -> bool:
        return not self._polling and self._poll_time_left_s() <= 0.001

    async def _leave_until_poll(self) -> None:
        """Leave the group because user code takes too long, so that other members can read the partitions.

        Return at the next poll. Then the member joins again.
        """
        limit_ms = self._settings.max_poll_interval_ms
        _log.warning("group %s: no poll for max_poll_interval_ms=%d: leaving", self._settings.group, limit_ms)
        self._has_left = True
        await self._leave(permanently=True)
        self._begin_incarnation()
        while self._is_poll_overdue() and not self._closing:
            await self._wait_until_woken()
        self._has_left = False

    async def _leave(self, *, permanently: bool = False) -> None:
        """Notify the coordinator that the member leaves. If this fails, the session timeout removes the member."""
        static = bool(self._settings.instance_id) and not permanently
        attempts = Attempts(self._coordinator, timeout_s=_LEAVE_S)
        try:
            await attempts.ask(self._heartbeat(LEAVE_STATIC if static else LEAVE), HeartbeatReply)
        except (BrokerError, ClientTimeout) as error:
            if not isinstance(error, BrokerError) or error.code not in REMOVED:
                _log.info("group %s: the coordinator did not confirm the leave: %s", self._settings.group, error)

    # --- offsets ---

    async def _fetch_offsets(self, partitions: frozenset[AssignedPartition]) -> dict[AssignedPartition, int | None]:
        wanted = tuple((topic, number) for topic, _, number in sorted(partitions))
        attempts = Attempts(self._coordinator, timeout_s=self._timeout_s)
        found: dict[tuple[str, int], GroupOffset] = {}
        held: set[tuple[str, int]] = set()
        for piece in pieces(wanted):
            request = FetchOffsets(0, self._settings.group, tuple(piece), self._member_id, self._epoch)
            reply = await attempts.ask(request, FetchOffsetsReply)
            if reply.refused:
                names = ", ".join(sorted({one.topic for one in reply.refused}))
                raise BrokerError(reply.refused[0].code, f"{reply.refused[0].detail}; refused topics: {names}")
            found.update({(one.topic, one.partition): one for one in reply.offsets})
            held.update(reply.held)
        offsets: dict[AssignedPartition, int | None] = {}
        for asked in partitions:
            if asked.tp not in held:
                one = found.get(asked.tp)
                offsets[asked] = one.offset if one is not None and one.topic_id in {"", asked.topic_id} else None
        return offsets

    def _wake_consumer(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b"!")


def _closed() -> ClientTimeout:
    return ClientTimeout("the consumer is closed, or its group refused it; no request was sent")


def _by_topic(partitions: Iterable[AssignedPartition]) -> tuple[TopicPartitions, ...]:
    by_topic: dict[tuple[str, str], list[int]] = {}
    for topic, topic_id, number in sorted(partitions):
        by_topic.setdefault((topic, topic_id), []).append(number)
    return tuple(TopicPartitions(*topic, tuple(numbers)) for topic, numbers in by_topic.items())
