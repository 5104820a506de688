"""The sender and the permissions that each kind of request needs.

This module is pure. A request that also exists in Kafka needs the same permissions as in Kafka. ``RULES`` has one line
for each kind of request, and a test fails if a kind is missing.

A rule names the *sender*. A client request may arrive on any connection. A request of a broker or of the controller
decides which records are acknowledged, which replica leads and what is deleted. So a broker accepts such a request only
on a connection whose peer has proved its identity (``protocol.proof``). Both clients and brokers send Fetch and
CommitOffsets; ``sender_of`` distinguishes the two by the request's content.

In addition, a rule has up to three parts:

- ``clauses``: conditions for the whole request. If one is not satisfied, the broker refuses the request.
- ``entries``: an operation, and the topic of each entry of the request. The broker refuses the entries on whose topic
  the operation is not allowed, whether or not the topic exists. It handles the other entries.
- ``hides``: the broker removes from its reply what the principal may not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sparklog.errors import ErrorCode
from sparklog.model import TRANSACTIONAL_ID_PREFIX
from sparklog.protocol.messages import (
    CONSUMER,
    AbortHanging,
    AbortTransaction,
    AddColumns,
    AddToTransaction,
    AlterClientQuotas,
    AlterReassignments,
    AlterTopic,
    AlterUserScramCredentials,
    BeginTransaction,
    CommitOffsets,
    ControlUpdate,
    CreateAcls,
    CreateDelegationToken,
    CreatePartitions,
    CreateTopic,
    DeleteAcls,
    DeleteGroup,
    DeleteRecords,
    DeleteTopic,
    DescribeAcls,
    DescribeBroker,
    DescribeClientQuotas,
    DescribeDelegationTokens,
    DescribeGroup,
    DescribeUserScramCredentials,
    ElectLeaders,
    EndTransaction,
    ExpireDelegationToken,
    Fetch,
    FetchOffsets,
    FindCoordinator,
    FindHanging,
    Heartbeat,
    Hello,
    HoldOffsets,
    InitProducerId,
    ListGroups,
    ListOffsets,
    ListParticipants,
    ListReassignments,
    ListSetAside,
    ListTransactions,
    Metadata,
    Produce,
    Prove,
    RemoveSetAside,
    RenewDelegationToken,
    Request,
    RequestLocalReads,
    RequestUnixSocket,
    RestartBroker,
    RestoreRecords,
    RestoreSetAside,
    SaslAuthenticate,
    SettleVersion,
    TouchTransaction,
    VerifyTransaction,
    WriteMarkers,
)
from sparklog.protocol.senders import SenderKind
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType

#: The error of a refused operation, by the type of its resource.
REFUSALS: dict[ResourceType, ErrorCode] = {
    ResourceType.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ResourceType.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ResourceType.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ResourceType.DELEGATION_TOKEN: ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    ResourceType.USER: ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
}


class Need(NamedTuple):
    """An operation that a principal must be allowed to do on a resource.

    If ``name`` is None, the operation must be allowed on at least one resource of the type.
    """

    operation: Operation
    resource_type: ResourceType
    name: str | None

    def __str__(self) -> str:
        name = "any" if self.name is None else repr(self.name)
        return f"{self.operation} on {self.resource_type} {name}"


#: A condition that is satisfied if one of these needs is allowed. Otherwise the last need decides the error.
Clause = tuple[Need, ...]
Clauses = Iterable[Clause]


class RequestRule(NamedTuple):
    """The permissions that one kind of request needs."""

    #: The rule in words, for the documentation.
    text: str
    clauses: Callable[[Any], Clauses]
    #: The operation on the topic of each entry, and the topics, one for each entry.
    entries: tuple[Operation, Callable[[Any], Iterable[str]]] | None = None
    #: Whether the broker removes parts of the reply.
    hides: bool = False
    #: The kind of process that may send the request. Brokers and controllers may also send all requests of clients.
    sender: SenderKind = SenderKind.CLIENT


_TOPIC, _GROUP, _CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
_TRANSACTION = ResourceType.TRANSACTIONAL_ID


def on_cluster(operation: Operation) -> Need:
    """Return the ``Need`` for this operation on the cluster."""
    return Need(operation, _CLUSTER, CLUSTER_NAME)


def transactional_id(key: str) -> str:
    """Return the name that ACLs use for the transactions of this key.

    The key of a producer is a prefix and the transactional id, and its name is the transactional id. The key of a Spark
    sink is also its name.
    """
    return key.removeprefix(TRANSACTIONAL_ID_PREFIX)


CLUSTER_ACTION: Clause = (on_cluster(Operation.CLUSTER_ACTION),)
ALTER_CLUSTER: Clause = (on_cluster(Operation.ALTER),)
DESCRIBE_CLUSTER: Clause = (on_cluster(Operation.DESCRIBE),)
_NONE: Clauses = ()


def everyone(text: str) -> RequestRule:
    """Return the rule of a request that needs no ACL. ``text`` describes the rule."""
    return RequestRule(text, lambda request: _NONE)


def of_cluster(operation: Operation) -> RequestRule:
    """Return the rule of a request that needs permission for this operation on the cluster."""
    clauses: Clauses = ((on_cluster(operation),),)
    return RequestRule(f"{operation} on the cluster", lambda request: clauses)


def of_sender(sender: SenderKind) -> RequestRule:
    """Return the rule of a request that only a broker, or only the controller, may send."""
    return of_cluster(Operation.CLUSTER_ACTION)._replace(sender=sender)


def _of_topic(operation: Operation, name: Callable[[Any], str]) -> RequestRule:
    return RequestRule(f"{operation} on the topic", lambda request: ((Need(operation, _TOPIC, name(request)),),))


def _of_group(operation: Operation) -> RequestRule:
    return RequestRule(f"{operation} on the group", lambda request: ((Need(operation, _GROUP, request.group),),))


def _of_transaction(operation: Operation) -> RequestRule:
    return RequestRule(
        f"{operation} on the transactional id",
        lambda request: ((Need(operation, _TRANSACTION, transactional_id(request.key)),),),
    )


def _of_topics(operation: Operation, names: Iterable[str]) -> Iterable[Clause]:
    return ((Need(operation, _TOPIC, name),) for name in dict.fromkeys(names))


def _produce(request: Produce) -> Clauses:
    return (
        ((Need(Operation.WRITE, _TRANSACTION, transactional_id(request.transaction)),),)
        if request.transaction
        else _NONE
    )


def _fetch(request: Fetch) -> Clauses:
    return _NONE if request.replica_id == CONSUMER else (CLUSTER_ACTION,)


def _fetched_topics(request: Fetch) -> Iterable[str]:
    return (wanted.topic for wanted in request.partitions) if request.replica_id == CONSUMER else ()


def _init_producer_id(request: InitProducerId) -> Clauses:
    if request.transactional_id is not None:
        return ((Need(Operation.WRITE, _TRANSACTION, request.transactional_id),),)
    return ((Need(Operation.WRITE, _TOPIC, None), on_cluster(Operation.IDEMPOTENT_WRITE)),)


def _find_coordinator(request: FindCoordinator) -> Clauses:
    if request.kind == "group":
        return ((Need(Operation.DESCRIBE, _GROUP, request.key),),)
    return ((Need(Operation.DESCRIBE, _TRANSACTION, transactional_id(request.key)),),)


def _add_to_transaction(request: AddToTransaction) -> Clauses:
    yield (Need(Operation.WRITE, _TRANSACTION, transactional_id(request.key)),)
    if request.group or request.offsets:
        yield (Need(Operation.READ, _GROUP, request.group),)
    yield from _of_topics(Operation.WRITE, (topic for topic, _ in request.partitions))
    yield from _of_topics(Operation.READ, (offset.topic for offset in request.offsets))


def _commit_offsets(request: CommitOffsets) -> Clauses:
    if request.transaction is not None:
        return (CLUSTER_ACTION,)
    return ((Need(Operation.READ, _GROUP, request.group),),)


def _committed_topics(request: CommitOffsets) -> Iterable[str]:
    return (offset.topic for offset in request.offsets) if request.transaction is None else ()


def _topics_of_offsets(request: FetchOffsets) -> Iterable[str]:
    return (topic for topic, _ in request.partitions or ())


def _hold_offsets(request: HoldOffsets) -> Clauses:
    yield (Need(Operation.WRITE, _TRANSACTION, transactional_id(request.key)),)
    yield (Need(Operation.READ, _GROUP, request.group),)
    yield from _of_topics(Operation.READ, (offset.topic for offset in request.offsets))


def _heartbeat(request: Heartbeat) -> Clauses:
    yield (Need(Operation.READ, _GROUP, request.group),)
    yield from _of_topics(Operation.DESCRIBE, request.topics)


def _create_topic(request: CreateTopic) -> Clauses:
    return ((on_cluster(Operation.CREATE), Need(Operation.CREATE, _TOPIC, request.name)),)


def _restore_records(request: RestoreRecords) -> Clauses:
    return (
        (Need(Operation.WRITE, _TOPIC, request.topic),),
        (Need(Operation.ALTER, _TOPIC, request.topic),),
    )


def _local_reads(request: RequestLocalReads) -> Clauses:
    return _of_topics(Operation.READ, request.topics)


def _topics_of_partitions(request: Any) -> Iterable[str]:
    return (wanted.topic for wanted in request.partitions)


def _no_clauses(request: Any) -> Clauses:
    return _NONE


_EVERY_PRINCIPAL = "none: every principal may send it"

RULES: dict[type, RequestRule] = {
    Hello: everyone(_EVERY_PRINCIPAL),
    Prove: everyone(_EVERY_PRINCIPAL),
    SaslAuthenticate: everyone(_EVERY_PRINCIPAL),
    RequestUnixSocket: everyone(_EVERY_PRINCIPAL),
    RequestLocalReads: RequestRule("Read on all topics", _local_reads),
    Metadata: RequestRule(
        "Describe on each topic; a request for all topics leaves the others out",
        _no_clauses,
        (Operation.DESCRIBE, lambda request: request.topics or ()),
        hides=True,
    ),
    Produce: RequestRule(
        "Write on each topic; with a transaction also Write on the transactional id",
        _produce,
        (Operation.WRITE, _topics_of_partitions),
    ),
    Fetch: RequestRule(
        "Read on each topic; of a follower ClusterAction on the cluster", _fetch, (Operation.READ, _fetched_topics)
    ),
    ListOffsets: RequestRule("Describe on each topic", _no_clauses, (Operation.DESCRIBE, _topics_of_partitions)),
    InitProducerId: RequestRule("IdempotentWrite on the cluster, or Write on any topic", _init_producer_id),
    FindCoordinator: RequestRule("Describe on the group or transactional id", _find_coordinator),
    BeginTransaction: _of_transaction(Operation.WRITE),
    SettleVersion: _of_transaction(Operation.WRITE),
    AddToTransaction: RequestRule(
        "Write on the transactional id and on all topics; with offsets Read on the group and on their topics",
        _add_to_transaction,
    ),
    TouchTransaction: _of_transaction(Operation.WRITE),
    EndTransaction: _of_transaction(Operation.WRITE),
    ListTransactions: RequestRule(
        "the reply has only transactional ids with Describe, and their topics with Describe", _no_clauses, hides=True
    ),
    AbortTransaction: _of_transaction(Operation.WRITE),
    VerifyTransaction: of_sender(SenderKind.BROKER),
    ListParticipants: of_sender(SenderKind.BROKER),
    FindHanging: RequestRule("the reply has only topics with Read", _no_clauses, hides=True),
    AbortHanging: of_cluster(Operation.ALTER),
    WriteMarkers: of_sender(SenderKind.BROKER),
    CommitOffsets: RequestRule(
        "Read on the group and on each topic; of a coordinator ClusterAction on the cluster",
        _commit_offsets,
        (Operation.READ, _committed_topics),
    ),
    FetchOffsets: RequestRule(
        "Describe on the group and on each named topic; a request for all topics leaves the others out",
        lambda request: ((Need(Operation.DESCRIBE, _GROUP, request.group),),),
        (Operation.DESCRIBE, _topics_of_offsets),
        hides=True,
    ),
    HoldOffsets: RequestRule("Write on the transactional id, Read on the group and on all topics", _hold_offsets),
    ListGroups: RequestRule(
        "Describe on the cluster; without it the reply has only groups with Describe", _no_clauses, hides=True
    ),
    Heartbeat: RequestRule(
        "Read on the group and Describe on all topics; of topics that match a pattern only those with Describe are "
        "assigned",
        _heartbeat,
        hides=True,
    ),
    DescribeGroup: RequestRule(
        "Describe on the group and on all topics that its members read",
        lambda request: ((Need(Operation.DESCRIBE, _GROUP, request.group),),),
        hides=True,
    ),
    DeleteGroup: _of_group(Operation.DELETE),
    CreateTopic: RequestRule("Create on the cluster or on the topic", _create_topic),
    DeleteTopic: _of_topic(Operation.DELETE, lambda request: request.name),
    CreatePartitions: _of_topic(Operation.ALTER, lambda request: request.topic),
    AddColumns: _of_topic(Operation.ALTER, lambda request: request.topic),
    AlterTopic: _of_topic(Operation.ALTER_CONFIGS, lambda request: request.topic),
    DeleteRecords: RequestRule("Delete on each topic", _no_clauses, (Operation.DELETE, _topics_of_partitions)),
    RestoreRecords: RequestRule("Write and Alter on the topic", _restore_records),
    AlterReassignments: of_cluster(Operation.ALTER),
    ListReassignments: of_cluster(Operation.DESCRIBE),
    ElectLeaders: of_cluster(Operation.ALTER),
    RestartBroker: of_cluster(Operation.ALTER),
    ListSetAside: of_cluster(Operation.DESCRIBE),
    RestoreSetAside: of_cluster(Operation.ALTER),
    RemoveSetAside: of_cluster(Operation.ALTER),
    DescribeBroker: RequestRule(
        "Describe on the cluster; the settings only with DescribeConfigs on the cluster",
        lambda request: (DESCRIBE_CLUSTER,),
        hides=True,
    ),
    CreateAcls: of_cluster(Operation.ALTER),
    DescribeAcls: of_cluster(Operation.DESCRIBE),
    DeleteAcls: of_cluster(Operation.ALTER),
    AlterClientQuotas: of_cluster(Operation.ALTER_CONFIGS),
    DescribeClientQuotas: of_cluster(Operation.DESCRIBE_CONFIGS),
    CreateDelegationToken: everyone("none: every principal that has not logged in by a token may send it"),
    RenewDelegationToken: everyone("none: the token's owner, its renewers and its holder may send it"),
    ExpireDelegationToken: everyone("none: the token's owner and renewers may send it"),
    DescribeDelegationTokens: RequestRule(
        "Describe on each token of another owner; the reply leaves the others out", _no_clauses, hides=True
    ),
    DescribeUserScramCredentials: of_cluster(Operation.DESCRIBE),
    AlterUserScramCredentials: of_cluster(Operation.ALTER),
    ControlUpdate: of_sender(SenderKind.CONTROLLER),
}


def sender_of(request: Request) -> SenderKind:
    """Return which kind of process may send this request. A broker and a controller may also send client requests.

    The type of the request decides, and for Fetch and CommitOffsets the content.
    """
    if isinstance(request, Fetch):
        return SenderKind.CLIENT if request.replica_id == CONSUMER else SenderKind.BROKER
    if isinstance(request, CommitOffsets):
        return SenderKind.CLIENT if request.transaction is None else SenderKind.BROKER
    return RULES[type(request)].sender
