"""The consumer's fetches: one long poll per leader, also while the consumer uses the last response.

Single-threaded. ``advance`` sends the missing fetches, waits for the first responses and decodes them. The next fetch
to a broker is sent before its response is decoded, unless the response reached the end of the log. A response counts
only for partitions whose position is still the requested one, so a seek invalidates it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.retry import UNKNOWN_TOPIC_GRACE_S
from sparklog.client.cluster.routing_core import PATIENCE_S
from sparklog.client.consumer.fetched_batches import FetchedBatch, PartitionBytes, decode_partition, split_partitions
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.client.consumer.schema_lookup import SchemaLookup
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.header_limits import MAX_HEADER_BYTES
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply

_MAX_WAIT_MS = 500
#: The maximum wait of a fetch while other partitions of the broker wait for the next request.
_SHORT_WAIT_MS = 250
#: An upper bound of a partition's bytes in a request, without its topic and columns.
_ENTRY_BYTES = 80
#: A number of partitions that fit into one request whatever their topics' names.
_FEW = 100
#: The age of a long poll at which the consumer asks for the current leader.
_SUSPECT_AFTER_S = PATIENCE_S + _MAX_WAIT_MS / 1000
#: A response of this size takes a while to use, and more records arrive meanwhile.
_LARGE_BYTES = 256 * 1024


#: The function that returns the requested columns of a topic, or None for all.
ColumnsOf = Callable[[str], "tuple[str, ...] | None"]


class PartitionCursor:
    """The state of one assigned partition: its position, and the time from which it may be fetched."""

    __slots__ = ("failing_since", "failures", "last_epoch", "position", "retry_at", "to_verify", "topic_id", "tp")

    def __init__(self, tp: TopicPartition, topic_id: str, position: int) -> None:
        self.tp = tp
        self.topic_id = topic_id
        self.position = position
        #: The leader epoch of the record before the position; -1 if this consumer did not read that record.
        self.last_epoch = NO_EPOCH
        self.failures = 0
        self.failing_since = 0.0
        self.retry_at = 0.0
        #: The offsets of a response in which a projected batch failed its checksum. For fetches from this range the
        #: broker is asked to verify what is on its disk.
        self.to_verify = range(0)

    def move(self, position: int, last_epoch: int = NO_EPOCH) -> None:
        """Set the offset of the next fetch."""
        self.position, self.last_epoch = position, last_epoch


class CursorBatch(NamedTuple):
    """A decoded batch and its partition."""

    tp: TopicPartition
    fetched: FetchedBatch


class _Poll:
    """A fetch in flight at one broker: the requested partitions and offsets."""

    __slots__ = ("asked", "connection", "leaders", "sent_at")

    def __init__(
        self, connection: BlockingConnection, asked: dict[TopicPartition, int], leaders: dict[TopicPartition, Leader]
    ) -> None:
        self.connection = connection
        self.asked = asked
        #: The leaders and epochs by which the broker was chosen.
        self.leaders = leaders
        self.sent_at = time.monotonic()


class Fetcher:
    """The fetches of one consumer, used by its thread. ``cursors`` may be changed between calls."""

    def __init__(
        self, cluster: BlockingCluster, *, max_bytes: int, isolation: int, columns: ColumnsOf | None = None
    ) -> None:
        """Create the fetcher.

        ``columns`` returns the requested columns of a topic by its name; None: all of every topic.
        """
        self.counters = ReadCounters()
        self.cursors: dict[TopicPartition, PartitionCursor] = {}
        self._cluster = cluster
        self._max_bytes = max_bytes
        self._isolation = isolation
        self._columns = columns
        self._connections: dict[int, BlockingConnection] = {}
        self._polls: dict[int, _Poll] = {}
        self._schemas: dict[str, SchemaLookup] = {}
        self._stale: set[str] = set()
        self._refresh_at = 0.0
        self._refreshes = 0
        #: By broker, the place in its group of the partition with which its next request begins.
        self._turns: dict[int, int] = {}
        self._moved = False
        #: The partitions to fetch; None: all.
        self.active: set[TopicPartition] | None = None
        #: The partitions that are assigned, but neither fetched nor returned.
        self.paused: set[TopicPartition] = set()
        #: ``advance`` returns when this descriptor is readable. Its owner reads from it.
        self.wake_fd: int | None = None
        self._woken = False
        #: An error that followed records of the same response. The records are returned first.
        self._error: Exception | None = None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._polls.clear()

    def advance(self, timeout_s: float, *, or_moved: bool = False) -> list[CursorBatch]:
        """Return batches as soon as some arrive, at most ``timeout_s`` from now.

        Positions move past these batches, and past records that are not returned (markers, aborted records). With
        ``or_moved`` the function also returns after such a move.

        Raises:
            BrokerError: OFFSET_OUT_OF_RANGE and all errors that a retry does not fix. Positions are unchanged.
            ClientTimeout: a partition could not be read for the cluster client's timeout.
        """
        deadline = time.monotonic() + timeout_s
        self._moved = self._woken = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        while True:
            now = time.monotonic()
            self._refresh_when_due(now)
            self._send_missing(now)
            left = max(0.0, deadline - now)
            batches = self._receive_ready(min(left, self._next_check_s(now)))
            if batches or self._woken or (or_moved and self._moved) or time.monotonic() >= deadline:
                return self._without_paused(batches) if self.paused else batches

    def _without_paused(self, found: list[CursorBatch]) -> list[CursorBatch]:
        """Move the positions of paused partitions back, so that their batches are fetched again after the pause."""
        for one in reversed(found):  # reversed, so that the first batch of a partition sets the position
            if one.tp in self.paused:
                self.cursors[one.tp].move(one.fetched.first_offset)
        return [one for one in found if one.tp not in self.paused]

    # --- sending ---

    def _send_missing(self, now: float) -> None:
        for broker_id, group in self._cluster.metadata.group_by_leader(self._sendable(now)).items():
            if broker_id is None:
                self._stale.update(tp.topic for tp in group)
            elif broker_id not in self._polls:
                self._send(broker_id, group)

    def _sendable(self, now: float) -> list[TopicPartition]:
        return [
            cursor.tp
            for cursor in self.cursors.values()
            if cursor.retry_at <= now
            and (self.active is None or cursor.tp in self.active)
            and cursor.tp not in self.paused
        ]

    def _send(self, broker_id: int, group: list[TopicPartition]) -> None:
        asked = {tp: self.cursors[tp].position for tp in self._in_turn(broker_id, group)}
        leaders: dict[TopicPartition, Leader] = {}
        wanted = []
        for tp, position in asked.items():
            leader = self._cluster.metadata.leader(tp)
            assert leader is not None, "partitions were grouped by it"
            leaders[tp] = leader
            cursor = self.cursors[tp]
            wanted.append(
                FetchPartition(
                    tp.topic,
                    tp.partition,
                    cursor.topic_id,
                    leader.epoch,
                    position,
                    self._max_bytes,
                    last_epoch=cursor.last_epoch,
                    columns=self._wire_columns(tp.topic),
                    verify=position in cursor.to_verify,
                )
            )
        request = Fetch(
            0,
            CONSUMER,
            incarnation=-1,
            max_wait_ms=_MAX_WAIT_MS if len(asked) == len(group) else _SHORT_WAIT_MS,
            min_bytes=1,
            max_bytes=self._max_bytes,
            isolation=self._isolation,
            session_id=0,
            session_epoch=-1,
            partitions=tuple(wanted),
        )
        try:
            connection = self._connection(broker_id)
            connection.send(request)
        except BrokerError as error:
            self._all_failed(asked, error)
            return
        self._polls[broker_id] = _Poll(connection, asked, leaders)

    def _in_turn(self, broker_id: int, group: list[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions for the next request, as many as it may have.

        Another partition is the first one each time, because a full response leaves out those at the end. Each broker
        has its own turns. If brokers shared one counter and were asked one after the other, each request to a broker
        could begin with the same partition.
        """
        count = len(group)
        named = min(count, self._most_at_once({tp.topic for tp in group})) if count > _FEW else count
        at = self._turns.get(broker_id, 0) % count
        self._turns[broker_id] = at + (named if named < count else 1)
        return (group[at:] + group[:at])[:named]

    def _most_at_once(self, topics: Collection[str]) -> int:
        """Return the number of partitions of these topics that one request may have. Its header's size is limited."""
        largest = max(
            len(topic) + sum(len(column.encode()) + 3 for column in self._wire_columns(topic) or ()) for topic in topics
        )
        return max(1, min(MAX_ENTRIES, MAX_HEADER_BYTES // (_ENTRY_BYTES + largest)))

    def _connection(self, broker_id: int) -> BlockingConnection:
        connection = self._connections.get(broker_id)
        if connection is None or connection.closed:
            connection = self._connections[broker_id] = self._cluster.open_connection(broker_id)
        return connection

    # --- receiving ---

    def _receive_ready(self, wait_s: float) -> list[CursorBatch]:
        if not self._polls and self.wake_fd is None:
            time.sleep(wait_s)
            return []
        poller = select.poll()
        if self.wake_fd is not None:
            poller.register(self.wake_fd, select.POLLIN)
        by_socket = {}
        for broker_id, poll in self._polls.items():
            number = poll.connection.fileno()
            by_socket[number] = broker_id
            poller.register(number, select.POLLIN)
        found: list[CursorBatch] = []
        for number, _ in poller.poll(wait_s * 1000):
            if number == self.wake_fd:
                self._woken = True
                continue
            try:
                found += self._receive(by_socket[number])
            except Exception as error:
                if not found:
                    raise
                self._error = error
                break
        return found

    def _receive(self, broker_id: int) -> list[CursorBatch]:
        poll = self._polls.pop(broker_id)
        try:
            reply, body = poll.connection.receive()
            if not isinstance(reply, FetchReply):
                poll.connection.close()
                raise BrokerError(
                    ErrorCode.INVALID_REQUEST, f"broker {broker_id} responded to Fetch with {reply!r:.100}"
                )
            if reply.code != ErrorCode.NONE:
                raise BrokerError(reply.code, f"fetch from broker {broker_id}")
        except BrokerError as error:
            self._all_failed(poll.asked, error)
            return []
        answers = []
        for part in split_partitions(reply.partitions, body):
            tp = TopicPartition(part.answer.topic, part.answer.partition)
            cursor = self.cursors.get(tp)
            if cursor is None or poll.asked.get(tp) != cursor.position:
                continue
            if part.answer.code != ErrorCode.NONE:
                refusal = BrokerError(part.answer.code, part.answer.detail or f"fetch of {tp}")
                self._failed(cursor, self._doubt(cursor, poll.leaders[tp], refusal) or refusal)
                continue
            cursor.failures = 0
            self._refreshes = 0
            if part.answer.diverging is not None:
                # The batches of other partitions are dropped. Their positions are unchanged, so they are fetched again.
                raise LogTruncated(tp, cursor.position, part.answer.diverging)
            self.counters.count(part)
            if part.headers:
                answers.append((cursor, (cursor.position, cursor.last_epoch), part))
        return self._use(broker_id, answers)

    def _use(
        self, broker_id: int, answers: list[tuple[PartitionCursor, tuple[int, int], PartitionBytes]]
    ) -> list[CursorBatch]:
        """Decode ``answers``, which have the position and last epoch of their request."""
        for _, _, part in answers:
            self._load_schemas(part)
        for cursor, _, part in answers:
            cursor.move(part.next_offset, part.headers[-1].leader_epoch)
        if answers:
            self._moved = True
            if _more_follows([part for _, _, part in answers]):
                self._send_ahead(broker_id)
        found: list[CursorBatch] = []
        decoded = 0
        try:
            for cursor, (start, _), part in answers:
                schema_of = self._schema_of(cursor.tp.topic)
                columns = self._wire_columns(cursor.tp.topic)
                batches = decode_partition(part, schema_of, start=start, columns=columns)
                found += [CursorBatch(cursor.tp, batch) for batch in batches]
                decoded += 1
        except Exception as error:
            # No record may be skipped: this partition and the ones after it are fetched again.
            for cursor, asked, _ in answers[decoded:]:
                cursor.move(*asked)
            if self._asks_to_verify(answers[decoded][0], answers[decoded][2], error):
                return found
            if not found and self._error is None:
                raise
            self._error = self._error or error
        return found

    def _asks_to_verify(self, cursor: PartitionCursor, part: PartitionBytes, error: Exception) -> bool:
        """Request verification if a projected batch was damaged that the broker did not verify.

        Return whether it applies.

        Only the broker can tell damage on its disk from damage on the way.
        """
        if (
            self._wire_columns(cursor.tp.topic) is None
            or cursor.position in cursor.to_verify
            or not (isinstance(error, BrokerError) and error.code == ErrorCode.CORRUPT_MESSAGE)
        ):
            return False
        cursor.to_verify = range(cursor.position, part.next_offset)
        return True

    def _send_ahead(self, broker_id: int) -> None:
        """Send the next fetch while this response is used. An error is raised after the batches of the response."""
        group = self._cluster.metadata.group_by_leader(self._sendable(time.monotonic())).get(broker_id)
        if group:
            try:
                self._send(broker_id, group)
            except Exception as error:
                self._error = error

    def _wire_columns(self, topic: str) -> tuple[str, ...] | None:
        return None if self._columns is None else self._columns(topic)

    def _schema_of(self, topic: str) -> SchemaLookup:
        lookup = self._schemas.get(topic)
        if lookup is None:
            lookup = self._schemas[topic] = SchemaLookup(self._cluster, topic)
        return lookup

    def _load_schemas(self, part: PartitionBytes) -> None:
        schema_of = self._schema_of(part.answer.topic)
        for header in part.headers:
            schema_of(header.schema_id)

    # --- failures ---

    def _doubt(self, cursor: PartitionCursor, leader: Leader, error: BrokerError) -> BrokerError | None:
        """Return the reason not to trust the leader's error, or None. The leader may be deposed without knowing it."""
        lags = cursor.failures > 0 and time.monotonic() - cursor.failing_since > _SUSPECT_AFTER_S
        if error.code == ErrorCode.OFFSET_OUT_OF_RANGE or (error.code == ErrorCode.OFFSET_NOT_AVAILABLE and lags):
            try:
                self._cluster.confirm(cursor.tp, leader)
            except BrokerError as doubt:
                return doubt
        return None

    def _all_failed(self, asked: Mapping[TopicPartition, int], error: BrokerError) -> None:
        for tp in asked:
            cursor = self.cursors.get(tp)
            if cursor is not None:
                self._failed(cursor, error)

    def _failed(self, cursor: PartitionCursor, error: BrokerError) -> None:
        now = time.monotonic()
        if not cursor.failures:
            cursor.failing_since = now
        since = now - cursor.failing_since
        unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and since > UNKNOWN_TOPIC_GRACE_S
        if not error.retriable or unknown:
            raise BrokerError(error.code, f"{cursor.tp} at offset {cursor.position}: {error.detail}")
        if since > self._cluster.timeout_s:
            raise ClientTimeout(
                f"reading {cursor.tp} at offset {cursor.position}: not possible for {self._cluster.timeout_s:g} s,"
                f" last: {error}"
            ) from error
        cursor.retry_at = now + self._cluster.pause_ms(cursor.failures) / 1000
        cursor.failures += 1
        if error.refresh_metadata:
            self._stale.add(cursor.tp.topic)

    def _refresh_when_due(self, now: float) -> None:
        self._suspect_silent(now)
        if not self._stale or now < self._refresh_at:
            return
        topics, self._stale = self._stale, set()
        self._refresh_at = now + self._cluster.pause_ms(self._refreshes) / 1000
        self._refreshes += 1
        try:
            self._cluster.refresh(sorted(topics))
        except BrokerError as error:
            self._stale |= topics
            self._all_failed({tp: 0 for tp in self.cursors if tp.topic in topics}, error)
            return
        for cursor in self.cursors.values():
            if cursor.tp.topic in topics:
                self._check_topic(cursor)

    def _check_topic(self, cursor: PartitionCursor) -> None:
        topic = self._cluster.metadata.topic(cursor.tp.topic)
        if topic is None:
            self._failed(cursor, BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no broker knows the topic"))
        elif cursor.topic_id and topic.topic_id != cursor.topic_id:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{cursor.tp} at offset {cursor.position}: the topic was deleted and created again",
            )
        elif self._cluster.metadata.leader(cursor.tp) is None:
            self._failed(cursor, BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, "the partition has no leader"))

    def _suspect_silent(self, now: float) -> None:
        """Check the leaders of old fetches: a leader that hangs does not report it. Close those that were deposed."""
        for broker_id, poll in list(self._polls.items()):
            silent_s = now - poll.sent_at
            if silent_s < _SUSPECT_AFTER_S or _readable(poll.connection):
                continue
            leaders = {self._cluster.metadata.leader(tp) for tp in poll.asked if tp in self.cursors}
            deposed = any(leader is not None and leader.broker_id != broker_id for leader in leaders)
            if deposed or silent_s > self._cluster.request_timeout_s:
                del self._polls[broker_id]
                poll.connection.close()
                detail = f"broker {broker_id} has not responded for {silent_s:.1f} s"
                self._all_failed(poll.asked, BrokerError(ErrorCode.NETWORK_EXCEPTION, detail))
            else:
                self._stale.update(tp.topic for tp in poll.asked)

    def _next_check_s(self, now: float) -> float:
        """Return how long only a response can change something."""
        times = [cursor.retry_at for cursor in self.cursors.values() if cursor.retry_at > now]
        if self._stale:
            times.append(self._refresh_at)
        return min(max(0.001, min(times) - now), 1.0) if times else 1.0


def _more_follows(parts: Sequence[PartitionBytes]) -> bool:
    """Return whether to send the next fetch before the batches of this response are used.

    At the end of the log it is useless, because the broker would only wait. It would even do harm: the broker that the
    request wakes may preempt this consumer.
    """
    if any(part.next_offset < part.answer.high_watermark for part in parts):
        return True
    return sum(len(part.bodies) for part in parts) >= _LARGE_BYTES


def _readable(connection: BlockingConnection) -> bool:
    """Return whether a response has begun to arrive. The caller may not have polled for a long time."""
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    return bool(poller.poll(0))
