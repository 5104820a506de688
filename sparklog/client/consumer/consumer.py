"""The consumer: a client that reads topics as Arrow batches.

A consumer begins at any position and continues with new records. The consumer returns plain ``pyarrow.RecordBatch``es
with the topic's columns, exactly as they were written and without a copy. ``sparklog.origin(batch)`` returns the
position of a batch, and ``log_columns=True`` adds it as columns. The records of a partition are returned in the order
of their offsets. The position of a partition is the offset of the next record to return.

With ``group=`` the consumers of a group share the partitions, and positions are committed to the group.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

import pyarrow as pa

from sparklog.client.admin.groups import group_offsets
from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.offsets import OffsetQuery, checked_offset, list_offsets, wire_time
from sparklog.client.consumer.consumer_projection import ConsumerProjection
from sparklog.client.consumer.fetch_buffer import FetchBuffer
from sparklog.client.consumer.fetch_decoder import FetchDecoder
from sparklog.client.consumer.fetcher import Fetcher
from sparklog.client.consumer.group_commits import AssignedPartition
from sparklog.client.consumer.group_consumer import GroupConsumer, OnPartitions
from sparklog.client.consumer.group_session import GroupMetadata, GroupSession, MemberSettings
from sparklog.client.consumer.partition_cursor import PartitionCursor
from sparklog.client.consumer.positions import Assignment, LogEnds, OnOutOfRange, Start, topics_and_partitions
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.client.consumer.timestamp_seek import TimestampSeek
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.client_security import Security
from sparklog.record.schema import fit_table

MIB = 1024 * 1024
_TOPIC_DELETED = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INCONSISTENT_TOPIC_ID})


class Consumer:
    """A client that reads records. Use it from one thread at a time. Close it, or use it in a ``with`` block.

    >>> with Consumer("localhost:9092", "flights") as consumer:                             # doctest: +SKIP
    ...     for batch in consumer:
    ...         print(sparklog.origin(batch), batch.num_rows)
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        topics: str | Iterable[str] | Iterable[TopicPartition] = (),
        *,
        group: str | None = None,
        pattern: str = "",
        start: Start = "earliest",
        columns: Sequence[str] | None = None,
        log_columns: bool = False,
        on_out_of_range: OnOutOfRange = "raise",
        max_bytes: int = 16 * MIB,
        max_records: int | None = None,
        isolation: Isolation = "read_committed",
        timeout_s: float = 30.0,
        client_id: str = "sparklog-consumer",
        first_contact_s: float | None = None,
        auto_commit_interval_ms: int | None = None,
        on_assign: OnPartitions | None = None,
        on_revoke: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        session_timeout_ms: int = 45_000,
        heartbeat_interval_ms: int = 3000,
        max_poll_interval_ms: int = 300_000,
        instance_id: str = "",
        rack: str = "",
        metadata_max_age_ms: int = 60_000,
        security: Security = None,
    ) -> None:
        """Connect and look up the start positions. With a group, begin to join it.

        Args:
            topics: one topic, several topics, or an assignment of ``TopicPartition``s. All partitions of a topic are
                read. Partitions that are added later are read from their beginning. In a group only topics are allowed;
                they need not exist yet.
            group: share the topics' partitions with all consumers of this group.
            pattern: (group) read all topics whose whole name matches this regular expression (RE2), including topics
                that are created later.
            start: ``"earliest"``, ``"latest"``, a datetime (in UTC if it has no time zone), or offsets by partition. In
                a group it applies to partitions without a committed offset, and offsets by partition are not allowed.
            columns: fetch only these columns, in this order. Records that are older than a column have nulls in it.
            log_columns: add ``_topic``, ``_partition`` and ``_offset`` after the topic's columns.
            on_out_of_range: what to do if retention has deleted the record at the position, or an unclean election has
                truncated the log below the position: ``"raise"`` an error, or continue from the ``"earliest"`` or
                ``"latest"`` offset. After a truncation, the consumer continues at the offset of the truncation.
            max_bytes: the maximum size of one response of one broker. A larger batch is returned alone.
            max_records: the maximum number of records of one ``poll``, and of one batch in an iteration. None means no
                limit.
            isolation: ``"read_committed"`` returns the records of a transaction after its commit, stops at the first
                open transaction, and never returns aborted records. ``"read_uncommitted"`` returns all replicated
                records.
            timeout_s: the time after which a call fails. A partition that cannot be read also raises after this time.
            first_contact_s: the time after which a call fails if no broker has ever responded. None: ``timeout_s``.
            auto_commit_interval_ms: (group) commit positions at this interval during polls, before partitions are
                revoked, and on close. Records count as processed at the ``poll`` after the one that returned them.
                None: positions are committed only by ``commit``.
            on_assign: (group) a callback with the partitions that are read from now on. The callbacks run within
                ``poll``, ``close`` or an iteration.
            on_revoke: (group) a callback with the partitions that will be revoked. It may ``commit`` their positions.
            on_lost: (group) a callback with the partitions that the consumer has lost, and that other members may
                already have read. Default: ``on_revoke``.
            session_timeout_ms: (group) the time without a heartbeat after which other members take over the partitions.
            heartbeat_interval_ms: (group) the maximum time between heartbeats. A thread of the consumer sends them, so
                they do not depend on user code.
            max_poll_interval_ms: (group) the time without a ``poll`` after which the consumer leaves the group. It
                joins again at its next ``poll``. Revoked partitions must also be given up within this time.
            instance_id: (group) the name of a static member. A consumer that returns with the same name within the
                session timeout gets the same partitions without a rebalance. It fences another consumer that still uses
                the name.
            rack: (group) prefer partitions with a replica in this rack.
            metadata_max_age_ms: (without a group) the time within which the consumer begins to read new partitions. In
                a group the coordinator assigns them.
            security: the settings for TLS and login, with Kafka's names, or the path of a file with them. None: the
                file that ``SPARKLOG_CLIENT_CONFIG`` names.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
            ClientTimeout: no broker responded.
            ConfigError: an argument has an invalid value.
        """
        if on_out_of_range not in {"raise", "earliest", "latest"}:
            raise ConfigError(f"on_out_of_range={on_out_of_range!r}: expected 'raise', 'earliest' or 'latest'")
        if not isinstance(start, (dt.datetime, Mapping)) and start not in {"earliest", "latest"}:
            raise ConfigError(f"start={start!r}: expected 'earliest', 'latest', a datetime or offsets by partition")
        self._isolation = wire_isolation(isolation)
        self._cluster = BlockingCluster(
            bootstrap,
            client_id=client_id,
            timeout_s=timeout_s,
            first_contact_s=first_contact_s,
            security=security,
        )
        self._columns = ConsumerProjection(
            self._cluster, columns, log_columns=log_columns, event_times=isinstance(start, dt.datetime)
        )
        self._fetcher = Fetcher(
            self._cluster, max_bytes=max_bytes, isolation=self._isolation, columns=self._columns.wire
        )
        self._timestamp_seek = TimestampSeek(self._cluster)
        decoder = FetchDecoder(self._cluster, columns=self._columns.wire, counters=self._fetcher.counters)
        self._buffer = FetchBuffer(self._fetcher, decoder, self._timestamp_seek)
        self._ends = LogEnds(
            self._cluster,
            self._fetcher.cursors,
            self._buffer,
            isolation=self._isolation,
            on_out_of_range=on_out_of_range,
        )
        if metadata_max_age_ms < 1:
            raise ConfigError(f"metadata_max_age_ms={metadata_max_age_ms}: expected 1 or more")
        if max_records is not None and max_records < 1:
            raise ConfigError(f"max_records={max_records}: expected 1 or more")
        self._max_records = max_records
        self._start = start
        self._group = group
        self._group_consumer: GroupConsumer | None = None
        self._session: GroupSession | None = None
        self._assignment = Assignment(
            self._cluster,
            self._fetcher.cursors,
            columns=self._columns,
            timestamp_seek=self._timestamp_seek,
            isolation=self._isolation,
            metadata_max_age_s=metadata_max_age_ms / 1000,
        )
        names, assigned = topics_and_partitions(topics, optional=bool(pattern))
        forks.watch(self)
        try:
            if group is None:
                if pattern or auto_commit_interval_ms is not None or instance_id:
                    raise ConfigError("pattern, auto_commit_interval_ms and instance_id need a group")
                self._assignment.begin(names, assigned, start)
                return
            if assigned or isinstance(start, Mapping):
                raise ConfigError("a consumer in a group reads topics from the group's offsets: name no partitions")
            member = MemberSettings(
                group, tuple(names), pattern, instance_id, rack, session_timeout_ms=session_timeout_ms,
                heartbeat_interval_ms=heartbeat_interval_ms, max_poll_interval_ms=max_poll_interval_ms,
            )  # fmt: skip
            self._session = GroupSession(
                bootstrap, member, client_id=client_id, timeout_s=timeout_s, security=self._cluster.security
            )
            self._group_consumer = GroupConsumer(
                self,
                self._session,
                auto_commit_s=None if auto_commit_interval_ms is None else auto_commit_interval_ms / 1000,
                on_assign=on_assign,
                on_revoke=on_revoke,
                on_lost=on_lost,
                commit_timeout_s=min(timeout_s, session_timeout_ms / 1000),
                start_moves=start == "latest",
            )
            self._fetcher.wake_fd = self._session.wake_fd
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections. Positions that were not committed are lost.

        A consumer in a group leaves the group at once. The consumer commits its positions only with
        ``auto_commit_interval_ms``. A second call does nothing. A call in a forked child does nothing.
        """
        self._close(processed=True)

    def _close(self, *, processed: bool) -> None:
        group_consumer, self._group_consumer = self._group_consumer, None
        try:
            if group_consumer is not None:
                group_consumer.close(processed=processed)
            elif self._session is not None:
                self._session.close()
        finally:
            self._buffer.ready.clear()
            self._fetcher.wake_fd = None
            self._fetcher.close()
            self._cluster.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the consumer. If the ``with`` block has failed, commit nothing, so that its records are read again."""
        self._close(processed=kind is None)

    # --- reading ---

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches without end. If the caller leaves the loop, no records are lost. See ``poll`` for errors."""
        while True:
            self._wait(1.0)
            for found in self._buffer.consume(None, batch_records=self._max_records):
                yield self._columns.to_user_batch(found)
                self._polling(False)
                if self._group_consumer is not None:  # Handle changes of the assignment before the other batches.
                    break

    def poll(self, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """Wait for records for at most ``timeout_s``, and return the available batches, or an empty list.

        Raises:
            LogTruncated: records that were read before are no longer in the log (depends on ``on_out_of_range``).
            BrokerError: OFFSET_OUT_OF_RANGE (depends on ``on_out_of_range``), CORRUPT_MESSAGE, INCONSISTENT_TOPIC_ID if
                a topic was recreated, UNKNOWN_TOPIC_OR_PARTITION if it was deleted.
            ClientTimeout: a partition could not be read for the consumer's ``timeout_s``.
        """
        self._wait(timeout_s)
        found = self._buffer.consume(self._max_records, batch_records=self._max_records)
        return [self._columns.to_user_batch(one) for one in found]

    def to_table(
        self, until: Mapping[TopicPartition, int] | None = None, *, timeout_s: float | None = None
    ) -> pa.Table:
        """Return all records from the positions to the offsets ``until`` (exclusive) as one table.

        By default ``until`` is the current end of each partition. A record that is older than a column has null in
        this column.

        Raises:
            ClientTimeout: no progress for ``timeout_s`` (by default the consumer's ``timeout_s``).
            BrokerError: the errors of ``poll``, such as OFFSET_OUT_OF_RANGE for a position beyond the end;
                SCHEMA_MISMATCH if the topics have different columns.
        """
        if self._group is not None:
            raise ConfigError(
                "to_table() needs a consumer without a group: in a group, partitions are assigned and revoked"
            )
        ends = {TopicPartition(*tp): end for tp, end in (self._ends.table_ends() if until is None else until).items()}
        for tp in ends:
            self._cursor(tp)
        self._columns.schema(ends)
        before = self.positions()
        self._fetcher.ends = ends  # Do not fetch other records, because they would only accumulate in the buffer.
        try:
            taken = self._buffer.consume_until(ends, self._more_for_table(ends, timeout_s))
            batches = [self._columns.to_user_batch(found) for found in taken]
        except BaseException:
            for tp, position in before.items():  # The table is not returned, so its records must be read again.
                self.seek(tp, position)
            raise
        finally:
            self._fetcher.ends = None
        schema = self._columns.schema(ends)  # Look the schema up again: columns may have been added in the meantime.
        return pa.Table.from_batches([fit_table(batch, schema) for batch in batches], schema)

    def _more_for_table(
        self, ends: Mapping[TopicPartition, int], timeout_s: float | None
    ) -> Callable[[Mapping[TopicPartition, int]], None]:
        """Return a function that waits for more records below ``ends``.

        The function raises ClientTimeout after ``timeout_s`` without progress.
        """
        limit_s = self._cluster.timeout_s if timeout_s is None else timeout_s
        progress_at = time.monotonic()
        reached_before = -1

        def wait(positions: Mapping[TopicPartition, int]) -> None:
            nonlocal progress_at, reached_before
            now = time.monotonic()
            reached_now = sum(positions.values())
            progress_at = now if reached_now > reached_before else progress_at
            reached_before = reached_now
            if now - progress_at > limit_s:
                behind = sorted(tp for tp, position in positions.items() if position < ends[tp])
                reached = ", ".join(f"{tp} at {positions[tp]} of {ends[tp]}" for tp in behind[:5])
                raise ClientTimeout(f"reading to the end: no progress for {limit_s:g} s; {reached}")
            self._wait(min(1.0, limit_s), or_moved=True)

        return wait

    @property
    def counters(self) -> ReadCounters:
        """Return the numbers of bytes and batches that this consumer has received."""
        return self._fetcher.counters

    # --- positions ---

    @property
    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that this consumer reads."""
        return list(self._fetcher.cursors)

    def position(self, partition: TopicPartition | tuple[str, int]) -> int:
        """Return the offset of the next record to be returned. Raises KeyError if the partition is not assigned."""
        tp = TopicPartition(*partition)
        self._cursor(tp)
        return self._buffer.position(tp)

    def positions(self) -> dict[TopicPartition, int]:
        """Return the positions of all partitions.

        ``start=``, ``Admin.commit_offsets`` and ``Producer.send_offsets`` accept the result.
        """
        return self._buffer.positions()

    def seek(self, partition: TopicPartition | tuple[str, int], to: int | Literal["earliest", "latest"]) -> None:
        """Set the position to an offset, or to the earliest or latest offset of the partition.

        Raises:
            KeyError: the partition is not assigned.
            ClientTimeout: the leader did not return the earliest or latest offset.
            ValueError: the offset is below 0 or has more than 63 bits, or ``to`` is another string.
            TypeError: ``to`` is neither an integer nor a string.
        """
        cursor = self._cursor(TopicPartition(*partition))
        if isinstance(to, str) and to in {"earliest", "latest"}:
            to = list_offsets(self._cluster, {cursor.tp: to}, isolation=self._isolation, known=self.positions())[
                cursor.tp
            ]
        else:
            to = checked_offset(cursor.tp, to, expected="an offset, 'earliest' or 'latest'")
        self._buffer.drop({cursor.tp})
        self._timestamp_seek.drop(cursor.tp)
        cursor.move(to)
        cursor.end_failures()

    def pause(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Pause the partitions: ``poll`` returns no records of them until ``resume``. The partitions stay assigned.

        Raises KeyError if a partition is not assigned.
        """
        for tp in [TopicPartition(*found) for found in partitions]:
            cursor, at = self._cursor(tp), self.position(tp)
            self._buffer.drop({tp})
            cursor.move(at)
            self._fetcher.paused.add(tp)

    def resume(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Resume the partitions after ``pause``: ``poll`` returns their records again."""
        self._fetcher.paused.difference_update(TopicPartition(*tp) for tp in partitions)

    @property
    def paused(self) -> list[TopicPartition]:
        return sorted(self._fetcher.paused)

    # --- a group's ---

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit the positions, or ``offsets`` of assigned partitions, and wait for the response.

        Raises:
            CommitRefused: the partitions are no longer assigned to this consumer. Other members continue from the
                committed offsets.
            TypeError, ValueError: an offset is invalid, see ``seek``; nothing is committed.
            ClientTimeout: the coordinator did not respond; the offsets may be committed.
            BrokerError: any other error of the coordinator.
        """
        self.commit_async(offsets).result()

    def commit_async(self, offsets: Mapping[TopicPartition, int] | None = None) -> Future[None]:
        """Commit without waiting for the response.

        The errors of ``commit`` are raised by this call or by the future. Commits take effect in the order of the
        calls. The future's callbacks run on a thread of the consumer and must not wait for this consumer.
        """
        named = None if offsets is None else {TopicPartition(*tp): offset for tp, offset in offsets.items()}
        return self._of_group().commit(named)

    def group_metadata(self) -> GroupMetadata:
        """Return the identity of this member for ``Producer.send_offsets``.

        The coordinator uses it to check that the transaction commits only offsets that this member may commit.

        Raises:
            CommitRefused: the consumer was removed from the group since its last poll.
        """
        return self._of_group().metadata()

    def committed(
        self, partitions: Iterable[TopicPartition | tuple[str, int]] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the group's committed offsets of ``partitions``, by default of the assigned partitions.

        The result has no entry for a partition without a committed offset.

        Raises:
            ClientTimeout: the coordinator did not respond.
        """
        group_consumer = self._of_group()
        wanted = self.assignment if partitions is None else [TopicPartition(*tp) for tp in partitions]
        if set(wanted) <= self._fetcher.cursors.keys():
            try:
                own = group_consumer.committed(wanted).result()
                if len(own) < len(wanted):
                    raise BrokerError(ErrorCode.UNSTABLE_OFFSET_COMMIT, f"group {self._group!r}: ask again")
                return {one.tp: offset for one, offset in own.items() if offset is not None}
            except BrokerError as error:
                if error.code != ErrorCode.STALE_MEMBER_EPOCH:
                    raise
        found = group_offsets(self._cluster, self._group or "")
        known = {TopicPartition(one.topic, one.partition): one.offset for one in found}
        return {tp: known[tp] for tp in wanted if tp in known}

    @property
    def member_id(self) -> str:
        """Return the member id in the group, or "" without a group. A removed consumer gets a new member id."""
        return self._session.member_id if self._session is not None else ""

    @property
    def member_epoch(self) -> int:
        """Return the last known member epoch, or 0 while this consumer is not a member."""
        return self._session.epoch if self._session is not None else 0

    def _of_group(self) -> GroupConsumer:
        if self._group_consumer is None:
            raise ConfigError("this consumer has no group, or is closed; commits need a group")
        return self._group_consumer

    def start_reading(self, starts: Mapping[AssignedPartition, int | None]) -> None:
        """Start to read partitions at these offsets. ``GroupConsumer`` calls this method.

        None means that the group has no committed offset. Then the partition is read from ``start`` on.
        """
        where: OffsetQuery = self._start if not isinstance(self._start, Mapping) else "earliest"
        for name in dict.fromkeys(one.topic for one in starts):
            self._cluster.topic(name)
            self._columns.choose(name)
        named = {one.tp: at for one, at in starts.items()}
        asked: dict[TopicPartition, OffsetQuery] = {tp: where for tp, at in named.items() if at is None}
        found = list_offsets(self._cluster, asked, isolation=self._isolation) if asked else {}
        if isinstance(where, dt.datetime):
            self._timestamp_seek.begin(asked, wire_time(where))
        for one, at in starts.items():
            position = found[one.tp] if at is None else at
            self._fetcher.cursors[one.tp] = PartitionCursor(one.tp, one.topic_id, position)

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading partitions. ``GroupConsumer`` calls this method."""
        gone = set(partitions)
        for tp in gone:
            self._fetcher.cursors.pop(tp, None)
            self._timestamp_seek.drop(tp)
        self._fetcher.paused -= gone
        self._buffer.drop(gone)

    def end_offsets(self) -> dict[TopicPartition, int]:
        """Return the end offset of each assigned partition.

        The end offset is the last stable offset with ``isolation="read_committed"``, and otherwise the high watermark.

        Raises:
            ClientTimeout: a leader did not respond.
        """
        return self._ends.end_offsets()

    # --- inside ---

    def _wait(self, timeout_s: float, *, or_moved: bool = False) -> None:
        """Wait until the buffer has batches, for at most ``timeout_s``.

        With ``or_moved`` also return after positions have moved past records that are not returned, such as markers and
        aborted records.
        """
        if self._group_consumer is not None:
            self._wait_in_group(self._group_consumer, timeout_s)
        elif self._group is not None:
            raise ConfigError("this consumer is closed")
        elif not self._buffer.ready:
            self._wait_for_assigned(timeout_s, or_moved=or_moved)

    def _wait_for_assigned(self, timeout_s: float, *, or_moved: bool) -> None:
        """Wait for batches, and look for new partitions from time to time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._assignment.add_new_partitions()
            left_s = max(0.0, deadline - time.monotonic())
            slice_s = min(left_s, self._assignment.next_refresh_s())
            slice_ends = time.monotonic() + slice_s
            self._advance(slice_s, or_moved=or_moved)
            if self._buffer.ready or slice_s == left_s or time.monotonic() < slice_ends:
                return

    def _wait_in_group(self, group_consumer: GroupConsumer, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._polling(True)
        try:
            while True:
                group_consumer.advance()
                left_s = max(0.0, deadline - time.monotonic())
                if not self._buffer.ready:
                    self._advance(min(left_s, group_consumer.slice_s))
                if self._buffer.ready or left_s <= 0:
                    return
        finally:
            self._polling(False)

    def _polling(self, now: bool) -> None:
        if self._session is not None:
            self._session.polling(now)

    def _advance(self, timeout_s: float, *, or_moved: bool = False) -> None:
        try:
            self._buffer.fill(timeout_s, or_moved=or_moved)
        except BrokerError as error:
            if self._group_consumer is not None and error.code in _TOPIC_DELETED and self._defer_deleted_topics():
                return
            if error.code != ErrorCode.OFFSET_OUT_OF_RANGE or self._ends.on_out_of_range == "raise":
                raise
            if isinstance(error, LogTruncated):
                self._fetcher.cursors[error.tp].move(error.offset)
            else:
                self._ends.reset_positions()

    def _defer_deleted_topics(self) -> bool:
        """Delay the next fetches of topics that were deleted or recreated. Return whether there are such topics.

        The group's coordinator will soon change the assignment.
        """
        gone = [
            cursor
            for cursor in self._fetcher.cursors.values()
            if (topic := self._cluster.metadata.topic(cursor.tp.topic)) is None or topic.topic_id != cursor.topic_id
        ]
        for cursor in gone:
            cursor.end_failures(retry_at=time.monotonic() + 1.0)
        return bool(gone)

    def _cursor(self, tp: TopicPartition) -> PartitionCursor:
        try:
            return self._fetcher.cursors[tp]
        except KeyError:
            raise KeyError(f"partition {tp} is not assigned: {sorted(map(str, self._fetcher.cursors))}") from None
