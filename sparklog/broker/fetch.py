"""Fetch requests of consumers and followers: answered at once, or held until there is something to say.

One long poll is one ``_OpenFetch``. It looks at a partition once, and again only when the partition says that
something moved, so a fetch that waits costs nothing. Partitions speak up in the middle of their steps; a held fetch
only takes note and answers on the next turn of the loop, once for all that moved in this one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from sparklog.broker.fetch_look import Look, follower_has_all, look_for_consumer, look_for_follower
from sparklog.broker.partition import FetchVerdict, Partition
from sparklog.broker.partitions import Partitions
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.server import ServerConnection
from sparklog.protocol.frames import Buffer
from sparklog.protocol.messages import CONSUMER, ErrorReply, Fetch, FetchedPartition, FetchPartition, FetchReply
from sparklog.replica.effects import ServeFetch
from sparklog.replica.events import FollowerFetched
from sparklog.replica.fetch_session import FULL, FetchContext, Key, SessionCache

_log = logging.getLogger(__name__)

#: A follower learns of a moved high watermark this late at most, unless records take the news along earlier.
_MARK_LINGER_S = 0.01
#: Timers of the loop are of whole milliseconds, and come this much early at most. Who is due within it is answered: a
#: timer set anew for what is left would come at once, again and again until then.
_TIMER_EARLY_S = 0.002
_MAX_WAIT_MS = 60_000
_M = TypeVar("_M")


class _OpenFetch:
    """One fetch request from arrival to reply. Owner: ``Fetches``."""

    __slots__ = (
        "_broker",
        "_looks",
        "_max_bytes",
        "_stale",
        "connection",
        "context",
        "done",
        "due_s",
        "is_to_look",
        "number",
        "of_follower",
        "request",
        "verdicts",
    )

    def __init__(
        self, broker: BrokerState, connection: ServerConnection, number: int, *, request: Fetch, context: FetchContext
    ) -> None:
        self._broker = broker
        self.connection = connection
        #: Its session's id: of a session one fetch waits at most. Below 0 without a session.
        self.number = number
        self.request = request
        self.context = context
        #: What the leader's replicas said to the positions named in this request; ServeFetch is not kept.
        self.verdicts: dict[Key, FetchVerdict] = {}
        self.done = False
        #: When it is answered with what there is; monotonic time.
        self.due_s = math.inf
        self.of_follower = request.replica_id != CONSUMER
        #: What an answer may hold in all, whatever is asked for: it is put together in memory.
        limit = broker.config.replica_fetch_response_max_bytes if self.of_follower else broker.config.fetch_max_bytes
        self._max_bytes = min(request.max_bytes, limit)
        self._looks: dict[Key, Look] = {}
        self._stale: dict[Key, FetchPartition] = {}
        #: It looks again on the next turn of the loop.
        self.is_to_look = False

    def begin(self) -> None:
        """Answer now if there is a reason to, else wait."""
        self._stale = self.context.due()
        has_news = self._has_only_marks()
        if self.request.max_wait_ms <= 0:
            self._complete()
            return
        if has_news is None and self._enough():
            self._answer()
            return
        wait_s = min(self.request.max_wait_ms, _MAX_WAIT_MS) / 1000
        if self.of_follower and (self._has_news() if has_news is None else has_news):
            wait_s = min(wait_s, _MARK_LINGER_S)
        self._answer_after(wait_s)

    def _has_only_marks(self) -> bool | None:
        """Whether marks have moved for a follower that has all there is in what it names, and nothing to be told but
        marks: found with less than a look takes, since it is so after nearly every batch. None for any other."""
        if not self.of_follower or self.verdicts or self.request.session_epoch == FULL:
            return None
        hosted, have_moved = self._broker.partitions, False
        for key, wanted in self._stale.items():
            partition = hosted.get(key)
            if partition is None or not follower_has_all(partition, wanted):
                return None
            if not have_moved:
                start = partition.log.log_start_offset
                have_moved = self.context.marks_moved(key, partition.replica.high_watermark, start)
        return have_moved

    def moved(self, key: Key, wanted: FetchPartition) -> None:
        """This partition is worth another look."""
        self._stale[key] = wanted

    def look_soon(self) -> None:
        """Look again on the next turn of the loop: there may be enough now."""
        if not (self.is_to_look or self.done):
            self.is_to_look = True
            self._broker.fetches.look_soon(self)

    def answer_shortly(self) -> None:
        """Answer with what there is once the linger is over."""
        self._answer_after(_MARK_LINGER_S)

    def _answer_after(self, delay_s: float) -> None:
        due_s = time.monotonic() + delay_s
        if due_s < self.due_s and not self.done:
            self.due_s = due_s
            self._broker.fetches.answer_in_time(self)

    def complete(self) -> None:
        """Answer with what there is."""
        self._guarded(self._complete)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Called by timers, which nobody could tell of an error: whoever waits must be answered all the same."""
        if self.done:
            return
        try:
            work()
        except Exception as error:
            self._broker.counters["requests.failed"] += 1
            _log.exception("fetch of %s failed", self.connection.peer)
            self.abandon()
            detail = f"{type(error).__name__}: {error}"
            self.connection.reply(ErrorReply(self.request.cid, ErrorCode.UNKNOWN_SERVER_ERROR, detail))

    def _complete(self) -> None:
        self._look()
        self._answer()

    def _answer(self) -> None:
        """With what was found."""
        self.abandon()
        results: list[FetchedPartition] = []
        body: list[Buffer] = []
        body_bytes = 0
        for look in self._looks.values():
            results.append(look.result)
            if look.records is not None:
                body.append(look.records.headers)
                body += look.records.bodies
                body_bytes += look.size
                if look.result.stored_bytes:
                    self._count_projected(look.result)
        self._broker.counters["fetch.follower.bytes" if self.of_follower else "fetch.consumer.bytes"] += body_bytes
        self.connection.reply(self.context.reply(results, self.request.cid), body)

    def _count_projected(self, result: FetchedPartition) -> None:
        counters = self._broker.counters
        counters["fetch.projected.batches"] += result.batch_count
        counters["fetch.projected.stored.bytes"] += result.stored_bytes
        counters["fetch.projected.sent.bytes"] += result.body_bytes

    def abandon(self) -> None:
        """No answer any more: it was given, or nobody waits for it."""
        self.done = True
        self._broker.fetches.forget(self)

    def look_again(self) -> None:
        """Answer if there is enough now."""
        self.is_to_look = False
        self._guarded(self._reconsider)

    def _reconsider(self) -> None:
        if self._enough():
            self._answer()
        elif self.of_follower and self._has_news():
            self.answer_shortly()

    def _look(self) -> bool:
        """Look at all partitions that are new or moved. What the size limit leaves no room for is not looked at, and
        stays due in its session.

        Nothing is looked at, and False is returned, while a consumer does not read what it has been answered: each of
        the fetches that wait on its connection would put an answer into memory. It asks again when it has read.
        """
        looks = self._looks
        if not (self.of_follower or self.connection.writable):
            looks.clear()
            return False
        if not self._stale:
            return True
        stale, self._stale = self._stale, {}
        left = self._max_bytes
        if looks:
            for key in stale:
                looks.pop(key, None)
            left -= sum(look.cost for look in looks.values())
        look_at = self._broker.fetches.look_for_follower if self.of_follower else look_for_consumer
        for key, wanted in stale.items():
            if left <= 0:
                self._stale[key] = wanted
                continue
            look = looks[key] = look_at(
                self._broker.partitions,
                wanted,
                verdict=self.verdicts.get(key),
                max_bytes=left,
                isolation=self.request.isolation,
            )
            left -= look.cost
        return True

    def _enough(self) -> bool:
        """Look; whether there is a reason to answer."""
        if not self._look():
            return True
        size = 0
        for look in self._looks.values():
            if look.urgent:
                return True
            size += look.size
        if size and (size >= self.request.min_bytes or self._stale):
            return True
        # A follower's new session is answered at once: only then can it add partitions while a request waits.
        return self.of_follower and self.request.session_epoch == FULL

    def _has_news(self) -> bool:
        return any(self.context.has_news(look.result) for look in self._looks.values())


class Fetches:
    """All fetches of one broker that wait, and the sessions they belong to. Owner: its event loop."""

    def __init__(self, broker: BrokerState, sessions: SessionCache) -> None:
        self._broker = broker
        self._sessions = sessions
        #: By number.
        self._waiting: dict[int, _OpenFetch] = {}
        #: Fetches without a session, by partition.
        self._sessionless: dict[Key, dict[_OpenFetch, FetchPartition]] = {}
        #: Of those that have fetched, as long as they are open.
        self._by_connection: dict[ServerConnection, set[_OpenFetch]] = {}
        self._followers: dict[int, ServerConnection] = {}
        #: When waiting fetches are to be looked after, and their numbers. One timer for all.
        self._due: list[tuple[float, int]] = []
        #: The earliest of these times by number. Most fetches have been answered by then: whoever waits under their
        #: number then is looked after, so that the next fetch of a session need not be noted again.
        self._due_s: dict[int, float] = {}
        self._numbers = itertools.count(-1, -1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        #: What was last seen for a follower, as long as nothing has moved: others wait at the same place.
        self._seen: tuple[FetchPartition, int, Look] | None = None
        #: Those that look again on the next turn of the loop, and how many of them are consumers'.
        self._to_look: list[_OpenFetch] = []
        self._consumers_due = 0

    # --- time ---

    def answer_in_time(self, fetch: _OpenFetch) -> None:
        """Answer with what there is when it is due, if that has not been done by then."""
        due_s, number = fetch.due_s, fetch.number
        if self._due_s.get(number, math.inf) <= due_s:
            return
        self._due_s[number] = due_s
        heapq.heappush(self._due, (due_s, number))
        if due_s < self._timer_s:
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        delay_s = max(0.0, due_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._answer_due)

    def _answer_due(self) -> None:
        self._timer, self._timer_s = None, math.inf
        now = time.monotonic() + _TIMER_EARLY_S
        while self._due and self._due[0][0] <= now:
            due_s, number = heapq.heappop(self._due)
            if self._due_s.get(number) != due_s:
                continue  # it was to be sooner
            del self._due_s[number]
            fetch = self._waiting.get(number)
            if fetch is not None and fetch.due_s <= now:
                fetch.complete()
            elif fetch is not None:
                self.answer_in_time(fetch)
        if self._due and self._due[0][0] < self._timer_s:
            self._arm(self._due[0][0])

    def after_consumers(self, answer: Callable[[_M], None], message: _M) -> None:
        """Answer now, or behind the answers to consumers that are on their way: whom it wakes may take this process's
        core, and they would wait for that."""
        if self._consumers_due:
            asyncio.get_running_loop().call_soon(answer, message)
        else:
            answer(message)

    # --- looks ---

    def look_soon(self, fetch: _OpenFetch) -> None:
        if not self._to_look:
            asyncio.get_running_loop().call_soon(self._look_again)
        self._to_look.append(fetch)
        if not fetch.of_follower:
            self._consumers_due += 1

    def _look_again(self) -> None:
        to_look, self._to_look = self._to_look, []
        for fetch in to_look:
            if not fetch.of_follower:
                self._consumers_due -= 1
            fetch.look_again()

    # --- requests ---

    def handle(self, connection: ServerConnection, request: Fetch) -> None:
        broker = self._broker
        earlier = self._waiting.get(request.session_id) if request.session_id > 0 else None
        if earlier is not None:
            # The fetcher has changed its mind about what it wants; the older request must not hold up the newer.
            earlier.complete()
        try:
            context = self._sessions.begin(request, broker.now_ms(), line=connection)
        except BrokerError as error:
            broker.counters["fetch.session.errors"] += 1
            _log.info("fetch of %s: %s", connection.peer, error)
            connection.reply(FetchReply(request.cid, error.code, 0, ()))
            return
        session = context.session
        number = next(self._numbers) if session is None else session.session_id
        fetch = _OpenFetch(broker, connection, number, request=request, context=context)
        if fetch.of_follower:
            broker.counters["fetch.follower.requests"] += 1
            if self._followers.get(request.replica_id) is not connection:
                self._note_line(request.replica_id, connection)
            self._note_positions(fetch)
        else:
            broker.counters["fetch.consumer.requests"] += 1
        fetch.begin()
        if not fetch.done:
            self._hold(fetch)

    def _note_line(self, replica_id: int, connection: ServerConnection) -> None:
        if self._broker.cache.endpoint(replica_id) is not None:
            self._followers[replica_id] = connection

    def _note_positions(self, fetch: _OpenFetch) -> None:
        """Tell each named partition how far the follower is."""
        request = fetch.request
        for wanted in fetch.context.named:
            partition = self._broker.partitions.get((wanted.topic, wanted.partition))
            if partition is None or partition.offline is not None:
                continue
            if wanted.topic_id and wanted.topic_id != partition.topic_id:
                continue
            verdict = partition.follower_fetched(
                FollowerFetched(
                    request.replica_id,
                    request.incarnation,
                    wanted.leader_epoch,
                    wanted.fetch_offset,
                    wanted.last_epoch,
                )
            )
            if type(verdict) is not ServeFetch:
                fetch.verdicts[wanted.topic, wanted.partition] = verdict

    def _hold(self, fetch: _OpenFetch) -> None:
        self._waiting[fetch.number] = fetch
        if fetch.context.session is None:
            for wanted in fetch.context.named:
                self._sessionless.setdefault((wanted.topic, wanted.partition), {})[fetch] = wanted
        of_connection = self._by_connection.get(fetch.connection)
        if of_connection is None:
            of_connection = self._by_connection[fetch.connection] = set()
        of_connection.add(fetch)

    def forget(self, fetch: _OpenFetch) -> None:
        if self._waiting.get(fetch.number) is fetch:
            del self._waiting[fetch.number]
        if fetch.context.session is None:
            for wanted in fetch.context.named:
                key = (wanted.topic, wanted.partition)
                waiting = self._sessionless.get(key)
                if waiting is not None and waiting.pop(fetch, None) is not None and not waiting:
                    del self._sessionless[key]
        of_connection = self._by_connection.get(fetch.connection)
        if of_connection is not None:
            of_connection.discard(fetch)

    def connection_lost(self, connection: ServerConnection) -> None:
        for fetch in self._by_connection.pop(connection, ()):
            fetch.abandon()
        self._sessions.line_lost(connection)
        for replica_id, of in list(self._followers.items()):
            if of is connection:
                del self._followers[replica_id]
                if not self._broker.quiesced:
                    self._broker.partitions.follower_lost(replica_id)

    def look_for_follower(
        self,
        partitions: Partitions,
        wanted: FetchPartition,
        *,
        verdict: FetchVerdict | None,
        max_bytes: int,
        isolation: int,
    ) -> Look:
        """As that of ``fetch_look``: what one follower is told, the next one is told that waits at the same place."""
        seen = self._seen
        if seen is not None and verdict is None and seen[1] == max_bytes and seen[0] == wanted:
            return seen[2]
        look = look_for_follower(partitions, wanted, verdict=verdict, max_bytes=max_bytes, isolation=isolation)
        if verdict is None and not look.urgent:
            self._seen = wanted, max_bytes, look
        return look

    # --- what moves ---

    def log_end_moved(self, partition: Partition) -> None:
        """There is more for followers."""
        for fetch in self._concerned(partition):
            if fetch.of_follower:
                fetch.look_soon()

    def high_watermark_moved(self, partition: Partition) -> None:
        """There is more for consumers; followers hear of it with the next records, or shortly."""
        for fetch in self._concerned(partition):
            if fetch.of_follower:
                fetch.answer_shortly()
            else:
                fetch.look_soon()

    def log_start_moved(self, partition: Partition) -> None:
        """Old records are gone: followers of an idle partition would not hear of it otherwise."""
        self.high_watermark_moved(partition)

    def changed(self, partition: Partition) -> None:
        """The replica's role changed, or it is gone: whoever waits for it must hear."""
        for fetch in self._concerned(partition):
            fetch.look_soon()

    def _concerned(self, partition: Partition) -> list[_OpenFetch]:
        """Waiting fetches that name this partition; it is marked for another look in each."""
        self._seen = None
        key: Key = partition.tp
        found = []
        for session in self._sessions.wake(key):
            fetch = self._waiting.get(session.session_id)
            if fetch is not None:
                fetch.moved(key, session.wanted[key])
                found.append(fetch)
        sessionless = self._sessionless.get(key)
        if sessionless is not None:
            for fetch, wanted in sessionless.items():
                fetch.moved(key, wanted)
                found.append(fetch)
        return found


def handle_fetch(broker: BrokerState, connection: ServerConnection, request: Fetch, body: memoryview) -> None:
    if request.isolation not in {0, 1}:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST, f"isolation {request.isolation} found, expected 0 (uncommitted) or 1 (committed)"
        )
    if request.max_bytes < 1:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"max_bytes {request.max_bytes} found, at least 1 expected")
    broker.fetches.handle(connection, request)


def connection_lost(broker: BrokerState, connection: ServerConnection) -> None:
    broker.fetches.connection_lost(connection)
