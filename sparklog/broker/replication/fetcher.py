"""The fetchers of a broker: one for each other broker that leads partitions which this broker follows.

A fetcher has one connection to its leader. The connection has one incremental fetch session for all partitions that
this broker follows at the leader, and one long poll in flight. The fetcher applies a response partition by partition,
in order: the replica's state machine appends records, truncates the log and raises the high watermark. If the leader
returns an error for a partition, the fetcher does not request this partition for a short time, and continues with the
other partitions.

A fetch request also confirms the records of the previous response, so producers with acks=all wait for it. The fetcher
therefore sends the next request directly in the callback that receives a response, without waking a task. The task of
each leader only opens and closes connections.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from sparklog.broker.asyncio_tasks import end_tasks
from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.logging_setup import Lines
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.throttle import CopyThrottle
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchPartition, FetchReply, Reply
from sparklog.record.header import HEADER_BYTES
from sparklog.replica.events import LeaderResponded
from sparklog.replica.fetch_session import Key, SessionBuilder

_log = logging.getLogger(__name__)
_error_lines = Lines(_log)

_PARTITION_PAUSE_S = 0.1
#: The pause after UNKNOWN_LEADER_EPOCH. The pause is short because the leader learns of its election soon, and writes
#: to the leader then wait for its followers.
_EPOCH_PAUSE_S = 0.02
#: The pause before a follower repeats to its leader that it refuses a truncation.
_REFUSED_PAUSE_S = 0.5
#: The maximum time for which responses are applied before the event loop runs other work.
_TURN_S = 0.05
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CONNECT_TIMEOUT_S = 3.0
#: The time that a leader has for a response in addition to the long poll. After this time the connection is closed.
_ANSWER_TIMEOUT_S = 10.0


class Followed(NamedTuple):
    """A partition that this broker follows, with the leader epoch for which it fetches."""

    partition: Partition
    leader_epoch: int


class _InFlight(msgspec.Struct, frozen=True):
    """A request without a response so far. ``session_id`` is the id of the fetch session when the request was sent."""

    session_id: int
    named: tuple[FetchPartition, ...]
    incarnation: int
    #: The monotonic time of the request.
    sent_s: float


class LeaderFetcher:
    """A fetcher for all partitions of one leader that this broker follows.

    A part of ``Fetchers``, which creates it at the first use of the leader and runs ``run`` as one task.
    """

    def __init__(self, context: BrokerContext, leader_id: int, throttle: CopyThrottle) -> None:
        self.leader_id = leader_id
        self._throttle = throttle
        self._context = context
        self._followed: dict[Key, Followed] = {}
        self._session = SessionBuilder()
        #: The fetch position of each partition, from the last request that named it and whose response has been applied
        #: or is being applied.
        self._positions: dict[Key, FetchPartition] = {}
        self._in_flight: deque[_InFlight] = deque()
        #: The responses that are not completely applied yet; each iterator applies one partition for each step.
        self._responses: deque[Iterator[None]] = deque()
        self._next_turn: asyncio.Handle | None = None
        #: A future that completes with an error when the connection must be closed.
        self._ended: asyncio.Future[None] | None = None
        self._nudge: asyncio.Handle | None = None
        self._wanted = asyncio.Event()
        self._connection: AsyncConnection | None = None

    def follow(self, partition: Partition, leader_epoch: int) -> None:
        key = (partition.tp.topic, partition.tp.partition)
        followed = self._followed[key] = Followed(partition, leader_epoch)
        self._wanted.set()
        if self._throttle.limit(partition.tp) and self._throttle.exhausted:
            self._defer(key, followed)
            return
        self._request(key)
        self._nudge_soon()

    def unfollow(self, key: Key) -> None:
        if self._followed.pop(key, None) is not None:
            self._session.drop(*key)
            # otherwise the positions of all deleted topics would stay as long as the connection, which may be months
            self._positions.pop(key, None)

    def on_registered(self) -> None:
        """Send a request at once, because this broker has registered again.

        When a leader learns of the new incarnation, it discards this follower's earlier position. The leader commits
        nothing until this broker fetches again, so the request must not wait until the long poll ends.
        """
        self._nudge_soon()

    def _nudge_soon(self) -> None:
        """Schedule a second request, which makes the leader end the long poll.

        One request covers all changes that are made before the event loop sends it.
        """
        if self._nudge is None:
            self._nudge = asyncio.get_running_loop().call_soon(self._send_nudge)

    def _send_nudge(self) -> None:
        self._nudge = None
        if self._ended is not None and not self._responses:
            self._send_next()

    def _send_next(self) -> None:
        """Send a request if none is in flight and partitions are followed.

        If a request is in flight, send a second request only if the leader must know of a change.
        """
        if not self._in_flight:
            if self._followed:
                self._send()
        elif self._session.established and len(self._in_flight) == 1 and self._has_changes():
            self._send()

    def _has_changes(self) -> bool:
        """Return whether the leader must know of a change before its long poll ends."""
        return self._session.changed or self._in_flight[0].incarnation != self._context.incarnation

    async def run(self) -> None:
        """Fetch until the task is cancelled. After a lost connection, connect again after a pause.

        The pause doubles after each failed connection, up to a second.
        """
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                if not self._followed:
                    self._wanted.clear()
                await self._wanted.wait()
                try:
                    await self._connect()
                    pause_s = _FIRST_PAUSE_S
                    await self._run_session()
                except (BrokerError, asyncio.TimeoutError) as error:
                    self._context.counters["fetcher.connections.failed"] += 1
                    _log.info("could not fetch from broker %d: %s", self.leader_id, error or "no response in time")
                except Exception:
                    # Only this task fetches these partitions, so it must continue and report the error.
                    self._context.counters["fetcher.connections.failed"] += 1
                    _log.exception("fetching from broker %d", self.leader_id)
                self._disconnect()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            self._disconnect()

    async def _connect(self) -> None:
        context = self._context
        endpoint = context.cache.peer(self.leader_id)
        if endpoint is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {self.leader_id} is not live")
        self._connection = await AsyncConnection.open(
            endpoint.host,
            endpoint.port,
            client_id=f"replica-{context.broker_id}",
            cluster_id=context.cluster_id,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            max_frame_bytes=context.config.max_frame_bytes + context.config.replica_fetch_response_max_bytes,
            credentials=context.credentials,
            broker_id=self.leader_id,
            proof_required=endpoint.proves,
            security=context.peers.client,
        )
        hello = self._connection.hello
        if hello is not None and hello.broker_id != self.leader_id:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"broker {self.leader_id} expected at {self._connection.address}, broker {hello.broker_id} responded",
            )

    def _disconnect(self) -> None:
        self._ended = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        self._in_flight.clear()
        self._responses.clear()
        self._positions.clear()
        self._session.lost()

    async def _run_session(self) -> None:
        """Send the first request, and wait until the connection must be closed. Raise the reason."""
        timeout_s = self._context.config.replica_fetch_wait_max_ms / 1000 + _ANSWER_TIMEOUT_S
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._send_next()
        while True:
            asked_s = self._in_flight[0].sent_s if self._in_flight else time.monotonic()
            left_s = asked_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise asyncio.TimeoutError
            await asyncio.wait({ended}, timeout=left_s)
            if ended.done():
                ended.result()

    def _end(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _send(self) -> None:
        assert self._connection is not None
        context = self._context
        config, incarnation = context.config, context.incarnation
        session = self._session.next_request()
        session_id, named = session.session_id, session.partitions
        context.counters["fetcher.requests"] += 1
        request = Fetch(
            0,
            context.broker_id,
            incarnation,
            config.replica_fetch_wait_max_ms,
            1,
            config.replica_fetch_response_max_bytes,
            0,
            session_id,
            session.session_epoch,
            named,
            session.forgotten,
        )
        sent = _InFlight(session_id, named, incarnation, time.monotonic())
        self._in_flight.append(sent)
        self._connection.ask(request, (), partial(self._on_response, sent))

    def _request(self, key: Key) -> None:
        followed = self._followed[key]
        if followed.partition.awaits_name:  # the partition is requested again once a checkpoint contains the new log
            self._session.drop(*key)
            return
        self._request_from_end(key, followed, self._throttle.limit(followed.partition.tp))

    def _request_from_end(self, key: Key, followed: Followed, limit: int, *, again: bool = False) -> None:
        """Request the partition from its log end on.

        ``limit`` is the throttle's rate for the partition. With ``again`` the partition is requested even if its
        position is unchanged.
        """
        partition, otherwise = followed.partition, self._context.config.replica_fetch_max_bytes
        log = partition.log
        self._session.want(
            FetchPartition(
                key[0],
                key[1],
                partition.topic_id,
                followed.leader_epoch,
                log.log_end_offset,
                self._throttle.max_bytes(limit, otherwise) if limit else otherwise,
                log.last_epoch,
                log.log_start_offset,
                refuses=partition.replica.refuses_truncation,
            ),
            again=again,
        )

    # --- responses ---

    def _on_response(self, request: _InFlight, answer: tuple[Reply, memoryview] | BrokerError) -> None:
        if not self._in_flight or self._in_flight[0] is not request:
            return  # a response of a closed connection
        if isinstance(answer, BrokerError):
            self._end(answer)
            return
        reply, body = answer
        assert isinstance(reply, FetchReply)
        self._in_flight.popleft()
        if request.session_id == self._session.session_id:
            self._session.on_response(reply)
        if reply.code != ErrorCode.NONE:
            self._context.counters["fetcher.sessions.lost"] += 1
        elif len(reply.partitions) == 1 and not self._responses:  # the common case, in which latency matters
            self._apply_alone(request, reply.partitions[0], body)
            return
        else:
            self._responses.append(self._apply_all(request, reply, body))
        if self._next_turn is None:
            self._apply_next()

    def _apply_alone(self, request: _InFlight, answer: FetchedPartition, body: memoryview) -> None:
        try:
            self._adopt_positions(request)
            self._apply(answer, body)
            self._send_next()
        except Exception as error:
            self._end(error)

    def _apply_next(self) -> None:
        """Apply responses and send the next request.

        After every ``_TURN_S`` the event loop runs other work: to create a thousand new logs may take longer than the
        broker may be unresponsive.
        """
        self._next_turn = None
        turn_ends = time.monotonic() + _TURN_S
        try:
            while self._responses:
                for _ in self._responses[0]:
                    if time.monotonic() >= turn_ends:
                        self._next_turn = asyncio.get_running_loop().call_soon(self._apply_next)
                        return
                self._responses.popleft()
            self._send_next()
        except Exception as error:
            self._end(error)

    def _adopt_positions(self, request: _InFlight) -> None:
        """Use the positions of the request whose response is applied next.

        This must not happen earlier, because the rest of the previous response is applied at the positions of the
        previous request.
        """
        for wanted in request.named:
            key = (wanted.topic, wanted.partition)
            if key in self._followed:  # still followed
                self._positions[key] = wanted

    def _apply_all(self, request: _InFlight, reply: FetchReply, body: memoryview) -> Iterator[None]:
        """Apply a response, one partition for each step of the iterator."""
        self._adopt_positions(request)
        at = 0
        for answer in reply.partitions:
            end = at + answer.batch_count * HEADER_BYTES + answer.body_bytes
            self._apply(answer, body[at:end])
            at = end
            yield

    def _apply(self, answer: FetchedPartition, body: memoryview) -> None:
        """Apply the response for one partition. ``body`` has its batches: all headers, then all bodies.

        Raises:
            BrokerError: CORRUPT_MESSAGE if ``body`` is shorter than the response announces.
        """
        code, batch_count, log_start_offset = answer.code, answer.batch_count, answer.log_start_offset
        headers_end = batch_count * HEADER_BYTES
        if len(body) < headers_end + answer.body_bytes:
            detail = f"{answer.topic}-{answer.partition}: {len(body)} bytes found, {answer.batch_count} batches of "
            raise BrokerError(ErrorCode.CORRUPT_MESSAGE, f"{detail}{answer.body_bytes} bytes announced")
        key = (answer.topic, answer.partition)
        followed, position = self._followed.get(key), self._positions.get(key)
        if followed is None or position is None or followed.partition.stopped:
            return
        partition = followed.partition
        if position.topic_id != partition.topic_id:
            return  # the response is about a deleted topic of the same name; its epoch and offset may be equal
        log, leader_epoch = partition.log, position.leader_epoch
        before = log.log_end_offset
        refused = partition.on_leader_response(
            LeaderResponded(
                leader_epoch=leader_epoch,
                fetch_offset=position.fetch_offset,
                code=code,
                high_watermark=answer.high_watermark,
                log_start_offset=log_start_offset,
                log_end_offset=answer.log_end_offset,
                diverging=answer.diverging,
                batch_count=batch_count,
                last_epoch=position.last_epoch,
            ),
            body[:headers_end],
            body[headers_end:],
        )
        self._context.counters["fetcher.bytes"] += len(body)
        # A late response of a former leader does not show the log start of the present leader.
        news = code == ErrorCode.NONE and log_start_offset > log.log_start_offset
        if news and leader_epoch == partition.replica.leader_epoch:
            partition.advance_log_start(log_start_offset)
        if self._followed.get(key) is not followed:
            return
        if partition.is_truncating or partition.awaits_name:  # the partition is requested again later
            self._session.drop(*key)
            return
        moved = log.log_end_offset != before
        if answer.diverging is not None and partition.replica.refuses_truncation:
            self._back_off(key, followed, _REFUSED_PAUSE_S)
        elif refused is not None:
            self._context.counters["fetcher.batches.refused"] += 1
            self._back_off(key, followed)
        elif code != ErrorCode.NONE and not moved:
            self._context.counters["fetcher.errors"] += 1
            _error_lines.info("%s: broker %d returned %s %s", partition.tp, self.leader_id, code, answer.detail)
            early = code == ErrorCode.UNKNOWN_LEADER_EPOCH
            self._back_off(key, followed, _EPOCH_PAUSE_S if early else _PARTITION_PAUSE_S)
        elif moved or batch_count or answer.diverging is not None:
            limit = self._throttle.limit(partition.tp)
            if limit:
                self._throttle.received(len(body))
                # A replica that has all committed records may already be in the ISR, although the controller has not
                # reported this yet. If the throttle delayed this replica, producers would wait for it.
                if log.log_end_offset < answer.high_watermark and self._throttle.exhausted:
                    self._defer(key, followed)
                    return
            self._request_from_end(key, followed, limit, again=True)

    def _back_off(self, key: Key, followed: Followed, pause_s: float = _PARTITION_PAUSE_S) -> None:
        """Remove the partition from the session for ``pause_s``."""
        self._session.drop(*key)
        asyncio.get_running_loop().call_later(pause_s, self._resume, key, followed)

    def _defer(self, key: Key, followed: Followed) -> None:
        """Remove the partition from the session until the throttle allows more bytes."""
        self._context.counters["fetcher.throttled"] += 1
        self._session.drop(*key)
        self._throttle.hold(followed.partition.tp, partial(self._resume, key, followed))

    def _resume(self, key: Key, followed: Followed) -> None:
        if self._followed.get(key) is followed and not followed.partition.stopped:
            self._request(key)
            self._nudge_soon()


class Fetchers:
    """The fetchers of one broker, one for each leader that it follows.

    Not thread-safe: use them only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._throttle = CopyThrottle(context)
        context.metadata_listeners.append(self._throttle.metadata_changed)
        context.registration_listeners.append(self._registered_again)
        self._by_leader: dict[int, LeaderFetcher] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def follow(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        """Fetch this partition from ``leader``, from the log end offset of this replica on.

        Stop fetching the partition from an earlier leader.
        """
        self.unfollow(partition, unless=leader)
        if self._closed:
            return
        fetcher = self._by_leader.get(leader)
        if fetcher is None:
            fetcher = self._by_leader[leader] = LeaderFetcher(self._context, leader, self._throttle)
            self._tasks.append(
                asyncio.get_running_loop().create_task(fetcher.run(), name=f"fetch from broker {leader}")
            )
        fetcher.follow(partition, leader_epoch)

    def _registered_again(self) -> None:
        for fetcher in self._by_leader.values():
            fetcher.on_registered()

    def unfollow(self, partition: Partition, *, unless: int = -1) -> None:
        key = (partition.tp.topic, partition.tp.partition)
        for leader, fetcher in self._by_leader.items():
            if leader != unless:
                fetcher.unfollow(key)

    async def close(self) -> None:
        self._closed = True
        self._throttle.close()
        await end_tasks(self._tasks)
