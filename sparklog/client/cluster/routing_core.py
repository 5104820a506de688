"""The decisions of a client about its requests: which broker gets a request, and how long to wait for it.

This module is pure. The methods that return ``RoutingSteps`` are generators. A generator yields effects: commands that
its driver carries out. The driver sends the result of each effect back into the generator, or throws the effect's error
into the generator. The generator's return value is the result of the method. ``BlockingCluster`` and ``LoopCluster``
are the drivers. The drivers own connections and clocks. ``retry`` decides whether a failed call is tried again.

If several brokers or addresses are possible, a counter selects one. The client increases the counter after a failure,
and after a metadata response that is outdated or lacks what the client needs. So N attempts reach each of N brokers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.cluster.bootstrap import Address, parse_bootstrap
from sparklog.client.cluster.metadata import ClientMetadata, Leader, MetadataPieces, topic_error
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint, TopicPartition
from sparklog.protocol.messages import Metadata, MetadataReply, Reply, Request, TopicMetadata

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

#: How long to wait for the response to a request that any broker could serve. After this time, another broker gets the
#: request. With each request without a response the time doubles, up to the request timeout.
PATIENCE_S = 1.0
#: If a broker with open requests has sent nothing for this time, it may hang. Then metadata requests prefer other
#: brokers, because a wait for this broker could take ``PATIENCE_S``.
SUSPICIOUS_S = 0.5
#: After this number of failures in a row, all connected brokers may be out of date.
ASK_OTHERS_AFTER = 3
#: The backoff between metadata requests that do not help. The maximum is short, because the backoff delays a client
#: that waits for a new leader.
METADATA_BACKOFF = Backoff(max_ms=200.0)


class NoResponse(BrokerError):
    """The error of a request that got no response in time. The code is NETWORK_EXCEPTION."""

    def __init__(self, address: str, waited_s: float) -> None:
        super().__init__(ErrorCode.NETWORK_EXCEPTION, f"{address}: no response within {waited_s:g} s")

    def __reduce__(self) -> tuple[type[BrokerError], tuple[ErrorCode, str]]:
        return BrokerError, (self.code, self.detail)


@dataclass(frozen=True, slots=True)
class ListOpen:
    """A command to list the brokers with an open connection.

    The result maps the id of each of these brokers to a time in seconds: how long the broker has sent nothing although
    it has a request without a response.
    """


@dataclass(frozen=True, slots=True)
class Connect:
    """A command to open a connection and store it.

    The result is the id of the broker at the address, or a BrokerError.
    """

    address: Address


@dataclass(frozen=True, slots=True)
class Prepare:
    """A command to connect to a broker that is in the metadata, for later requests.

    The command has no result. The driver may continue before the connection is open.
    """

    broker_id: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A command to send a request to a broker. The result is the reply, or a BrokerError.

    Without a reply within ``timeout_s``, the error is NoResponse.
    """

    broker_id: int
    request: Request
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A command to close the connection to a broker, so that all its open requests fail. The command has no result."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """A command to wait until a time, which may be in the past. The result is the current time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """A command to report that there is new metadata, or why there is none (``problem``). The command has no result."""

    problem: str


Effect = ListOpen | Connect | Prepare | Ask | Disconnect
RoutingSteps = Generator[Effect, Any, T]
#: Steps without a result, which a client performs in the background.
BackgroundSteps = Generator[Effect | WaitUntil | Report, Any, T]


class RoutingCore:
    """The part of a cluster client that chooses brokers and caches metadata. This part performs no I/O; see the module.

    Not thread-safe: only its driver uses it.
    """

    def __init__(self, bootstrap: str | Iterable[str], *, request_timeout_s: float, roll: Callable[[], float]) -> None:
        """Create the state without metadata. ``roll`` returns random numbers in [0, 1).

        Raises:
            ConfigError: ``bootstrap`` has no address.
        """
        self.metadata = ClientMetadata()
        self.bootstrap = parse_bootstrap(bootstrap)
        #: The topics that ``refresh_wanted`` requests.
        self.wanted: set[str] = set()
        #: The topics with an error in the last responses to ``refresh_wanted``, with their errors.
        self.topic_errors: dict[str, TopicMetadata] = {}
        self._request_timeout_s = request_timeout_s
        self.roll = roll
        #: The counter that selects one of several brokers. Clients begin with different numbers.
        self._turn = int(roll() * (1 << 16))
        #: True if the next request should go to the next broker.
        self._turn_is_due = False
        #: Brokers that have not responded to the last request, or whose last metadata is stale. Requests prefer other
        #: brokers.
        self._doubted: set[int] = set()
        #: The number of requests in a row without a response in time.
        self._silences = 0
        #: The number of failures in a row that new metadata could have prevented.
        self._useless = 0
        self._refreshed_at_s = -math.inf

    # --- facts ---

    def on_connected(self, broker_id: int) -> None:
        """Stop avoiding a broker, because a new connection to it is open."""
        self._doubted.discard(broker_id)

    def on_useless(self) -> None:
        """Count a failure that newer metadata could have prevented."""
        self._useless += 1
        self._turn_is_due = True

    def on_progress(self) -> None:
        """Record that a request has succeeded with the current metadata."""
        self._useless = 0

    # --- one request ---

    def any_broker(self) -> RoutingSteps[int]:
        """Return the id of a connected broker, for a request that every broker can serve.

        If the connected brokers may be out of date, also connect to another broker. If no broker is connected, try the
        addresses in the metadata, and then the bootstrap addresses.

        Raises:
            BrokerError: NETWORK_EXCEPTION with all addresses that were tried, or another error of one of them.
        """
        self._turn += self._turn_is_due
        self._turn_is_due = False
        silent_s: Mapping[int, float] = yield ListOpen()
        is_any_trusted = not silent_s.keys() <= self._doubted
        if self._useless >= ASK_OTHERS_AFTER or (silent_s and not is_any_trusted):
            others = sorted(self.metadata.brokers.keys() - silent_s.keys())
            if others:
                yield Prepare(others[self._turn % len(others)])
                silent_s = yield ListOpen()
        # If the response of the connected brokers had no brokers, try other addresses.
        if silent_s and (self.metadata.brokers or (is_any_trusted and not self.metadata.version)):
            return self._choose(silent_s)
        brokers = self._rotated(self.metadata.brokers.values())
        brokers.sort(key=lambda broker: broker.broker_id in self._doubted)
        known = [Address(broker.host, broker.port) for broker in brokers]
        failures = []
        for address in dict.fromkeys([*known, *self._rotated(self.bootstrap)]):
            try:
                connected: int = yield Connect(address)
            except BrokerError as error:  # noqa: PERF203 - the next address is tried
                if error.code != ErrorCode.NETWORK_EXCEPTION:
                    raise
                failures.append(error.detail)
                self._turn += 1
            else:
                return connected
        raise BrokerError(ErrorCode.NETWORK_EXCEPTION, f"no broker can be reached: {'; '.join(failures)}")

    def _choose(self, silent_s: Mapping[int, float]) -> int:
        """Return a connected broker. Prefer brokers that are not doubted, and among these one that does not hang."""
        fit = [broker_id for broker_id in silent_s if broker_id not in self._doubted] or list(silent_s)
        fit = [broker_id for broker_id in fit if silent_s[broker_id] < SUSPICIOUS_S] or fit
        return fit[self._turn % len(fit)]

    def _rotated(self, items: Iterable[T]) -> list[T]:
        listed = list(items)
        first = self._turn % len(listed) if listed else 0
        return listed[first:] + listed[:first]

    def reach(self, broker: BrokerEndpoint) -> RoutingSteps[None]:
        """Connect to a broker unless it is connected.

        Raises:
            BrokerError: NETWORK_EXCEPTION; BROKER_NOT_AVAILABLE if another broker replies at this address.
        """
        if broker.broker_id not in (yield ListOpen()):
            address = Address(broker.host, broker.port)
            check_broker(address, found=(yield Connect(address)), expected=broker.broker_id)

    def ask(
        self, broker_id: int, request: Request, expected: type[R], *, timeout_s: float = math.inf
    ) -> RoutingSteps[R]:
        """Send a request once, to this broker. Raises BrokerError."""
        reply = yield Ask(broker_id, request, timeout_s)
        if isinstance(reply, expected):
            return reply
        yield Disconnect(broker_id)  # The broker's later replies may also be of a wrong type.
        raise BrokerError(
            ErrorCode.INVALID_REQUEST,
            f"broker {broker_id} responded to {type(request).__name__} with {type(reply).__name__}",
        )

    def ask_any(
        self, request: Request, expected: type[R], *, is_long: bool = False, longest_s: float = math.inf
    ) -> RoutingSteps[R]:
        """Send a request once, to any broker. Raises BrokerError.

        ``is_long`` means that the request takes long at every broker, because the controller carries it out. Then wait
        for the whole request timeout. Otherwise ``longest_s`` limits the wait.
        """
        broker_id = yield from self.any_broker()
        if is_long:
            return (yield from self.ask(broker_id, request, expected, timeout_s=self._request_timeout_s))
        return (yield from self._ask_replaceable(broker_id, request, expected, longest_s=longest_s))

    def _ask_replaceable(
        self, broker_id: int, request: Request, expected: type[R], *, longest_s: float = math.inf
    ) -> RoutingSteps[R]:
        """Send a request that another broker could serve too. So do not wait long.

        A broker that does not respond in time is doubted. Its connection is closed only after the whole request
        timeout, because the broker may be busy with other requests.
        """
        limit_s = next_timeout_s(self._silences, min(self._request_timeout_s, longest_s))
        try:
            reply = yield from self.ask(broker_id, request, expected, timeout_s=limit_s)
        except NoResponse:
            self._silences += 1
            self._doubt(broker_id)
            if limit_s >= self._request_timeout_s:
                yield Disconnect(broker_id)
            raise
        self._silences = 0
        self._doubted.discard(broker_id)
        return reply

    def _doubt(self, broker_id: int) -> None:
        self._doubted.add(broker_id)
        self._turn_is_due = True

    # --- metadata ---

    def ask_metadata(self, request: Metadata, broker_id: int | None = None) -> RoutingSteps[MetadataReply]:
        """Send a metadata request to a broker, and return the whole response. None means any broker.

        Do not cache the response. Raises BrokerError.
        """
        if broker_id is None:
            broker_id = yield from self.any_broker()
        pieces = MetadataPieces(request)
        while pieces.request is not None:
            pieces.add((yield from self._ask_replaceable(broker_id, pieces.request, MetadataReply)))
        if self.metadata.is_stale(pieces.reply):
            self._doubt(broker_id)
        return pieces.reply

    def refresh(self, topics: tuple[str, ...] | None) -> RoutingSteps[MetadataReply]:
        """Request metadata once, from any broker, and cache the response.

        If ``topics`` is None, request all topics. If it is empty, request only the brokers.
        """
        reply = yield from self.ask_metadata(Metadata(0, topics))
        self.metadata.update(reply)
        return reply

    def fetch_topic(self, name: str) -> RoutingSteps[TopicMetadata]:
        """Refresh the metadata once, and return the topic ``name``.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION.
        """
        reply = yield from self.refresh((name,))
        error = next((self._error(topic, reply) for topic in reply.topics if topic.name == name), None)
        topic_now = self.metadata.topic(name)
        if error is None and topic_now is not None:
            return topic_now
        self._turn_is_due = True
        raise error or BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r}")

    def leader(self, tp: TopicPartition, *, refresh: bool) -> RoutingSteps[Leader]:
        """Return the leader of a partition. If it is unknown or ``refresh`` is set, refresh the metadata once.

        Raises:
            BrokerError: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NETWORK_EXCEPTION: all retriable.
        """
        leader = None if refresh else self.metadata.leader(tp)
        if leader is None:
            yield from self.fetch_topic(tp.topic)
            leader = self.metadata.leader(tp)
        if leader is None:
            raise no_leader(self.metadata, tp)
        return leader

    def refresh_wanted(self) -> BackgroundSteps[None]:
        """Request the metadata of the topics in ``wanted`` until ``wanted`` is empty.

        Each request waits until ``refresh_pause_s`` after the last request. This delay grows with each request.
        """
        while self.wanted:
            self._refreshed_at_s = yield WaitUntil(self._refreshed_at_s + self.refresh_pause_s())
            topics = tuple(sorted(self.wanted))
            try:
                problem = yield from self.refresh_noting_errors(topics)
                is_final = True
            except BrokerError as error:
                problem, is_final = str(error), not error.retriable
                if is_final:
                    failed = [TopicMetadata(int(error.code), name, detail=error.detail) for name in topics]
                    self.topic_errors.update((topic.name, topic) for topic in failed)
                    self.metadata.version += 1
            if is_final:
                self.wanted.difference_update(topics)
            self.on_useless()  # ``on_progress`` resets the count if a request then succeeds with the new metadata.
            yield Report(problem)

    def refresh_pause_s(self) -> float:
        """Return the minimum delay between two metadata requests. The delay grows until ``on_progress`` is called."""
        return METADATA_BACKOFF.delay_ms(self._useless, self.roll()) / 1000

    def refresh_noting_errors(self, topics: tuple[str, ...]) -> RoutingSteps[str]:
        """Request the metadata of topics, merge them, and store the topics' errors in ``topic_errors``.

        If the broker's metadata is stale, an error may be wrong. Then return the error as text and do not store it.
        """
        reply = yield from self.refresh(topics)
        problem = ""
        for topic in reply.topics:
            error = self._error(topic, reply)
            if error is None:
                self.topic_errors.pop(topic.name, None)
            elif error.code == topic.code:
                self.topic_errors[topic.name] = topic
            else:
                problem = str(error)
        return problem

    def _error(self, topic: TopicMetadata, reply: MetadataReply) -> BrokerError | None:
        """Return the error of a topic in a response, or None.

        If the response is stale, an unknown topic may exist. Then return a retriable error.
        """
        error = topic_error(topic)
        if error is None or error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or not self.metadata.is_stale(reply):
            return error
        detail = f"the broker lacks the current controller's update: {error.detail}"
        return BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, detail)


def next_timeout_s(silences: int, most_s: float) -> float:
    """Return how long to wait for a response, at most ``most_s``.

    ``silences`` is the number of earlier requests without a response.
    """
    return min(most_s, PATIENCE_S * 2.0 ** min(silences, 10))


def check_broker(address: object, *, found: int, expected: int) -> None:
    """Raise BrokerError BROKER_NOT_AVAILABLE if a broker other than the expected one has replied at an address."""
    if found != expected:
        raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, f"{address} is broker {found}; expected {expected}")


def no_leader(metadata: ClientMetadata, tp: TopicPartition) -> BrokerError:
    """Return the error for ``tp``, which has no leader: no such topic, no such partition, or no elected leader."""
    if metadata.partition(tp) is not None:
        return BrokerError(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {tp} has no leader")
    count = len(metadata.partitions(tp.topic))
    detail = f"partition {tp}: topic {tp.topic!r} has {count} partitions" if count else f"topic {tp.topic!r}"
    return BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, detail)
