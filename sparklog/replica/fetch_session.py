"""Incremental fetch sessions, both ends, pure. Source: KIP-227.

A follower of a thousand partitions fetches from their leader in one long poll after the other. A session lets each
request name only what changed on the fetcher's side, and each reply only what has something to say; what is idle
costs neither bytes nor time on either side:

    request, session epoch 0      everything wanted                      -> a new session id
    request, session epoch n > 0  partitions whose position moved, and those forgotten
    reply                         partitions with records, errors, a divergence or moved marks

The epoch counts requests: a repeated or lost one is noticed, and the fetcher starts a new session. On the server a
partition is *due* when a request named it or something moved (``SessionCache.wake``); only due ones are looked at.

Belongs to the event loop of the broker; bounded by ``fetch.session.slots`` and by the partitions that all sessions
together may hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import msgspec

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.messages import CONSUMER, MAX_ENTRIES, Fetch, FetchedPartition, FetchPartition, FetchReply

#: (topic, partition)
Key = tuple[str, int]

NO_SESSION = 0
FULL = 0  #: session epoch that asks for a new session
SESSIONLESS = -1  #: session epoch of a single fetch

#: Partitions held by all sessions of one broker: some hundred megabytes.
MAX_PARTITIONS = 1_000_000


class FetchSession:
    """Server side: what one fetcher wants, and what it was last told. Mutable, owned by ``SessionCache``."""

    __slots__ = ("due", "epoch", "incarnation", "line", "replica_id", "session_id", "told", "used_ms", "wanted")

    def __init__(self, session_id: int, fetch: Fetch, now_ms: int) -> None:
        self.session_id = session_id
        self.replica_id = fetch.replica_id
        self.incarnation = fetch.incarnation
        #: of the next request
        self.epoch = 1
        self.wanted: dict[Key, FetchPartition] = {}
        #: high watermark and log start in the last reply that named the partition
        self.told: dict[Key, tuple[int, int]] = {}
        #: partitions to look at, the longest unserved first
        self.due: dict[Key, None] = {}
        self.used_ms = now_ms
        #: the connection that the last request came by
        self.line: object = None

    def take(self, key: Key, partition: FetchPartition) -> bool:
        """Note what a request names; another topic or leader epoch makes what was told worthless. Returns whether the
        partition is new here."""
        before = self.wanted.get(key)
        self.wanted[key] = partition
        self.due[key] = None
        if before is None:
            return True
        if before.leader_epoch != partition.leader_epoch or before.topic_id != partition.topic_id:
            self.told.pop(key, None)
        return False

    def belongs_to(self, fetch: Fetch) -> bool:
        return self.replica_id == fetch.replica_id and self.incarnation == fetch.incarnation

    def drop(self, key: Key) -> None:
        self.wanted.pop(key, None)
        self.told.pop(key, None)
        self.due.pop(key, None)


class FetchContext(msgspec.Struct, frozen=True):
    """One request being served. ``session`` None: sessionless, then ``named`` is all there is."""

    session: FetchSession | None
    #: partitions of this request: the fetcher's position is news
    named: tuple[FetchPartition, ...]

    def due(self) -> dict[Key, FetchPartition]:
        """Partitions to look at now, the longest unserved first. Ask again after a wake-up."""
        session = self.session
        if session is None:
            return {(wanted.topic, wanted.partition): wanted for wanted in self.named}
        return {key: session.wanted[key] for key in session.due}

    def has_news(self, result: FetchedPartition) -> bool:
        """Whether the fetcher must be told ``result``."""
        if self.session is None or result.batch_count or result.code or result.diverging is not None:
            return True
        marks = (result.high_watermark, result.log_start_offset)
        return self.session.told.get((result.topic, result.partition)) != marks

    def marks_moved(self, key: Key, high_watermark: int, log_start_offset: int) -> bool:
        """As ``has_news``, of a partition that has nothing else to say."""
        return self.session is None or self.session.told.get(key) != (high_watermark, log_start_offset)

    def weigh(self, result: FetchedPartition) -> bool:
        """As ``has_news``, for a request that will go on waiting: a partition without news is due no longer."""
        if self.has_news(result):
            return True
        if self.session is not None:
            self.session.due.pop((result.topic, result.partition), None)
        return False

    def reply(self, results: Iterable[FetchedPartition], cid: int = 0) -> FetchReply:
        """Choose what is said and what stays due. ``results`` are of partitions that were due; others stay so.

        A partition answered with records or an error stays due until the fetcher names it again or nothing is left
        to say, for it may not have used the answer. It goes to the end of the line.
        """
        if self.session is None:
            return FetchReply(cid, ErrorCode.NONE, NO_SESSION, tuple(results))
        session = self.session
        said = []
        for result in results:
            key = (result.topic, result.partition)
            marks = (result.high_watermark, result.log_start_offset)
            session.due.pop(key, None)
            if result.batch_count or result.code or result.diverging is not None:
                if key in session.wanted:
                    session.due[key] = None
            elif session.told.get(key) == marks:
                continue
            said.append(result)
            session.told[key] = marks
        if not session.due:
            session.due.clear()  # what was taken out one by one leaves gaps, and each request would go through them all
        return FetchReply(cid, ErrorCode.NONE, session.session_id, tuple(said))


def _wanted_after(fetch: Fetch, session: FetchSession) -> int:
    """Return how many partitions the session holds with the partitions that the request names, at most."""
    if len(session.wanted) + len(fetch.partitions) <= MAX_ENTRIES:
        return len(session.wanted) + len(fetch.partitions)
    named = {(wanted.topic, wanted.partition) for wanted in fetch.partitions}
    return len((session.wanted.keys() - set(fetch.forgotten)) | named)


class SessionCache:
    """All sessions of one broker. Followers' are never given up for consumers'. ``first_id`` should differ from one
    process to the next, so that a session of an earlier one is not mistaken for a new one."""

    def __init__(
        self, *, slots: int, first_id: int = 1, keep_ms: int = 120_000, max_partitions: int = MAX_PARTITIONS
    ) -> None:
        self._slots = slots
        self._max_partitions = max_partitions
        #: in all sessions
        self._partitions = 0
        self._next_id = max(first_id, 1)
        self._keep_ms = keep_ms
        #: by id, the longest unused first
        self._followers: OrderedDict[int, FetchSession] = OrderedDict()
        self._consumers: OrderedDict[int, FetchSession] = OrderedDict()
        #: sessions that want a partition, by their ids
        self.holders: dict[Key, dict[int, FetchSession]] = {}
        #: told of each session that is closed, whatever for
        self.on_close: Callable[[int], None] = lambda session_id: None
        #: sessions by the connection they were last used on
        self._by_line: dict[object, dict[int, FetchSession]] = {}

    def __len__(self) -> int:
        return len(self._followers) + len(self._consumers)

    def begin(self, fetch: Fetch, now_ms: int, *, line: object = None) -> FetchContext:
        """Find or make the request's session and bring it up to date. ``line`` is the connection it came by.

        Raises:
            BrokerError: FETCH_SESSION_ID_NOT_FOUND or INVALID_FETCH_SESSION_EPOCH; the fetcher starts a new session.
                THROTTLING_QUOTA_EXCEEDED when all sessions together would hold too many partitions.
        """
        session = self._gone_on(fetch, now_ms, line)
        if session is not None:
            return FetchContext(session, fetch.partitions)
        if fetch.session_epoch == SESSIONLESS:
            self._close_own(fetch)
            return FetchContext(None, fetch.partitions)
        if fetch.session_epoch == FULL:
            self._close_own(fetch)
            session = self._open(fetch, now_ms) if self._has_room(fetch, None) else None
        else:
            session = self._resume(fetch, now_ms)
            at_most = self._partitions + len(fetch.partitions)
            if at_most > self._max_partitions and not self._has_room(fetch, session):
                detail = (
                    f"{self._partitions} partitions are held by sessions and more named, at most "
                    f"{self._max_partitions} expected"
                )
                self.close(session.session_id)
                raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)
            if fetch.replica_id == CONSUMER and _wanted_after(fetch, session) > MAX_ENTRIES:
                detail = f"a consumer's session that would hold over {MAX_ENTRIES} partitions"
                self.close(session.session_id)
                raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, detail)
        if session is None:
            return FetchContext(None, fetch.partitions)
        if fetch.forgotten:
            before = len(session.wanted)
            for topic, number in fetch.forgotten:
                session.drop((topic, number))
                self._release((topic, number), session.session_id)
            self._partitions += len(session.wanted) - before
        for partition in fetch.partitions:
            key = (partition.topic, partition.partition)
            if session.take(key, partition):
                self.holders.setdefault(key, {})[session.session_id] = session
                self._partitions += 1
        if session.line is not line:
            self._move(session, line)
        return FetchContext(session, fetch.partitions)

    def wake(self, key: Key) -> Collection[FetchSession]:
        """Records came or a mark moved: make the partition due. Returns the sessions whose long poll may end now."""
        holders = self.holders.get(key)
        if holders is None:
            return ()
        for session in holders.values():
            session.due[key] = None
        return holders.values()

    def line_lost(self, line: object) -> list[int]:
        """The connection closed: nobody comes back to the sessions it was used for. Returns the ids that they had."""
        lost = list(self._by_line.get(line, ()))
        for session_id in lost:
            self.close(session_id)
        return lost

    def close(self, session_id: int) -> None:
        session = self._followers.pop(session_id, None) or self._consumers.pop(session_id, None)
        if session is not None:
            self._partitions -= len(session.wanted)
            for key in session.wanted:
                self._release(key, session_id)
            self._move(session, None)
            self.on_close(session_id)

    def _has_room(self, fetch: Fetch, session: FetchSession | None) -> bool:
        """Whether what the request adds to its session (None: to a new one) fits, if consumers make room for it."""
        added = len(fetch.partitions)
        if self._partitions + added <= self._max_partitions:
            return True
        if session is not None:
            added = sum((wanted.topic, wanted.partition) not in session.wanted for wanted in fetch.partitions)
        while fetch.replica_id != CONSUMER and self._consumers and self._partitions + added > self._max_partitions:
            self.close(next(iter(self._consumers)))
        return self._partitions + added <= self._max_partitions

    def _close_own(self, fetch: Fetch) -> None:
        """Close the session that the request gives up, also one of its earlier incarnation; of another fetcher's it has
        only guessed the number."""
        session = self._sessions_of(fetch).get(fetch.session_id)
        if session is not None and session.replica_id == fetch.replica_id and session.incarnation <= fetch.incarnation:
            self.close(session.session_id)

    def _sessions_of(self, fetch: Fetch) -> OrderedDict[int, FetchSession]:
        return self._consumers if fetch.replica_id == CONSUMER else self._followers

    def _gone_on(self, fetch: Fetch, now_ms: int, line: object) -> FetchSession | None:
        """The session of a request that names one partition, of those that it has, anew: as the rest of ``begin`` does
        it. None for any other, and for one that is to be refused: nothing was done."""
        sessions = self._consumers if fetch.replica_id == CONSUMER else self._followers
        session = sessions.get(fetch.session_id)
        partitions = fetch.partitions
        if (
            session is None
            or fetch.session_epoch != session.epoch
            or len(partitions) != 1
            or fetch.forgotten
            or session.replica_id != fetch.replica_id
            or session.incarnation != fetch.incarnation
            or session.line is not line
        ):
            return None
        wanted = partitions[0]
        key = wanted.topic, wanted.partition
        before = session.wanted.get(key)
        if before is None or before.leader_epoch != wanted.leader_epoch or before.topic_id != wanted.topic_id:
            return None
        session.epoch += 1
        session.used_ms = now_ms
        sessions.move_to_end(session.session_id)
        session.wanted[key] = wanted
        session.due[key] = None
        return session

    def _resume(self, fetch: Fetch, now_ms: int) -> FetchSession:
        sessions = self._sessions_of(fetch)
        session = sessions.get(fetch.session_id)
        if session is None or not session.belongs_to(fetch):
            raise BrokerError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, f"no fetch session {fetch.session_id}")
        if fetch.session_epoch != session.epoch:
            detail = f"epoch {fetch.session_epoch} of fetch session {fetch.session_id}, {session.epoch} expected"
            raise BrokerError(ErrorCode.INVALID_FETCH_SESSION_EPOCH, detail)
        session.epoch += 1
        session.used_ms = now_ms
        sessions.move_to_end(session.session_id)
        return session

    def _open(self, fetch: Fetch, now_ms: int) -> FetchSession | None:
        """A new session, or None when every slot is taken by someone who deserves it more."""
        follower = fetch.replica_id != CONSUMER
        if len(self) >= self._slots and not self._make_room(follower, now_ms):
            return None
        session = FetchSession(self._next_id, fetch, now_ms)
        self._next_id += 1
        (self._followers if follower else self._consumers)[session.session_id] = session
        return session

    def _make_room(self, follower: bool, now_ms: int) -> bool:
        for sessions, always in ((self._consumers, follower), (self._followers, False)):
            oldest = next(iter(sessions.values()), None)
            if oldest is not None and (always or oldest.used_ms + self._keep_ms <= now_ms):
                self.close(oldest.session_id)
                return True
        return False

    def _release(self, key: Key, session_id: int) -> None:
        holders = self.holders.get(key)
        if holders is not None:
            holders.pop(session_id, None)
            if not holders:
                del self.holders[key]

    def _move(self, session: FetchSession, line: object) -> None:
        """Note the other connection a session is used on, None for none."""
        earlier = self._by_line.get(session.line)
        if earlier is not None:
            del earlier[session.session_id]
            if not earlier:
                del self._by_line[session.line]
        session.line = line
        if line is not None:
            self._by_line.setdefault(line, {})[session.session_id] = session


class SessionRequest(msgspec.Struct, frozen=True, gc=False):
    """The session's part of a ``Fetch``."""

    session_id: int
    session_epoch: int
    partitions: tuple[FetchPartition, ...]
    forgotten: tuple[Key, ...]


class SessionBuilder:
    """Fetcher side, one per leader connection: turns what is wanted into requests.

    ``want`` and ``forget`` may be called at any time; what they change goes into the next request. Once a session is
    ``established`` the next request may be sent before the last one is answered: it ends that one's long poll, so that
    what changed does not wait for it. Answers are reported in order.
    """

    def __init__(self) -> None:
        self._wanted: dict[Key, FetchPartition] = {}
        self._changed: dict[Key, None] = {}
        self._forgotten: dict[Key, None] = {}
        #: as the server has told it last
        self.session_id = NO_SESSION
        self._epoch = FULL

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, partition: FetchPartition, *, again: bool = False) -> None:
        """Fetch this partition from this position. The same position again is no change, unless it is to be named
        ``again``: its answer was not used."""
        key = (partition.topic, partition.partition)
        if again or self._wanted.get(key) != partition:
            self._wanted[key] = partition
            self._changed[key] = None
            if self._forgotten:
                self._forgotten.pop(key, None)

    def forget(self, topic: str, partition: int) -> None:
        key = (topic, partition)
        if self._wanted.pop(key, None) is not None:
            self._changed.pop(key, None)
            self._forgotten[key] = None

    @property
    def established(self) -> bool:
        """The server has told the session's id, and the session is not lost since."""
        return self._epoch != FULL

    @property
    def changed(self) -> bool:
        """There is something to say that the server does not know yet."""
        return bool(self._changed or self._forgotten)

    def next_request(self) -> SessionRequest:
        if self._epoch == FULL:
            request = SessionRequest(self.session_id, FULL, tuple(self._wanted.values()), ())
        else:
            changed = tuple(map(self._wanted.__getitem__, self._changed))
            request = SessionRequest(self.session_id, self._epoch, changed, tuple(self._forgotten))
            self._epoch += 1
        self._changed.clear()
        if self._forgotten:
            self._forgotten.clear()
        return request

    def answered(self, reply: FetchReply) -> None:
        """The reply to the oldest request under way came. A session error starts a new session; so does a server
        without a slot."""
        if reply.code != ErrorCode.NONE or reply.session_id == NO_SESSION:
            self.lost()
        elif self._epoch == FULL:
            self.session_id = reply.session_id
            self._epoch = 1

    def lost(self) -> None:
        """The connection or the session is gone: the next request names everything, and the old session, so that the
        server need not keep it until it is too old."""
        self._epoch = FULL
        self._changed.clear()
        self._forgotten.clear()
