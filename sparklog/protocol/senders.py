"""A table of the permitted senders of each request.

Pure.

A client request may arrive on any connection. A request of a broker or of the controller decides which records are
acknowledged, which replica leads and what is deleted. So a broker accepts such a request only on a connection whose
peer has proved its identity (``protocol.proof``). Both clients and brokers send Fetch and CommitOffsets; ``sender_of``
distinguishes the two by the request's content.
"""

from __future__ import annotations

from enum import Enum

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


class SenderKind(Enum):
    """The kind of process that sends a request. The values are the names of the roles in Hello."""

    CLIENT = "client"
    BROKER = "broker"
    CONTROLLER = "controller"


#: The sender that each request needs. Brokers and controllers may also send all requests of CLIENT.
SENDERS: dict[type, SenderKind] = {
    Hello: SenderKind.CLIENT,
    Prove: SenderKind.CLIENT,
    SaslAuthenticate: SenderKind.CLIENT,
    RequestUnixSocket: SenderKind.CLIENT,
    Metadata: SenderKind.CLIENT,
    Produce: SenderKind.CLIENT,
    Fetch: SenderKind.CLIENT,  # a follower's: BROKER
    ListOffsets: SenderKind.CLIENT,
    InitProducerId: SenderKind.CLIENT,
    FindCoordinator: SenderKind.CLIENT,
    BeginTransaction: SenderKind.CLIENT,
    SettleVersion: SenderKind.CLIENT,
    AddToTransaction: SenderKind.CLIENT,
    TouchTransaction: SenderKind.CLIENT,
    EndTransaction: SenderKind.CLIENT,
    ListTransactions: SenderKind.CLIENT,
    AbortTransaction: SenderKind.CLIENT,
    VerifyTransaction: SenderKind.BROKER,
    ListParticipants: SenderKind.BROKER,
    FindHanging: SenderKind.CLIENT,
    AbortHanging: SenderKind.CLIENT,
    WriteMarkers: SenderKind.BROKER,
    CommitOffsets: SenderKind.CLIENT,  # with a transaction, from its coordinator: BROKER
    FetchOffsets: SenderKind.CLIENT,
    HoldOffsets: SenderKind.CLIENT,
    ListGroups: SenderKind.CLIENT,
    Heartbeat: SenderKind.CLIENT,
    DescribeGroup: SenderKind.CLIENT,
    DeleteGroup: SenderKind.CLIENT,
    CreateTopic: SenderKind.CLIENT,
    DeleteTopic: SenderKind.CLIENT,
    CreatePartitions: SenderKind.CLIENT,
    AddColumns: SenderKind.CLIENT,
    AlterTopic: SenderKind.CLIENT,
    DeleteRecords: SenderKind.CLIENT,
    RestoreRecords: SenderKind.CLIENT,
    AlterReassignments: SenderKind.CLIENT,
    ListReassignments: SenderKind.CLIENT,
    ElectLeaders: SenderKind.CLIENT,
    RestartBroker: SenderKind.CLIENT,
    ListSetAside: SenderKind.CLIENT,
    RestoreSetAside: SenderKind.CLIENT,
    RemoveSetAside: SenderKind.CLIENT,
    DescribeBroker: SenderKind.CLIENT,
    CreateAcls: SenderKind.CLIENT,
    DescribeAcls: SenderKind.CLIENT,
    DeleteAcls: SenderKind.CLIENT,
    AlterClientQuotas: SenderKind.CLIENT,
    DescribeClientQuotas: SenderKind.CLIENT,
    CreateDelegationToken: SenderKind.CLIENT,
    DescribeDelegationTokens: SenderKind.CLIENT,
    ExpireDelegationToken: SenderKind.CLIENT,
    RenewDelegationToken: SenderKind.CLIENT,
    DescribeUserScramCredentials: SenderKind.CLIENT,
    AlterUserScramCredentials: SenderKind.CLIENT,
    ControlUpdate: SenderKind.CONTROLLER,
}


def sender_of(request: Request) -> SenderKind:
    """Return which kind of process may send this request. A broker and a controller may also send client requests.

    The type of the request decides, and for Fetch and CommitOffsets the content.
    """
    if isinstance(request, Fetch):
        return SenderKind.CLIENT if request.replica_id == CONSUMER else SenderKind.BROKER
    if isinstance(request, CommitOffsets):
        return SenderKind.CLIENT if request.transaction is None else SenderKind.BROKER
    return SENDERS[type(request)]
