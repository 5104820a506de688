"""Request handlers that check the ACLs first.

A broker without an authorizer uses handlers without these checks. A denied request gets an error. If a request has
entries, such as partitions, the handler gets only the allowed entries, and this module adds an error for each denied
entry to the reply. If a request lists resources, the reply omits the resources that the principal may not see.

Fetch is an exception: the broker may read the partitions of one Fetch request later and repeatedly. So
``AuthorizedFetch`` checks the ACLs before each read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import Any, cast

from msgspec.structs import replace

from sparklog.broker.groups.group_requests import check_offsets
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.dispatch import HandleRequest, Handlers
from sparklog.broker.requests.open_fetch import FetchHost, OpenFetch
from sparklog.broker.requests.slices import Slices, Steps, answer_failure
from sparklog.broker.security.authorizer import Authorizer
from sparklog.broker.security.forwarding_connections import HidingConnection, MergingConnection, end_without_reply
from sparklog.errors import BrokerError
from sparklog.model import is_internal
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    CommitOffsets,
    CommitOffsetsReply,
    DeleteRecords,
    DeleteRecordsReply,
    Fetch,
    FetchedPartition,
    FetchOffsets,
    FetchOffsetsReply,
    FetchPartition,
    ListOffsets,
    ListOffsetsReply,
    Metadata,
    MetadataReply,
    Produce,
    ProduceReply,
    Reply,
    Request,
    TopicMetadata,
)
from sparklog.replica.fetch_session import FetchContext, Key
from sparklog.security.acls import Operation, ResourceType
from sparklog.security.partial_answers import REFUSED, Allows, Split, merged, without
from sparklog.security.request_rules import RULES, Need, RequestRule

_TOPIC = ResourceType.TOPIC
#: The number of names that are checked at once. A check may take 25 us, so more names are checked in slices.
_AT_ONCE = 200
_EMPTY: dict[type, Callable[[int], Reply]] = {
    Produce: lambda cid: ProduceReply(cid, ()),
    ListOffsets: lambda cid: ListOffsetsReply(cid, ()),
    DeleteRecords: lambda cid: DeleteRecordsReply(cid, ()),
    CommitOffsets: lambda cid: CommitOffsetsReply(cid, ()),
    FetchOffsets: lambda cid: FetchOffsetsReply(cid, ()),
}


def authorized_handlers(
    authorizer: Authorizer, handlers: Handlers, *, slices: Slices, cache: MetadataCache
) -> Handlers:
    """Return handlers that check the ACLs and then call the given handlers.

    Raises KeyError for a kind of request that has no rule.
    """
    checks = _Checks(authorizer, slices, cache)
    return {kind: checks.of(kind, RULES[kind], handle) for kind, handle in handlers.items()}


class _Checks:
    """A wrapper of one broker's handlers that checks the ACLs before each request."""

    def __init__(self, authorizer: Authorizer, slices: Slices, cache: MetadataCache) -> None:
        self._authorizer = authorizer
        self._slices = slices
        self._cache = cache

    def of(self, kind: type, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        if kind is Metadata:
            return self._metadata(handle)
        if kind is Produce:
            return self._produce(rule, handle)
        if kind is FetchOffsets:
            return self._fetch_offsets(rule, handle)
        if kind is not Fetch and rule.entries is not None:
            return self._entries(rule, handle)
        return self._hiding(rule, handle) if rule.hides else self._whole(kind, rule, handle)

    def _require(
        self,
        connection: ServerConnection,
        request: Request,
        rule: RequestRule,
        then: Callable[[], None],
    ) -> None:
        """Call ``then`` if the clauses of the rule are satisfied. For a request with many names, check in slices.

        If there are few names, raise the same errors as ``Authorizer.require``.
        """
        if _names(request) <= _AT_ONCE:
            self._authorizer.require(connection, request, rule.clauses(request))
            then()
            return

        def steps() -> Steps:
            for clause in rule.clauses(request):
                if self._slices.over():
                    yield None
                self._authorizer.require(connection, request, (clause,))
            then()

        self._run(connection, request, steps())

    def _run(self, connection: ServerConnection, request: Request, steps: Steps) -> None:
        def failed(error: Exception) -> None:
            if isinstance(request, Produce) and request.acks == 0:
                end_without_reply(connection, request.cid)
            else:
                answer_failure(connection, request, error)

        self._slices.run(connection, steps, failed)

    def _whole(self, kind: type, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        authorizer = self._authorizer

        def authorized(connection: ServerConnection, request: Any, body: memoryview) -> None:
            if authorizer.skips(connection):
                handle(connection, request, body)
            else:
                self._require(connection, request, rule, lambda: handle(connection, request, body))

        def authorized_fetch(connection: ServerConnection, request: Fetch, body: memoryview) -> None:
            if not authorizer.skips(connection):
                authorizer.require(connection, request, rule.clauses(request))
            handle(connection, request, body)

        return authorized_fetch if kind is Fetch else authorized

    def _hiding(self, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        authorizer, slices = self._authorizer, self._slices

        def authorized(connection: ServerConnection, request: Any, body: memoryview) -> None:
            if authorizer.skips(connection):
                handle(connection, request, body)
                return
            hiding = HidingConnection(connection, request, slices, _allows(authorizer, connection))
            self._require(connection, request, rule, lambda: handle(cast(ServerConnection, hiding), request, body))

        return authorized

    def _entries(self, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        authorizer, clauses = self._authorizer, rule.clauses

        def then(connection: ServerConnection, request: Any, body: memoryview, refused: dict[int, str]) -> None:
            if refused:
                self._handle_rest(connection, request, body, handle=handle, refused=refused)
            else:
                handle(connection, request, body)

        def authorized(connection: ServerConnection, request: Any, body: memoryview) -> None:
            if authorizer.skips(connection):
                handle(connection, request, body)
                return
            if isinstance(request, CommitOffsets):
                check_offsets(request)
            authorizer.require(connection, request, clauses(request))
            self._find_refused(connection, request, rule, lambda refused: then(connection, request, body, refused))

        return authorized

    def _produce(self, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        checked = self._entries(rule, handle)
        authorizer = self._authorizer

        def authorized(connection: ServerConnection, request: Produce, body: memoryview) -> None:
            # Most requests have one partition, outside a transaction.
            if len(request.partitions) == 1 and not request.transaction:
                topic = request.partitions[0].topic
                if authorizer.skips(connection) or authorizer.allows(connection, Operation.WRITE, _TOPIC, topic):
                    handle(connection, request, body)
                    return
            try:
                checked(connection, request, body)
            except BrokerError:
                if request.acks != 0:
                    raise
                end_without_reply(connection, request.cid)

        return authorized

    def _fetch_offsets(self, rule: RequestRule, handle: HandleRequest) -> HandleRequest:
        authorizer, slices = self._authorizer, self._slices

        def hiding(connection: ServerConnection, request: FetchOffsets, body: memoryview) -> None:
            if not authorizer.skips(connection):
                allows = _allows(authorizer, connection)
                connection = cast(ServerConnection, HidingConnection(connection, request, slices, allows))
            handle(connection, request, body)

        of_all, of_named = self._hiding(rule, handle), self._entries(rule, hiding)

        def authorized(connection: ServerConnection, request: FetchOffsets, body: memoryview) -> None:
            (of_all if request.partitions is None else of_named)(connection, request, body)

        return authorized

    def _find_refused(
        self,
        connection: ServerConnection,
        request: Request,
        rule: RequestRule,
        then: Callable[[dict[int, str]], None],
    ) -> None:
        """Call ``then`` with the error text of each refused entry, by its index. Check many entries in slices."""

        def steps(over: Callable[[], bool]) -> Steps:
            then((yield from self._refused(connection, request, rule, over)))

        if _names(request) > _AT_ONCE:
            self._run(connection, request, steps(self._slices.over))
        else:
            for _ in steps(lambda: False):
                raise AssertionError("few entries are checked at once")

    def _refused(
        self, connection: ServerConnection, request: Request, rule: RequestRule, over: Callable[[], bool]
    ) -> Generator[None, None, dict[int, str]]:
        """Return the error text of each refused entry, by its index. Yield whenever ``over`` returns true."""
        assert rule.entries is not None
        operation, topics = rule.entries
        refused: dict[int, str] = {}
        details: dict[str, str] = {}
        for index, topic in enumerate(topics(request)):
            if over():
                yield
            if not self._authorizer.allows(connection, operation, _TOPIC, topic):
                if topic not in details:
                    details[topic] = self._authorizer.deny(connection, request, Need(operation, _TOPIC, topic))
                refused[index] = details[topic]
        return refused

    def _handle_rest(
        self,
        connection: ServerConnection,
        request: Split,
        body: memoryview,
        *,
        handle: HandleRequest,
        refused: dict[int, str],
    ) -> None:
        """Handle the entries that are not refused, and add the refusals to the reply."""
        merging = MergingConnection(connection, lambda reply: merged(request, reply, refused))
        entries = request.offsets if isinstance(request, CommitOffsets) else request.partitions or ()
        if isinstance(request, Produce) and request.acks == 0:
            merging.closes = True
        if len(refused) == len(entries):
            if merging.closes:
                merging.done(request.cid)
            else:
                merging.reply(_EMPTY[type(request)](request.cid))
            return
        rest, rest_body = without(request, body, refused)
        handle(cast(ServerConnection, merging), rest, rest_body)

    def _metadata(self, handle: HandleRequest) -> HandleRequest:
        authorizer, rule = self._authorizer, RULES[Metadata]

        def authorized(connection: ServerConnection, request: Metadata, body: memoryview) -> None:
            if authorizer.skips(connection):
                handle(connection, request, body)
            elif request.topics is None:
                work = self._all_topics(connection, request, body, handle)
                self._slices.run(connection, work, lambda error: answer_failure(connection, request, error))
            else:
                self._find_refused(
                    connection,
                    request,
                    rule,
                    lambda refused: self._named_topics(connection, request, body, handle, refused=refused),
                )

        return authorized

    def _named_topics(
        self,
        connection: ServerConnection,
        request: Metadata,
        body: memoryview,
        handle: HandleRequest,
        *,
        refused: dict[int, str],
    ) -> None:
        assert request.topics is not None
        if not refused:
            handle(connection, request, body)
            return
        named = {request.topics[index]: detail for index, detail in refused.items()}

        def with_refusals(reply: Reply) -> Reply:
            if not isinstance(reply, MetadataReply) or reply.next is not None:
                return reply  # the last part of the reply has the refusals
            refusals = (TopicMetadata(REFUSED, name, detail=detail) for name, detail in named.items())
            return replace(reply, topics=(*reply.topics, *refusals))

        rest = replace(request, topics=tuple(name for name in request.topics if name not in named))
        handle(cast(ServerConnection, MergingConnection(connection, with_refusals)), rest, body)

    def _all_topics(
        self, connection: ServerConnection, request: Metadata, body: memoryview, handle: HandleRequest
    ) -> Steps:
        """Replace a request for all topics by one that names the topics that the principal may describe.

        So no part of the reply names another topic.
        """
        allows, names = _allows(self._authorizer, connection), []
        for name in tuple(self._cache.topics()):
            if self._slices.over():
                yield None
            if (request.internal or not is_internal(name)) and allows(Operation.DESCRIBE, _TOPIC, name):
                names.append(name)
        names.sort()
        start = request.start
        if start is not None and start[1] >= 0:
            at = bisect_left(names, start[0])
            names = names[at:]  # the topic of ``start`` may have been deleted meanwhile
            start = start if names and names[0] == start[0] else None
        handle(connection, replace(request, topics=tuple(names), start=start), body)


def scoped_handlers(authorizer: Authorizer, handlers: Handlers, *, slices: Slices, cache: MetadataCache) -> Handlers:
    """Return handlers for a broker without ACLs.

    If the client's delegation token has a scope, the handlers check the scope first.

    Raises KeyError for a kind of request that has no rule.
    """
    authorized = authorized_handlers(authorizer, handlers, slices=slices, cache=cache)

    def of(plain: HandleRequest, authorized: HandleRequest) -> HandleRequest:
        def handle(connection: ServerConnection, request: Any, body: memoryview) -> None:
            if authorizer.has_scope(connection):
                authorized(connection, request, body)
            else:
                plain(connection, request, body)

        return handle

    return {kind: of(handle, authorized[kind]) for kind, handle in handlers.items()}


def scoped_fetch(authorizer: Authorizer) -> Callable[..., OpenFetch]:
    """Return the function by which a broker without ACLs creates an ``OpenFetch`` for a Fetch request.

    If the client has logged in with a delegation token that has a scope, the fetch checks the scope before each read.
    """

    def open_fetch(
        host: FetchHost, connection: ServerConnection, number: int, *, request: Fetch, context: FetchContext
    ) -> OpenFetch:
        if authorizer.has_scope(connection):
            return AuthorizedFetch(authorizer, host, connection, number, request=request, context=context)
        return OpenFetch(host, connection, number, request=request, context=context)

    return open_fetch


def _names(request: Request) -> int:
    """Return the number of topics, partitions and offsets that a request names."""
    named = (getattr(request, field, None) for field in ("topics", "partitions", "offsets"))
    return sum(len(entries) for entries in named if isinstance(entries, tuple))


def _allows(authorizer: Authorizer, connection: ServerConnection) -> Allows:
    return lambda operation, resource_type, name: authorizer.allows(connection, operation, resource_type, name)


class AuthorizedFetch(OpenFetch):
    """A fetch that checks before each read of a partition whether the principal may read the topic.

    A refused partition gets the same error whether or not it exists.
    """

    __slots__ = ("_authorizer",)

    def __init__(self, authorizer: Authorizer, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._authorizer = authorizer

    def read_one(self, key: Key, wanted: FetchPartition, max_bytes: int) -> int:
        authorizer, connection = self._authorizer, self.connection
        if (
            self.of_follower
            or authorizer.skips(connection)
            or authorizer.allows(connection, Operation.READ, _TOPIC, wanted.topic)
        ):
            return super().read_one(key, wanted, max_bytes)
        detail = authorizer.deny(connection, self.request, Need(Operation.READ, _TOPIC, wanted.topic))
        result = FetchedPartition(wanted.topic, wanted.partition, REFUSED, -1, -1, -1, -1, detail=detail)
        return self.refuse_one(key, result)
