"""Reading one range of offsets of one partition, all of it or an error: under Spark's tasks and other bounded reads.

The next fetch is sent before the last answer is decoded and handed out, so the broker and the socket work while the
caller does. A reader never ends early without saying so: a range that cannot be read raises.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import get_args

import pyarrow as pa

from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import UNKNOWN_TOPIC_GRACE_S, BlockingCluster, Deadline
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.replica_selector import LocalReads, nearest
from sparklog.client.consumer.fetched_batches import FetchedBatch, PartitionBytes, decode_partition, split_partitions
from sparklog.client.consumer.local_log import LocalLog
from sparklog.client.consumer.projection import TopicProjection
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.client.consumer.schema_lookup import SchemaLookup
from sparklog.client.errors import ClientTimeout, LocalReadUnavailable, LogTruncated
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import NO_EPOCH, NO_LEADER, TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.net.descriptors import is_this_host
from sparklog.protocol.messages import CONSUMER, Fetch, FetchPartition, FetchReply, TopicMetadata
from sparklog.record.header import BatchHeader
from sparklog.record.schema import parse_schema

_MAX_WAIT_MS = 500
#: Of an answer: two of the batches that tables are stored as, which take a little more or less than 4 MiB.
_MAX_BYTES = 10 * 1024 * 1024
#: A leader that has not what is wanted for so long may have been deposed without knowing.
_SUSPECT_AFTER_S = 1.5
#: Between looks at a log of this host that has not what is wanted yet.
_LOCAL_PAUSE_S = 0.02


class PartitionReader:
    """Iterates ``(BatchHeader, pyarrow.RecordBatch)`` over the offsets ``[start, end)`` of one partition.

    Use from one thread, once; close it, or use it in a ``with`` block. The header is the stored one, apart from length
    and CRC where some of the columns were sent; the records are cut to the range, so ``fetched()``, which also tells
    each batch's first offset, is what offsets are read from.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] | BlockingCluster,
        topic_partition: TopicPartition,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        keep: Callable[[BatchHeader], bool] | None = None,
        topic_id: str = "",
        last_epoch: int = NO_EPOCH,
        isolation: Isolation | int = "read_committed",
        local: LocalReads = "auto",
        max_bytes: int = _MAX_BYTES,
        timeout_s: float = 60.0,
        client_id: str = "sparklog-reader",
    ) -> None:
        """Connects to nothing yet.

        Args:
            bootstrap: addresses, or a link to share (which the reader then does not close).
            columns: only these are sent, in this order; nulls where a batch is older than a column. None at all: only
                headers are sent, and the batches have no columns but their number of rows.
            keep: batches whose header it says no to are passed over.
            topic_id: refuse to read a topic of the same name that was made anew.
            last_epoch: a leader epoch in which the log was known to reach ``start``: raise if it has been cut below
                since. NO_EPOCH: not checked.
            isolation: ``"read_committed"`` leaves out records of aborted transactions, and waits below those of open
                ones; ``"read_uncommitted"`` does neither.
            local: ``"auto"`` maps the files of an in-sync replica on this host where there is one, and fetches from
                the nearest replica otherwise; ``"never"`` fetches; ``"require"`` fails where it would have to fetch.
                ``counters`` tell which it was.
            max_bytes: of one answer; a larger batch comes alone.
            timeout_s: the longest time without any progress.
        """
        assert 0 <= start <= end, f"range [{start}, {end})"
        if local not in get_args(LocalReads):
            raise ConfigError(f"local={local!r}: expected {', '.join(get_args(LocalReads))}")
        self._owns_link = not isinstance(bootstrap, BlockingCluster)
        self._link = (
            bootstrap
            if isinstance(bootstrap, BlockingCluster)
            else BlockingCluster(bootstrap, client_id=client_id, timeout_s=timeout_s)
        )
        self._tp = TopicPartition(*topic_partition)
        self._start = start
        self._end = end
        self._columns = list(columns) if columns is not None else None
        #: Made with the first fetch, when the topic is known.
        self._choice: TopicProjection | None = None
        self._keep = keep
        self.counters = ReadCounters()
        self._topic_id = topic_id
        self._isolation = wire_isolation(isolation)
        self._max_bytes = max_bytes
        self._local_only = local == "require"
        self._local = (
            None if local == "never" else LocalLog(self._link, self._tp, isolation=self._isolation, max_bytes=max_bytes)
        )
        self._timeout_s = timeout_s
        self._connection: BlockingConnection | None = None
        self._under_way = False
        self._asked = start
        self._asked_leader = Leader(NO_LEADER, NO_EPOCH)
        #: Who is asked, and the followers that have failed to answer, which are not asked again.
        self._source = NO_LEADER
        self._avoided: set[int] = set()
        self._stale = False
        #: Leader epoch of the last record read: what is read next has to follow it in the same history.
        self._last_epoch = last_epoch
        #: Until the first batch the epoch is only a bound: a leader that appended nothing left no trace in the log.
        self._epoch_is_bound = True
        #: The end of an answer in which a projected batch failed its checksum. Below it the broker is asked to verify
        #: what it has, in as many answers as that takes.
        self._verify_until = -1
        self._schema_of = SchemaLookup(self._link, self._tp.topic)
        forks.watch(self)

    def close(self) -> None:
        """End the reader's connections. Does nothing in a forked child."""
        self._disconnect()
        self._close_local()
        if self._owns_link:
            self._link.close()

    def __enter__(self) -> PartitionReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[BatchHeader, pa.RecordBatch]]:
        return ((found.header, found.batch) for found in self.fetched())

    def fetched(self) -> Iterator[FetchedBatch]:
        """The same, with the offset of each batch's first record.

        Raises:
            LogTruncated: an unclean election cut the log while it was being read.
            BrokerError: OFFSET_OUT_OF_RANGE, UNKNOWN_TOPIC_OR_PARTITION, INCONSISTENT_TOPIC_ID, CORRUPT_MESSAGE;
                SCHEMA_MISMATCH for columns that the topic does not have.
            LocalReadUnavailable: with ``local="require"``, for whatever reason.
            ClientTimeout: no progress for ``timeout_s``; names the offset reached.
        """
        position = self._start
        try:
            while position < self._end:
                answer = self._read_local(position) or self._await(position)
                done, position = position, answer.next_offset
                before = self._last_epoch, self._epoch_is_bound
                self._last_epoch = answer.headers[-1].leader_epoch
                self._epoch_is_bound = False
                if position < self._end and self._local is None:
                    self._send_ahead(position)
                try:
                    for found in self._decoded(answer, done):
                        done = found.header.next_offset
                        before = found.header.leader_epoch, False
                        yield found
                except BrokerError as error:
                    if answer.mapped or not self._is_to_be_verified(error, done):
                        raise
                    self._disconnect()
                    self._verify_until, position = answer.next_offset, done
                    self._last_epoch, self._epoch_is_bound = before
        finally:
            self._disconnect()
            self._close_local()

    def _is_to_be_verified(self, error: BrokerError, offset: int) -> bool:
        """Whether ``error`` says that a projected batch from ``offset`` on is damaged, and the broker did not verify it
        on its way here: it is asked to, since only it can tell the disk's damage from another."""
        wire = None if self._choice is None else self._choice.wire
        return wire is not None and error.code == ErrorCode.CORRUPT_MESSAGE and offset >= self._verify_until

    def _read_local(self, position: int) -> PartitionBytes | None:
        """The batches at ``position`` out of files of this host, or None: they are to be fetched."""
        deadline = Deadline(self._timeout_s)
        while self._local is not None:
            try:
                leader, topic = self._look_up()
                wire = None if self._choice is None else self._choice.wire
                self._asked = position
                answer = self._local.read(
                    position,
                    topic_id=topic.topic_id,
                    leader=leader,
                    last_epoch=self._last_epoch,
                    headers_only=wire == (),
                )
            except (BrokerError, OSError) as error:
                self._fall_back(error)
                return None
            if answer.headers:
                self.counters.count_local(answer)
                return answer
            self._check_history(answer)
            if answer.answer.diverging is None:
                if not self._local_only:
                    return None  # a fetch can wait for what is not there yet
                if not deadline.left_s():
                    raise self._no_progress(position, _marks(answer))
                time.sleep(_LOCAL_PAUSE_S)
        return None

    def _fall_back(self, error: BrokerError | OSError) -> None:
        if self._local_only:
            code = error.code if isinstance(error, BrokerError) else ErrorCode.REPLICA_NOT_AVAILABLE
            detail = error.detail if isinstance(error, BrokerError) else str(error)
            raise LocalReadUnavailable(code, f"{self._tp}: {detail}") from error
        self.counters.local_fallbacks += 1
        self._close_local()

    def _close_local(self) -> None:
        if self._local is not None:
            self._local.close()
            self._local = None

    def _decoded(self, answer: PartitionBytes, start: int) -> Iterator[FetchedBatch]:
        choice = self._choice
        wire = None if choice is None else choice.wire
        for found in decode_partition(
            answer, self._schema_of, start=start, end=self._end, keep=self._keep, columns=wire
        ):
            self.counters.decoded_batches += 1
            self.counters.local_bytes += found.looked_at if answer.mapped else 0
            yield found if choice is None else found._replace(batch=choice.complete(found.batch))

    def _await(self, position: int) -> PartitionBytes:
        """The answer to the fetch at ``position``, which is sent again until it brings batches."""
        deadline = Deadline(self._timeout_s)
        grace = Deadline(min(UNKNOWN_TOPIC_GRACE_S, self._timeout_s))
        suspect = Deadline(_SUSPECT_AFTER_S)
        failures = 0
        while True:
            delay_ms = 0.0
            try:
                if not self._under_way:
                    self._send(position)
                answer = self._receive()
                if answer.headers:
                    return answer
                reason = _marks(answer)
            except BrokerError as error:
                if self._turn_to_leader():
                    continue  # only its word counts
                doubt = self._doubt(error)
                unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                lasting = not error.retriable or self._made_anew() or (unknown and not grace.left_s())
                if lasting and doubt is None:
                    raise
                if (doubt or error).refresh_metadata:
                    self._stale = True
                reason = str(doubt or error)
                delay_ms = self._link.pause_ms(failures)
                failures += 1
            if delay_ms / 1000 >= deadline.left_s():
                raise self._no_progress(position, reason)
            time.sleep(delay_ms / 1000)
            if not suspect.left_s():
                self._turn_to_leader()
                with contextlib.suppress(BrokerError):  # whatever it is, the next fetch goes to whom the cache names
                    self._link.confirm(self._tp, self._asked_leader)
                suspect = Deadline(_SUSPECT_AFTER_S)

    def _no_progress(self, position: int, reason: str) -> ClientTimeout:
        return ClientTimeout(
            f"reading {self._tp} offsets [{self._start}, {self._end}): stood at {position} for"
            f" {self._timeout_s:g} s, last: {reason}"
        )

    def _turn_to_leader(self) -> bool:
        """Ask the follower that was asked last no more. False when it was the leader."""
        if self._source == self._asked_leader.broker_id:
            return False
        self._avoided.add(self._source)
        self._source = self._asked_leader.broker_id
        self._disconnect()
        return True

    def _doubt(self, error: BrokerError) -> BrokerError | None:
        """Why an error that is final is not to be believed yet, or None."""
        cut = isinstance(error, LogTruncated) and not self._epoch_is_bound
        if error.code == ErrorCode.OFFSET_OUT_OF_RANGE and not cut:
            try:
                self._link.confirm(self._tp, self._asked_leader)
            except BrokerError as doubt:
                return doubt
        return None

    def _send_ahead(self, position: int) -> None:
        """Ask for what comes next; when that fails, ``_await`` asks again and sees the error."""
        try:
            self._send(position)
        except BrokerError as error:
            if not error.retriable:
                raise

    def _look_up(self) -> tuple[Leader, TopicMetadata]:
        """Who leads, and the topic, with which the columns are settled.

        Raises:
            BrokerError: INCONSISTENT_TOPIC_ID, SCHEMA_MISMATCH; as ``BlockingCluster.leader``.
        """
        leader = self._link.leader(self._tp, refresh=self._stale)
        self._stale = False
        topic = self._link.metadata.topic(self._tp.topic)
        assert topic is not None, "it has a leader"
        self._topic_id = self._topic_id or topic.topic_id
        if self._made_anew():
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{self._tp}: the topic was deleted and created again ({topic.topic_id} found,"
                f" {self._topic_id} expected)",
            )
        if self._columns is not None and self._choice is None:
            self._choice = self._choose(self._columns, topic)
        return leader, topic

    def _send(self, position: int) -> None:
        leader, _ = self._look_up()
        self._asked_leader, self._source = leader, self._nearest(leader)
        connection = self._connect(self._source)
        wanted = FetchPartition(
            self._tp.topic,
            self._tp.partition,
            self._topic_id,
            leader.epoch,
            position,
            self._max_bytes,
            last_epoch=self._last_epoch,
            columns=None if self._choice is None else self._choice.wire,
            verify=position < self._verify_until,
        )
        connection.send(
            Fetch(
                0,
                CONSUMER,
                incarnation=-1,
                max_wait_ms=_MAX_WAIT_MS,
                min_bytes=1,
                max_bytes=self._max_bytes,
                isolation=self._isolation,
                session_id=0,
                session_epoch=-1,
                partitions=(wanted,),
            )
        )
        self._under_way = True
        self._asked = position

    def _nearest(self, leader: Leader) -> int:
        """The broker to fetch from. Whether the log is still the one that was read up to ``start`` only the leader can
        tell, so it is asked first where that matters."""
        partition = self._link.metadata.partition(self._tp)
        if partition is None or (self._epoch_is_bound and self._last_epoch != NO_EPOCH):
            return leader.broker_id
        in_sync = [broker_id for broker_id in partition.isr if broker_id not in self._avoided]
        return nearest(leader.broker_id, in_sync, self._link.metadata.brokers, is_here=is_this_host)

    def _receive(self) -> PartitionBytes:
        connection = self._connection
        assert connection is not None
        self._under_way = False
        reply, body = connection.receive()
        if not isinstance(reply, FetchReply) or len(reply.partitions) != 1:
            connection.close()
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{connection.address} answered Fetch with {reply!r:.200}")
        if reply.code != ErrorCode.NONE:
            raise BrokerError(reply.code, f"fetch of {self._tp}")
        (answer,) = split_partitions(reply.partitions, body)
        if answer.answer.code != ErrorCode.NONE:
            raise BrokerError(answer.answer.code, answer.answer.detail or f"fetch of {self._tp}")
        self._check_history(answer)
        self.counters.count(answer)
        if self._source != self._asked_leader.broker_id:
            self.counters.follower_batches += len(answer.headers)
        return answer

    def _check_history(self, answer: PartitionBytes) -> None:
        """Raises LogTruncated when the log has parted from what was read."""
        if answer.answer.diverging is not None:
            epoch, end_offset = answer.answer.diverging
            if not self._epoch_is_bound or end_offset < self._asked:
                raise LogTruncated(self._tp, self._asked, answer.answer.diverging)
            self._last_epoch, self._epoch_is_bound = epoch, False

    def _choose(self, columns: Sequence[str], topic: TopicMetadata) -> TopicProjection:
        try:
            return TopicProjection(topic.name, columns, parse_schema(topic.schemas[-1].message))
        except BrokerError:  # the topic may have got columns since its metadata were read
            newest = self._link.topic(topic.name, refresh=True).schemas[-1]
            return TopicProjection(topic.name, columns, parse_schema(newest.message))

    def _made_anew(self) -> bool:
        topic = self._link.metadata.topic(self._tp.topic)
        return bool(topic is not None and self._topic_id and topic.topic_id != self._topic_id)

    def _connect(self, broker_id: int) -> BlockingConnection:
        """The connection fetches go over: its own, so that metadata can be asked for while a fetch is under way."""
        connection = self._connection
        if connection is None or connection.closed or connection.hello.broker_id != broker_id:
            self._disconnect()
            connection = self._connection = self._link.open_connection(broker_id)
        return connection

    def _disconnect(self) -> None:
        self._under_way = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _marks(answer: PartitionBytes) -> str:
    found = answer.answer
    return f"the high watermark is {found.high_watermark}, the last stable offset {found.last_stable_offset}"
