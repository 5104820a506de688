"""Reading topics as Arrow batches, from any place, for as long as wanted.

What is handed out are plain ``pyarrow.RecordBatch``es with the topic's columns, as they were written and without a
copy; ``sparklog.origin(batch)`` tells where a batch comes from, and ``log_columns=True`` puts that into columns. Order
holds within a partition. The position of a partition is the offset of the next record to be handed out.
"""

from __future__ import annotations

import datetime as dt
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal

import numpy as np
import pyarrow as pa

from sparklog.client.column_choice import ColumnChoice
from sparklog.client.errors import ClientTimeout, LogTruncated
from sparklog.client.fetched import FetchedBatch
from sparklog.client.fetching import Feed, FeedBatch, Fetcher
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

#: Where to begin: an end of the log, a time, or an offset for each partition (others begin at the earliest).
Start = Literal["earliest", "latest"] | dt.datetime | Mapping[TopicPartition, int]
_LOG_COLUMNS = [
    pa.field("_topic", pa.string(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
]


class Consumer:
    """A client that reads. Use from one thread at a time; close it, or use it in a ``with`` block.

    >>> with Consumer("localhost:9092", "flights") as consumer:                             # doctest: +SKIP
    ...     for batch in consumer:
    ...         print(sparklog.origin(batch), batch.num_rows)
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        topics: str | Iterable[str] | Iterable[TopicPartition],
        *,
        start: Start = "earliest",
        columns: Sequence[str] | None = None,
        log_columns: bool = False,
        on_out_of_range: Literal["raise", "earliest", "latest"] = "raise",
        max_bytes: int = 16 * MIB,
        isolation: Isolation = "read_committed",
        timeout_s: float = 30.0,
        client_id: str = "sparklog-consumer",
        first_contact_s: float | None = None,
    ) -> None:
        """Connects and looks up the positions to start from.

        Args:
            topics: one topic, several, or an assignment of ``TopicPartition``s. Of topics all partitions are read,
                and those added later from their beginning.
            start: ``"earliest"``, ``"latest"``, a datetime, or offsets by partition.
            columns: only these are sent, in this order; nulls for records older than a column.
            log_columns: add ``_topic``, ``_partition`` and ``_offset`` behind the topic's columns.
            on_out_of_range: what to do when retention has passed the position, or an unclean election has cut the log
                below it: raise, or go on from an end; after a cut, from where it was made.
            max_bytes: of one answer of one broker; a larger batch comes alone.
            isolation: ``"read_committed"``: records of transactions once they are committed, up to the first that is
                open, and never those of aborted ones; ``"read_uncommitted"``: everything that is replicated.
            timeout_s: a call, or a partition that cannot be read, fails after this.
            first_contact_s: give up after this when no broker has ever answered; None: no sooner than any call.

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
        self._topics, assigned = _topics_and_partitions(topics)
        self._refreshed_at = time.monotonic()
        try:
            self._assign(assigned, start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connections. Positions are forgotten; nothing is committed. Idempotent."""
        self._ready.clear()
        self._fetcher.close()
        self._link.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- reading ---

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Batches without end; leaving the loop loses nothing. Raises as ``poll``."""
        while True:
            self._wait(1.0)
            while self._ready:
                yield self._hand_out(self._ready.popleft())

    def poll(self, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """What is there, waiting at most ``timeout_s`` for something; an empty list when nothing came.

        Raises:
            LogTruncated: records read before are not in the log any more (unless ``on_out_of_range`` says otherwise).
            BrokerError: OFFSET_OUT_OF_RANGE (unless ``on_out_of_range`` says otherwise), CORRUPT_MESSAGE,
                INCONSISTENT_TOPIC_ID when a topic was made anew, UNKNOWN_TOPIC_OR_PARTITION when it is gone.
            ClientTimeout: a partition could not be read for the consumer's ``timeout_s``.
        """
        self._wait(timeout_s)
        batches = [self._hand_out(found) for found in self._ready]
        self._ready.clear()
        return batches

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
        if self._ready:
            return
        self._look_for_partitions()
        try:
            found = self._fetcher.advance(timeout_s, or_moved=or_moved)
        except BrokerError as error:
            if error.code != ErrorCode.OFFSET_OUT_OF_RANGE or self._on_out_of_range == "raise":
                raise
            if isinstance(error, LogTruncated):
                self._fetcher.feeds[error.tp].move(error.offset)
            else:
                self._reset_out_of_range()
            return
        self._ready.extend(found if not self._not_before_us else self._after_start(found))

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
                yield one if row == 0 else FeedBatch(one.tp, _tail(one.fetched, row))

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
            batch = _with_log_columns(batch, place, offsets)
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
            head_offsets = None if offsets is None else offsets[:rows]
            head = found.fetched._replace(batch=batch.slice(0, rows), offsets=head_offsets)
            taken.append(self._hand_out(FeedBatch(found.tp, head)))
        kept.append(FeedBatch(found.tp, _tail(found.fetched, rows)))

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
            found[name] = pa.schema([*schema, *_LOG_COLUMNS]) if self._log_columns else schema
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
    topics: str | Iterable[str] | Iterable[TopicPartition],
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
    if not names and not partitions:
        raise ConfigError("a consumer needs a topic or a partition")
    return list(dict.fromkeys(names)), [tp for tp in dict.fromkeys(partitions) if tp.topic not in names]


def _tail(fetched: FetchedBatch, rows: int) -> FetchedBatch:
    if fetched.offsets is None:
        return fetched._replace(batch=fetched.batch.slice(rows), first_offset=fetched.first_offset + rows)
    offsets = fetched.offsets[rows:]
    return fetched._replace(batch=fetched.batch.slice(rows), first_offset=int(offsets[0]), offsets=offsets)


def _with_log_columns(batch: pa.RecordBatch, place: Origin, offsets: np.ndarray | None) -> pa.RecordBatch:
    count = batch.num_rows
    if offsets is None:
        offsets = np.arange(place.offset, place.offset + count, dtype=np.int64)
    values = [
        pa.repeat(place.topic, count),
        pa.repeat(pa.scalar(place.partition, pa.int32()), count),
        pa.array(offsets, pa.int64()),
    ]
    schema = pa.schema([*batch.schema, *_LOG_COLUMNS])
    return pa.RecordBatch.from_arrays([*batch.columns, *values], schema=schema)
