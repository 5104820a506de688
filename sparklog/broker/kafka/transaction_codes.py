"""The error codes that Kafka's clients expect in responses about transactions, and the keys of transactional ids."""

from __future__ import annotations

from sparklog.broker.kafka.error_codes import KafkaCode
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TRANSACTIONAL_ID_PREFIX

#: The maximum length of a transactional id. Requests between brokers have the id with the prefix of its key as a name,
#: and a name has at most 255 characters.
_MAX_ID = 255 - len(TRANSACTIONAL_ID_PREFIX)
#: The first version of Produce with TRANSACTION_ABORTABLE, and the first one with CONCURRENT_TRANSACTIONS (KIP-890).
_ABORTABLE_FROM, _CONCURRENT_FROM = 11, 12
#: Retriable errors of a transaction's coordinator. Clients do not expect them in a response to Produce.
_COORDINATOR_ERRORS = frozenset(
    {ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)


def transaction_key(transactional_id: str) -> str:
    """Return the key of a transactional id in the transaction coordinator."""
    return TRANSACTIONAL_ID_PREFIX + transactional_id


def check_transactional_id(name: str) -> None:
    """Check the length of a transactional id.

    Raises:
        BrokerError: INVALID_REQUEST, the id is empty or too long.
    """
    if not 1 <= len(name) <= _MAX_ID:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"a transactional id of 1 to {_MAX_ID} characters expected")


def transaction_code(code: int, *, fences: bool) -> int:
    """Return Kafka's error code for an error code of the transaction coordinator.

    ``fences`` means that clients know the error PRODUCER_FENCED in responses of this version (KIP-588). Otherwise the
    result is INVALID_PRODUCER_EPOCH in its place.
    """
    if code == ErrorCode.INVALID_PRODUCER_EPOCH and fences:
        return int(KafkaCode.PRODUCER_FENCED)
    return int(KafkaCode.INVALID_PRODUCER_ID_MAPPING) if code == ErrorCode.UNKNOWN_PRODUCER_ID else code


def produce_code(code: int, version: int) -> int:
    """Return Kafka's error code for an error of a transactional Produce request of this version."""
    if code == ErrorCode.INVALID_TXN_STATE and version >= _ABORTABLE_FROM:
        return int(KafkaCode.TRANSACTION_ABORTABLE)
    if code in _COORDINATOR_ERRORS or (code == ErrorCode.CONCURRENT_TRANSACTIONS and version < _CONCURRENT_FROM):
        return int(ErrorCode.NOT_ENOUGH_REPLICAS)
    return transaction_code(code, fences=False)
