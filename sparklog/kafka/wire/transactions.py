"""The messages of idempotent and transactional producers."""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import array, boolean, int16, int32, int64, message, string, struct


@message(ApiKey.INIT_PRODUCER_ID, "0-5", flexible="2+")
class InitProducerIdRequest:
    """A request for a producer id and epoch."""

    transactional_id: str | None = string("0+", nullable="0+")
    transaction_timeout_ms: int = int32("0+")
    producer_id: int = int64("3+", default=-1)
    producer_epoch: int = int16("3+", default=-1)


@message(ApiKey.INIT_PRODUCER_ID, "0-5", flexible="2+")
class InitProducerIdResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    producer_id: int = int64("0+", default=-1)
    producer_epoch: int = int16("0+")


@struct
class AddPartitionsToTxnTopic:
    name: str = string("0+")
    partitions: list[int] = array(int32, "0+")


@struct
class AddPartitionsToTxnTransaction:
    transactional_id: str = string("4+")
    producer_id: int = int64("4+")
    producer_epoch: int = int16("4+")
    verify_only: bool = boolean("4+")
    topics: list[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic, "4+")


@message(ApiKey.ADD_PARTITIONS_TO_TXN, "0-5", flexible="3+")
class AddPartitionsToTxnRequest:
    """A request to add partitions to transactions."""

    transactions: list[AddPartitionsToTxnTransaction] = array(AddPartitionsToTxnTransaction, "4+")
    v3_and_below_transactional_id: str = string("0-3")
    v3_and_below_producer_id: int = int64("0-3")
    v3_and_below_producer_epoch: int = int16("0-3")
    v3_and_below_topics: list[AddPartitionsToTxnTopic] = array(AddPartitionsToTxnTopic, "0-3")


@struct
class AddPartitionsToTxnPartitionResult:
    partition_index: int = int32("0+")
    partition_error_code: int = int16("0+")


@struct
class AddPartitionsToTxnTopicResult:
    name: str = string("0+")
    results_by_partition: list[AddPartitionsToTxnPartitionResult] = array(AddPartitionsToTxnPartitionResult, "0+")


@struct
class AddPartitionsToTxnResult:
    transactional_id: str = string("4+")
    topic_results: list[AddPartitionsToTxnTopicResult] = array(AddPartitionsToTxnTopicResult, "4+")


@message(ApiKey.ADD_PARTITIONS_TO_TXN, "0-5", flexible="3+")
class AddPartitionsToTxnResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("4+")
    results_by_transaction: list[AddPartitionsToTxnResult] = array(AddPartitionsToTxnResult, "4+")
    results_by_topic_v3_and_below: list[AddPartitionsToTxnTopicResult] = array(AddPartitionsToTxnTopicResult, "0-3")


@message(ApiKey.ADD_OFFSETS_TO_TXN, "0-4", flexible="3+")
class AddOffsetsToTxnRequest:
    """A request to add the offsets of a group to a transaction."""

    transactional_id: str = string("0+")
    producer_id: int = int64("0+")
    producer_epoch: int = int16("0+")
    group_id: str = string("0+")


@message(ApiKey.ADD_OFFSETS_TO_TXN, "0-4", flexible="3+")
class AddOffsetsToTxnResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")


@struct
class TxnOffsetCommitRequestPartition:
    partition_index: int = int32("0+")
    committed_offset: int = int64("0+")
    committed_leader_epoch: int = int32("2+", default=-1)
    committed_metadata: str | None = string("0+", nullable="0+")


@struct
class TxnOffsetCommitRequestTopic:
    name: str = string("0+")
    partitions: list[TxnOffsetCommitRequestPartition] = array(TxnOffsetCommitRequestPartition, "0+")


@message(ApiKey.TXN_OFFSET_COMMIT, "0-5", flexible="3+")
class TxnOffsetCommitRequest:
    """A request to store a group's offsets as part of a transaction."""

    transactional_id: str = string("0+")
    group_id: str = string("0+")
    producer_id: int = int64("0+")
    producer_epoch: int = int16("0+")
    generation_id: int = int32("3+", default=-1)
    member_id: str = string("3+")
    group_instance_id: str | None = string("3+", default=None, nullable="3+")
    topics: list[TxnOffsetCommitRequestTopic] = array(TxnOffsetCommitRequestTopic, "0+")


@struct
class TxnOffsetCommitResponsePartition:
    partition_index: int = int32("0+")
    error_code: int = int16("0+")


@struct
class TxnOffsetCommitResponseTopic:
    name: str = string("0+")
    partitions: list[TxnOffsetCommitResponsePartition] = array(TxnOffsetCommitResponsePartition, "0+")


@message(ApiKey.TXN_OFFSET_COMMIT, "0-5", flexible="3+")
class TxnOffsetCommitResponse:
    throttle_time_ms: int = int32("0+")
    topics: list[TxnOffsetCommitResponseTopic] = array(TxnOffsetCommitResponseTopic, "0+")


@message(ApiKey.END_TXN, "0-5", flexible="3+")
class EndTxnRequest:
    """A request to commit or abort a transaction."""

    transactional_id: str = string("0+")
    producer_id: int = int64("0+")
    producer_epoch: int = int16("0+")
    committed: bool = boolean("0+")


@message(ApiKey.END_TXN, "0-5", flexible="3+")
class EndTxnResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    producer_id: int = int64("5+", default=-1)
    producer_epoch: int = int16("5+", default=-1)


@struct
class TopicRequest:
    name: str = string("0+")
    partition_indexes: list[int] = array(int32, "0+")


@message(ApiKey.DESCRIBE_PRODUCERS, "0", flexible="0+")
class DescribeProducersRequest:
    """A request for the producers that have written to partitions."""

    topics: list[TopicRequest] = array(TopicRequest, "0+")


@struct
class ProducerState:
    producer_id: int = int64("0+")
    producer_epoch: int = int32("0+")
    last_sequence: int = int32("0+", default=-1)
    last_timestamp: int = int64("0+", default=-1)
    coordinator_epoch: int = int32("0+")
    current_txn_start_offset: int = int64("0+", default=-1)


@struct
class PartitionResponse:
    partition_index: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", default=None, nullable="0+")
    active_producers: list[ProducerState] = array(ProducerState, "0+")


@struct
class TopicResponse:
    name: str = string("0+")
    partitions: list[PartitionResponse] = array(PartitionResponse, "0+")


@message(ApiKey.DESCRIBE_PRODUCERS, "0", flexible="0+")
class DescribeProducersResponse:
    throttle_time_ms: int = int32("0+")
    topics: list[TopicResponse] = array(TopicResponse, "0+")


@message(ApiKey.DESCRIBE_TRANSACTIONS, "0", flexible="0+")
class DescribeTransactionsRequest:
    """A request for the state of transactions."""

    transactional_ids: list[str] = array(string, "0+")


@struct
class TopicData:
    topic: str = string("0+")
    partitions: list[int] = array(int32, "0+")


@struct
class TransactionState:
    error_code: int = int16("0+")
    transactional_id: str = string("0+")
    transaction_state: str = string("0+")
    transaction_timeout_ms: int = int32("0+")
    transaction_start_time_ms: int = int64("0+")
    producer_id: int = int64("0+")
    producer_epoch: int = int16("0+")
    topics: list[TopicData] = array(TopicData, "0+")


@message(ApiKey.DESCRIBE_TRANSACTIONS, "0", flexible="0+")
class DescribeTransactionsResponse:
    throttle_time_ms: int = int32("0+")
    transaction_states: list[TransactionState] = array(TransactionState, "0+")


@message(ApiKey.LIST_TRANSACTIONS, "0-2", flexible="0+")
class ListTransactionsRequest:
    """A request for the transactions that a broker coordinates."""

    state_filters: list[str] = array(string, "0+")
    producer_id_filters: list[int] = array(int64, "0+")
    duration_filter: int = int64("1+", default=-1)
    transactional_id_pattern: str | None = string("2+", default=None, nullable="2+")


@struct
class ListedTransactionState:
    transactional_id: str = string("0+")
    producer_id: int = int64("0+")
    transaction_state: str = string("0+")


@message(ApiKey.LIST_TRANSACTIONS, "0-2", flexible="0+")
class ListTransactionsResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    unknown_state_filters: list[str] = array(string, "0+")
    transaction_states: list[ListedTransactionState] = array(ListedTransactionState, "0+")
