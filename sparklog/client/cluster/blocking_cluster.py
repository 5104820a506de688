"""Blocking connections to the brokers of one cluster, with metadata and retries, for Admin, Consumer and readers.

It has no thread and no loop: everything happens in the caller's thread, and connections are opened when they are
needed. It finds the broker for a request, sends the request, and retries as long as the error is retriable. It does not
know what a request means.
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

#: How long each broker has to name the leader, when a leader is doubted.
_DOUBT_TIMEOUT_S = 2.0
#: How long "unknown topic" may mean that the broker does not know a new topic yet.
UNKNOWN_TOPIC_GRACE_S = 1.5
#: The number of failures in a row after which the brokers asked so far may be out of date.
_ASK_OTHERS_AFTER = 3


class Deadline:
    """A time on the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._at - time.monotonic())


class BlockingCluster:
    """The client of one cluster, with connections by broker id. Owner: one thread. ``close`` ends the connections."""

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
        """Create the client without connecting.

        ``timeout_s`` bounds each call including retries. ``request_timeout_s`` bounds one wait for a broker, so that a
        broker that hangs does not use up the call's time. ``first_contact_s`` bounds calls until a broker has responded
        once: it is for users who may have given a wrong address.

        Raises:
            ConfigError: ``bootstrap`` has no address.
        """
        self.metadata = MetadataCache()
        self.timeout_s = timeout_s
        self.request_timeout_s = min(request_timeout_s, timeout_s)
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._first_contact_s = first_contact_s
        if first_contact_s is not None:
            # Addresses are tried in sequence, and one that drops packets must not use up the time.
            connect_timeout_s = min(connect_timeout_s, max(first_contact_s / len(self._bootstrap), 0.3))
        self._connect_timeout_s = connect_timeout_s
        self._backoff = backoff
        self._connections: dict[int, BlockingConnection] = {}
        self._closed = False
        self._random = random.Random()
        #: Selects the first of several brokers. It differs between clients, and changes after each failure.
        self._turn = self._random.randrange(1 << 16)
        forks.watch(self)

    def close(self) -> None:
        """Close the client permanently. A later request, perhaps from a late thread, raises ConfigError."""
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
        """Ask any reachable broker, once."""
        return self._ask(self.any_connection(), request, expected)

    def ask_broker(self, broker_id: int, request: Request, expected: type[R]) -> R:
        """Ask one broker, once."""
        return self._ask(self.connection(broker_id), request, expected)

    def ask_metadata(self, request: Metadata, broker_id: int | None = None) -> MetadataReply:
        """Return the complete metadata of one broker, or of any reachable one, without merging it."""
        connection = self.any_connection() if broker_id is None else self.connection(broker_id)
        return self._ask_metadata(connection, request)

    def broker_timeout_ms(self, timeout_s: float | None = None) -> int:
        """Return the time that a broker may use of a call's timeout, so that its response arrives in time.

        ``timeout_s`` None means the client's default timeout.
        """
        return max(1, int(min(self.timeout_s if timeout_s is None else timeout_s, self.request_timeout_s) * 800))

    def retrying(self, what: str, attempt: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call ``attempt`` until it succeeds, fails permanently, or the time is up.

        ``attempt`` itself refreshes the metadata, because it knows the topics.

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
                    self._try_another()
                if not self._contacted and contact.left_s() <= 0:
                    raise ClientTimeout(f"{error.detail} (tried for {contact.timeout_s:g} s)") from error
                self._pause(what, error, deadline=deadline, count=count)
        raise AssertionError("unreachable")

    def refresh(self, topics: Iterable[str] | None = ()) -> MetadataReply:
        """Request metadata from any broker once and merge it. None requests all topics, () only the brokers."""
        wanted = None if topics is None else tuple(topics)
        connection = self.any_connection()
        reply = self._ask_metadata(connection, Metadata(0, wanted))
        self.metadata.update(reply)
        if self.metadata.is_stale(reply):
            connection.close()  # another broker may know more
            self._turn += 1
        return reply

    def topic(self, name: str, *, timeout_s: float | None = None, refresh: bool = False) -> TopicMetadata:
        """Return the topic from the cache. Request it if ``refresh`` is set or it is unknown.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
            ClientTimeout: no broker responded.
        """
        cached = None if refresh else self.metadata.topic(name)
        return cached or self.retrying(f"metadata of {name!r}", lambda: self._fetch_topic(name), timeout_s=timeout_s)

    def leader(self, tp: TopicPartition, *, refresh: bool = False) -> Leader:
        """Return the leader of a partition from the cache, or after one refresh if it is requested or needed.

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
        """Check that ``leader`` still leads, before its log end offset is trusted.

        A leader that is cut off from the cluster may be deposed without knowing it, and a client that knows no later
        epoch cannot tell. So all other brokers are asked, among them a possible successor.

        Raises:
            BrokerError: retriable. FENCED_LEADER_EPOCH if ``leader`` no longer leads; BROKER_NOT_AVAILABLE unless more
                than half of the brokers, including ``leader``, confirm it.
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
                    f"{tp}: broker {leader.broker_id} no longer leads in epoch {leader.epoch},"
                    f" according to broker {broker_id}",
                )
            confirmed += not self.metadata.is_stale(reply)
        if confirmed * 2 <= len(others) + 1:
            raise BrokerError(
                ErrorCode.BROKER_NOT_AVAILABLE,
                f"{tp}: only {confirmed} of {len(others) + 1} brokers confirm that broker {leader.broker_id} leads",
            )

    # --- connections ---

    def connection(self, broker_id: int) -> BlockingConnection:
        """Return the open connection to a broker, or a new one.

        Raises:
            BrokerError: BROKER_NOT_AVAILABLE if its address is unknown, NETWORK_EXCEPTION.
        """
        open_one = self._connections.get(broker_id)
        if open_one is not None and not open_one.closed:
            return open_one
        connection = self._connections[broker_id] = self.open_connection(broker_id)
        return connection

    def open_connection(self, broker_id: int, *, at_most_s: float | None = None) -> BlockingConnection:
        """Return a new connection that the caller owns, for requests that stay in flight beside others.

        ``at_most_s`` bounds each wait for the broker, in addition to the client's own timeouts.

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
                f"{connection.address} is broker {connection.hello.broker_id}; expected {broker_id}",
            )
        return connection

    def any_connection(self) -> BlockingConnection:
        """Return an open connection, else one to a known broker, else one to a bootstrap address.

        Raises:
            BrokerError: NETWORK_EXCEPTION with all addresses that were tried, or a worse error of one of them.
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

    def _try_another(self) -> None:
        """Connect to another broker if there is one, because the ones asked so far may be out of date."""
        self._turn += 1
        connected = {broker_id for broker_id, open_one in self._connections.items() if not open_one.closed}
        untried = sorted(self.metadata.brokers.keys() - connected)
        if untried:
            with contextlib.suppress(BrokerError):
                self.connection(untried[self._turn % len(untried)])

    def pause_ms(self, count: int) -> float:
        """Return the delay after failure number ``count`` (from 0), with jitter."""
        return self._backoff.delay_ms(count, self._random.random())

    @property
    def _contacted(self) -> bool:
        """Return whether a broker has ever responded."""
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
                f"{connection.address} responded to {type(request).__name__} with {type(reply).__name__}",
            )
        return reply

    def _ask_metadata(self, connection: BlockingConnection, request: Metadata) -> MetadataReply:
        pieces = MetadataPieces(request)
        while pieces.request is not None:
            pieces.add(self._ask(connection, pieces.request, MetadataReply))
        return pieces.reply

    def _fetch_topic(self, name: str) -> TopicMetadata:
        reply = self.refresh((name,))
        for topic in reply.topics:
            if topic.name == name:
                error = topic_error(topic)
                if error is not None:
                    if self.metadata.is_stale(reply):
                        raise _uncertain_error(error)
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


def _uncertain_error(error: BrokerError) -> BrokerError:
    """Return the error to raise for an error from a broker that lacks the current controller's update."""
    if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return error
    return BrokerError(
        ErrorCode.BROKER_NOT_AVAILABLE, f"the broker lacks the current controller's update: {error.detail}"
    )


def _rotated(addresses: Iterable[Address], turn: int) -> list[Address]:
    items = list(addresses)
    at = turn % len(items) if items else 0
    return items[at:] + items[:at]


def no_leader(metadata: MetadataCache, tp: TopicPartition) -> BrokerError:
    """Return the reason why ``tp`` has no leader: no such topic, no such partition, or none elected."""
    if metadata.partition(tp) is not None:
        return BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {tp} has no leader")
    count = len(metadata.partitions(tp.topic))
    detail = f"partition {tp}: topic {tp.topic!r} has {count} partitions" if count else f"topic {tp.topic!r}"
    return BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail)
