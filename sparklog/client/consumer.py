"""Reading topics as Arrow batches, from any place, for as long as wanted.

What is handed out are plain ``pyarrow.RecordBatch``es with the topic's columns, as they were written and without a
copy; ``sparklog.origin(batch)`` tells where a batch comes from, and ``log_columns=True`` puts that into columns. Order
holds within a partition. The position of a partition is the offset of the next record to be handed out.

With ``group=`` the partitions are shared with the group's other consumers, and positions are committed to it.
"""

from __future__ import annotations

import datetime as dt
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Literal

import numpy as np
import pyarrow as pa

from sparklog.client.column_choice import ColumnChoice
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.client.feed_cuts import LOG_COLUMNS, head, tail, with_log_columns
from sparklog.client.fetching import Feed, FeedBatch, Fetcher
from sparklog.client.group_reading import GroupReading, OnPartitions
from sparklog.client.group_session import GroupMetadata, GroupSession, MemberSettings, Place
from sparklog.client.groups import group_offsets
from sparklog.client.isolation import Isolation, wire_isolation
from sparklog.client.link import ClusterLink, no_leader
from sparklog.client.offsets import OffsetQuery, list_offsets, wire_time
from sparklog.client.origin import Origin, with_origin
from sparklog.client.read_counters import ReadCounters
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.schema import fit_table, parse_schema

MIB = 1024 * 1024
_METADATA_MAX_AGE_S = 60.0
_TOPIC_GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.INCONSISTENT_TOPIC_ID})

#: Where to begin: an end of the log, a time, or an offset for each partition (others begin at the earliest).
Start = Literal["earliest", "latest"] | dt.datetime | Mapping[TopicPartition, int]


class Consumer:
    """A client that reads. Use from one thread at a time; close it, or use it in a ``with`` block.

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
        on_out_of_range: Literal["raise", "earliest", "latest"] = "raise",
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
    ) -> None:
        """Connects and looks up the positions to start from; with a group, begins to join it.

        Args:
            topics: one topic, several, or an assignment of ``TopicPartition``s. Of topics all partitions are read,
                and those added later from their beginning. In a group: topics, also such as do not exist yet.
            group: share the topics' partitions with all consumers of this group.
            pattern: (group) topics whose whole names match this regular expression (RE2), now or later.
            start: ``"earliest"``, ``"latest"``, a datetime, or offsets by partition. In a group: of partitions
                without a committed offset, and not by partition.
            columns: only these are sent, in this order; nulls for records older than a column.
            log_columns: add ``_topic``, ``_partition`` and ``_offset`` behind the topic's columns.
            on_out_of_range: what to do when retention has passed the position, or an unclean election has cut the log
                below it: raise, or go on from an end; after a cut, from where it was made.
            max_bytes: of one answer of one broker; a larger batch comes alone.
            max_records: of one ``poll``, and of one batch of an iteration; None: no limit.
            isolation: ``"read_committed"``: records of transactions once they are committed, up to the first that is
                open, and never those of aborted ones; ``"read_uncommitted"``: everything that is replicated.
            timeout_s: a call, or a partition that cannot be read, fails after this.
            first_contact_s: give up after this when no broker has ever answered; None: no sooner than any call.
            auto_commit_interval_ms: (group) commit positions so often while polling, before partitions are given up,
                and on close: what was handed out before the present ``poll`` counts as processed. None: nothing is
                committed but by ``commit``.
            on_assign, on_revoke, on_lost: (group) called within ``poll``, ``close`` or an iteration with partitions
                that are read from now on; that will be given up, with time for a last ``commit``; that others may have
                had for some time (left out: ``on_revoke``).
            session_timeout_ms: (group) without a heartbeat for so long the others take over.
            heartbeat_interval_ms: (group) a heartbeat at least so often, whatever user code does.
            max_poll_interval_ms: (group) without a ``poll`` for so long the consumer leaves until the next one; and for
                so long it may take to give partitions up.
            instance_id: (group) of a static member: who comes back under it within the session time-out gets the same
                partitions, and nothing moves meanwhile; who has it already is fenced.
            rack: (group) prefer partitions with a replica there.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
            ClientTimeout: no broker answered.
            ConfigError: an argument is not one of those allowed.
        """
        if on_out_of_range not in {"raise", "earliest", "latest"}:
            raise ConfigError(f"on_out_of_range={on_out_of_range!r}: expected 'raise', 'earliest' or 'latest'")
        if not isinstance(start, (dt.datetime, Mapping)) and start not in {"earliest", "latest"}:
            raise ConfigError(f"start={start!r}: expected 'earliest', 'latest', a datetime or offsets by partition")
        self._columns = list(columns) if columns is not None else None
        self._log_columns = log_columns
        self._on_out_of_range = on_out_of_range
        self._isolation = wire_isolation(isolation)
        self._link = ClusterLink(bootstrap, client_id=client_id, timeout_s=timeout_s, first_contact_s=first_contact_s)
        #: The columns of each topic; empty when all are wanted.
        self._choices: dict[str, ColumnChoice] = {}
        self._from_time = isinstance(start, dt.datetime)
        self._fetcher = Fetcher(self._link, max_bytes=max_bytes, isolation=self._isolation, columns=self._wire_columns)
        self._ready: deque[FeedBatch] = deque()
        #: Partitions that start at a time and have not come to it: leaders answer with the batch it lies in.
        self._not_before_us: dict[TopicPartition, int] = {}
        if max_records is not None and max_records < 1:
            raise ConfigError(f"max_records={max_records}: expected 1 or more")
        self._max_records = max_records
        self._start = start
        self._group = group
        self._reading: GroupReading | None = None
        self._session: GroupSession | None = None
        self._topics, assigned = _topics_and_partitions(topics, optional=bool(pattern))
        self._refreshed_at = time.monotonic()
        try:
            if group is None:
                if pattern or auto_commit_interval_ms is not None or instance_id:
                    raise ConfigError("pattern, auto_commit_interval_ms and instance_id need a group")
                self._assign(assigned, start)
                return
            if assigned or isinstance(start, Mapping):
                raise ConfigError("a group's consumer reads topics, and begins where the group is: name no partitions")
            member = MemberSettings(
                group, tuple(self._topics), pattern, instance_id, rack, session_timeout_ms=session_timeout_ms,
                heartbeat_interval_ms=heartbeat_interval_ms, max_poll_interval_ms=max_poll_interval_ms,
            )  # fmt: skip
            self._session = GroupSession(bootstrap, member, client_id=client_id, timeout_s=timeout_s)
            self._reading = GroupReading(
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
        """End the connections. Positions are forgotten. A group's consumer leaves it at once, and commits where it
        does so by itself; otherwise nothing is committed. Idempotent."""
        self._close(processed=True)

    def _close(self, *, processed: bool) -> None:
        reading, self._reading = self._reading, None
        try:
            if reading is not None:
                reading.close(processed=processed)
            elif self._session is not None:
                self._session.close()
        finally:
            self._ready.clear()
            self._fetcher.wake_fd = None
            self._fetcher.close()
            self._link.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As ``close``. Of a block that failed nothing is committed: what it was at comes again."""
        self._close(processed=kind is None)

    # --- reading ---

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Batches without end; leaving the loop loses nothing. Raises as ``poll``."""
        while True:
            self._wait(1.0)
            for batch in self._take(None):
                yield batch
                self._polling(False)

    def poll(self, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """What is there, waiting at most ``timeout_s`` for something; an empty list when nothing came.

        Raises:
            LogTruncated: records read before are not in the log any more (unless ``on_out_of_range`` says otherwise).
            BrokerError: OFFSET_OUT_OF_RANGE (unless ``on_out_of_range`` says otherwise), CORRUPT_MESSAGE,
                INCONSISTENT_TOPIC_ID when a topic was made anew, UNKNOWN_TOPIC_OR_PARTITION when it is gone.
            ClientTimeout: a partition could not be read for the consumer's ``timeout_s``.
        """
        self._wait(timeout_s)
        return list(self._take(self._max_records))

    def to_table(
        self, until: Mapping[TopicPartition, int] | None = None, *, timeout_s: float | None = None
    ) -> pa.Table:
        """All records from the positions to the offsets ``until`` (exclusive), by default to where the partitions end
        now, as one table. Records of older schemas get nulls for later columns.

        Raises:
            ClientTimeout: no progress for ``timeout_s`` (by default the consumer's).
            BrokerError: as ``poll``, so OFFSET_OUT_OF_RANGE for a position beyond the end; SCHEMA_MISMATCH when
                the topics read have different columns.
        """
        if self._group is not None:
            raise ConfigError("a table is read by a consumer without a group: partitions come and go in one")
        ends = {TopicPartition(*tp): end for tp, end in (self._ends_ahead() if until is None else until).items()}
        for tp in ends:
            self._feed(tp)
        timeout_s = self._link.timeout_s if timeout_s is None else timeout_s
        self._schema(ends)
        taken: list[pa.RecordBatch] = []
        kept: deque[FeedBatch] = deque()
        progress_at = time.monotonic()
        reached_before = -1
        before = self.positions()
        try:
            while True:
                while self._ready:
                    self._take_until(self._ready.popleft(), ends, taken, kept)
                behind = {tp for tp, end in ends.items() if self._position(tp, kept) < end}
                if not behind:
                    break
                self._fetcher.active = behind  # the others' records would only pile up here
                now = time.monotonic()
                reached_now = sum(self._position(tp, kept) for tp in ends)
                progress_at = now if reached_now > reached_before else progress_at
                reached_before = reached_now
                if now - progress_at > timeout_s:
                    reached = ", ".join(
                        f"{tp} at {self._position(tp, kept)} of {ends[tp]}" for tp in sorted(behind)[:5]
                    )
                    raise ClientTimeout(f"reading to the end: no progress for {timeout_s:g} s; {reached}")
                self._wait(min(1.0, timeout_s), or_moved=True)
        except BaseException:
            for tp, position in before.items():  # what was taken goes nowhere: it will be read again
                self.seek(tp, position)
            kept.clear()
            raise
        finally:
            self._fetcher.active = None
            self._ready.extendleft(reversed(kept))
        schema = self._schema(ends)  # again: what was read may have told of columns added since
        return pa.Table.from_batches([fit_table(batch, schema) for batch in taken], schema)

    @property
    def counters(self) -> ReadCounters:
        """What this consumer has been sent."""
        return self._fetcher.counters

    # --- positions ---

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return list(self._fetcher.feeds)

    def position(self, partition: TopicPartition | tuple[str, int]) -> int:
        """The offset of the next record to be handed out. Raises KeyError when the partition is not assigned."""
        tp = TopicPartition(*partition)
        self._feed(tp)
        return self._position(tp, self._ready)

    def positions(self) -> dict[TopicPartition, int]:
        """The positions of all partitions: what ``start=``, ``Admin.commit_offsets`` and ``send_offsets`` take."""
        return {tp: self._position(tp, self._ready) for tp in self._fetcher.feeds}

    def seek(self, partition: TopicPartition | tuple[str, int], to: int | Literal["earliest", "latest"]) -> None:
        """Go on elsewhere: at an offset, or at an end of the partition.

        Raises:
            KeyError: the partition is not assigned.
            ClientTimeout: the leader did not tell where the end is.
            ValueError: an offset below 0.
        """
        feed = self._feed(TopicPartition(*partition))
        if isinstance(to, str):
            to = list_offsets(self._link, {feed.tp: to}, isolation=self._isolation, known=self.positions())[feed.tp]
        if to < 0:
            raise ValueError(f"offset {to}: expected 0 or more")
        self._ready = deque(found for found in self._ready if found.tp != feed.tp)
        self._not_before_us.pop(feed.tp, None)
        feed.move(to)
        feed.failures, feed.retry_at = 0, 0.0

    def pause(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Hand out nothing of these until ``resume``; they stay assigned. Raises KeyError when one is not assigned."""
        for tp in [TopicPartition(*found) for found in partitions]:
            feed, at = self._feed(tp), self.position(tp)
            self._ready = deque(found for found in self._ready if found.tp != tp)
            feed.move(at)
            self._fetcher.paused.add(tp)

    def resume(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Undo ``pause``."""
        self._fetcher.paused.difference_update(TopicPartition(*tp) for tp in partitions)

    @property
    def paused(self) -> list[TopicPartition]:
        return sorted(self._fetcher.paused)

    # --- a group's ---

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Commit where the next records come from, or ``offsets`` of assigned partitions, and wait for it.

        Raises:
            CommitRefused: these partitions are not this consumer's any more; others read on from what was committed.
            ClientTimeout: the coordinator did not answer; it may have been committed.
            BrokerError: anything else that it says.
        """
        self.commit_async(offsets).result()

    def commit_async(self, offsets: Mapping[TopicPartition, int] | None = None) -> Future[None]:
        """As ``commit``, without waiting: the future raises what that does. Commits take effect in their order. What is
        called when the future is done runs on the group's own thread, and must not wait for this consumer."""
        named = None if offsets is None else {TopicPartition(*tp): offset for tp, offset in offsets.items()}
        return self._of_group().commit(named)

    def group_metadata(self) -> GroupMetadata:
        """For ``Producer.send_offsets``: who reads these partitions, so that the transaction commits no more of them
        than this consumer may.

        Raises:
            CommitRefused: it was removed from the group since it last polled.
        """
        return self._of_group().metadata()

    def committed(
        self, partitions: Iterable[TopicPartition | tuple[str, int]] | None = None
    ) -> dict[TopicPartition, int]:
        """What the group has committed for ``partitions`` (left out: those assigned); those without are left out.

        Raises:
            ClientTimeout: the coordinator did not answer.
        """
        reading = self._of_group()
        wanted = self.assignment if partitions is None else [TopicPartition(*tp) for tp in partitions]
        if set(wanted) <= self._fetcher.feeds.keys():
            try:
                own = reading.committed(wanted).result()
                return {TopicPartition(place[0], place[2]): offset for place, offset in own.items()}
            except BrokerError as error:
                if error.code != ErrorCode.STALE_MEMBER_EPOCH:
                    raise
        found = group_offsets(self._link, self._group or "")
        known = {TopicPartition(one.topic, one.partition): one.offset for one in found}
        return {tp: known[tp] for tp in wanted if tp in known}

    @property
    def member_id(self) -> str:
        """In the group now; another one after the consumer was removed from it. Empty without a group."""
        return self._session.member_id if self._session is not None else ""

    @property
    def member_epoch(self) -> int:
        """As the coordinator has told last; 0 while this consumer is no member."""
        return self._session.epoch if self._session is not None else 0

    def _of_group(self) -> GroupReading:
        if self._reading is None:
            raise ConfigError("this consumer has no group, or is closed: commits need one")
        return self._reading

    def read_from(self, places: Mapping[Place, int | None]) -> None:
        """For ``GroupReading``."""
        where: OffsetQuery = self._start if not isinstance(self._start, Mapping) else "earliest"
        for name in dict.fromkeys(place[0] for place in places):
            self._link.topic(name)
            self._choose_columns(name)
        named = {TopicPartition(place[0], place[2]): at for place, at in places.items()}
        asked: dict[TopicPartition, OffsetQuery] = {tp: where for tp, at in named.items() if at is None}
        found = list_offsets(self._link, asked, isolation=self._isolation) if asked else {}
        if isinstance(where, dt.datetime):
            self._not_before_us.update(dict.fromkeys(asked, wire_time(where)))
        for place, at in places.items():
            tp = TopicPartition(place[0], place[2])
            self._fetcher.feeds[tp] = Feed(tp, place[1], found[tp] if at is None else at)

    def read_no_more(self, partitions: Iterable[TopicPartition]) -> None:
        """For ``GroupReading``."""
        gone = set(partitions)
        for tp in gone:
            self._fetcher.feeds.pop(tp, None)
            self._not_before_us.pop(tp, None)
        self._fetcher.paused -= gone
        self._ready = deque(found for found in self._ready if found.tp not in gone)

    def end_offsets(self) -> dict[TopicPartition, int]:
        """Where the partitions end now: the offset of the next record that will become visible in each, by the
        consumer's ``isolation``.

        Raises:
            ClientTimeout: a leader did not tell.
        """
        return self._latest()

    # --- inside ---

    def _wait(self, timeout_s: float, *, or_moved: bool = False) -> None:
        """Fill ``_ready``, unless there is something in it; ``or_moved``: or until positions have moved over what is
        not handed out, as markers and aborted records."""
        if self._reading is not None:
            self._wait_in_group(self._reading, timeout_s)
        elif self._group is not None:
            raise ConfigError("this consumer is closed")
        elif not self._ready:
            self._look_for_partitions()
            self._advance(timeout_s, or_moved=or_moved)

    def _wait_in_group(self, reading: GroupReading, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._polling(True)
        try:
            while True:
                reading.advance()
                left_s = max(0.0, deadline - time.monotonic())
                if not self._ready:
                    self._advance(min(left_s, reading.slice_s))
                if self._ready or left_s <= 0:
                    return
        finally:
            self._polling(False)

    def _polling(self, now: bool) -> None:
        if self._session is not None:
            self._session.polling(now)

    def _take(self, limit: int | None) -> Iterator[pa.RecordBatch]:
        """What is ready, ``limit`` records at most; of an iteration, in batches of ``max_records``."""
        left = limit
        while self._ready and left != 0:
            found = self._ready.popleft()
            most = self._max_records if left is None else left
            if most is not None and found.fetched.batch.num_rows > most:
                self._ready.appendleft(FeedBatch(found.tp, tail(found.fetched, most)))
                found = FeedBatch(found.tp, head(found.fetched, most))
            if left is not None:
                left -= found.fetched.batch.num_rows
            yield self._hand_out(found)

    def _advance(self, timeout_s: float, *, or_moved: bool = False) -> None:
        try:
            found = self._fetcher.advance(timeout_s, or_moved=or_moved)
        except BrokerError as error:
            if self._reading is not None and error.code in _TOPIC_GONE and self._put_off_gone():
                return
            if error.code != ErrorCode.OFFSET_OUT_OF_RANGE or self._on_out_of_range == "raise":
                raise
            if isinstance(error, LogTruncated):
                self._fetcher.feeds[error.tp].move(error.offset)
            else:
                self._reset_out_of_range()
            return
        if self._fetcher.paused:
            found = list(self._without_paused(found))
        self._ready.extend(found if not self._not_before_us else self._after_start(found))

    def _put_off_gone(self) -> bool:
        """Leave topics alone that were deleted, or made anew: the group's coordinator hears of it as well."""
        gone = [
            feed
            for feed in self._fetcher.feeds.values()
            if (topic := self._link.metadata.topic(feed.tp.topic)) is None or topic.topic_id != feed.topic_id
        ]
        for feed in gone:
            feed.failures, feed.retry_at = 0, time.monotonic() + 1.0
        return bool(gone)

    def _without_paused(self, found: list[FeedBatch]) -> Iterator[FeedBatch]:
        """What was asked for before the pause is asked for again after it."""
        back: set[TopicPartition] = set()
        for one in found:
            if one.tp not in self._fetcher.paused:
                yield one
            elif one.tp not in back:
                back.add(one.tp)
                self._fetcher.feeds[one.tp].move(one.fetched.first_offset)

    def _ends_ahead(self) -> dict[TopicPartition, int]:
        """Where the partitions end. A position beyond that is out of range, and not a partition without news."""
        ends = self.end_offsets()
        beyond = {tp: position for tp, position in self.positions().items() if position > ends[tp]}
        if beyond and self._isolation:
            # Records of open transactions lie between: there is nothing to read there yet.
            ends |= list_offsets(self._link, dict.fromkeys(beyond, "latest"))
            ends |= {tp: position for tp, position in beyond.items() if position <= ends[tp]}
        beyond = {tp: position for tp, position in beyond.items() if position > ends[tp]}
        if not beyond:
            return ends
        if self._on_out_of_range == "raise":
            tp = next(iter(beyond))
            raise BrokerError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"{tp}: position {self.position(tp)} found, the log ends at {ends[tp]}"
            )
        self._reset_out_of_range()
        return ends

    def _latest(self) -> dict[TopicPartition, int]:
        at: dict[TopicPartition, OffsetQuery] = dict.fromkeys(self._fetcher.feeds, "latest")
        return list_offsets(self._link, at, isolation=self._isolation, known=self.positions())

    def _after_start(self, found: list[FeedBatch]) -> Iterator[FeedBatch]:
        """Without the records in front of the first that is not older than the time to start from."""
        for one in found:
            start_us = self._not_before_us.get(one.tp)
            row = 0 if start_us is None else self._first_row_at(one, start_us)
            if row < one.fetched.batch.num_rows:
                self._not_before_us.pop(one.tp, None)
                yield one if row == 0 else FeedBatch(one.tp, tail(one.fetched, row))

    def _first_row_at(self, found: FeedBatch, start_us: int) -> int:
        topic = self._link.metadata.topic(found.tp.topic)
        batch = found.fetched.batch
        if topic is None or topic.event_time is None or topic.event_time not in batch.schema.names:
            return 0  # append times: all records of a batch have the same
        times = batch.column(topic.event_time).cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        reached = np.flatnonzero(times.fill_null(-(2**63)).to_numpy(zero_copy_only=False) >= start_us)
        return int(reached[0]) if len(reached) else batch.num_rows

    def _reset_out_of_range(self) -> None:
        """Positions outside their log go to the end that was chosen; the error names one, several may be."""
        feeds = self._fetcher.feeds
        starts = list_offsets(self._link, dict.fromkeys(feeds, "earliest"), isolation=self._isolation)
        ends = self._latest()
        log_ends = list_offsets(self._link, dict.fromkeys(feeds, "latest"), known=self.positions())
        for tp, feed in feeds.items():
            if not starts[tp] <= feed.position <= log_ends[tp]:
                feed.move((starts if self._on_out_of_range == "earliest" else ends)[tp])

    def _hand_out(self, found: FeedBatch) -> pa.RecordBatch:
        header, batch, first, offsets, _ = found.fetched
        place = Origin(found.tp.topic, found.tp.partition, first, header.leader_epoch)
        if self._columns is not None:
            batch = self._choices[found.tp.topic].complete(batch)
        if self._log_columns:
            batch = with_log_columns(batch, place, offsets)
        return with_origin(batch, place)

    def _take_until(
        self,
        found: FeedBatch,
        ends: Mapping[TopicPartition, int],
        taken: list[pa.RecordBatch],
        kept: deque[FeedBatch],
    ) -> None:
        """Cut a batch at the end of its partition's range: the head is taken, the tail kept for later."""
        if found.tp not in ends:
            kept.append(found)
            return
        batch, first, offsets = found.fetched.batch, found.fetched.first_offset, found.fetched.offsets
        end = ends[found.tp]
        rows = max(0, end - first) if offsets is None else int(np.searchsorted(offsets, end))
        if rows >= batch.num_rows:
            taken.append(self._hand_out(found))
            return
        if rows:
            taken.append(self._hand_out(FeedBatch(found.tp, head(found.fetched, rows))))
        kept.append(FeedBatch(found.tp, tail(found.fetched, rows)))

    def _position(self, tp: TopicPartition, ready: Iterable[FeedBatch]) -> int:
        waiting = next((found.fetched.first_offset for found in ready if found.tp == tp), None)
        return self._fetcher.feeds[tp].position if waiting is None else waiting

    def _feed(self, tp: TopicPartition) -> Feed:
        try:
            return self._fetcher.feeds[tp]
        except KeyError:
            raise KeyError(f"partition {tp} is not assigned: {sorted(map(str, self._fetcher.feeds))}") from None

    def _schema(self, partitions: Iterable[TopicPartition]) -> pa.Schema:
        """The schema of a table of these partitions, by their topics' newest."""
        found: dict[str, pa.Schema] = {}
        for name in dict.fromkeys(tp.topic for tp in partitions):
            schema = parse_schema(self._link.topic(name).schemas[-1].message)
            if self._columns is not None:
                schema = pa.schema([schema.field(column) for column in self._columns])
            found[name] = pa.schema([*schema, *LOG_COLUMNS]) if self._log_columns else schema
        schemas = list(found.values())
        if any(not schema.equals(schemas[0]) for schema in schemas):
            raise BrokerError(
                ErrorCode.SCHEMA_MISMATCH, f"topics {list(found)} have different columns: read them one by one"
            )
        return schemas[0] if schemas else pa.schema([])

    def _assign(self, assigned: Sequence[TopicPartition], start: Start) -> None:
        for topic in dict.fromkeys([*self._topics, *(tp.topic for tp in assigned)]):
            self._link.topic(topic)
        partitions = [*assigned, *(tp for topic in self._topics for tp in self._link.metadata.partitions(topic))]
        for tp in partitions:
            if self._link.metadata.partition(tp) is None:
                raise no_leader(self._link.metadata, tp)
        for name in dict.fromkeys(tp.topic for tp in partitions):
            self._choose_columns(name)
        given: dict[TopicPartition, int] = {}
        default: OffsetQuery = "earliest"
        if isinstance(start, Mapping):
            given = {TopicPartition(*tp): offset for tp, offset in start.items()}
            unknown = given.keys() - set(partitions)
            if unknown:
                raise ConfigError(f"start names partitions that are not read: {sorted(map(str, unknown))}")
        else:
            default = start
        asked = {tp: default for tp in partitions if tp not in given}
        found = {**list_offsets(self._link, asked, isolation=self._isolation), **given} if asked else given
        for tp in partitions:
            self._add(tp, found[tp])
        if isinstance(start, dt.datetime):
            self._not_before_us = dict.fromkeys(partitions, wire_time(start))

    def _add(self, tp: TopicPartition, position: int) -> None:
        topic = self._link.metadata.topic(tp.topic)
        assert topic is not None
        self._fetcher.feeds[tp] = Feed(tp, topic.topic_id, position)

    def _choose_columns(self, name: str) -> None:
        """Raises BrokerError SCHEMA_MISMATCH."""
        if self._columns is None:
            return
        topic = self._link.topic(name)
        also = [topic.event_time] if self._from_time and topic.event_time else []
        newest = parse_schema(topic.schemas[-1].message)
        self._choices[name] = ColumnChoice(name, self._columns, newest, also=also)

    def _wire_columns(self, topic: str) -> tuple[str, ...] | None:
        choice = self._choices.get(topic)
        return None if choice is None else choice.wire

    def _look_for_partitions(self) -> None:
        """Partitions added to the topics are read from their first record on."""
        now = time.monotonic()
        if not self._topics or now < self._refreshed_at + _METADATA_MAX_AGE_S:
            return
        self._refreshed_at = now
        for topic in self._topics:
            self._link.topic(topic, refresh=True)
            for tp in self._link.metadata.partitions(topic):
                if tp not in self._fetcher.feeds:
                    self._add(tp, 0)


def _topics_and_partitions(
    topics: str | Iterable[str] | Iterable[TopicPartition], *, optional: bool
) -> tuple[list[str], list[TopicPartition]]:
    """What was asked for, as names of topics and as single partitions."""
    if isinstance(topics, str):
        return [topics], []
    names: list[str] = []
    partitions: list[TopicPartition] = []
    for item in topics:
        if isinstance(item, str):
            names.append(item)
        else:
            partitions.append(TopicPartition(*item))
    if not names and not partitions and not optional:
        raise ConfigError("a consumer needs a topic or a partition")
    return list(dict.fromkeys(names)), [tp for tp in dict.fromkeys(partitions) if tp.topic not in names]
