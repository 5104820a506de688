"""The permitted senders of each request of the wire, in one table.

Pure.

A client request may arrive on any connection. A request of a broker or of the controller decides which records are
acknowledged, which replica leads and what is deleted. So a broker accepts such a request only on a connection that has
proved its sender (``protocol.proof``). Two requests have two kinds of senders, and ``sender_of`` distinguishes them by
content.
"""

from __future__ import annotations

from enum import Enum

from sparklog.protocol.messages import (
    CONSUMER,
    AbortHanging,
    AbortTransaction,
    AddColumns,
    AddToTransaction,
    AlterReassignments,
    AlterTopic,
    BeginTransaction,
    CommitOffsets,
    ControlUpdate,
    CreatePartitions,
    CreateTopic,
    DeleteGroup,
    DeleteRecords,
    DeleteTopic,
    DescribeBroker,
    DescribeGroup,
    ElectLeaders,
    EndTransaction,
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
    Request,
    RestartBroker,
    RestoreRecords,
    RestoreSetAside,
    SettleVersion,
    TouchTransaction,
    VerifyTransaction,
    WriteMarkers,
)


class Sender(Enum):
    """A kind of sender. The values are the names of roles on the wire."""

    CLIENT = "client"
    BROKER = "broker"
    CONTROLLER = "controller"


#: The minimum sender of a request. Brokers and controllers may send a request of CLIENT as well.
SENDERS: dict[type, Sender] = {
    Hello: Sender.CLIENT,
    Prove: Sender.CLIENT,
    Metadata: Sender.CLIENT,
    Produce: Sender.CLIENT,
    Fetch: Sender.CLIENT,  # a follower's: BROKER
    ListOffsets: Sender.CLIENT,
    InitProducerId: Sender.CLIENT,
    FindCoordinator: Sender.CLIENT,
    BeginTransaction: Sender.CLIENT,
    SettleVersion: Sender.CLIENT,
    AddToTransaction: Sender.CLIENT,
    TouchTransaction: Sender.CLIENT,
    EndTransaction: Sender.CLIENT,
    ListTransactions: Sender.CLIENT,
    AbortTransaction: Sender.CLIENT,
    VerifyTransaction: Sender.BROKER,
    ListParticipants: Sender.BROKER,
    FindHanging: Sender.CLIENT,
    AbortHanging: Sender.CLIENT,
    WriteMarkers: Sender.BROKER,
    CommitOffsets: Sender.CLIENT,  # with a transaction, from its coordinator: BROKER
    FetchOffsets: Sender.CLIENT,
    HoldOffsets: Sender.CLIENT,
    ListGroups: Sender.CLIENT,
    Heartbeat: Sender.CLIENT,
    DescribeGroup: Sender.CLIENT,
    DeleteGroup: Sender.CLIENT,
    CreateTopic: Sender.CLIENT,
    DeleteTopic: Sender.CLIENT,
    CreatePartitions: Sender.CLIENT,
    AddColumns: Sender.CLIENT,
    AlterTopic: Sender.CLIENT,
    DeleteRecords: Sender.CLIENT,
    RestoreRecords: Sender.CLIENT,
    AlterReassignments: Sender.CLIENT,
    ListReassignments: Sender.CLIENT,
    ElectLeaders: Sender.CLIENT,
    RestartBroker: Sender.CLIENT,
    ListSetAside: Sender.CLIENT,
    RestoreSetAside: Sender.CLIENT,
    RemoveSetAside: Sender.CLIENT,
    DescribeBroker: Sender.CLIENT,
    ControlUpdate: Sender.CONTROLLER,
}


def sender_of(request: Request) -> Sender:
    """Return the sender that this request needs, by its type and its content."""
    if isinstance(request, Fetch):
        return Sender.CLIENT if request.replica_id == CONSUMER else Sender.BROKER
    if isinstance(request, CommitOffsets):
        return Sender.CLIENT if request.transaction is None else Sender.BROKER
    return SENDERS[type(request)]
