"""Tests of the error table: it is complete, has Kafka's codes for Kafka's errors, and its errors survive pickling."""

from __future__ import annotations

import pickle

import pytest

from sparklog.errors import (
    TRAITS,
    BrokerError,
    ClusterError,
    ConfigError,
    ErrorCode,
    ProtocolError,
    SparklogError,
    StorageError,
)

# Source: Kafka protocol guide, "Error codes": (code, retriable)
KAFKA = {
    "UNKNOWN_SERVER_ERROR": (-1, False),
    "NONE": (0, False),
    "OFFSET_OUT_OF_RANGE": (1, False),
    "CORRUPT_MESSAGE": (2, True),
    "UNKNOWN_TOPIC_OR_PARTITION": (3, True),
    "LEADER_NOT_AVAILABLE": (5, True),
    "NOT_LEADER_OR_FOLLOWER": (6, True),
    "REQUEST_TIMED_OUT": (7, True),
    "BROKER_NOT_AVAILABLE": (8, False),
    "REPLICA_NOT_AVAILABLE": (9, True),
    "MESSAGE_TOO_LARGE": (10, False),
    "STALE_CONTROLLER_EPOCH": (11, False),
    "NETWORK_EXCEPTION": (13, True),
    "COORDINATOR_NOT_AVAILABLE": (15, True),
    "INVALID_TOPIC_EXCEPTION": (17, False),
    "NOT_ENOUGH_REPLICAS": (19, True),
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": (20, True),
    "INVALID_REQUIRED_ACKS": (21, False),
    "TOPIC_AUTHORIZATION_FAILED": (29, False),
    "GROUP_AUTHORIZATION_FAILED": (30, False),
    "CLUSTER_AUTHORIZATION_FAILED": (31, False),
    "UNSUPPORTED_SASL_MECHANISM": (33, False),
    "ILLEGAL_SASL_STATE": (34, False),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": (53, False),
    "SECURITY_DISABLED": (54, False),
    "SASL_AUTHENTICATION_FAILED": (58, False),
    "DELEGATION_TOKEN_NOT_FOUND": (62, False),
    "DELEGATION_TOKEN_OWNER_MISMATCH": (63, False),
    "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED": (64, False),
    "DELEGATION_TOKEN_AUTHORIZATION_FAILED": (65, False),
    "DELEGATION_TOKEN_EXPIRED": (66, False),
    "RESOURCE_NOT_FOUND": (91, False),
    "DUPLICATE_RESOURCE": (92, False),
    "UNACCEPTABLE_CREDENTIAL": (93, False),
    "UNSUPPORTED_VERSION": (35, False),
    "TOPIC_ALREADY_EXISTS": (36, False),
    "INVALID_PARTITIONS": (37, False),
    "INVALID_REPLICATION_FACTOR": (38, False),
    "INVALID_REPLICA_ASSIGNMENT": (39, False),
    "INVALID_CONFIG": (40, False),
    "NOT_CONTROLLER": (41, True),
    "INVALID_REQUEST": (42, False),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": (45, False),
    "DUPLICATE_SEQUENCE_NUMBER": (46, False),
    "INVALID_PRODUCER_EPOCH": (47, False),
    "KAFKA_STORAGE_ERROR": (56, True),
    "UNKNOWN_PRODUCER_ID": (59, False),
    "FETCH_SESSION_ID_NOT_FOUND": (70, True),
    "INVALID_FETCH_SESSION_EPOCH": (71, True),
    "FENCED_LEADER_EPOCH": (74, True),
    "UNKNOWN_LEADER_EPOCH": (75, True),
    "STALE_BROKER_EPOCH": (77, False),
    "OFFSET_NOT_AVAILABLE": (78, True),
    "COORDINATOR_LOAD_IN_PROGRESS": (14, True),
    "NOT_COORDINATOR": (16, True),
    "INVALID_TXN_STATE": (48, False),
    "CONCURRENT_TRANSACTIONS": (51, True),
    "REASSIGNMENT_IN_PROGRESS": (60, False),
    "PREFERRED_LEADER_NOT_AVAILABLE": (80, True),
    "ELIGIBLE_LEADERS_NOT_AVAILABLE": (83, True),
    "ELECTION_NOT_NEEDED": (84, True),
    "NO_REASSIGNMENT_IN_PROGRESS": (85, False),
    "ILLEGAL_GENERATION": (22, False),
    "INCONSISTENT_GROUP_PROTOCOL": (23, False),
    "UNKNOWN_MEMBER_ID": (25, False),
    "REBALANCE_IN_PROGRESS": (27, False),
    "INVALID_SESSION_TIMEOUT": (26, False),
    "NON_EMPTY_GROUP": (68, False),
    "GROUP_ID_NOT_FOUND": (69, False),
    "GROUP_MAX_SIZE_REACHED": (81, False),
    "FENCED_INSTANCE_ID": (82, False),
    "UNSTABLE_OFFSET_COMMIT": (88, True),
    "FENCED_MEMBER_EPOCH": (110, False),
    "STALE_MEMBER_EPOCH": (113, False),
    "INVALID_REGULAR_EXPRESSION": (128, False),
    "INVALID_TIMESTAMP": (32, False),
    "UNSUPPORTED_COMPRESSION_TYPE": (76, False),
    "INVALID_RECORD": (87, False),
    "THROTTLING_QUOTA_EXCEEDED": (89, True),
    "UNKNOWN_TOPIC_ID": (100, True),
    "INCONSISTENT_TOPIC_ID": (103, True),
}
#: sparklog differs here: bytes are checked end to end, so the same bytes would be as corrupt again. An unreachable
#: broker may return at its old address.
RETRIED_OTHERWISE = {"CORRUPT_MESSAGE", "BROKER_NOT_AVAILABLE"}

ERRORS = [
    BrokerError(ErrorCode.OFFSET_OUT_OF_RANGE, "offset 7, log is [0, 5)"),
    ProtocolError(ErrorCode.MALFORMED_FRAME, "header of 9 bytes in a frame of 5", True),
    StorageError("disk full"),
    ConfigError("bad"),
    ClusterError("no slots"),
]


def test_every_code_has_a_trait_and_a_sentence() -> None:
    assert set(TRAITS) == set(ErrorCode)
    sentences = [trait.sentence for trait in TRAITS.values()]
    assert all(sentences) and len(set(sentences)) == len(sentences)


def test_codes_and_retries_equal_kafkas() -> None:
    own = {code.name for code in ErrorCode if code.value >= 1000}
    assert {code.name for code in ErrorCode} - own == set(KAFKA)
    for name, (code, retriable) in KAFKA.items():
        assert ErrorCode[name] == code
        if name not in RETRIED_OTHERWISE:
            assert TRAITS[ErrorCode[name]].retriable is retriable, name


def test_errors_that_refresh_metadata_are_retriable() -> None:
    assert all(trait.retriable for trait in TRAITS.values() if trait.refresh_metadata)


def test_a_broker_error_names_the_found_value() -> None:
    error = BrokerError(1, "offset 7, log is [0, 5)")
    assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert str(error) == "OFFSET_OUT_OF_RANGE: offset 7, log is [0, 5)"
    assert str(BrokerError(ErrorCode.NOT_CONTROLLER)).startswith("NOT_CONTROLLER: there is no active controller")
    assert not error.retriable and not error.refresh_metadata
    moved = BrokerError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert moved.retriable and moved.refresh_metadata


def test_unknown_codes_are_bugs() -> None:
    with pytest.raises(ValueError, match="12345"):
        BrokerError(12345)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: SparklogError) -> None:
    assert isinstance(error, SparklogError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
