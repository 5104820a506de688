"""The translation of sparklog's error codes to Kafka's, and the codes that only Kafka's protocol has.

``ErrorCode`` has Kafka's numbers where the meaning is Kafka's. The codes from 1000 on are sparklog's own, and a Kafka
client would take each of them for an unknown server error, which it does not retry. So each of them becomes the Kafka
error to which a client reacts in the same way.
"""

from __future__ import annotations

from enum import IntEnum

from sparklog.errors import BrokerError, ErrorCode, SparklogError

#: The first code that Kafka does not have.
_FIRST_OWN = 1000
_NEAREST: dict[ErrorCode, ErrorCode] = {
    # The client encodes the records again after it has read the metadata. The broker encodes them for Kafka clients.
    ErrorCode.SCHEMA_OUTDATED: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.SCHEMA_MISMATCH: ErrorCode.INVALID_RECORD,
    ErrorCode.FRAME_TOO_LARGE: ErrorCode.MESSAGE_TOO_LARGE,
    ErrorCode.MALFORMED_FRAME: ErrorCode.INVALID_REQUEST,
    ErrorCode.UNKNOWN_API: ErrorCode.UNSUPPORTED_VERSION,
    # A stopping broker has handed over its leaderships, so the client finds the new leader in the metadata.
    ErrorCode.BROKER_STOPPING: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    # Retriable, and without a change of the leader.
    ErrorCode.TOPIC_RESTORING: ErrorCode.NOT_ENOUGH_REPLICAS,
}


class KafkaCode(IntEnum):
    """The error codes of Kafka's protocol that ``ErrorCode`` does not have.

    Source: Kafka protocol guide, "Error codes".
    """

    OFFSET_METADATA_TOO_LARGE = 12
    INVALID_GROUP_ID = 24
    INVALID_COMMIT_OFFSET_SIZE = 28
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    TRANSACTION_COORDINATOR_FENCED = 52
    OPERATION_NOT_ATTEMPTED = 55
    LOG_DIR_NOT_FOUND = 57
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    TRANSACTION_ABORTABLE = 120


class KafkaError(SparklogError):
    """An error with a code of Kafka's protocol, which a handler of the Kafka listener raises."""

    def __init__(self, code: int, detail: str = "") -> None:
        self.code = code
        self.detail = detail
        super().__init__(code, detail)


#: The errors with which a handler, or the coordinator that it asks, refuses a request.
REFUSALS = (BrokerError, KafkaError)


def kafka_code(code: int) -> int:
    """Return Kafka's error code for an error code of sparklog."""
    if code < _FIRST_OWN:
        return int(code)
    try:
        return int(_NEAREST.get(ErrorCode(code), ErrorCode.UNKNOWN_SERVER_ERROR))
    except ValueError:
        return int(ErrorCode.UNKNOWN_SERVER_ERROR)


def kafka_error(error: BrokerError | KafkaError) -> tuple[int, str]:
    """Return the code and the text of an error for a Kafka response."""
    return kafka_code(error.code), error.detail or str(error)
