"""Blocking connections to the brokers of one cluster, with metadata and retries: under Admin, Consumer and readers.

No thread and no loop: everything happens in the caller's thread, and what is not needed is not opened. It does not
decide what a request means; it finds the broker to ask, asks, and asks again while the error says that this may help.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from sparklog.client.cluster import forks
from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.bootstrap import Address, parse_bootstrap
from sparklog.client.cluster.metadata import Leader, MetadataCache, MetadataPieces, topic_error
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.net.blocking import BlockingConnection
from sparklog.protocol.messages import Metadata, MetadataReply, Reply, Request, TopicMetadata

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

#: How long each broker has to say who leads, when a leader's word is doubted.
_DOUBT_TIMEOUT_S = 2.0
#: How long "unknown topic" may mean "not told yet": brokers learn of a new topic one after the other.
UNKNOWN_TOPIC_GRACE_S = 1.5
#: Failures in a row after which the brokers asked so far count as perhaps out of date.
_ASK_OTHERS_AFTER = 3


class Deadline:
    """A point on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


class BlockingCluster:
    """Connections by broker id, opened when first asked for. Owned and used by one thread; ``close`` ends them."""

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        client_id: str = "sparklog",
        timeout_s: float = 30.0,
        request_timeout_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        first_contact_s: float | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008 - an immutable value
    ) -> None:
        """``timeout_s`` bounds each call as a whole, retries included; ``request_timeout_s`` one wait for a broker,
        so that a broker that hangs does not use up the call's time. ``first_contact_s`` bounds calls as long as no
        broker has ever answered: for people, whose address may be wrong. Connects to nothing yet.

        Raises:
            ConfigError: ``bootstrap`` holds no address.
        """
        self.metadata = MetadataCache()
        self.timeout_s = timeout_s
        self.request_timeout_s = min(request_timeout_s, timeout_s)
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._first_contact_s = first_contact_s
        if first_contact_s is not None:
            # Addresses are tried one after the other, and one that swallows packets must not take all of the time.
            connect_timeout_s = min(connect_timeout_s, max(first_contact_s / len(self._bootstrap), 0.3))
        self._connect_timeout_s = connect_timeout_s
        self._backoff = backoff
        self._connections: dict[int, BlockingConnection] = {}
        self._closed = False
        self._random = random.Random()
        #: Which of several brokers is asked first differs from client to client, and moves on after each failure.
        self._turn = self._random.randrange(1 << 16)
        forks.watch(self)

    def close(self) -> None:
        """For good: what is asked after it, perhaps by a thread that came late, raises ConfigError."""
        self._closed = True
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def __enter__(self) -> BlockingCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- asking ---

    def ask_any(self, request: Request, expected: type[R]) -> R:
        """Ask whichever broker can be reached, once."""
        return self._ask(self.any_connection(), request, expected)

    def ask_broker(self, broker_id: int, request: Request, expected: type[R]) -> R:
        """Ask one broker, once."""
        return self._ask(self.connection(broker_id), request, expected)

    def ask_metadata(self, request: Metadata, broker_id: int | None = None) -> MetadataReply:
        """The whole reply, of one broker or of whichever can be reached, asked once; it is not merged in."""
        connection = self.any_connection() if broker_id is None else self.connection(broker_id)
        return self._ask_metadata(connection, request)

    def broker_timeout_ms(self, timeout_s: float | None = None) -> int:
        """What a broker may take of a call's time (left out: of any call's), so that its answer still comes within
        it."""
        return max(1, int(min(self.timeout_s if timeout_s is None else timeout_s, self.request_timeout_s) * 800))

    def retrying(self, what: str, attempt: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call ``attempt`` until it succeeds, fails for good, or the time is up.

        Metadata is refreshed between attempts by ``attempt`` itself, which knows the topics.

        Raises:
            BrokerError: one that is not retriable, or an unknown topic that stayed unknown for the grace period.
            ClientTimeout: names ``what`` and the last error.
        """
        deadline = Deadline(self.timeout_s if timeout_s is None else timeout_s)
        contact = Deadline(min(deadline.timeout_s, self._first_contact_s or deadline.timeout_s))
        grace = Deadline(UNKNOWN_TOPIC_GRACE_S)
        for count in itertools.count():
            try:
                return attempt()
            except BrokerError as error:  # noqa: PERF203 - a retry loop
                unknown = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if not error.retriable or (unknown and not grace.left_s()):
                    raise
                if count >= _ASK_OTHERS_AFTER and error.refresh_metadata:
                    self._meet_another()
                if not self._contacted and contact.left_s() <= 0:
                    raise ClientTimeout(f"{error.detail} (tried for {contact.timeout_s:g} s)") from error
                self._pause(what, error, deadline=deadline, count=count)
        raise AssertionError("unreachable")

    def refresh(self, topics: Iterable[str] | None = ()) -> MetadataReply:
        """Ask any broker for metadata once and merge it in; None asks for all topics, () for the brokers only."""
        wanted = None if topics is None else tuple(topics)
        connection = self.any_connection()
        reply = self._ask_metadata(connection, Metadata(0, wanted))
        self.metadata.update(reply)
        if self.metadata.is_stale(reply):
            connection.close()  # another broker may know more
            self._turn += 1
        return reply

    def topic(self, name: str, *, timeout_s: float | None = None, refresh: bool = False) -> TopicMetadata:
        """The topic, from the cache unless ``refresh`` or not there.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
            ClientTimeout: no broker answered.
        """
        cached = None if refresh else self.metadata.topic(name)
        return cached or self.retrying(f"metadata of {name!r}", lambda: self._fetch_topic(name), timeout_s=timeout_s)

    def leader(self, tp: TopicPartition, *, refresh: bool = False) -> Leader:
        """Who leads a partition, by the cache, or after one refresh where it is asked for or needed.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NETWORK_EXCEPTION: all retriable.
        """
        leader = None if refresh else self.metadata.leader(tp)
        if leader is None:
            self._fetch_topic(tp.topic)
            leader = self.metadata.leader(tp)
        if leader is None:
            raise no_leader(self.metadata, tp)
        return leader

    def confirm(self, tp: TopicPartition, leader: Leader) -> None:
        """Make sure that ``leader`` still leads, before what it says about the end of its log is taken for the truth:
        one that was cut off may have been deposed without knowing, and a client that has heard of no later epoch cannot
        tell. Every other broker is asked, its successor among them.

        Raises:
            BrokerError: retriable. FENCED_LEADER_EPOCH when ``leader`` leads no more; BROKER_NOT_AVAILABLE when not
                more than half of the brokers, ``leader`` included, say that it does.
        """
        others = [broker_id for broker_id in self.metadata.brokers if broker_id != leader.broker_id]
        confirmed = 1
        for broker_id in others:
            try:
                with self.open_connection(broker_id, at_most_s=_DOUBT_TIMEOUT_S) as connection:
                    reply = self._ask_metadata(connection, Metadata(0, (tp.topic,)))
            except BrokerError:
                continue
            self.metadata.update(reply)
            if self.metadata.leader(tp) != leader:
                raise BrokerError(
                    ErrorCode.FENCED_LEADER_EPOCH,
                    f"{tp}: broker {leader.broker_id} does not lead in epoch {leader.epoch} any more,"
                    f" as broker {broker_id} says",
                )
            confirmed += not self.metadata.is_stale(reply)
        if confirmed * 2 <= len(others) + 1:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"{tp}: only {confirmed} of {len(others) + 1} brokers say that broker {leader.broker_id} leads",
            )

    # --- connections ---

    def connection(self, broker_id: int) -> BlockingConnection:
        """The open connection to a broker, or a new one.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE when its address is not known, NETWORK_EXCEPTION.
        """
        open_one = self._connections.get(broker_id)
        if open_one is not None and not open_one.closed:
            return open_one
        connection = self._connections[broker_id] = self.open_connection(broker_id)
        return connection

    def open_connection(self, broker_id: int, *, at_most_s: float | None = None) -> BlockingConnection:
        """A connection of the caller's own, for requests that stay under way while others are asked. ``at_most_s``: a
        bound on each wait for the broker, where the link's own are too long.

        Raises:
            BrokerError: as ``connection``.
        """
        endpoint = self.metadata.endpoint(broker_id)
        if endpoint is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id} is not registered")
        connection = self._open(Address(endpoint.host, endpoint.port), at_most_s=at_most_s)
        if connection.hello.broker_id != broker_id:
            connection.close()
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"{connection.address} is broker {connection.hello.broker_id}, {broker_id} expected",
            )
        return connection

    def any_connection(self) -> BlockingConnection:
        """An open connection, else one to a known broker, else one to a bootstrap address.

        Raises:
            BrokerError: NETWORK_EXCEPTION with every address tried, or the one that answered with something worse.
        """
        alive = [connection for connection in self._connections.values() if not connection.closed]
        if alive:
            return alive[self._turn % len(alive)]
        known = [Address(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        addresses = list(dict.fromkeys([*_rotated(known, self._turn), *_rotated(self._bootstrap, self._turn)]))
        failures = []
        for address in addresses:
            try:
                connection = self._open(address)
            except BrokerError as error:  # noqa: PERF203 - the next address is tried
                if error.code != ErrorCode.NETWORK_EXCEPTION:
                    raise
                failures.append(error.detail)
                self._turn += 1
            else:
                self._connections[connection.hello.broker_id] = connection
                return connection
        raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"no broker can be reached: {'; '.join(failures)}")

    def _meet_another(self) -> None:
        """Connect to one more broker, if there is one, and ask another next time: those asked so far may be out of
        date."""
        self._turn += 1
        connected = {broker_id for broker_id, open_one in self._connections.items() if not open_one.closed}
        strange = sorted(self.metadata.brokers.keys() - connected)
        if strange:
            with contextlib.suppress(BrokerError):
                self.connection(strange[self._turn % len(strange)])

    def pause_ms(self, count: int) -> float:
        """The delay after failure number ``count`` (from 0), jittered."""
        return self._backoff.delay_ms(count, self._random.random())

    @property
    def _contacted(self) -> bool:
        """A broker has answered, now or earlier."""
        return bool(self.metadata.brokers or self._connections)

    def _open(self, address: Address, *, at_most_s: float | None = None) -> BlockingConnection:
        if self._closed:
            raise ConfigError("this client is closed")
        limit_s = self.timeout_s if at_most_s is None else min(at_most_s, self.timeout_s)
        return BlockingConnection(
            address.host,
            address.port,
            client_id=self._client_id,
            cluster_id=self.metadata.cluster_id,
            connect_timeout_s=min(self._connect_timeout_s, limit_s),
            timeout_s=min(self.request_timeout_s, limit_s),
        )

    def _ask(self, connection: BlockingConnection, request: Request, expected: type[R]) -> R:
        reply, _ = connection.request(request)
        if not isinstance(reply, expected):
            connection.close()
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{connection.address} answered {type(request).__name__} with {type(reply).__name__}",
            )
        return reply

    def _ask_metadata(self, connection: BlockingConnection, request: Metadata) -> MetadataReply:
        pieces = MetadataPieces(request)
        while pieces.request is not None:
            pieces.take(self._ask(connection, pieces.request, MetadataReply))
        return pieces.reply

    def _fetch_topic(self, name: str) -> TopicMetadata:
        reply = self.refresh((name,))
        for topic in reply.topics:
            if topic.name == name:
                error = topic_error(topic)
                if error is not None:
                    if self.metadata.is_stale(reply):
                        raise _not_told(error)
                    self._turn += 1
                    raise error
        topic_now = self.metadata.topic(name)
        if topic_now is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r}")
        return topic_now

    def _pause(self, what: str, error: BrokerError, *, deadline: Deadline, count: int) -> None:
        delay_s = self.pause_ms(count) / 1000
        if delay_s >= deadline.left_s():
            raise ClientTimeout(f"{what}: not done within {deadline.timeout_s:g} s, last: {error}") from error
        time.sleep(delay_s)


def _not_told(error: BrokerError) -> BrokerError:
    """What to make of an error from a broker that has not heard of the present controller."""
    if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return error
    return BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"the broker has not heard from the controller: {error.detail}")


def _rotated(addresses: Iterable[Address], turn: int) -> list[Address]:
    items = list(addresses)
    at = turn % len(items) if items else 0
    return items[at:] + items[:at]


def no_leader(metadata: MetadataCache, tp: TopicPartition) -> BrokerError:
    """Why ``tp`` has no leader in ``metadata``: no such topic, no such partition, or none elected."""
    if metadata.partition(tp) is not None:
        return BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {tp} has no leader")
    count = len(metadata.partitions(tp.topic))
    detail = f"partition {tp}: topic {tp.topic!r} has {count} partitions" if count else f"topic {tp.topic!r}"
    return BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail)
