"""All errors of sparklog: the error codes of the protocol, and the Python exceptions.

Errors that Kafka also has use Kafka's names and codes (Source: Kafka protocol guide, "Error codes"), so that Kafka's
documentation applies to them. Codes from 1000 on are specific to sparklog. This module prints and logs nothing, and
holds no state.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ErrorCode(IntEnum):
    """The error code in a broker's response. ``NONE`` means success."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    UNSTABLE_OFFSET_COMMIT = 88
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    INVALID_RECORD = 87
    THROTTLING_QUOTA_EXCEEDED = 89
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    FENCED_MEMBER_EPOCH = 110
    STALE_MEMBER_EPOCH = 113
    INVALID_REGULAR_EXPRESSION = 128
    SCHEMA_OUTDATED = 1000
    SCHEMA_MISMATCH = 1001
    FRAME_TOO_LARGE = 1002
    MALFORMED_FRAME = 1003
    UNKNOWN_API = 1004
    BROKER_STOPPING = 1005
    TOPIC_RESTORING = 1006


class ErrorTrait(NamedTuple):
    """The properties of an error code: how clients react to it, and a sentence that explains it."""

    #: True if the same request may succeed later.
    retriable: bool
    #: True if the client's metadata is stale and must be refreshed before a retry.
    refresh_metadata: bool
    sentence: str


_T = ErrorTrait
TRAITS: dict[ErrorCode, ErrorTrait] = {
    ErrorCode.UNKNOWN_SERVER_ERROR: _T(False, False, "the broker failed with an unexpected error"),
    ErrorCode.NONE: _T(False, False, "success"),
    ErrorCode.OFFSET_OUT_OF_RANGE: _T(False, False, "the offset is outside the range of the log"),
    ErrorCode.CORRUPT_MESSAGE: _T(False, False, "the batch failed a checksum or structure check"),
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: _T(True, True, "this broker does not know the topic or partition"),
    ErrorCode.LEADER_NOT_AVAILABLE: _T(True, True, "the partition currently has no leader"),
    ErrorCode.NOT_LEADER_OR_FOLLOWER: _T(True, True, "this broker is not the leader of the partition"),
    ErrorCode.REQUEST_TIMED_OUT: _T(True, False, "the request timed out"),
    ErrorCode.BROKER_NOT_AVAILABLE: _T(True, True, "the broker is not available"),
    ErrorCode.REPLICA_NOT_AVAILABLE: _T(True, True, "the replica is not available"),
    ErrorCode.MESSAGE_TOO_LARGE: _T(False, False, "the batch is larger than the topic allows"),
    ErrorCode.STALE_CONTROLLER_EPOCH: _T(False, False, "the controller epoch is older than the newest one seen"),
    ErrorCode.NETWORK_EXCEPTION: _T(True, True, "the connection closed before the response arrived"),
    ErrorCode.COORDINATOR_NOT_AVAILABLE: _T(True, True, "the coordinator is not available"),
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: _T(True, False, "the coordinator is loading its state"),
    ErrorCode.NOT_COORDINATOR: _T(True, True, "this broker is not the coordinator of the transaction or group"),
    ErrorCode.INVALID_TXN_STATE: _T(False, False, "the transaction is not in a state that allows this"),
    ErrorCode.CONCURRENT_TRANSACTIONS: _T(True, False, "an earlier transaction of this key is still being completed"),
    ErrorCode.INVALID_TOPIC_EXCEPTION: _T(False, False, "the topic name is not allowed"),
    ErrorCode.NOT_ENOUGH_REPLICAS: _T(True, False, "the partition has fewer in-sync replicas than min.insync.replicas"),
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: _T(
        True, False, "the batch was appended, but the ISR then shrank below min.insync.replicas"
    ),
    ErrorCode.INVALID_REQUIRED_ACKS: _T(False, False, "acks must be 0, 1 or all"),
    ErrorCode.ILLEGAL_GENERATION: _T(False, False, "the generation is not the group's current one"),
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL: _T(
        False, False, "the group has members of the other protocol, or members that support no protocol in common"
    ),
    ErrorCode.REBALANCE_IN_PROGRESS: _T(False, False, "the group is rebalancing, so its members must join again"),
    ErrorCode.UNKNOWN_MEMBER_ID: _T(False, False, "the group does not have this member"),
    ErrorCode.INVALID_SESSION_TIMEOUT: _T(
        False, False, "the session time-out is outside the range that the broker allows"
    ),
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: _T(
        False, False, "the sender may not do this to the cluster, or it did not prove its role in the cluster"
    ),
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: _T(False, False, "the principal may not do this to the topic"),
    ErrorCode.GROUP_AUTHORIZATION_FAILED: _T(False, False, "the principal may not do this to the group"),
    ErrorCode.UNSUPPORTED_SASL_MECHANISM: _T(False, False, "the listener does not offer this SASL mechanism"),
    ErrorCode.ILLEGAL_SASL_STATE: _T(False, False, "the connection is not in a state that allows this request"),
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: _T(False, False, "the principal may not use the transactional id"),
    ErrorCode.SECURITY_DISABLED: _T(False, False, "the cluster has no ACLs or users, because security is off"),
    ErrorCode.SASL_AUTHENTICATION_FAILED: _T(False, False, "the login failed"),
    ErrorCode.DELEGATION_TOKEN_NOT_FOUND: _T(False, False, "the delegation token does not exist"),
    ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH: _T(
        False, False, "the principal is neither the owner nor a renewer of the delegation token"
    ),
    ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED: _T(
        False, False, "a connection that has logged in with a delegation token may not request one"
    ),
    ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED: _T(
        False, False, "the principal may not do this to the delegation token"
    ),
    ErrorCode.DELEGATION_TOKEN_EXPIRED: _T(False, False, "the delegation token has expired"),
    ErrorCode.RESOURCE_NOT_FOUND: _T(False, False, "the user or resource does not exist"),
    ErrorCode.DUPLICATE_RESOURCE: _T(False, False, "the request names the same resource twice"),
    ErrorCode.UNACCEPTABLE_CREDENTIAL: _T(False, False, "the credential does not meet the requirements"),
    ErrorCode.UNSUPPORTED_VERSION: _T(False, False, "client and broker have no protocol version in common"),
    ErrorCode.TOPIC_ALREADY_EXISTS: _T(False, False, "a topic with this name already exists"),
    ErrorCode.INVALID_PARTITIONS: _T(False, False, "the number of partitions is not allowed"),
    ErrorCode.INVALID_REPLICATION_FACTOR: _T(False, False, "the replication factor is not possible"),
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: _T(False, False, "the replica assignment is not possible"),
    ErrorCode.INVALID_CONFIG: _T(False, False, "a configuration value is not allowed"),
    ErrorCode.NOT_CONTROLLER: _T(True, True, "there is no active controller to handle the request"),
    ErrorCode.INVALID_REQUEST: _T(False, False, "the request contradicts itself"),
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER: _T(False, False, "the producer's sequence number is out of order"),
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER: _T(False, False, "the batch is a duplicate of an earlier one"),
    ErrorCode.INVALID_PRODUCER_EPOCH: _T(False, False, "a producer with the same id and a newer epoch exists"),
    ErrorCode.KAFKA_STORAGE_ERROR: _T(True, True, "the log directory of the replica is offline"),
    ErrorCode.UNKNOWN_PRODUCER_ID: _T(False, False, "the broker does not know this producer id"),
    ErrorCode.REASSIGNMENT_IN_PROGRESS: _T(False, False, "a reassignment of the partition is in progress"),
    ErrorCode.NON_EMPTY_GROUP: _T(False, False, "the group is not empty"),
    ErrorCode.GROUP_ID_NOT_FOUND: _T(False, False, "the group does not exist"),
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND: _T(True, False, "the broker does not know the fetch session"),
    ErrorCode.INVALID_FETCH_SESSION_EPOCH: _T(True, False, "the fetch session epoch does not match"),
    ErrorCode.FENCED_LEADER_EPOCH: _T(True, True, "the leader epoch in the request is older than the broker's"),
    ErrorCode.UNKNOWN_LEADER_EPOCH: _T(True, True, "the leader epoch in the request is newer than the broker's"),
    ErrorCode.STALE_BROKER_EPOCH: _T(False, False, "the broker's incarnation is not current"),
    ErrorCode.OFFSET_NOT_AVAILABLE: _T(True, False, "the offset exists but is not yet known to be committed"),
    ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE: _T(True, True, "the preferred leader is not in sync or not alive"),
    ErrorCode.GROUP_MAX_SIZE_REACHED: _T(False, False, "the group has reached its maximum size"),
    ErrorCode.FENCED_INSTANCE_ID: _T(False, False, "another member has taken over this group instance id"),
    ErrorCode.UNSTABLE_OFFSET_COMMIT: _T(True, False, "an open transaction may commit these offsets"),
    ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE: _T(True, True, "no replica that can be elected is alive"),
    ErrorCode.ELECTION_NOT_NEEDED: _T(True, True, "the partition already has the requested leader"),
    ErrorCode.NO_REASSIGNMENT_IN_PROGRESS: _T(False, False, "no reassignment of the partition is in progress"),
    ErrorCode.INVALID_TIMESTAMP: _T(False, False, "a record's timestamp is not valid for the topic"),
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: _T(False, False, "the batch has an unknown compression codec"),
    ErrorCode.INVALID_RECORD: _T(False, False, "a record is not valid for the topic"),
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: _T(True, False, "a quota is exhausted"),
    ErrorCode.UNKNOWN_TOPIC_ID: _T(True, True, "no topic with this id exists"),
    ErrorCode.INCONSISTENT_TOPIC_ID: _T(True, True, "the topic was deleted and created again"),
    ErrorCode.FENCED_MEMBER_EPOCH: _T(False, False, "the group has fenced this member epoch"),
    ErrorCode.STALE_MEMBER_EPOCH: _T(False, False, "the partition is not assigned to the member in this epoch"),
    ErrorCode.INVALID_REGULAR_EXPRESSION: _T(False, False, "the pattern is not a valid regular expression (RE2)"),
    ErrorCode.SCHEMA_OUTDATED: _T(True, True, "the topic has a newer schema; encode the records with it"),
    ErrorCode.SCHEMA_MISMATCH: _T(False, False, "the columns do not match the topic's schema"),
    ErrorCode.FRAME_TOO_LARGE: _T(False, False, "the frame is larger than the receiver accepts"),
    ErrorCode.MALFORMED_FRAME: _T(False, False, "the bytes are not a valid frame of this protocol"),
    ErrorCode.UNKNOWN_API: _T(False, False, "the request type is unknown"),
    ErrorCode.BROKER_STOPPING: _T(True, True, "the broker is stopping and accepts no new writes"),
    ErrorCode.TOPIC_RESTORING: _T(
        True, False, "the topic is being restored and accepts no writes until the restore completes"
    ),
}


class SparklogError(Exception):
    """The base class of all exceptions that sparklog raises on purpose. Instances can be pickled."""


class BrokerError(SparklogError):
    """An error with a code of the protocol. Usually it is a broker's error response.

    ``code`` is the error code, and ``detail`` says what was found and what was expected.
    """

    def __init__(self, code: ErrorCode | int, detail: str = "") -> None:
        self.code = ErrorCode(code)
        self.detail = detail
        super().__init__(code, detail)

    def __str__(self) -> str:
        trait = TRAITS[self.code]
        return f"{self.code.name}: {self.detail or trait.sentence}"

    @property
    def retriable(self) -> bool:
        return TRAITS[self.code].retriable

    @property
    def refresh_metadata(self) -> bool:
        return TRAITS[self.code].refresh_metadata


class ProtocolError(SparklogError):
    """The error for received bytes that violate the protocol.

    ``fatal`` is true if the start of the next frame is unknown, so that the connection must be closed.
    """

    def __init__(self, code: ErrorCode, detail: str, fatal: bool = False) -> None:
        self.code = code
        self.detail = detail
        self.fatal = fatal
        super().__init__(code, detail, fatal)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.detail}"


class StorageError(SparklogError):
    """The error for an unusable log directory: full, read-only, of another cluster, of a newer format, or damaged."""


class ConfigError(SparklogError):
    """The error for an invalid setting or argument, such as an unknown key or a value out of range."""


class ClusterError(SparklogError):
    """The error for a cluster that cannot be started or stopped, or for running brokers that cannot be taken over."""
