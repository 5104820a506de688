"""The reader of one range of offsets of one partition, for Spark's tasks and other bounded reads.

The next fetch is sent before the last response is decoded, so the broker and the socket work while the caller does. A
reader never ends early without an error: it raises if it cannot read the whole range.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import get_args

import pyarrow as pa

from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import BlockingCluster, Deadline
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.metadata import Leader
from sparklog.client.cluster.replica_selector import LocalReads, nearest
from sparklog.client.cluster.retry import UNKNOWN_TOPIC_GRACE_S
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
#: The size of a response: two of the batches that tables are stored as, which have about 4 MiB each.
_MAX_BYTES = 10 * 1024 * 1024
#: The time without progress after which the leader may be deposed without knowing it.
_SUSPECT_AFTER_S = 1.5
#: The time between checks of a log on this host that does not have the wanted records yet.
_LOCAL_PAUSE_S = 0.02


class PartitionReader:
    """An iterator of ``(BatchHeader, pyarrow.RecordBatch)`` over the offsets ``[start, end)`` of one partition.

    Use it from one thread, once. Close it, or use it in a ``with`` block. The header is the stored one, except for
    length and CRC if only some columns were sent. The records are cut to the range. To get offsets, use ``fetched()``,
    which also returns the first offset of each batch.
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
        """Create the reader without connecting.

        Args:
            bootstrap: addresses, or a cluster client to share, which the reader then does not close.
            columns: fetch only these, in this order; nulls if a batch is older than a column. Empty: fetch only
                headers, and return batches with a number of rows but no columns.
            keep: a filter for headers. Batches for which it returns False are skipped.
            topic_id: refuse to read a recreated topic of the same name.
            last_epoch: a leader epoch in which the log was known to reach ``start``. The reader raises if the log was
                truncated below it since. NO_EPOCH: not checked.
            isolation: ``"read_committed"`` leaves out records of aborted transactions, and waits at those of open ones;
                ``"read_uncommitted"`` does neither.
            local: ``"auto"`` maps the files of an in-sync replica on this host if there is one, and otherwise fetches
                from the nearest replica. ``"never"`` fetches. ``"require"`` fails instead of fetching. ``counters``
                shows which one was used.
            max_bytes: the size of one response; a larger batch is returned alone.
            timeout_s: the maximum time without any progress.
        """
        assert 0 <= start <= end, f"range [{start}, {end})"
        if local not in get_args(LocalReads):
            raise ConfigError(f"local={local!r}: expected {', '.join(get_args(LocalReads))}")
        self._owns_link = not isinstance(bootstrap, BlockingCluster)
        self._cluster = (
            bootstrap
            if isinstance(bootstrap, BlockingCluster)
            else BlockingCluster(bootstrap, client_id=client_id, timeout_s=timeout_s)
        )
        self._tp = TopicPartition(*topic_partition)
        self._start = start
        self._end = end
        self._columns = list(columns) if columns is not None else None
        #: Created at the first fetch, when the topic is known.
        self._choice: TopicProjection | None = None
        self._keep = keep
        self.counters = ReadCounters()
        self._topic_id = topic_id
        self._isolation = wire_isolation(isolation)
        self._max_bytes = max_bytes
        self._local_only = local == "require"
        self._local = (
            None
            if local == "never"
            else LocalLog(self._cluster, self._tp, isolation=self._isolation, max_bytes=max_bytes)
        )
        self._timeout_s = timeout_s
        self._connection: BlockingConnection | None = None
        self._is_in_flight = False
        self._asked = start
        self._asked_leader = Leader(NO_LEADER, NO_EPOCH)
        #: The broker of the last fetch, and the followers that failed, which are not used again.
        self._source = NO_LEADER
        self._avoided: set[int] = set()
        self._stale = False
        #: The leader epoch of the last record that was read. The next record must follow it in the same history.
        self._last_epoch = last_epoch
        #: True before the first batch. Until then the epoch is only a bound: a leader that appended nothing left no
        #: trace in the log.
        self._epoch_is_bound = True
        #: The end of a response in which a projected batch failed its checksum. For fetches below it the broker is
        #: asked to verify what is on its disk.
        self._verify_until = -1
        self._schema_of = SchemaLookup(self._cluster, self._tp.topic)
        forks.watch(self)

    def close(self) -> None:
        """Close the reader's connections. Does nothing in a forked child."""
        self._disconnect()
        self._close_local()
        if self._owns_link:
            self._cluster.close()

    def __enter__(self) -> PartitionReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[BatchHeader, pa.RecordBatch]]:
        return ((found.header, found.batch) for found in self.fetched())

    def fetched(self) -> Iterator[FetchedBatch]:
        """Yield the batches with the offset of each batch's first record.

        Raises:
            LogTruncated: an unclean election truncated the log during the read.
            BrokerError: OFFSET_OUT_OF_RANGE, UNKNOWN_TOPIC_OR_PARTITION, INCONSISTENT_TOPIC_ID, CORRUPT_MESSAGE;
                SCHEMA_MISMATCH for columns that the topic does not have.
            LocalReadUnavailable: any reason, with ``local="require"``.
            ClientTimeout: no progress for ``timeout_s``; the message has the offset that was reached.
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
        """Return whether to request verification: a projected batch from ``offset`` on is damaged and was not verified.

        Only the broker can tell damage on its disk from damage on the way.
        """
        wire = None if self._choice is None else self._choice.wire
        return wire is not None and error.code == ErrorCode.CORRUPT_MESSAGE and offset >= self._verify_until

    def _read_local(self, position: int) -> PartitionBytes | None:
        """Return the batches at ``position`` from files of this host, or None if they must be fetched."""
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
                    return None  # a fetch can wait for records that do not exist yet
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
        """Return the response to the fetch at ``position``, which is sent again until it has batches."""
        deadline = Deadline(self._timeout_s)
        grace = Deadline(min(UNKNOWN_TOPIC_GRACE_S, self._timeout_s))
        suspect = Deadline(_SUSPECT_AFTER_S)
        failures = 0
        while True:
            delay_ms = 0.0
            try:
                if not self._is_in_flight:
                    self._send(position)
                answer = self._receive()
                if answer.headers:
                    return answer
                reason = _marks(answer)
            except BrokerError as error:
                if self._switch_to_leader():
                    continue  # only the leader's error counts
                doubt = self._doubt(error)
                unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                lasting = not error.retriable or self._is_recreated() or (unknown and not grace.left_s())
                if lasting and doubt is None:
                    raise
                if (doubt or error).refresh_metadata:
                    self._stale = True
                reason = str(doubt or error)
                delay_ms = self._cluster.pause_ms(failures)
                failures += 1
            if delay_ms / 1000 >= deadline.left_s():
                raise self._no_progress(position, reason)
            time.sleep(delay_ms / 1000)
            if not suspect.left_s():
                self._switch_to_leader()
                # whatever the error, the next fetch goes to the leader in the metadata
                with contextlib.suppress(BrokerError):
                    self._cluster.confirm(self._tp, self._asked_leader)
                suspect = Deadline(_SUSPECT_AFTER_S)

    def _no_progress(self, position: int, reason: str) -> ClientTimeout:
        return ClientTimeout(
            f"reading {self._tp} offsets [{self._start}, {self._end}): no progress at {position} for"
            f" {self._timeout_s:g} s, last: {reason}"
        )

    def _switch_to_leader(self) -> bool:
        """Stop using the follower of the last fetch. Return False if it was the leader."""
        if self._source == self._asked_leader.broker_id:
            return False
        self._avoided.add(self._source)
        self._source = self._asked_leader.broker_id
        self._disconnect()
        return True

    def _doubt(self, error: BrokerError) -> BrokerError | None:
        """Return the reason not to trust a final error yet, or None."""
        cut = isinstance(error, LogTruncated) and not self._epoch_is_bound
        if error.code == ErrorCode.OFFSET_OUT_OF_RANGE and not cut:
            try:
                self._cluster.confirm(self._tp, self._asked_leader)
            except BrokerError as doubt:
                return doubt
        return None

    def _send_ahead(self, position: int) -> None:
        """Send the next fetch. If it fails, ``_await`` sends it again and handles the error."""
        try:
            self._send(position)
        except BrokerError as error:
            if not error.retriable:
                raise

    def _look_up(self) -> tuple[Leader, TopicMetadata]:
        """Return the leader and the topic, and choose the columns.

        Raises:
            BrokerError: INCONSISTENT_TOPIC_ID, SCHEMA_MISMATCH; as ``BlockingCluster.leader``.
        """
        leader = self._cluster.leader(self._tp, refresh=self._stale)
        self._stale = False
        topic = self._cluster.metadata.topic(self._tp.topic)
        assert topic is not None, "it has a leader"
        self._topic_id = self._topic_id or topic.topic_id
        if self._is_recreated():
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
        self._is_in_flight = True
        self._asked = position

    def _nearest(self, leader: Leader) -> int:
        """Return the broker to fetch from.

        Only the leader can tell whether the log up to ``start`` is unchanged, so the first fetch goes there if that
        matters.
        """
        partition = self._cluster.metadata.partition(self._tp)
        if partition is None or (self._epoch_is_bound and self._last_epoch != NO_EPOCH):
            return leader.broker_id
        in_sync = [broker_id for broker_id in partition.isr if broker_id not in self._avoided]
        return nearest(leader.broker_id, in_sync, self._cluster.metadata.brokers, is_here=is_this_host)

    def _receive(self) -> PartitionBytes:
        connection = self._connection
        assert connection is not None
        self._is_in_flight = False
        reply, body = connection.receive()
        if not isinstance(reply, FetchReply) or len(reply.partitions) != 1:
            connection.close()
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{connection.address} responded to Fetch with {reply!r:.200}")
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
        """Raise LogTruncated if the log has diverged from the records that were read."""
        if answer.answer.diverging is not None:
            epoch, end_offset = answer.answer.diverging
            if not self._epoch_is_bound or end_offset < self._asked:
                raise LogTruncated(self._tp, self._asked, answer.answer.diverging)
            self._last_epoch, self._epoch_is_bound = epoch, False

    def _choose(self, columns: Sequence[str], topic: TopicMetadata) -> TopicProjection:
        try:
            return TopicProjection(topic.name, columns, parse_schema(topic.schemas[-1].message))
        except BrokerError:  # columns may have been added to the topic since the metadata was read
            newest = self._cluster.topic(topic.name, refresh=True).schemas[-1]
            return TopicProjection(topic.name, columns, parse_schema(newest.message))

    def _is_recreated(self) -> bool:
        topic = self._cluster.metadata.topic(self._tp.topic)
        return bool(topic is not None and self._topic_id and topic.topic_id != self._topic_id)

    def _connect(self, broker_id: int) -> BlockingConnection:
        """Return the connection for fetches.

        It carries no other requests, so that metadata can be requested during a fetch.
        """
        connection = self._connection
        if connection is None or connection.closed or connection.hello.broker_id != broker_id:
            self._disconnect()
            connection = self._connection = self._cluster.open_connection(broker_id)
        return connection

    def _disconnect(self) -> None:
        self._is_in_flight = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _marks(answer: PartitionBytes) -> str:
    found = answer.answer
    return f"the high watermark is {found.high_watermark}, the last stable offset {found.last_stable_offset}"
