"""One open fetch request: when it reads its partitions, when it responds, and what the response contains.

A partition is read once, and again only after it reports a change. A partition is *due* when the fetch must read it. A
follower with only one due partition needs a low latency, so it has two shorter code paths: one waits at the log end,
and one sends new records.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from sparklog.broker.replication.partition import FetchVerdict, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.fetch_read import PartitionRead, follower_has_all, read_for_consumer
from sparklog.errors import ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import CONSUMER, ErrorReply, Fetch, FetchedPartition, FetchPartition, FetchReply
from sparklog.replica.fetch_session import FULL, FetchContext, Key

_log = logging.getLogger(__name__)

#: The maximum delay until a follower learns of a new high watermark. New records may bring it earlier.
_MARK_LINGER_S = 0.01
_MAX_WAIT_MS = 60_000
#: The time for which one fetch reads partitions before the event loop runs other work, and the number of reads between
#: two checks of the clock.
_READS_S = 0.02
_READS_AT_CLOCK = 64


class FetchHost(Protocol):
    """The part of ``fetch.Fetches`` that an open fetch uses to read, to wait and to end."""

    partitions: Partitions
    counters: Counter[str]
    consumer_sent: Callable[[ServerConnection, int], int] | None
    #: Limits of a response, even if the client requests more, because the broker builds the response in memory.
    consumer_max_bytes: int
    follower_max_bytes: int

    def reply_within(self, fetch: OpenFetch, delay_s: float) -> None: ...

    def read_soon(self, fetch: OpenFetch) -> None: ...

    def drop(self, fetch: OpenFetch) -> None: ...

    def read_for_follower(
        self,
        partitions: Partitions,
        wanted: FetchPartition,
        *,
        verdict: FetchVerdict | None,
        max_bytes: int,
        isolation: int,
    ) -> PartitionRead: ...


class OpenFetch:
    """One fetch request, from its arrival to its response.

    A part of ``Fetches``. Not thread-safe: use it only on the broker's event loop.
    """

    __slots__ = (
        "_completes",
        "_cost",
        "_host",
        "_max_bytes",
        "_reads",
        "_rest",
        "_unfinished",
        "connection",
        "context",
        "done",
        "due_s",
        "is_due_to_read",
        "number",
        "of_follower",
        "request",
        "stale",
        "verdicts",
    )

    def __init__(
        self, host: FetchHost, connection: ServerConnection, number: int, *, request: Fetch, context: FetchContext
    ) -> None:
        self._host = host
        self.connection = connection
        #: The id of the session, which has at most one waiting fetch; a number below 0 without a session.
        self.number = number
        self.request = request
        self.context = context
        #: The partitions' verdicts on the positions that this request names, except ``ServeFetch``.
        self.verdicts: dict[Key, FetchVerdict] = {}
        self.done = False
        #: The monotonic time at which the fetch responds with the records found so far.
        self.due_s = math.inf
        self.of_follower = request.replica_id != CONSUMER
        limit = host.follower_max_bytes if self.of_follower else host.consumer_max_bytes
        max_bytes = request.max_bytes
        self._max_bytes = max_bytes if max_bytes < limit else limit  # every fetch runs this, and min() takes longer
        self._reads: dict[Key, PartitionRead] = {}
        #: The total cost of all reads.
        self._cost = 0
        #: Partitions that are still to be read after a pause for other work, in reverse order: the last one is read
        #: next.
        self._rest: list[tuple[Key, FetchPartition]] = []
        #: Partitions to read, or to read again.
        self.stale: dict[Key, FetchPartition] = {}
        #: Whether another read of the fetch is scheduled.
        self.is_due_to_read = False
        #: Whether partitions in ``_rest`` are still to be read.
        self._unfinished = False
        #: Whether the fetch responds, with any records found, once it has read all partitions.
        self._completes = False

    def begin(self) -> None:
        """Respond now if there are enough records, an error or a divergence, or if the request allows no wait.

        Otherwise wait.
        """
        self.stale = self.context.due()
        changed = self._has_only_marks()
        if self.request.max_wait_ms <= 0:
            self._complete()
            return
        if changed is None and self._has_enough():
            self._answer()
            return
        wait_s = min(self.request.max_wait_ms, _MAX_WAIT_MS) / 1000
        if self.of_follower and (self._has_changes() if changed is None else changed):
            wait_s = min(wait_s, _MARK_LINGER_S)
        self._host.reply_within(self, wait_s)
        if self._unfinished:
            self._host.read_soon(self)

    def park_at_end(self, partition: Partition) -> bool:
        """Wait for new records if the follower has all records of its only due partition. Return whether it waits.

        A due partition is one that the fetch must read. This is a shorter form of ``begin``, because a follower has all
        records after almost every batch. ``partition`` is the only one in the request, and its leader has accepted the
        position. If the follower cannot wait in this way, return False and change nothing.
        """
        request, session = self.request, self.context.session
        if session is None or len(session.due) != 1 or request.session_epoch == FULL or request.max_wait_ms <= 0:
            return False
        wanted, offsets = self.context.named[0], partition.log.offsets
        # The leader has accepted the position, so up to this offset both logs are equal.
        if wanted.fetch_offset != offsets.log_end or wanted.columns is not None:
            return False
        key = wanted.topic, wanted.partition
        self.stale[key] = wanted
        wait_ms = request.max_wait_ms
        wait_s = (wait_ms if wait_ms < _MAX_WAIT_MS else _MAX_WAIT_MS) / 1000
        if wait_s > _MARK_LINGER_S and session.reported.get(key) != (
            partition.replica.view.high_watermark,
            offsets.log_start,
        ):
            wait_s = _MARK_LINGER_S
        self._host.reply_within(self, wait_s)
        return True

    def _has_only_marks(self) -> bool | None:
        """Return whether the high watermark or log start has moved, for a follower that already has all records.

        This costs less than a read, and is the state after almost every batch. In all other cases None is returned.
        """
        if not self.of_follower or self.verdicts or self.request.session_epoch == FULL:
            return None
        hosted, have_moved = self._host.partitions, False
        for key, wanted in self.stale.items():
            partition = hosted.get(key)
            if partition is None or not follower_has_all(partition, wanted):
                return None
            if not have_moved:
                start = partition.log.log_start_offset
                have_moved = self.context.marks_moved(key, partition.replica.high_watermark, start)
        return have_moved

    def reply_shortly(self) -> None:
        """Respond within 10 ms (``_MARK_LINGER_S``), with the records found by then."""
        self._host.reply_within(self, _MARK_LINGER_S)

    def complete(self) -> None:
        """Stop waiting: read the partitions that have changed, and respond with the records found."""
        if self.done:
            return
        try:
            self._complete()
        except Exception as error:
            self._failed(error)

    def read_again(self) -> None:
        """Read the partitions that have changed, and respond if there are enough records now."""
        self.is_due_to_read = False
        if self.done:
            return
        try:
            if not (self.of_follower and self._reply_single_partition()):
                self._reconsider()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Respond with an error.

        The client waits, and a callback of the event loop has no caller that could respond.
        """
        self._host.counters["requests.failed"] += 1
        _log.error("fetch of %s failed", self.connection.peer, exc_info=error)
        self.abandon()
        detail = f"{type(error).__name__}: {error}"
        self.connection.reply(ErrorReply(self.request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))

    def _complete(self) -> None:
        """Read all partitions and respond, or continue to read later.

        A fetch without a session reads all partitions before it responds, because no later request would read the rest.
        """
        self._read_all()
        if self._unfinished and self.context.session is None:
            self._completes = True
            self._host.read_soon(self)
        else:
            self._answer()

    def _answer(self) -> None:
        """Send the response with the records found."""
        self.abandon()
        results: list[FetchedPartition] = []
        body: list[Buffer] = []
        body_bytes = 0
        for read in self._reads.values():
            results.append(read.result)
            if read.body:
                body += read.body
                body_bytes += read.size
                if read.result.stored_bytes:
                    self._count_projected(read.result)
        host, reply = self._host, self.context.reply(results, self.request.cid)
        host.counters["fetch.follower.bytes" if self.of_follower else "fetch.consumer.bytes"] += body_bytes
        if host.consumer_sent is not None and not self.of_follower:
            throttle_ms = host.consumer_sent(self.connection, body_bytes)
            if throttle_ms:
                reply = replace(reply, throttle_time_ms=throttle_ms)
        self.connection.reply(reply, body, body_bytes)

    def _count_projected(self, result: FetchedPartition) -> None:
        counters = self._host.counters
        counters["fetch.projected.batches"] += result.batch_count
        counters["fetch.projected.stored.bytes"] += result.stored_bytes
        counters["fetch.projected.sent.bytes"] += result.body_bytes

    def abandon(self) -> None:
        """Stop waiting, because the fetch gets its response or its client is gone."""
        self.done = True
        self._host.drop(self)

    def _reconsider(self) -> None:
        if self._completes:
            self._complete()
        elif self._has_enough():
            self._answer()
        elif self._unfinished:
            self._host.read_soon(self)
        elif self.of_follower and self._has_changes():
            self.reply_shortly()

    def _reply_single_partition(self) -> bool:
        """Send new records to a follower that has only one partition to read.

        This is a shorter form of ``_reconsider``. In all other cases this returns False, and the only effect is the
        read.
        """
        session, stale, request = self.context.session, self.stale, self.request
        if session is None or self._reads or len(stale) != 1 or len(session.due) != 1:
            return False
        host = self._host
        ((key, wanted),) = stale.items()  # this is also the only due partition
        read = host.read_for_follower(
            host.partitions,
            wanted,
            verdict=self.verdicts.get(key),
            max_bytes=self._max_bytes,
            isolation=request.isolation,
        )
        result, size = read.result, read.size
        if not read.body or size < request.min_bytes or key not in session.wanted:
            self._reads[key] = read
            self._cost += read.cost
            stale.clear()
            return False
        self.done = True
        host.drop(self)
        host.counters["fetch.follower.bytes"] += size
        # The partition is still the only due one.
        session.reported[key] = result.high_watermark, result.log_start_offset
        reply = FetchReply(request.cid, ErrorCode.NONE, session.session_id, (result,))
        self.connection.reply(reply, read.body, size)
        return True

    def _read_all(self) -> bool:
        """Read all partitions that are new or have changed. Return False if the client does not read its responses.

        A partition that exceeds the size limit is not read, and stays due in its session. A partition that exceeds the
        time limit is read later.

        While a consumer does not read its responses, nothing is read. Otherwise each fetch that waits on the connection
        would put a response into memory. The consumer fetches again after it has read its responses.
        """
        reads = self._reads
        self._unfinished = False
        if not (self.of_follower or self.connection.writable):
            reads.clear()
            self._cost = 0
            return False
        if not (self.stale or self._rest):
            return True
        stale, self.stale = self.stale, {}
        left = self._max_bytes
        if reads:
            for key in stale:
                if (gone := reads.pop(key, None)) is not None:
                    self._cost -= gone.cost
            left -= self._cost
        if len(stale) > _READS_AT_CLOCK or self._rest:
            self._rest.extend(reversed(stale.items()))
            self._read_rest(left)
            return True
        for key, wanted in stale.items():
            if left <= 0:
                self.stale[key] = wanted
            else:
                left -= self.read_one(key, wanted, left)
        return True

    def read_one(self, key: Key, wanted: FetchPartition, max_bytes: int) -> int:
        """Read one partition. Return the number of bytes that the read uses of the response's size limit."""
        read_one = self._host.read_for_follower if self.of_follower else read_for_consumer
        read = self._reads[key] = read_one(
            self._host.partitions,
            wanted,
            verdict=self.verdicts.get(key),
            max_bytes=max_bytes,
            isolation=self.request.isolation,
        )
        self._cost += read.cost
        return read.cost

    def refuse_one(self, key: Key, refusal: FetchedPartition) -> int:
        """Use ``refusal`` as the result of a partition, without a read. Return 0, the bytes used of the size limit."""
        self._reads[key] = PartitionRead(refusal, (), 0, urgent=True)
        return 0

    def _read_rest(self, left: int) -> None:
        """Read partitions of ``_rest`` for at most ``_READS_S``."""
        rest, ends_s = self._rest, time.monotonic() + _READS_S
        while rest and left > 0:
            key, wanted = rest.pop()
            left -= self.read_one(key, wanted, left)
            if not len(rest) % _READS_AT_CLOCK and time.monotonic() >= ends_s:
                break
        if left <= 0:
            self.stale.update(reversed(rest))
            rest.clear()
        self._unfinished = bool(rest)

    def _has_enough(self) -> bool:
        """Read the changed partitions, and return whether there is a reason to respond."""
        if not self._read_all():
            return True
        size = 0
        for read in self._reads.values():
            if read.urgent:
                return True
            size += read.size
        if size and (size >= self.request.min_bytes or self.stale):
            return True
        # The first request of a follower's session gets its response at once. Only after that can the follower add
        # partitions while a request waits.
        return self.of_follower and self.request.session_epoch == FULL

    def _has_changes(self) -> bool:
        return any(self.context.has_news(read.result) for read in self._reads.values())
