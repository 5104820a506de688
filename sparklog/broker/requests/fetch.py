"""Fetch requests of consumers and followers, and their long polls.

Each request is one ``OpenFetch``. An ``OpenFetch`` reads a partition once, and again only after the partition reports a
change, so a waiting fetch costs nothing. A partition reports a change while it still performs effects, so the waiting
fetch only records the change. The fetch reads and responds in a later callback of the event loop, once for all changes
until then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from sparklog.broker.context import BrokerContext
from sparklog.broker.replication.partition import FetchVerdict, Partition
from sparklog.broker.replication.partitions import Partitions
from sparklog.broker.requests.access import Access
from sparklog.broker.requests.fetch_read import PartitionRead, read_for_follower
from sparklog.broker.requests.open_fetch import OpenFetch
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_EPOCH
from sparklog.net.server_connection import ServerConnection
from sparklog.net.turn import TURN_S
from sparklog.protocol.messages import CONSUMER, MAX_ENTRIES, Fetch, FetchPartition, FetchReply
from sparklog.replica.effects import ServeFetch
from sparklog.replica.events import FollowerFetched
from sparklog.replica.fetch_session import FetchContext, Key, SessionCache

_log = logging.getLogger(__name__)

#: The event loop rounds its timers to milliseconds, so a timer may fire early, by less than this time. A fetch that is
#: due within this time gets its response now. A new timer for the rest would fire at once, repeatedly.
_TIMER_EARLY_S = 0.002
#: The maximum number of fetches without a session that wait on one connection. A client has one or two such fetches.
_MOST_OF_CONNECTION = 16
#: The maximum number of fetches without a session that wait in the whole broker. A fetch above this number gets its
#: response after ``_CROWDED_S``, and new records do not wake it.
_MOST_WAITING = 20_000
_CROWDED_S = 0.1
_M = TypeVar("_M")


class Fetches:
    """The component that handles fetch requests in one broker: it keeps the waiting fetches and wakes them.

    Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext, access: Access, partitions: Partitions, sessions: SessionCache) -> None:
        self._context = context
        self._access = access
        self.partitions = partitions
        self.counters = context.counters
        #: The class of the fetches; with an authorizer, one that checks what the principal may read.
        self.open_fetch: Callable[..., OpenFetch] = OpenFetch
        #: The class of the fetches on connections that have logged in with a delegation token, which may have a scope.
        self.open_fetch_of_token: Callable[..., OpenFetch] = OpenFetch
        #: Called with the bytes of each reply to a consumer, if consumers have quotas. It returns the throttle time.
        self.consumer_sent: Callable[[ServerConnection, int], int] | None = None
        #: Called with the seconds that each read for a waiting consumer has taken, if the time of requests has quotas.
        self.time_used: Callable[[ServerConnection, float], None] | None = None
        self.consumer_max_bytes = context.config.fetch_max_bytes
        self.follower_max_bytes = context.config.replica_fetch_response_max_bytes
        self._sessions = sessions
        sessions.on_close = self._session_closed
        sessions.may_use = _same_principal
        #: The waiting fetches by number.
        self._waiting: dict[int, OpenFetch] = {}
        #: The waiting fetches without a session, by partition and by connection.
        self._sessionless: dict[Key, dict[OpenFetch, FetchPartition]] = {}
        self._sessionless_of: dict[ServerConnection, dict[OpenFetch, None]] = {}
        self._sessionless_count = 0
        self._followers: dict[int, ServerConnection] = {}
        #: The connection and incarnation for which each follower was last authorized.
        self._admitted: dict[int, tuple[ServerConnection, int]] = {}
        self._unproven = context.cache.unproven
        context.metadata_listeners.append(self._metadata_changed)
        #: A heap of the deadlines of waiting fetches, each with the number of the fetch. One timer serves all.
        self._due: list[tuple[float, int]] = []
        #: The earliest deadline in the heap for each number. Most fetches get their response before their deadline. The
        #: entry then serves the next fetch of the same session, which has the same number, so this fetch needs no new
        #: entry.
        self._due_s: dict[int, float] = {}
        self._numbers = itertools.count(-1, -1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        #: The last read for a follower. It is kept until a partition changes, because other followers may wait at the
        #: same position.
        self._seen: tuple[FetchPartition, int, PartitionRead] | None = None
        #: The fetches that will read again in the next call of ``_read_due``.
        self._due_to_read: deque[OpenFetch] = deque()
        self._reads_scheduled = False
        self._consumers_due = 0

    # --- time ---

    def reply_within(self, fetch: OpenFetch, delay_s: float) -> None:
        """Respond to the fetch after ``delay_s`` at the latest, with the records found by then."""
        due_s = time.monotonic() + delay_s
        if due_s < fetch.due_s and not fetch.done:
            fetch.due_s = due_s
            noted_s = self._due_s.get(fetch.number)
            if noted_s is None or due_s < noted_s:
                self._note_due(due_s, fetch.number)

    def _note_due(self, due_s: float, number: int) -> None:
        self._due_s[number] = due_s
        heapq.heappush(self._due, (due_s, number))
        if due_s < self._timer_s:
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        delay_s = max(0.0, due_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._reply_due)

    def _reply_due(self) -> None:
        # entries that are added below do not set the timer, which is set at the end
        self._timer, self._timer_s = None, -math.inf
        now = time.monotonic() + _TIMER_EARLY_S
        try:
            while self._due and self._due[0][0] <= now:
                due_s, number = heapq.heappop(self._due)
                if self._due_s.get(number) != due_s:
                    continue  # an earlier deadline has replaced this one
                del self._due_s[number]
                fetch = self._waiting.get(number)
                if fetch is not None and fetch.due_s <= now:
                    fetch.complete()
                elif fetch is not None:
                    self._note_due(fetch.due_s, number)
        finally:
            self._timer_s = math.inf
            if self._due:
                self._arm(self._due[0][0])

    def reply_after_consumers(self, answer: Callable[[_M], None], message: _M) -> None:
        """Send a response: at once, or after the scheduled reads for waiting consumers if there are any.

        The response wakes its client, which may get the CPU core of this process. The consumers would then wait until
        the client gives the core back.
        """
        if self._consumers_due:
            asyncio.get_running_loop().call_soon(answer, message)
        else:
            answer(message)

    # --- reads ---

    def read_soon(self, fetch: OpenFetch) -> None:
        """Schedule another read for the fetch, because its partitions may have enough records now."""
        if fetch.is_due_to_read or fetch.done:
            return
        fetch.is_due_to_read = True
        if not self._reads_scheduled:
            self._reads_scheduled = True
            asyncio.get_running_loop().call_soon(self._read_due)
        if fetch.of_follower:
            # Followers come first: producers with acks=all wait for them, and must not wait for thousands of consumers
            # too.
            self._due_to_read.appendleft(fetch)
        else:
            self._due_to_read.append(fetch)
            self._consumers_due += 1

    def _read_due(self) -> None:
        """Let the scheduled fetches read again for ``TURN_S``, and schedule the rest.

        The limit is needed because thousands of fetches may wait for one partition.
        """
        self._reads_scheduled = False
        due, ends_s = self._due_to_read, time.monotonic() + TURN_S
        for _ in range(len(due)):
            fetch = due.popleft()
            if fetch.of_follower:
                fetch.read_again()
            else:
                self._consumers_due -= 1
                if self.time_used is None:
                    fetch.read_again()
                else:
                    self._read_again_timed(fetch, self.time_used)
            if due and time.monotonic() >= ends_s:
                break
        if due and not self._reads_scheduled:
            self._reads_scheduled = True
            asyncio.get_running_loop().call_soon(self._read_due)

    def _read_again_timed(self, fetch: OpenFetch, time_used: Callable[[ServerConnection, float], None]) -> None:
        began_s = time.monotonic()
        try:
            fetch.read_again()
        finally:
            time_used(fetch.connection, time.monotonic() - began_s)

    # --- requests ---

    def handle(self, connection: ServerConnection, request: Fetch, body: memoryview) -> None:
        if request.isolation not in {0, 1}:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"isolation: expected 0 (uncommitted) or 1 (committed), found {request.isolation}",
            )
        if request.max_bytes < 1:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"max_bytes: expected at least 1, found {request.max_bytes}")
        replica_id = request.replica_id
        if replica_id != CONSUMER:
            if self._admitted.get(replica_id) != (connection, request.incarnation):
                self._admit(connection, replica_id, request.incarnation)
        elif len(request.partitions) > MAX_ENTRIES or len(request.forgotten) > MAX_ENTRIES:
            found = max(len(request.partitions), len(request.forgotten))
            detail = f"{found} partitions found in a consumer's fetch, at most {MAX_ENTRIES} expected"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        session_id = request.session_id
        earlier = self._waiting.get(session_id) if session_id > 0 else None
        if earlier is not None and _same_principal(earlier.connection, connection):
            # The client has sent a new request in this session, so the older one gets its response now.
            earlier.complete()
        try:
            context = self._sessions.begin(request, self._context.now_ms(), connection=connection)
        except BrokerError as error:
            self.counters["fetch.session.errors"] += 1
            _log.info("fetch of %s: %s", connection.peer, error)
            connection.reply(FetchReply(request.cid, error.code, 0, ()))
            return
        session = context.session
        number = next(self._numbers) if session is None else session.session_id
        open_fetch = self.open_fetch_of_token if connection.token_id else self.open_fetch
        fetch = open_fetch(self, connection, number, request=request, context=context)
        if fetch.of_follower:
            self.counters["fetch.follower.requests"] += 1
            served = self._note_positions(fetch)
        else:
            self.counters["fetch.consumer.requests"] += 1
            served = None
        if served is not None and fetch.park_at_end(served):
            self._waiting[number] = fetch
            return
        fetch.begin()
        if not fetch.done:
            self._hold(fetch)

    def serve(self, connection: ServerConnection, request: Fetch, open_fetch: Callable[..., OpenFetch]) -> None:
        """Serve a fetch from a client of another protocol, which has no fetch session.

        ``open_fetch`` creates the fetch, and decides how it responds.
        """
        context = FetchContext(None, request.partitions)
        fetch = open_fetch(self, connection, next(self._numbers), request=request, context=context)
        self.counters["fetch.consumer.requests"] += 1
        fetch.begin()
        if not fetch.done:
            self._hold(fetch)

    def _admit(self, connection: ServerConnection, replica_id: int, incarnation: int) -> None:
        """Check that ``connection`` may fetch as this follower, and remember the connection.

        Raises:
            BrokerError: CLUSTER_AUTHORIZATION_FAILED; STALE_BROKER_EPOCH if the connection has no proof and the request
                has a newer incarnation than the controller has announced.
        """
        cache = self._context.cache
        self._access.require_follower(connection, replica_id)
        told = cache.incarnations.get(replica_id, NO_EPOCH)
        if incarnation > told and not self._access.proves_broker(connection, replica_id):
            detail = f"incarnation {incarnation} of broker {replica_id}: the controller has announced {told} so far"
            raise BrokerError(ErrorCode.STALE_BROKER_EPOCH, detail)
        if cache.endpoint(replica_id) is not None:
            self._followers[replica_id] = connection
            self._admitted[replica_id] = (connection, incarnation)

    def _metadata_changed(self) -> None:
        """If the list of brokers that need no proof has changed, check each follower again at its next fetch."""
        if self._context.cache.unproven != self._unproven:
            self._unproven = self._context.cache.unproven
            self._admitted.clear()

    def _note_positions(self, fetch: OpenFetch) -> Partition | None:
        """Pass the follower's position to each partition in the request.

        If the request names only one partition, and its leader accepts the position, return this partition.
        """
        request, named = fetch.request, fetch.context.named
        served: Partition | None = None
        hosted, replica_id, incarnation = self.partitions.get, request.replica_id, request.incarnation
        for wanted in named:
            partition = hosted((wanted.topic, wanted.partition))
            if partition is None or partition.offline is not None:
                continue
            if wanted.topic_id and wanted.topic_id != partition.topic_id:
                continue
            verdict = partition.follower_fetched(
                FollowerFetched(
                    replica_id,
                    incarnation,
                    wanted.leader_epoch,
                    wanted.fetch_offset,
                    wanted.last_epoch,
                    wanted.refuses,
                )
            )
            if type(verdict) is ServeFetch:
                served = partition
            else:
                fetch.verdicts[wanted.topic, wanted.partition] = verdict
        return served if len(named) == 1 else None

    def _hold(self, fetch: OpenFetch) -> None:
        self._waiting[fetch.number] = fetch
        if fetch.context.session is not None:
            return
        of_connection = self._sessionless_of.setdefault(fetch.connection, {})
        of_connection[fetch] = None
        self._sessionless_count += 1
        if self._sessionless_count > _MOST_WAITING:
            # New records do not wake this fetch, because each append would have to visit all waiting fetches.
            self.counters["fetch.crowded"] += 1
            self.reply_within(fetch, _CROWDED_S)
            return
        for wanted in fetch.context.named:
            self._sessionless.setdefault((wanted.topic, wanted.partition), {})[fetch] = wanted
        if len(of_connection) > _MOST_OF_CONNECTION:
            self.counters["fetch.crowded"] += 1
            next(iter(of_connection)).complete()

    def drop(self, fetch: OpenFetch) -> None:
        if self._waiting.get(fetch.number) is fetch:
            del self._waiting[fetch.number]
            if fetch.context.session is None:
                self._drop_sessionless(fetch)

    def _drop_sessionless(self, fetch: OpenFetch) -> None:
        for wanted in fetch.context.named:
            key = (wanted.topic, wanted.partition)
            waiting = self._sessionless.get(key)
            if waiting is not None and waiting.pop(fetch, None) is not None and not waiting:
                del self._sessionless[key]
        of_connection = self._sessionless_of[fetch.connection]
        del of_connection[fetch]
        self._sessionless_count -= 1
        if not of_connection:
            del self._sessionless_of[fetch.connection]

    def _session_closed(self, session_id: int) -> None:
        """Respond to the fetch of a closed session with the records found so far.

        A session may be closed because another session needs its place. Later requests do not find the session, and new
        records do not wake its fetch.
        """
        fetch = self._waiting.get(session_id)
        if fetch is not None:
            asyncio.get_running_loop().call_soon(fetch.complete)

    def connection_lost(self, connection: ServerConnection) -> None:
        for fetch in list(self._sessionless_of.get(connection, ())):
            fetch.abandon()
        # The request of a session waits on the connection that last used the session.
        for session_id in self._sessions.connection_lost(connection):
            of_session = self._waiting.get(session_id)
            if of_session is not None:
                of_session.abandon()
        for replica_id, of in list(self._followers.items()):
            if of is connection:
                del self._followers[replica_id]
                self._admitted.pop(replica_id, None)
                if not self._context.quiesced:
                    self.partitions.follower_lost(replica_id)

    def read_for_follower(
        self,
        partitions: Partitions,
        wanted: FetchPartition,
        *,
        verdict: FetchVerdict | None,
        max_bytes: int,
        isolation: int,
    ) -> PartitionRead:
        """Read one partition for a follower.

        If the previous read for a follower had the same position and limit, return the result of that read again.
        """
        seen = self._seen
        if seen is not None and verdict is None and seen[0] == wanted and seen[1] == max_bytes:
            return seen[2]
        read = read_for_follower(partitions, wanted, verdict=verdict, max_bytes=max_bytes, isolation=isolation)
        if verdict is None and not read.urgent:
            self._seen = wanted, max_bytes, read
        return read

    # --- changes of partitions ---

    def log_end_moved(self, partition: Partition) -> None:
        """Wake the fetches of followers that wait for this partition, because there are new records for them."""
        for fetch in self._concerned(partition):
            if fetch.of_follower:
                self.read_soon(fetch)

    def high_watermark_moved(self, partition: Partition) -> None:
        """Wake the fetches of consumers that wait for this partition, because they may read further.

        Followers learn of the new high watermark with the next records, or after a short delay.
        """
        for fetch in self._concerned(partition):
            if fetch.of_follower:
                fetch.reply_shortly()
            else:
                self.read_soon(fetch)

    def log_start_moved(self, partition: Partition) -> None:
        """Wake all fetches that wait for this partition.

        Otherwise followers of an idle partition would not learn of the new log start offset.
        """
        self.high_watermark_moved(partition)

    def changed(self, partition: Partition) -> None:
        """Wake all fetches that wait for this partition, because its replica was removed or its role has changed."""
        for fetch in self._concerned(partition):
            self.read_soon(fetch)

    def _concerned(self, partition: Partition) -> list[OpenFetch]:
        """Return the waiting fetches that include this partition, and mark the partition in them for another read."""
        self._seen = None
        key: Key = partition.tp
        found = []
        for session in self._sessions.wake(key):
            fetch = self._waiting.get(session.session_id)
            if fetch is not None:
                fetch.stale[key] = session.wanted[key]
                found.append(fetch)
        if self._sessionless:
            for fetch, wanted in self._sessionless.get(key, {}).items():
                fetch.stale[key] = wanted
                found.append(fetch)
        return found


def _same_principal(owner: object, connection: object) -> bool:
    """Return whether both connections have the same principal, or one of them is closed."""
    if owner is connection or not (isinstance(owner, ServerConnection) and isinstance(connection, ServerConnection)):
        return True
    return owner.principal == connection.principal
