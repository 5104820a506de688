"""The fetches of consumers and of bounded reads.

One fetch to each broker is in flight, even while the caller uses the records of the last response. One thread does all
the work. ``advance`` sends fetches to the brokers that have none in flight, waits for the first responses, and checks
them. The next fetch to a broker is sent before the last response is decoded, unless that response reached the end of
the log. If the position of a partition has changed since the request, for example by a seek, its batches are dropped.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterable, Mapping, Sequence

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.quota_waits import QuotaWaits
from sparklog.client.cluster.replica_selector import nearest
from sparklog.client.cluster.retry import UNKNOWN_TOPIC_GRACE_S
from sparklog.client.cluster.routing_core import PATIENCE_S, no_leader
from sparklog.client.consumer.fetch_turns import FetchTurns
from sparklog.client.consumer.fetched_batches import PartitionBytes, split_partitions
from sparklog.client.consumer.partition_cursor import CompletedFetch, PartitionCursor
from sparklog.client.consumer.projection import ColumnsOf
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.client.errors import LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.net.descriptors import is_this_host
from sparklog.protocol.messages import CONSUMER, Fetch, FetchedPartition, FetchPartition, FetchReply

_MAX_WAIT_MS = 500
#: The maximum wait of a fetch that has no room for all partitions of the broker.
_SHORT_WAIT_MS = 250
#: The time without a response or without progress after which the leader may have a successor that it does not know.
_SUSPECT_AFTER_S = PATIENCE_S + _MAX_WAIT_MS / 1000
#: The size from which a response counts as large. While the caller uses a large response, more records are likely to
#: arrive.
_LARGE_BYTES = 256 * 1024


class _FetchInFlight:
    """A fetch request in flight at one broker, with the requested partitions and offsets."""

    __slots__ = ("asked", "broker_id", "connection", "leaders", "sent_at")

    def __init__(self, broker_id: int, asked: dict[TopicPartition, int], leaders: dict[TopicPartition, Leader]) -> None:
        self.broker_id = broker_id
        self.asked = asked
        #: The leaders and leader epochs of the partitions when the request was made.
        self.leaders = leaders
        #: The connection for the request, which is set before the request is sent.
        self.connection: BlockingConnection
        self.sent_at = time.monotonic()

    def is_from_follower(self, tp: TopicPartition) -> bool:
        return self.leaders[tp].broker_id != self.broker_id


class Fetcher:
    """The fetcher of one consumer or reader: it sends fetch requests to brokers and checks the responses.

    Not thread-safe: use it only in the consumer's thread. The caller may change ``cursors`` between calls.
    """

    def __init__(
        self,
        cluster: BlockingCluster,
        *,
        max_bytes: int,
        isolation: int,
        columns: ColumnsOf,
        timeout_s: float | None = None,
        from_followers: bool = False,
    ) -> None:
        """Create the fetcher.

        Args:
            max_bytes: the maximum size of one response.
            timeout_s: the time for which all fetches of a partition may fail. None: the cluster client's timeout.
            from_followers: fetch from the nearest in-sync replica instead of the leader.
        """
        self.counters = ReadCounters()
        self.cursors: dict[TopicPartition, PartitionCursor] = {}
        self._cluster = cluster
        self._max_bytes = max_bytes
        self._isolation = isolation
        self._columns = columns
        self._timeout_s = cluster.timeout_s if timeout_s is None else timeout_s
        self._from_followers = from_followers
        #: The followers that failed. The fetcher does not use them again.
        self._avoided: set[int] = set()
        self._connections: dict[int, BlockingConnection] = {}
        #: The fetch in flight at each broker, by broker id.
        self._in_flight: dict[int, _FetchInFlight] = {}
        #: The brokers to which nothing is sent because a quota is exceeded, with the monotonic time at which the wait
        #: ends.
        self._throttled: dict[int, float] = {}
        self._quota_waits = QuotaWaits()
        self._stale: set[str] = set()
        self._refresh_at = 0.0
        self._turns = FetchTurns(columns)
        #: The offsets up to which to fetch (exclusive). Partitions that are not in it are not fetched. None: all
        #: partitions are fetched, without an end.
        self.ends: Mapping[TopicPartition, int] | None = None
        #: Assigned partitions that are not fetched, and whose records are not returned.
        self.paused: set[TopicPartition] = set()
        #: A file descriptor. ``advance`` returns when it is readable. The descriptor's owner must read from it.
        self.wake_fd: int | None = None
        #: Whether ``wake_fd`` was readable in the last ``advance``.
        self.woken = False
        self._deferred: Exception | None = None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._in_flight.clear()

    def advance(self, timeout_s: float) -> list[CompletedFetch]:
        """Wait for responses with batches, for at most ``timeout_s``, and return them.

        The cursors move past the returned batches.

        Raises:
            LogTruncated: records that were read before are no longer in the log.
            BrokerError: OFFSET_OUT_OF_RANGE and all errors that are not retriable. Positions are unchanged.
            ClientTimeout: all fetches of a partition have failed for the fetcher's ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        self.woken = False
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            if not self._is_outdated(error):
                raise error
        while True:
            now = time.monotonic()
            self._refresh_when_due(now)
            self._send_missing(now)
            left = max(0.0, deadline - now)
            completed = self._receive_ready(min(left, self._next_check_s(now)))
            if completed or self.woken or time.monotonic() >= deadline:
                return completed

    def defer(self, error: Exception) -> None:
        """Store an error that the next ``advance`` raises, after the records before the error have been returned."""
        self._deferred = self._deferred or error

    def _is_outdated(self, error: Exception) -> bool:
        """Return whether ``error`` is a truncation at a position that a seek or a revocation has made obsolete."""
        if not isinstance(error, LogTruncated):
            return False
        cursor = self.cursors.get(error.tp)
        return cursor is None or cursor.position != error.position

    # --- sending ---

    def _send_missing(self, now: float) -> None:
        for broker_id, group in self._group_by_source(self._sendable(now)).items():
            if broker_id is None:
                self._stale.update(tp.topic for tp in group)
            elif broker_id not in self._in_flight and not self._waits(broker_id, now):
                self._send(broker_id, group)

    def _send_ahead(self, broker_id: int) -> None:
        """Send the next fetch to a broker before its response is used. An error is raised by the next ``advance``."""
        now = time.monotonic()
        group = self._group_by_source(self._sendable(now)).get(broker_id)
        if group and not self._waits(broker_id, now):
            try:
                self._send(broker_id, group)
            except Exception as error:
                self.defer(error)

    def _waits(self, broker_id: int, now: float) -> bool:
        """Return whether the next fetch to the broker must wait, because a quota is exceeded."""
        until = self._throttled.get(broker_id)
        if until is None:
            return False
        if until <= now:
            del self._throttled[broker_id]
            return False
        return True

    def _sendable(self, now: float) -> list[TopicPartition]:
        ends = self.ends
        return [
            cursor.tp
            for cursor in self.cursors.values()
            if cursor.retry_at <= now
            and (ends is None or cursor.position < ends.get(cursor.tp, 0))
            and cursor.tp not in self.paused
        ]

    def _group_by_source(self, partitions: Iterable[TopicPartition]) -> dict[int | None, list[TopicPartition]]:
        """Group partitions by the broker to fetch them from. Partitions without a known leader get the key None."""
        if not self._from_followers:
            return self._cluster.metadata.group_by_leader(partitions)
        groups: dict[int | None, list[TopicPartition]] = {}
        for tp in partitions:
            groups.setdefault(self._nearest(tp), []).append(tp)
        return groups

    def _nearest(self, tp: TopicPartition) -> int | None:
        """Return the broker to fetch from, or None if the partition has no known leader.

        If only a bound of the last epoch is known, return the leader: only the leader can check for a truncation.
        """
        metadata = self._cluster.metadata
        leader, partition = metadata.leader(tp), metadata.partition(tp)
        if leader is None or partition is None:
            return None
        if self.cursors[tp].epoch_is_bound:
            return leader.broker_id
        in_sync = [broker_id for broker_id in partition.isr if broker_id not in self._avoided]
        return nearest(leader.broker_id, in_sync, metadata.brokers, is_here=is_this_host)

    def _send(self, broker_id: int, group: list[TopicPartition]) -> None:
        named = self._turns.next(broker_id, group)
        leaders: dict[TopicPartition, Leader] = {}
        for tp in named:
            leader = self._cluster.metadata.leader(tp)
            assert leader is not None, "partitions were grouped by it"
            leaders[tp] = leader
        fetch = _FetchInFlight(broker_id, {tp: self.cursors[tp].position for tp in named}, leaders)
        request = Fetch(
            0,
            CONSUMER,
            incarnation=-1,
            max_wait_ms=_MAX_WAIT_MS if len(named) == len(group) else _SHORT_WAIT_MS,
            min_bytes=1,
            max_bytes=self._max_bytes,
            isolation=self._isolation,
            session_id=0,
            session_epoch=-1,
            partitions=tuple(self._wanted(self.cursors[tp], leader.epoch) for tp, leader in leaders.items()),
        )
        try:
            fetch.connection = self._connection(broker_id)
            fetch.connection.send(request)
        except BrokerError as error:
            self._fetch_failed(fetch, error)
            return
        self._in_flight[broker_id] = fetch

    def _wanted(self, cursor: PartitionCursor, leader_epoch: int) -> FetchPartition:
        return FetchPartition(
            cursor.tp.topic,
            cursor.tp.partition,
            cursor.topic_id,
            leader_epoch,
            cursor.position,
            self._max_bytes,
            last_epoch=cursor.last_epoch,
            columns=self._columns(cursor.tp.topic),
            verify=cursor.position in cursor.to_verify,
        )

    def _connection(self, broker_id: int) -> BlockingConnection:
        """Return the connection for fetches. It is not used for other requests, because a fetch would delay them."""
        connection = self._connections.get(broker_id)
        if connection is None or connection.closed:
            connection = self._connections[broker_id] = self._cluster.open_connection(broker_id)
        return connection

    # --- receiving ---

    def _receive_ready(self, wait_s: float) -> list[CompletedFetch]:
        if not self._in_flight and self.wake_fd is None:
            time.sleep(wait_s)
            return []
        poller = select.poll()
        if self.wake_fd is not None:
            poller.register(self.wake_fd, select.POLLIN)
        by_socket = {}
        for broker_id, fetch in self._in_flight.items():
            number = fetch.connection.fileno()
            by_socket[number] = broker_id
            poller.register(number, select.POLLIN)
        completed: list[CompletedFetch] = []
        # The poller does not see replies that a connection has read already.
        ready = {number: None for number, broker_id in by_socket.items() if self._has_received(broker_id)}
        ready |= dict.fromkeys(number for number, _ in poller.poll(0 if ready else wait_s * 1000))
        for number in ready:
            if number == self.wake_fd:
                self.woken = True
                continue
            try:
                completed += self._receive(by_socket[number])
            except Exception as error:
                if not completed:
                    raise
                self.defer(error)
                break
        return completed

    def _has_received(self, broker_id: int) -> bool:
        return self._in_flight[broker_id].connection.has_received

    def _receive(self, broker_id: int) -> list[CompletedFetch]:
        fetch = self._in_flight.pop(broker_id)
        try:
            reply, body = fetch.connection.receive()
            if not isinstance(reply, FetchReply):
                fetch.connection.close()
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST, f"broker {broker_id} responded to Fetch with {reply!r:.100}"
                )
            if reply.throttle_time_ms:
                self._throttle(broker_id, reply.throttle_time_ms)
            if reply.code != ErrorCode.NONE:
                raise BrokerError(reply.code, f"fetch from broker {broker_id}")
        except BrokerError as error:
            self._fetch_failed(fetch, error)
            return []
        checked = [
            (cursor, part)
            for part in split_partitions(reply.partitions, body)
            if (cursor := self._checked(fetch, part)) is not None
        ]
        completed = [cursor.move_past(part) for cursor, part in checked]
        if completed and _more_follows([part for _, part in checked]):
            self._send_ahead(broker_id)
        return completed

    def _throttle(self, broker_id: int, throttle_time_ms: int) -> None:
        now, waits = time.monotonic(), self._quota_waits
        self._throttled[broker_id] = now + waits.add(f"broker {broker_id}", throttle_time_ms, now) / 1000
        self.counters.quota_waits, self.counters.quota_waited_ms = waits.waits, waits.waited_ms

    def _checked(self, fetch: _FetchInFlight, part: PartitionBytes) -> PartitionCursor | None:
        """Check one partition of a response. Return its cursor if the response has batches for the cursor's position.

        If this raises, the batches of the other partitions are dropped. Their positions have not changed, so these
        batches are fetched again.
        """
        tp = TopicPartition(part.answer.topic, part.answer.partition)
        cursor = self.cursors.get(tp)
        if cursor is None or tp in self.paused or fetch.asked.get(tp) != cursor.position:
            return None
        try:
            if part.answer.code != ErrorCode.NONE:
                raise BrokerError(part.answer.code, part.answer.detail or f"fetch of {tp}")
            if part.answer.diverging is not None:
                cursor.on_diverging(part.answer.diverging)
        except BrokerError as error:
            self._partition_failed(fetch, cursor, error)
            return None
        cursor.end_failures()
        self._cluster.core.on_progress()
        self.counters.count(part)
        if not part.headers:
            self._check_empty(fetch, cursor, part.answer)
            return None
        if fetch.is_from_follower(tp):
            self.counters.follower_batches += len(part.headers)
        return cursor

    def _check_empty(self, fetch: _FetchInFlight, cursor: PartitionCursor, answer: FetchedPartition) -> None:
        """Handle a response without batches.

        If the log is known to have more records, and the leader has not returned them for a long time, check whether it
        is still the leader.
        """
        now = time.monotonic()
        waiting_s = cursor.on_empty(water_marks(answer), now)
        if self.ends is not None and waiting_s > _SUSPECT_AFTER_S:
            cursor.waiting_since = now
            self._leave_follower(fetch, cursor)
            # Ignore the error: ``confirm`` has updated the metadata, and the next fetch goes to the leader there.
            with contextlib.suppress(BrokerError):
                self._cluster.confirm(cursor.tp, fetch.leaders[cursor.tp])

    # --- failures ---

    def _fetch_failed(self, fetch: _FetchInFlight, error: BrokerError) -> None:
        for tp in fetch.asked:
            cursor = self.cursors.get(tp)
            if cursor is not None:
                self._partition_failed(fetch, cursor, error)

    def _partition_failed(self, fetch: _FetchInFlight, cursor: PartitionCursor, error: BrokerError) -> None:
        if not self._leave_follower(fetch, cursor):  # Only the error of a leader counts.
            self._failed(cursor, self._doubt(fetch, cursor, error) or error)

    def _leave_follower(self, fetch: _FetchInFlight, cursor: PartitionCursor) -> bool:
        """Do not fetch from this follower any more. Return False if the fetch was sent to the leader."""
        is_follower = fetch.is_from_follower(cursor.tp)
        if is_follower:
            self._avoided.add(fetch.broker_id)
        return is_follower

    def _doubt(self, fetch: _FetchInFlight, cursor: PartitionCursor, error: BrokerError) -> BrokerError | None:
        """Return the reason not to trust the leader's error, or None.

        The leader may have a successor without knowing it, so for some errors the other brokers must confirm it. If the
        error reports a truncation below records whose epoch is known, no confirmation is needed.
        """
        if isinstance(error, LogTruncated) and not cursor.epoch_is_bound:
            return None
        lags = cursor.failing_s(time.monotonic()) > _SUSPECT_AFTER_S
        if error.code == ErrorCode.OFFSET_OUT_OF_RANGE or (error.code == ErrorCode.OFFSET_NOT_AVAILABLE and lags):
            try:
                self._cluster.confirm(cursor.tp, fetch.leaders[cursor.tp])
            except BrokerError as doubt:
                return doubt
        return None

    def _failed(self, cursor: PartitionCursor, error: BrokerError) -> None:
        """Retry later. Raises the errors of ``PartitionCursor.on_error``."""
        cursor.on_error(
            error,
            time.monotonic(),
            pause_ms=self._cluster.pause_ms(cursor.failures),
            timeout_s=self._timeout_s,
            grace_s=UNKNOWN_TOPIC_GRACE_S,
        )
        if error.refresh_metadata:
            self._stale.add(cursor.tp.topic)

    def _refresh_when_due(self, now: float) -> None:
        self._suspect_silent(now)
        if not self._stale or now < self._refresh_at:
            return
        topics, self._stale = self._stale, set()
        self._refresh_at = now + self._cluster.core.refresh_pause_s()
        self._cluster.core.on_useless()  # ``on_progress`` resets the count after a successful fetch.
        try:
            self._cluster.refresh(sorted(topics))
        except BrokerError as error:
            self._stale |= topics
            for cursor in self._cursors_of(topics):
                self._failed(cursor, error)
            return
        for cursor in self._cursors_of(topics):
            self._check_topic(cursor)

    def _cursors_of(self, topics: set[str]) -> list[PartitionCursor]:
        return [cursor for cursor in self.cursors.values() if cursor.tp.topic in topics]

    def _check_topic(self, cursor: PartitionCursor) -> None:
        topic = self._cluster.metadata.topic(cursor.tp.topic)
        if topic is not None and cursor.topic_id and topic.topic_id != cursor.topic_id:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{cursor.tp} at offset {cursor.position}: the topic was deleted and created again",
            )
        if self._cluster.metadata.leader(cursor.tp) is None:
            self._failed(cursor, no_leader(self._cluster.metadata, cursor.tp))

    def _suspect_silent(self, now: float) -> None:
        """Check the fetches without a response, because a leader may hang.

        If the partition has another leader by now, or the request timeout is over, close the connection. Otherwise
        refresh the metadata.
        """
        for broker_id, fetch in list(self._in_flight.items()):
            silent_s = now - fetch.sent_at
            if silent_s < _SUSPECT_AFTER_S or _readable(fetch.connection):
                continue
            if self._is_deposed(fetch) or silent_s > self._cluster.request_timeout_s:
                del self._in_flight[broker_id]
                fetch.connection.close()
                detail = f"broker {broker_id} has not responded for {silent_s:.1f} s"
                self._fetch_failed(fetch, BrokerError(ErrorCode.NETWORK_EXCEPTION, detail))
            else:
                self._stale.update(tp.topic for tp in fetch.asked)

    def _is_deposed(self, fetch: _FetchInFlight) -> bool:
        """Return whether a partition now has another leader than when the request was made."""
        leaders = [(self._cluster.metadata.leader(tp), fetch.leaders[tp]) for tp in fetch.asked if tp in self.cursors]
        return any(now is not None and now.broker_id != asked.broker_id for now, asked in leaders)

    def _next_check_s(self, now: float) -> float:
        """Return the time until something must be done even if no response arrives, in seconds."""
        times = [cursor.retry_at for cursor in self.cursors.values() if cursor.retry_at > now]
        times += [until for until in self._throttled.values() if until > now]
        if self._stale:
            times.append(self._refresh_at)
        return min(max(0.001, min(times) - now), 1.0) if times else 1.0


def water_marks(answer: FetchedPartition) -> str:
    """Return the log's offsets as text for error messages, to explain why a response has no records."""
    return f"the high watermark is {answer.high_watermark}, the last stable offset {answer.last_stable_offset}"


def _more_follows(parts: Sequence[PartitionBytes]) -> bool:
    """Return whether to send the next fetch before the batches of this response are used.

    If the response reached the end of the log, this would not help, because the broker would only wait. It would even
    do harm: the request wakes the broker process, which may take the processor away from this consumer.
    """
    if any(part.next_offset < part.answer.high_watermark for part in parts):
        return True
    return sum(len(part.bodies) for part in parts) >= _LARGE_BYTES


def _readable(connection: BlockingConnection) -> bool:
    """Return whether a response has arrived, perhaps long ago, while the user did not call the consumer."""
    if connection.has_received:
        return True
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    return bool(poller.poll(0))
