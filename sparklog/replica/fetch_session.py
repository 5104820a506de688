"""Incremental fetch sessions (KIP-227): the server side and the fetcher side.

The module does no I/O. A broker that follows a thousand partitions of one leader always has a fetch waiting at this
leader. In a session each request contains only the partitions that changed on the fetcher's side, and each reply
contains only the partitions that have something new. An idle partition costs neither bytes nor time on either side:

    request, session epoch 0      all wanted partitions               -> a new session id
    request, session epoch n > 0  partitions whose position moved, and those to drop
    reply                         partitions with records, errors, a divergence or moved offsets

The session epoch counts requests. By this epoch the server detects a repeated or lost request. The fetcher then starts
a new session. On the server a partition is *due* after a request named it, its log grew, or one of its offsets moved
(``SessionCache.wake``). A fetch reads only due partitions.

The broker's event loop owns the sessions. ``fetch.session.slots`` bounds their number, and ``MAX_PARTITIONS`` the
number of partitions in all of them.
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
FULL = 0  #: the session epoch of a request for a new session
SESSIONLESS = -1  #: the session epoch of a fetch without a session

#: The maximum number of partitions in all sessions of one broker. This number of partitions takes some hundred
#: megabytes.
MAX_PARTITIONS = 1_000_000


class FetchSession:
    """The server side of a session: the partitions that a fetcher wants, and what the last replies reported about each.

    A part of ``SessionCache``; mutable.
    """

    __slots__ = (
        "connection",
        "due",
        "epoch",
        "incarnation",
        "replica_id",
        "reported",
        "session_id",
        "used_ms",
        "wanted",
    )

    def __init__(self, session_id: int, fetch: Fetch, now_ms: int) -> None:
        self.session_id = session_id
        self.replica_id = fetch.replica_id
        self.incarnation = fetch.incarnation
        #: The session epoch of the next request.
        self.epoch = 1
        self.wanted: dict[Key, FetchPartition] = {}
        #: For each partition, the high watermark and log start offset in the last reply with the partition.
        self.reported: dict[Key, tuple[int, int]] = {}
        #: The partitions to read. The one that has waited longest is first.
        self.due: dict[Key, None] = {}
        self.used_ms = now_ms
        #: The connection of the last request.
        self.connection: object = None

    def update(self, key: Key, partition: FetchPartition) -> bool:
        """Store the position from which a request fetches a partition.

        Return whether the partition is new in this session. If the topic id or leader epoch has changed, forget the
        offsets that earlier replies reported for the partition.
        """
        before = self.wanted.get(key)
        self.wanted[key] = partition
        self.due[key] = None
        if before is None:
            return True
        if before.leader_epoch != partition.leader_epoch or before.topic_id != partition.topic_id:
            self.reported.pop(key, None)
        return False

    def belongs_to(self, fetch: Fetch) -> bool:
        return self.replica_id == fetch.replica_id and self.incarnation == fetch.incarnation

    def drop(self, key: Key) -> None:
        self.wanted.pop(key, None)
        self.reported.pop(key, None)
        self.due.pop(key, None)


class FetchContext(msgspec.Struct, frozen=True):
    """One fetch request while it is being served, with its session.

    If the request has no ``session``, all its partitions are in ``named``.
    """

    session: FetchSession | None
    #: The partitions that the request itself contains.
    named: tuple[FetchPartition, ...]

    def due(self) -> dict[Key, FetchPartition]:
        """Return the partitions to read now. The partition that has waited longest is first.

        Call this again after ``SessionCache.wake`` has returned the session of this request.
        """
        session = self.session
        if session is None:
            return {(wanted.topic, wanted.partition): wanted for wanted in self.named}
        return {key: session.wanted[key] for key in session.due}

    def has_news(self, result: FetchedPartition) -> bool:
        """Return whether ``result`` has records, an error, a divergence, or changed offsets.

        The offsets have changed if they differ from the last reported offsets. Without a session, the result is always
        True.
        """
        if self.session is None or result.batch_count or result.code or result.diverging is not None:
            return True
        marks = (result.high_watermark, result.log_start_offset)
        return self.session.reported.get((result.topic, result.partition)) != marks

    def marks_moved(self, key: Key, high_watermark: int, log_start_offset: int) -> bool:
        """Return whether these offsets differ from the last reported offsets. Without a session, return True."""
        return self.session is None or self.session.reported.get(key) != (high_watermark, log_start_offset)

    def has_news_else_not_due(self, result: FetchedPartition) -> bool:
        """Return whether ``result`` has records, an error, a divergence, or changed offsets, as ``has_news`` does.

        If it has none of these, the fetches of this session skip the partition until a request names the partition, its
        log grows, or one of its offsets moves.

        Use this for a request that continues to wait.
        """
        if self.has_news(result):
            return True
        if self.session is not None:
            self.session.due.pop((result.topic, result.partition), None)
        return False

    def reply(self, results: Iterable[FetchedPartition], cid: int = 0) -> FetchReply:
        """Build the reply, and update which partitions the next fetch reads (the *due* partitions).

        ``results`` are results of due partitions. Due partitions without a result stay due.

        A partition with records or an error also stays due, but becomes the last of the due partitions, because the
        fetcher may not have used the reply. After a result with nothing new the partition is no longer due.
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
            elif session.reported.get(key) == marks:
                continue
            said.append(result)
            session.reported[key] = marks
        if not session.due:
            # A dict keeps gaps for removed items, and each request would iterate over all of them.
            session.due.clear()
        return FetchReply(cid, ErrorCode.NONE, session.session_id, tuple(said))


def _wanted_after(fetch: Fetch, session: FetchSession) -> int:
    """Return an upper bound of the number of partitions in the session after this request."""
    if len(session.wanted) + len(fetch.partitions) <= MAX_ENTRIES:
        return len(session.wanted) + len(fetch.partitions)
    named = {(wanted.topic, wanted.partition) for wanted in fetch.partitions}
    return len((session.wanted.keys() - set(fetch.forgotten)) | named)


class SessionCache:
    """A cache of the fetch sessions of one broker.

    A follower's session in use is never closed to make room for a consumer's session.

    ``first_id`` should differ between processes, so that no new session gets a session id of an earlier process.
    """

    def __init__(
        self, *, slots: int, first_id: int = 1, keep_ms: int = 120_000, max_partitions: int = MAX_PARTITIONS
    ) -> None:
        self._slots = slots
        self._max_partitions = max_partitions
        #: The number of partitions in all sessions.
        self._partitions = 0
        self._next_id = max(first_id, 1)
        self._keep_ms = keep_ms
        #: Sessions by id. The one that has been unused for longest is first.
        self._followers: OrderedDict[int, FetchSession] = OrderedDict()
        self._consumers: OrderedDict[int, FetchSession] = OrderedDict()
        #: For each partition the sessions that want it, by session id.
        self.holders: dict[Key, dict[int, FetchSession]] = {}
        #: A callback, called with the id of each session that is closed for any reason.
        self.on_close: Callable[[int], None] = lambda session_id: None
        #: A function that returns whether a request of the second connection may use a session of the first connection.
        #: The check is needed because session ids can be guessed.
        self.may_use: Callable[[object, object], bool] = lambda owner, connection: True
        #: Sessions by the connection of their last request.
        self._by_connection: dict[object, dict[int, FetchSession]] = {}

    def __len__(self) -> int:
        return len(self._followers) + len(self._consumers)

    def begin(self, fetch: Fetch, now_ms: int, *, connection: object = None) -> FetchContext:
        """Find or create the request's session and update it.

        ``connection`` identifies the connection of the request.

        Raises:
            BrokerError: FETCH_SESSION_ID_NOT_FOUND or INVALID_FETCH_SESSION_EPOCH, after which the fetcher starts a new
                session. THROTTLING_QUOTA_EXCEEDED if this session or all sessions together would have too many
                partitions.
        """
        session = self._continued(fetch, now_ms, connection)
        if session is not None:
            return FetchContext(session, fetch.partitions)
        if fetch.session_epoch == SESSIONLESS:
            self._close_own(fetch, connection)
            return FetchContext(None, fetch.partitions)
        if fetch.session_epoch == FULL:
            self._close_own(fetch, connection)
            session = self._open(fetch, now_ms) if self._has_room(fetch, None) else None
        else:
            session = self._resume(fetch, now_ms, connection)
            at_most = self._partitions + len(fetch.partitions)
            if at_most > self._max_partitions and not self._has_room(fetch, session):
                detail = (
                    f"all sessions together have {self._partitions} partitions and the request adds more, at most "
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
            if session.update(key, partition):
                self.holders.setdefault(key, {})[session.session_id] = session
                self._partitions += 1
        if session.connection is not connection:
            self._move(session, connection)
        return FetchContext(session, fetch.partitions)

    def wake(self, key: Key) -> Collection[FetchSession]:
        """Let the next fetch of each session with this partition read it, because its log or offsets have changed.

        Return these sessions: their waiting fetches may now have enough for a response.
        """
        holders = self.holders.get(key)
        if holders is None:
            return ()
        for session in holders.values():
            session.due[key] = None
        return holders.values()

    def connection_lost(self, connection: object) -> list[int]:
        """Close the sessions that a closed connection used, and return their ids.

        No request will use these sessions again.
        """
        lost = list(self._by_connection.get(connection, ()))
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
        """Return whether the partitions that the request adds to ``session`` (None for a new one) fit into the limit.

        For a follower this closes consumers' sessions to make room.
        """
        added = len(fetch.partitions)
        if self._partitions + added <= self._max_partitions:
            return True
        if session is not None:
            added = sum((wanted.topic, wanted.partition) not in session.wanted for wanted in fetch.partitions)
        while fetch.replica_id != CONSUMER and self._consumers and self._partitions + added > self._max_partitions:
            self.close(next(iter(self._consumers)))
        return self._partitions + added <= self._max_partitions

    def _close_own(self, fetch: Fetch, connection: object) -> None:
        """Close the session that the request replaces, even if an earlier incarnation of the fetcher created it.

        A session of another fetcher stays open: the request's session id matches it only by chance.
        """
        session = self._sessions_of(fetch).get(fetch.session_id)
        if (
            session is not None
            and session.replica_id == fetch.replica_id
            and session.incarnation <= fetch.incarnation
            and self.may_use(session.connection, connection)
        ):
            self.close(session.session_id)

    def _sessions_of(self, fetch: Fetch) -> OrderedDict[int, FetchSession]:
        return self._consumers if fetch.replica_id == CONSUMER else self._followers

    def _continued(self, fetch: Fetch, now_ms: int, connection: object) -> FetchSession | None:
        """Handle a request with exactly one partition, which its session already has; return the session.

        This is a faster way to do what ``begin`` does. For any other request, or if the request must be refused, it
        returns None and changes nothing.
        """
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
            or session.connection is not connection
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

    def _resume(self, fetch: Fetch, now_ms: int, connection: object) -> FetchSession:
        sessions = self._sessions_of(fetch)
        session = sessions.get(fetch.session_id)
        if session is None or not session.belongs_to(fetch) or not self.may_use(session.connection, connection):
            raise BrokerError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, f"no fetch session {fetch.session_id}")
        if fetch.session_epoch != session.epoch:
            detail = f"epoch {fetch.session_epoch} of fetch session {fetch.session_id}, {session.epoch} expected"
            raise BrokerError(ErrorCode.INVALID_FETCH_SESSION_EPOCH, detail)
        session.epoch += 1
        session.used_ms = now_ms
        sessions.move_to_end(session.session_id)
        return session

    def _open(self, fetch: Fetch, now_ms: int) -> FetchSession | None:
        """Return a new session, or None if no slot is free and none can be freed."""
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

    def _move(self, session: FetchSession, connection: object) -> None:
        """Set the connection that a session uses; None if it has none."""
        earlier = self._by_connection.get(session.connection)
        if earlier is not None:
            del earlier[session.session_id]
            if not earlier:
                del self._by_connection[session.connection]
        session.connection = connection
        if connection is not None:
            self._by_connection.setdefault(connection, {})[session.session_id] = session


class SessionRequest(msgspec.Struct, frozen=True, gc=False):
    """The fields of a ``Fetch`` that belong to the session: id, epoch, changed partitions and dropped partitions."""

    session_id: int
    session_epoch: int
    partitions: tuple[FetchPartition, ...]
    forgotten: tuple[Key, ...]


class SessionBuilder:
    """The fetcher side of a session, which builds requests from the wanted partitions.

    There is one builder for each connection to a leader. ``want`` and ``drop`` may be called at any time; the next
    request contains the changes. Once a session is ``established``, a request may be sent before the reply to the
    previous one. The server then ends the wait of the previous request, so that changes take effect at once. Pass
    replies to ``on_response`` in order.
    """

    def __init__(self) -> None:
        self._wanted: dict[Key, FetchPartition] = {}
        self._changed: dict[Key, None] = {}
        self._forgotten: dict[Key, None] = {}
        #: The session id in the server's last reply.
        self.session_id = NO_SESSION
        self._epoch = FULL

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, partition: FetchPartition, *, again: bool = False) -> None:
        """Request this partition from this position with the next request.

        The next request does not repeat a position that the server knows already, unless ``again`` is set. Set
        ``again`` if the fetcher did not use the reply.
        """
        key = (partition.topic, partition.partition)
        if again or self._wanted.get(key) != partition:
            self._wanted[key] = partition
            self._changed[key] = None
            if self._forgotten:
                self._forgotten.pop(key, None)

    def drop(self, topic: str, partition: int) -> None:
        key = (topic, partition)
        if self._wanted.pop(key, None) is not None:
            self._changed.pop(key, None)
            self._forgotten[key] = None

    @property
    def established(self) -> bool:
        """Return whether the server has sent the session's id, and the session has not been lost since then."""
        return self._epoch != FULL

    @property
    def changed(self) -> bool:
        """Return whether wanted partitions have changed since the last request."""
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

    def on_response(self, reply: FetchReply) -> None:
        """Handle the reply to the oldest request in flight.

        The next request starts a new session after a reply with an error, and after a reply without a session id, which
        a server without a free slot sends.
        """
        if reply.code != ErrorCode.NONE or reply.session_id == NO_SESSION:
            self.lost()
        elif self._epoch == FULL:
            self.session_id = reply.session_id
            self._epoch = 1

    def lost(self) -> None:
        """Start a new session with the next request, because the connection or the session was lost.

        The next request contains all partitions and the id of the old session, so that the server can close the old
        session at once.
        """
        self._epoch = FULL
        self._changed.clear()
        self._forgotten.clear()
