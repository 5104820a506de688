"""All messages of the wire protocol: the unions of all requests and of all replies, and their encoding in MessagePack.

A message is the header of a frame. Batches are in the frame's body. The message has only their counts and lengths, so
no code between sender and receiver parses the batches. A struct is encoded as an array. Later releases may add fields
with defaults at the end: an older peer ignores fields that it does not know.

The structs are in several modules, by subject. All other code imports them from this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from sparklog.protocol.acl_messages import (
    AclCondition,
    AclEntry,
    CreateAcls,
    DeleteAcls,
    DeleteAclsReply,
    DescribeAcls,
    DescribeAclsReply,
)
from sparklog.protocol.admin_messages import (
    Ack,
    AddColumns,
    AlterReassignments,
    AlterReassignmentsReply,
    AlterTopic,
    CreatePartitions,
    CreateTopic,
    CreateTopicReply,
    DeletedRecords,
    DeleteRecords,
    DeleteRecordsPartition,
    DeleteRecordsReply,
    DeleteTopic,
    DescribeBroker,
    DescribeBrokerReply,
    ElectLeaders,
    ElectLeadersReply,
    ListReassignments,
    ListReassignmentsReply,
    ReassignmentStatus,
    ReplicaDescription,
    ReplicaMove,
    RestartBroker,
    RestoreRecords,
    RestoreRecordsReply,
)
from sparklog.protocol.control_messages import (
    ControlUpdate,
    ControlUpdateReply,
    PartitionDecision,
    TopicChange,
)
from sparklog.protocol.data_messages import (
    ACKS_ALL,
    CONSUMER,
    EARLIEST,
    LATEST,
    AbortedRange,
    ErrorReply,
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    Hello,
    HelloReply,
    InitProducerId,
    InitProducerIdReply,
    ListedOffset,
    ListOffsets,
    ListOffsetsPartition,
    ListOffsetsReply,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    Produce,
    ProducePartition,
    ProduceReply,
    ProduceResult,
    Prove,
    TopicMetadata,
)
from sparklog.protocol.fields import (
    MAX_ENTRIES,
    Message,
    PartitionResult,
)
from sparklog.protocol.group_messages import (
    JOIN,
    LEAVE,
    LEAVE_STATIC,
    CommitOffsets,
    CommitOffsetsReply,
    DeleteGroup,
    DescribedGroup,
    DescribeGroup,
    DescribeGroupReply,
    FetchOffsets,
    FetchOffsetsReply,
    GroupOffset,
    Heartbeat,
    HeartbeatReply,
    HoldOffsets,
    ListGroups,
    ListGroupsReply,
    MemberDescription,
    TopicPartitions,
)
from sparklog.protocol.quota_messages import (
    AlterClientQuotas,
    AlterClientQuotasReply,
    DescribeClientQuotas,
    DescribeClientQuotasReply,
    DescribedQuotas,
    QuotaAlteration,
    QuotaKey,
    QuotaResult,
)
from sparklog.protocol.security_messages import (
    LocalReadsReply,
    RequestLocalReads,
    RequestUnixSocket,
    SaslAuthenticate,
    SaslAuthenticateReply,
    UnixSocketReply,
)
from sparklog.protocol.set_aside_messages import (
    ListSetAside,
    ListSetAsideReply,
    RemoveSetAside,
    RestoreSetAside,
    RestoreSetAsideReply,
    SetAsideLog,
)
from sparklog.protocol.token_messages import (
    CreateDelegationToken,
    CreateDelegationTokenReply,
    DelegationTokenExpiryReply,
    DescribeDelegationTokens,
    DescribeDelegationTokensReply,
    ExpireDelegationToken,
    RenewDelegationToken,
)
from sparklog.protocol.transaction_messages import (
    AbortHanging,
    AbortTransaction,
    AddToTransaction,
    BeginTransaction,
    BeginTransactionReply,
    DescribedTransaction,
    EndTransaction,
    EndTransactionReply,
    FindCoordinator,
    FindCoordinatorReply,
    FindHanging,
    FindHangingReply,
    FoundHangingTransaction,
    ListParticipants,
    ListParticipantsReply,
    ListTransactions,
    ListTransactionsReply,
    SettleVersion,
    SettleVersionReply,
    TouchTransaction,
    TransactionMarker,
    VerifyTransaction,
    VerifyTransactionReply,
    WriteMarkers,
    WriteMarkersReply,
)
from sparklog.protocol.user_messages import (
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    DescribeUserScramCredentials,
    DescribeUserScramCredentialsReply,
)

__all__ = [
    "CreateDelegationToken",
    "CreateDelegationTokenReply",
    "DelegationTokenExpiryReply",
    "DescribeDelegationTokens",
    "DescribeDelegationTokensReply",
    "ExpireDelegationToken",
    "RenewDelegationToken",
    "ACKS_ALL",
    "AbortHanging",
    "AbortTransaction",
    "AbortedRange",
    "AclCondition",
    "AclEntry",
    "Ack",
    "AddColumns",
    "AddToTransaction",
    "AlterClientQuotas",
    "AlterClientQuotasReply",
    "AlterReassignments",
    "AlterReassignmentsReply",
    "AlterTopic",
    "AlterUserScramCredentials",
    "AlterUserScramCredentialsReply",
    "BeginTransaction",
    "BeginTransactionReply",
    "CONSUMER",
    "CommitOffsets",
    "CommitOffsetsReply",
    "ControlUpdate",
    "ControlUpdateReply",
    "CreateAcls",
    "CreatePartitions",
    "CreateTopic",
    "CreateTopicReply",
    "DeleteAcls",
    "DeleteAclsReply",
    "DeleteGroup",
    "DeleteRecords",
    "DeleteRecordsPartition",
    "DeleteRecordsReply",
    "DeleteTopic",
    "DeletedRecords",
    "DescribeAcls",
    "DescribeAclsReply",
    "DescribeClientQuotas",
    "DescribeClientQuotasReply",
    "DescribedQuotas",
    "DescribeBroker",
    "DescribeBrokerReply",
    "DescribeGroup",
    "DescribeGroupReply",
    "DescribeUserScramCredentials",
    "DescribeUserScramCredentialsReply",
    "EARLIEST",
    "ElectLeaders",
    "ElectLeadersReply",
    "EndTransaction",
    "EndTransactionReply",
    "ErrorReply",
    "Fetch",
    "FetchOffsets",
    "FetchOffsetsReply",
    "FetchPartition",
    "FetchReply",
    "FetchedPartition",
    "FindCoordinator",
    "FindCoordinatorReply",
    "FindHanging",
    "FindHangingReply",
    "DescribedGroup",
    "GroupOffset",
    "FoundHangingTransaction",
    "Heartbeat",
    "HeartbeatReply",
    "HoldOffsets",
    "Hello",
    "HelloReply",
    "InitProducerId",
    "InitProducerIdReply",
    "JOIN",
    "LATEST",
    "LEAVE",
    "LEAVE_STATIC",
    "ListGroups",
    "ListGroupsReply",
    "ListOffsets",
    "ListOffsetsPartition",
    "ListOffsetsReply",
    "ListParticipants",
    "ListParticipantsReply",
    "ListReassignments",
    "ListReassignmentsReply",
    "ListSetAside",
    "ListSetAsideReply",
    "ListTransactions",
    "ListTransactionsReply",
    "ListedOffset",
    "LocalReadsReply",
    "MAX_ENTRIES",
    "MemberDescription",
    "Message",
    "Metadata",
    "MetadataReply",
    "PROTOCOL_MAX_VERSION",
    "PROTOCOL_MIN_VERSION",
    "PartitionDecision",
    "PartitionMetadata",
    "PartitionResult",
    "Produce",
    "ProducePartition",
    "ProduceReply",
    "ProduceResult",
    "Prove",
    "QuotaAlteration",
    "QuotaKey",
    "QuotaResult",
    "ReassignmentStatus",
    "ReplicaDescription",
    "ReplicaMove",
    "RemoveSetAside",
    "Reply",
    "Request",
    "RequestLocalReads",
    "RequestUnixSocket",
    "RestartBroker",
    "RestoreRecords",
    "RestoreRecordsReply",
    "RestoreSetAside",
    "RestoreSetAsideReply",
    "SaslAuthenticate",
    "SaslAuthenticateReply",
    "SetAsideLog",
    "SettleVersion",
    "SettleVersionReply",
    "TopicChange",
    "TopicMetadata",
    "TopicPartitions",
    "TouchTransaction",
    "DescribedTransaction",
    "TransactionMarker",
    "UNDECODABLE",
    "UnixSocketReply",
    "VerifyTransaction",
    "VerifyTransactionReply",
    "WriteMarkers",
    "WriteMarkersReply",
    "decode_reply",
    "decode_request",
    "encode_message",
    "request_decoder",
]

PROTOCOL_MIN_VERSION = 1
PROTOCOL_MAX_VERSION = 1

Request = (
    Hello
    | Prove
    | SaslAuthenticate
    | Metadata
    | Produce
    | Fetch
    | ListOffsets
    | InitProducerId
    | FindCoordinator
    | BeginTransaction
    | SettleVersion
    | AddToTransaction
    | TouchTransaction
    | EndTransaction
    | ListTransactions
    | AbortTransaction
    | VerifyTransaction
    | ListParticipants
    | FindHanging
    | AbortHanging
    | WriteMarkers
    | CommitOffsets
    | FetchOffsets
    | HoldOffsets
    | ListGroups
    | Heartbeat
    | DescribeGroup
    | DeleteGroup
    | CreateTopic
    | DeleteTopic
    | CreatePartitions
    | AddColumns
    | AlterTopic
    | DeleteRecords
    | RestoreRecords
    | AlterReassignments
    | ListReassignments
    | ElectLeaders
    | RestartBroker
    | ListSetAside
    | RestoreSetAside
    | RemoveSetAside
    | DescribeBroker
    | CreateAcls
    | DescribeAcls
    | DeleteAcls
    | AlterClientQuotas
    | DescribeClientQuotas
    | CreateDelegationToken
    | RenewDelegationToken
    | ExpireDelegationToken
    | DescribeDelegationTokens
    | DescribeUserScramCredentials
    | AlterUserScramCredentials
    | ControlUpdate
    | RequestUnixSocket
    | RequestLocalReads
)
Reply = (
    HelloReply
    | ErrorReply
    | MetadataReply
    | ProduceReply
    | FetchReply
    | ListOffsetsReply
    | InitProducerIdReply
    | FindCoordinatorReply
    | BeginTransactionReply
    | SettleVersionReply
    | EndTransactionReply
    | ListTransactionsReply
    | VerifyTransactionReply
    | WriteMarkersReply
    | ListParticipantsReply
    | FindHangingReply
    | CommitOffsetsReply
    | FetchOffsetsReply
    | ListGroupsReply
    | HeartbeatReply
    | DescribeGroupReply
    | CreateTopicReply
    | AlterReassignmentsReply
    | DeleteRecordsReply
    | RestoreRecordsReply
    | ListReassignmentsReply
    | ElectLeadersReply
    | ListSetAsideReply
    | RestoreSetAsideReply
    | Ack
    | DescribeBrokerReply
    | DescribeAclsReply
    | DeleteAclsReply
    | AlterClientQuotasReply
    | DescribeClientQuotasReply
    | CreateDelegationTokenReply
    | DelegationTokenExpiryReply
    | DescribeDelegationTokensReply
    | DescribeUserScramCredentialsReply
    | AlterUserScramCredentialsReply
    | ControlUpdateReply
    | SaslAuthenticateReply
    | UnixSocketReply
    | LocalReadsReply
)

#: The errors that decoding invalid bytes may raise: msgspec's own, and Python's errors for text that is not UTF-8 and
#: for too deep nesting (in fields that this version does not know).
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

# These are the methods themselves, without a wrapper, because they are called for every message.
encode_message: Callable[[Request | Reply], bytes] = _encoder.encode
#: The function that decodes the header of a reply. It raises one of ``UNDECODABLE`` for invalid bytes. The module
#: ``connection`` handles these errors.
decode_reply: Callable[[bytes | memoryview], Reply] = _reply_decoder.decode


@functools.cache  # Created at the first use: clients do not need it, and its creation takes 3 ms.
def request_decoder() -> Callable[[bytes | memoryview], Request]:
    """Return the function that decodes the header of a request.

    The function raises one of the exceptions in ``UNDECODABLE`` for invalid bytes.
    """
    decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
    return decoder.decode


def decode_request(header: bytes | memoryview) -> Request:
    """Decode the header of a request. Raises one of the exceptions in ``UNDECODABLE`` if the bytes are invalid."""
    return request_decoder()(header)
