"""The following side of replication: one connection to each broker that leads something this broker follows.

Each connection carries one incremental fetch session for all partitions followed there, with one long poll under way.
Answers are applied partition by partition in their order: records appended, logs truncated, high watermarks raised, as
the replica's core decides. A partition the leader has an error for rests for a moment; the others go on.

What producers with acks=all wait for is the way from an answer to the next request: it is gone in the turn of the loop
in which the answer is read, without a task to wake. The task of each leader only makes connections, and ends them.
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
from sparklog.broker.lifecycle.logging_setup import Lines
from sparklog.broker.replication.partition import Partition
from sparklog.broker.replication.throttle import CopyThrottle
from sparklog.broker.state import BrokerState
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.async_client import AsyncConnection
from sparklog.protocol.messages import Fetch, FetchedPartition, FetchPartition, FetchReply, Reply
from sparklog.record.header import HEADER_BYTES
from sparklog.replica.events import LeaderAnswered
from sparklog.replica.fetch_session import Key, SessionBuilder

_log = logging.getLogger(__name__)
_error_lines = Lines(_log)

_PARTITION_PAUSE_S = 0.1
#: A leader that has not heard of its election yet will within moments, and its writes wait for its followers.
_EPOCH_PAUSE_S = 0.02
#: A leader that lacks what is committed here is told so again.
_REFUSED_PAUSE_S = 0.5
#: Answers are applied for so long in one turn of the loop.
_TURN_S = 0.05
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CONNECT_TIMEOUT_S = 3.0
#: On top of the long poll: after that a leader that does not answer is given up, and the connection with it.
_ANSWER_TIMEOUT_S = 10.0


class Followed(NamedTuple):
    """A partition followed at one leader in one epoch."""

    partition: Partition
    leader_epoch: int


class _UnderWay(msgspec.Struct, frozen=True):
    """A request whose answer has not come. ``session_id`` as it was when the request was made."""

    session_id: int
    named: tuple[FetchPartition, ...]
    incarnation: int
    #: monotonic time
    sent_s: float


class LeaderFetcher:
    """Everything this broker follows at one leader. Owner: ``Fetchers``; runs as one task from first use on."""

    def __init__(self, broker: BrokerState, leader_id: int, throttle: CopyThrottle) -> None:
        self.leader_id = leader_id
        self._throttle = throttle
        self._broker = broker
        self._followed: dict[Key, Followed] = {}
        self._session = SessionBuilder()
        #: Where each partition stood in the requests whose answers were applied so far, the one at work with them.
        self._positions: dict[Key, FetchPartition] = {}
        self._under_way: deque[_UnderWay] = deque()
        #: What is left to apply of the answers that have come.
        self._answers: deque[Iterator[None]] = deque()
        self._next_turn: asyncio.Handle | None = None
        #: Why the connection is to be given up, once there is a reason.
        self._ended: asyncio.Future[None] | None = None
        self._nudge: asyncio.Handle | None = None
        self._wanted = asyncio.Event()
        self._connection: AsyncConnection | None = None

    def follow(self, partition: Partition, leader_epoch: int) -> None:
        key = (partition.tp.topic, partition.tp.partition)
        followed = self._followed[key] = Followed(partition, leader_epoch)
        self._wanted.set()
        if self._throttle.limit(partition.tp) and self._throttle.exhausted:
            self._hold(key, followed)
            return
        self._want(key)
        self._nudge_soon()

    def unfollow(self, key: Key) -> None:
        if self._followed.pop(key, None) is not None:
            self._session.forget(*key)
            self._positions.pop(key, None)  # or a connection of months would keep those of all topics that there were

    def registered_again(self) -> None:
        """A leader that has heard of the new incarnation counts on nothing that the one before held, and commits
        nothing until this one has fetched: it is not to wait for the end of a long poll."""
        self._nudge_soon()

    def _nudge_soon(self) -> None:
        """Something new is wanted while a long poll waits: end it with a second request, one for all that is new."""
        if self._nudge is None:
            self._nudge = asyncio.get_running_loop().call_soon(self._send_nudge)

    def _send_nudge(self) -> None:
        self._nudge = None
        if self._ended is not None and not self._answers:
            self._send_next()

    def _send_next(self) -> None:
        """One request is under way as long as something is followed here, and a second one if there is news."""
        if not self._under_way:
            if self._followed:
                self._send()
        elif self._session.established and len(self._under_way) == 1 and self._has_news():
            self._send()

    def _has_news(self) -> bool:
        """For the leader at which a long poll waits."""
        return self._session.changed or self._under_way[0].incarnation != self._broker.incarnation

    async def run(self) -> None:
        """Fetch until cancelled; a lost connection is made again with growing pauses."""
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                if not self._followed:
                    self._wanted.clear()
                await self._wanted.wait()
                try:
                    await self._connect()
                    pause_s = _FIRST_PAUSE_S
                    await self._fetch_on()
                except (BrokerError, asyncio.TimeoutError) as error:
                    self._broker.counters["fetcher.connections.failed"] += 1
                    _log.info("could not fetch from broker %d: %s", self.leader_id, error or "no response in time")
                except Exception:
                    # Nobody else would fetch these partitions, and nobody would be told that they are not fetched.
                    self._broker.counters["fetcher.connections.failed"] += 1
                    _log.exception("fetching from broker %d", self.leader_id)
                self._disconnect()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            self._disconnect()

    async def _connect(self) -> None:
        broker = self._broker
        endpoint = broker.cache.endpoint(self.leader_id)
        if endpoint is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {self.leader_id} is not live")
        self._connection = await AsyncConnection.open(
            endpoint.host,
            endpoint.port,
            client_id=f"replica-{broker.broker_id}",
            cluster_id=broker.cluster_id,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            max_frame_bytes=broker.config.max_frame_bytes + broker.config.replica_fetch_response_max_bytes,
            credentials=broker.credentials,
            broker_id=self.leader_id,
            proof_required=endpoint.proves,
        )
        hello = self._connection.hello
        if hello is not None and hello.broker_id != self.leader_id:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"broker {self.leader_id} expected at {self._connection.address}, {hello.broker_id} answered",
            )

    def _disconnect(self) -> None:
        self._ended = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        self._under_way.clear()
        self._answers.clear()
        self._positions.clear()
        self._session.lost()

    async def _fetch_on(self) -> None:
        """Until the connection is to be given up: raises why."""
        timeout_s = self._broker.config.replica_fetch_wait_max_ms / 1000 + _ANSWER_TIMEOUT_S
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._send_next()
        while True:
            asked_s = self._under_way[0].sent_s if self._under_way else time.monotonic()
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
        broker = self._broker
        config, incarnation = broker.config, broker.incarnation
        session = self._session.next_request()
        session_id, named = session.session_id, session.partitions
        broker.counters["fetcher.requests"] += 1
        request = Fetch(
            0,
            broker.broker_id,
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
        under_way = _UnderWay(session_id, named, incarnation, time.monotonic())
        self._under_way.append(under_way)
        self._connection.ask(request, (), partial(self._answered, under_way))

    def _want(self, key: Key) -> None:
        followed = self._followed[key]
        if followed.partition.awaits_name:  # it is followed again once it is named
            self._session.forget(*key)
            return
        self._want_at_end(key, followed, self._throttle.limit(followed.partition.tp))

    def _want_at_end(self, key: Key, followed: Followed, limit: int, *, again: bool = False) -> None:
        """``limit``: what the throttle says of it. ``again``: name it even where it stands as it stood."""
        partition, otherwise = followed.partition, self._broker.config.replica_fetch_max_bytes
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
                refuses=partition.replica.refuses_cut,
            ),
            again=again,
        )

    # --- answers ---

    def _answered(self, request: _UnderWay, answer: tuple[Reply, memoryview] | BrokerError) -> None:
        if not self._under_way or self._under_way[0] is not request:
            return  # of a connection that was given up
        if isinstance(answer, BrokerError):
            self._end(answer)
            return
        reply, body = answer
        assert isinstance(reply, FetchReply)
        self._under_way.popleft()
        if request.session_id == self._session.session_id:
            self._session.answered(reply)
        if reply.code != ErrorCode.NONE:
            self._broker.counters["fetcher.sessions.lost"] += 1
        elif len(reply.partitions) == 1 and not self._answers:  # as it is where latency counts
            self._apply_alone(request, reply.partitions[0], body)
            return
        else:
            self._answers.append(self._apply_all(request, reply, body))
        if self._next_turn is None:
            self._go_on()

    def _apply_alone(self, request: _UnderWay, answer: FetchedPartition, body: memoryview) -> None:
        try:
            self._take_positions(request)
            self._apply(answer, body)
            self._send_next()
        except Exception as error:
            self._end(error)

    def _go_on(self) -> None:
        """Apply what has come, and ask for more. Others have their turn in between: a thousand new logs take longer
        than a broker may be silent."""
        self._next_turn = None
        turn_ends = time.monotonic() + _TURN_S
        try:
            while self._answers:
                for _ in self._answers[0]:
                    if time.monotonic() >= turn_ends:
                        self._next_turn = asyncio.get_running_loop().call_soon(self._go_on)
                        return
                self._answers.popleft()
            self._send_next()
        except Exception as error:
            self._end(error)

    def _take_positions(self, request: _UnderWay) -> None:
        """Its answer is the next to be applied. Not sooner: what is left of the answer before was asked from where the
        partitions stood in that request."""
        for wanted in request.named:
            key = (wanted.topic, wanted.partition)
            if key in self._followed:  # still
                self._positions[key] = wanted

    def _apply_all(self, request: _UnderWay, reply: FetchReply, body: memoryview) -> Iterator[None]:
        """One partition a step."""
        self._take_positions(request)
        at = 0
        for answer in reply.partitions:
            end = at + answer.batch_count * HEADER_BYTES + answer.body_bytes
            self._apply(answer, body[at:end])
            at = end
            yield

    def _apply(self, answer: FetchedPartition, body: memoryview) -> None:
        """``body``: the batches of this partition, headers first.

        Raises:
            BrokerError: CORRUPT_MESSAGE when there is less of it than the answer says.
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
            return  # about a topic that was deleted since and made anew: epoch and offset may well be the same
        log, leader_epoch = partition.log, position.leader_epoch
        before = log.log_end_offset
        refused = partition.leader_answered(
            LeaderAnswered(
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
        self._broker.counters["fetcher.bytes"] += len(body)
        # A late answer of a deposed leader says nothing about the log of the present one.
        news = code == ErrorCode.NONE and log_start_offset > log.log_start_offset
        if news and leader_epoch == partition.replica.leader_epoch:
            partition.advance_log_start(log_start_offset)
        if self._followed.get(key) is not followed:
            return
        if partition.is_cutting or partition.awaits_name:  # then it is followed anew
            self._session.forget(*key)
            return
        moved = log.log_end_offset != before
        if answer.diverging is not None and partition.replica.refuses_cut:
            self._rest(key, followed, _REFUSED_PAUSE_S)
        elif refused is not None:
            self._broker.counters["fetcher.batches.refused"] += 1
            self._rest(key, followed)
        elif code != ErrorCode.NONE and not moved:
            self._broker.counters["fetcher.errors"] += 1
            _error_lines.info("%s: broker %d returned %s %s", partition.tp, self.leader_id, code, answer.detail)
            early = code == ErrorCode.UNKNOWN_LEADER_EPOCH
            self._rest(key, followed, _EPOCH_PAUSE_S if early else _PARTITION_PAUSE_S)
        elif moved or batch_count or answer.diverging is not None:
            limit = self._throttle.limit(partition.tp)
            if limit:
                self._throttle.received(len(body))
                # Whoever has all that is committed may be in the ISR by now, with no controller there to say so. Held
                # back it would hold producers back.
                if log.log_end_offset < answer.high_watermark and self._throttle.exhausted:
                    self._hold(key, followed)
                    return
            self._want_at_end(key, followed, limit, again=True)

    def _rest(self, key: Key, followed: Followed, pause_s: float = _PARTITION_PAUSE_S) -> None:
        """Leave the partition out of the session for a moment."""
        self._session.forget(*key)
        asyncio.get_running_loop().call_later(pause_s, self._resume, key, followed)

    def _hold(self, key: Key, followed: Followed) -> None:
        """Leave the partition out of the session until there are bytes for it to copy."""
        self._broker.counters["fetcher.throttled"] += 1
        self._session.forget(*key)
        self._throttle.hold(followed.partition.tp, partial(self._resume, key, followed))

    def _resume(self, key: Key, followed: Followed) -> None:
        if self._followed.get(key) is followed and not followed.partition.stopped:
            self._want(key)
            self._nudge_soon()


class Fetchers:
    """The fetchers of one broker, one for each leader. Owner: its event loop."""

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker
        self._throttle = CopyThrottle(broker)
        broker.metadata_listeners.append(self._throttle.metadata_changed)
        broker.registration_listeners.append(self._registered_again)
        self._by_leader: dict[int, LeaderFetcher] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def follow(self, partition: Partition, leader: int, leader_epoch: int) -> None:
        """Fetch this partition from ``leader`` from its log's end on; replaces what was ordered before."""
        self.unfollow(partition, unless=leader)
        if self._closed:
            return
        fetcher = self._by_leader.get(leader)
        if fetcher is None:
            fetcher = self._by_leader[leader] = LeaderFetcher(self._broker, leader, self._throttle)
            self._tasks.append(
                asyncio.get_running_loop().create_task(fetcher.run(), name=f"fetch from broker {leader}")
            )
        fetcher.follow(partition, leader_epoch)

    def _registered_again(self) -> None:
        for fetcher in self._by_leader.values():
            fetcher.registered_again()

    def unfollow(self, partition: Partition, *, unless: int = -1) -> None:
        key = (partition.tp.topic, partition.tp.partition)
        for leader, fetcher in self._by_leader.items():
            if leader != unless:
                fetcher.unfollow(key)

    async def close(self) -> None:
        self._closed = True
        self._throttle.close()
        await end_tasks(self._tasks)
