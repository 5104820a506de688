"""The reader of a range of offsets of one partition, for Spark tasks and other bounded reads.

If a broker on this host has an in-sync replica, the reader reads the broker's segment files. Otherwise it fetches from
the leader or from a follower. If it cannot read the whole range, it raises an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import get_args

import pyarrow as pa

from sparklog.client.cluster import forks
from sparklog.client.cluster.blocking_cluster import BlockingCluster, Deadline
from sparklog.client.cluster.isolation_level import Isolation, wire_isolation
from sparklog.client.cluster.replica_selector import LocalReadMode
from sparklog.client.consumer.fetch_decoder import FetchDecoder
from sparklog.client.consumer.fetched_batches import FetchedBatch
from sparklog.client.consumer.fetcher import Fetcher, water_marks
from sparklog.client.consumer.local_log import LocalLog
from sparklog.client.consumer.partition_cursor import CompletedFetch, PartitionCursor
from sparklog.client.consumer.projection import TopicProjection
from sparklog.client.errors import ClientTimeout, LocalReadUnavailable
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import NO_EPOCH, TopicPartition
from sparklog.net.client_security import Security
from sparklog.protocol.messages import TopicMetadata
from sparklog.record.header import BatchHeader
from sparklog.record.schema import parse_schema

#: The maximum size of a response. Two batches of a stored table fit into it, because each has about 4 MiB.
_MAX_BYTES = 10 * 1024 * 1024
#: The time between two reads of local files, if the log does not have the requested records yet.
_LOCAL_PAUSE_S = 0.02


class PartitionReader:
    """An iterator of ``(BatchHeader, pyarrow.RecordBatch)`` over the offsets ``[start, end)`` of one partition.

    Use it once, from one thread. Close it, or use it in a ``with`` block. The header is the stored header, but with
    another length and CRC if the broker sent only some columns. Records outside of the range are removed. To get
    offsets, use ``fetched()``, which also returns the first offset of each batch.
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
        local: LocalReadMode = "auto",
        max_bytes: int = _MAX_BYTES,
        timeout_s: float = 60.0,
        client_id: str = "sparklog-reader",
        security: Security = None,
    ) -> None:
        """Create the reader without connecting.

        Args:
            bootstrap: addresses, or a shared cluster client, which the reader does not close.
            columns: fetch only these columns, in this order. Batches that are older than a column have nulls in it. If
                it is empty, fetch only headers, and return batches with a number of rows but no columns.
            keep: a filter for headers. Batches for which it returns False are skipped.
            topic_id: the expected id of the topic. A recreated topic with the same name has another id and is not read.
            last_epoch: a leader epoch in which the log had reached ``start``. The reader raises if the log was
                truncated below ``start`` after that. NO_EPOCH: this is not checked.
            isolation: ``"read_committed"`` skips the records of aborted transactions, and waits for the end of open
                transactions. ``"read_uncommitted"`` does neither.
            local: ``"auto"`` maps the files of an in-sync replica on this host if there is one, and otherwise fetches
                from the nearest replica. ``"never"`` always fetches. ``"require"`` fails instead of fetching.
                ``counters`` shows which one was used.
            max_bytes: the maximum size of one response. A larger batch is returned alone.
            timeout_s: the maximum time without any progress.
            security: the settings for TLS and login. Ignored with a cluster client, which has its own settings.
        """
        assert 0 <= start <= end, f"range [{start}, {end})"
        if local not in get_args(LocalReadMode):
            raise ConfigError(f"local={local!r}: expected {', '.join(get_args(LocalReadMode))}")
        self._owns_cluster = not isinstance(bootstrap, BlockingCluster)
        self._cluster = (
            bootstrap
            if isinstance(bootstrap, BlockingCluster)
            else BlockingCluster(bootstrap, client_id=client_id, timeout_s=timeout_s, security=security)
        )
        self._tp = TopicPartition(*topic_partition)
        self._start = start
        self._end = end
        self._columns = list(columns) if columns is not None else None
        #: The projection to the chosen columns, which is set when the topic is known. None: all columns.
        self._projection: TopicProjection | None = None
        self._keep = keep
        self._timeout_s = timeout_s
        self._cursor = PartitionCursor(self._tp, topic_id, start, last_epoch=last_epoch)
        self._fetcher = Fetcher(
            self._cluster,
            max_bytes=max_bytes,
            isolation=wire_isolation(isolation),
            columns=self._wire_columns,
            timeout_s=timeout_s,
            from_followers=True,
        )
        self._fetcher.cursors[self._tp] = self._cursor
        self._fetcher.ends = {self._tp: end}
        self.counters = self._fetcher.counters
        self._decoder = FetchDecoder(self._cluster, columns=self._wire_columns, counters=self.counters)
        self._local_only = local == "require"
        self._local = (
            None
            if local == "never"
            else LocalLog(self._cluster, self._tp, isolation=wire_isolation(isolation), max_bytes=max_bytes)
        )
        forks.watch(self)

    def close(self) -> None:
        """Close the reader's connections. A call in a forked child does nothing."""
        self._fetcher.close()
        self._close_local()
        if self._owns_cluster:
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
        """Yield the batches, each with the offset of its first record.

        Raises:
            LogTruncated: an unclean election truncated the log during the read.
            BrokerError: OFFSET_OUT_OF_RANGE, UNKNOWN_TOPIC_OR_PARTITION, INCONSISTENT_TOPIC_ID, CORRUPT_MESSAGE;
                SCHEMA_MISMATCH for columns that the topic does not have.
            LocalReadUnavailable: the files cannot be read on this host, and ``local`` is ``"require"``.
            ClientTimeout: no progress for ``timeout_s``; the message has the offset that was reached.
        """
        cursor = self._cursor
        try:
            if cursor.position < self._end:
                self._look_up_topic()
            while cursor.position < self._end:
                fetch = self._read_local() or self._fetch()
                projection = self._projection
                for found in self._decoder.decode(fetch, end=self._end, keep=self._keep):
                    yield found if projection is None else found._replace(batch=projection.complete(found.batch))
        finally:
            self._fetcher.close()
            self._close_local()

    # --- the topic ---

    def _look_up_topic(self) -> None:
        """Look up the leader and the topic, and choose the columns.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INCONSISTENT_TOPIC_ID, SCHEMA_MISMATCH.
            ClientTimeout: the partition has no leader, or no broker responds.
        """
        self._cluster.retrying(
            f"reading {self._tp} offsets [{self._start}, {self._end})",
            lambda: self._cluster.leader(self._tp),
            timeout_s=self._timeout_s,
        )
        topic = self._cluster.topic(self._tp.topic)
        expected = self._cursor.topic_id
        if expected and topic.topic_id != expected:
            raise BrokerError(
                ErrorCode.INCONSISTENT_TOPIC_ID,
                f"{self._tp}: the topic was deleted and created again ({topic.topic_id} found, {expected} expected)",
            )
        self._cursor.topic_id = topic.topic_id
        if self._columns is not None:
            self._projection = self._choose(self._columns, topic)

    def _choose(self, columns: Sequence[str], topic: TopicMetadata) -> TopicProjection:
        try:
            return TopicProjection(topic.name, columns, parse_schema(topic.schemas[-1].message))
        except BrokerError:  # The columns may have been added to the topic after the metadata was read.
            newest = self._cluster.topic(topic.name, refresh=True).schemas[-1]
            return TopicProjection(topic.name, columns, parse_schema(newest.message))

    def _wire_columns(self, _topic: str) -> tuple[str, ...] | None:
        return None if self._projection is None else self._projection.wire

    # --- fetches ---

    def _fetch(self) -> CompletedFetch:
        """Fetch until there are batches at the position, and return them."""
        deadline = Deadline(self._timeout_s)
        while deadline.left_s():
            for completed in self._fetcher.advance(deadline.left_s()):
                return completed
        raise self._no_progress(self._cursor.problem)

    def _no_progress(self, reason: str) -> ClientTimeout:
        return ClientTimeout(
            f"reading {self._tp} offsets [{self._start}, {self._end}): no progress at {self._cursor.position} for"
            f" {self._timeout_s:g} s, last: {reason}"
        )

    # --- files of this host ---

    def _read_local(self) -> CompletedFetch | None:
        """Return the batches at the position from files on this host, or None if they must be fetched."""
        deadline = Deadline(self._timeout_s)
        cursor = self._cursor
        while self._local is not None:
            try:
                part = self._local.read(
                    cursor.position,
                    topic_id=cursor.topic_id,
                    leader=self._cluster.leader(self._tp),
                    last_epoch=cursor.last_epoch,
                    headers_only=self._wire_columns(self._tp.topic) == (),
                )
            except (BrokerError, OSError) as error:
                self._fall_back(error)
                return None
            if part.headers:
                self.counters.count_local(part)
                return cursor.move_past(part)
            if part.answer.diverging is not None:
                cursor.on_diverging(part.answer.diverging)
            elif not self._local_only:
                return None  # Fetch instead: the broker can wait for records that do not exist yet.
            elif not deadline.left_s():
                raise self._no_progress(water_marks(part.answer))
            else:
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
