"""The messages of administrators: topics, partitions, records, settings, replicas and quotas."""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import array, boolean, float64, int8, int16, int32, int64, message, string, struct, uuid


@struct
class CreatableReplicaAssignment:
    partition_index: int = int32("0+")
    broker_ids: list[int] = array(int32, "0+")


@struct
class CreatableTopicConfig:
    name: str = string("0+")
    value: str | None = string("0+", nullable="0+")


@struct
class CreatableTopic:
    name: str = string("0+")
    num_partitions: int = int32("0+")
    replication_factor: int = int16("0+")
    assignments: list[CreatableReplicaAssignment] = array(CreatableReplicaAssignment, "0+")
    configs: list[CreatableTopicConfig] = array(CreatableTopicConfig, "0+")


@message(ApiKey.CREATE_TOPICS, "2-7", flexible="5+")
class CreateTopicsRequest:
    """A request to create topics."""

    topics: list[CreatableTopic] = array(CreatableTopic, "0+")
    timeout_ms: int = int32("0+", default=60000)
    validate_only: bool = boolean("1+")


@struct
class CreatableTopicConfigs:
    name: str = string("5+")
    value: str | None = string("5+", nullable="5+")
    read_only: bool = boolean("5+")
    config_source: int = int8("5+", default=-1)
    is_sensitive: bool = boolean("5+")


@struct
class CreatableTopicResult:
    name: str = string("0+")
    topic_id: bytes = uuid("7+")
    error_code: int = int16("0+")
    error_message: str | None = string("1+", nullable="1+")
    topic_config_error_code: int = int16("5+", tag=0)
    num_partitions: int = int32("5+", default=-1)
    replication_factor: int = int16("5+", default=-1)
    configs: list[CreatableTopicConfigs] | None = array(CreatableTopicConfigs, "5+", nullable="5+")


@message(ApiKey.CREATE_TOPICS, "2-7", flexible="5+")
class CreateTopicsResponse:
    throttle_time_ms: int = int32("2+")
    topics: list[CreatableTopicResult] = array(CreatableTopicResult, "0+")


@struct
class DeleteTopicState:
    name: str | None = string("6+", default=None, nullable="6+")
    topic_id: bytes = uuid("6+")


@message(ApiKey.DELETE_TOPICS, "1-6", flexible="4+")
class DeleteTopicsRequest:
    """A request to delete topics by name. From version 6 on a topic's id may replace its name."""

    topics: list[DeleteTopicState] = array(DeleteTopicState, "6+")
    topic_names: list[str] = array(string, "0-5")
    timeout_ms: int = int32("0+")


@struct
class DeletableTopicResult:
    name: str | None = string("0+", nullable="6+")
    topic_id: bytes = uuid("6+")
    error_code: int = int16("0+")
    error_message: str | None = string("5+", default=None, nullable="5+")


@message(ApiKey.DELETE_TOPICS, "1-6", flexible="4+")
class DeleteTopicsResponse:
    throttle_time_ms: int = int32("1+")
    responses: list[DeletableTopicResult] = array(DeletableTopicResult, "0+")


@struct
class CreatePartitionsAssignment:
    broker_ids: list[int] = array(int32, "0+")


@struct
class CreatePartitionsTopic:
    name: str = string("0+")
    count: int = int32("0+")
    assignments: list[CreatePartitionsAssignment] | None = array(CreatePartitionsAssignment, "0+", nullable="0+")


@message(ApiKey.CREATE_PARTITIONS, "0-3", flexible="2+")
class CreatePartitionsRequest:
    """A request to add partitions to topics. ``count`` is the new total."""

    topics: list[CreatePartitionsTopic] = array(CreatePartitionsTopic, "0+")
    timeout_ms: int = int32("0+")
    validate_only: bool = boolean("0+")


@struct
class CreatePartitionsTopicResult:
    name: str = string("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", default=None, nullable="0+")


@message(ApiKey.CREATE_PARTITIONS, "0-3", flexible="2+")
class CreatePartitionsResponse:
    throttle_time_ms: int = int32("0+")
    results: list[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult, "0+")


@struct
class DeleteRecordsPartition:
    partition_index: int = int32("0+")
    offset: int = int64("0+")


@struct
class DeleteRecordsTopic:
    name: str = string("0+")
    partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition, "0+")


@message(ApiKey.DELETE_RECORDS, "0-2", flexible="2+")
class DeleteRecordsRequest:
    """A request to delete the records before given offsets."""

    topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic, "0+")
    timeout_ms: int = int32("0+")


@struct
class DeleteRecordsPartitionResult:
    partition_index: int = int32("0+")
    low_watermark: int = int64("0+")
    error_code: int = int16("0+")


@struct
class DeleteRecordsTopicResult:
    name: str = string("0+")
    partitions: list[DeleteRecordsPartitionResult] = array(DeleteRecordsPartitionResult, "0+")


@message(ApiKey.DELETE_RECORDS, "0-2", flexible="2+")
class DeleteRecordsResponse:
    throttle_time_ms: int = int32("0+")
    topics: list[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult, "0+")


@struct
class DescribeConfigsResource:
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    configuration_keys: list[str] | None = array(string, "0+", nullable="0+")


@message(ApiKey.DESCRIBE_CONFIGS, "1-4", flexible="4+")
class DescribeConfigsRequest:
    """A request for the settings of topics and brokers."""

    resources: list[DescribeConfigsResource] = array(DescribeConfigsResource, "0+")
    include_synonyms: bool = boolean("1+")
    include_documentation: bool = boolean("3+")


@struct
class DescribeConfigsSynonym:
    name: str = string("1+")
    value: str | None = string("1+", nullable="1+")
    source: int = int8("1+")


@struct
class DescribeConfigsResourceResult:
    name: str = string("0+")
    value: str | None = string("0+", nullable="0+")
    read_only: bool = boolean("0+")
    config_source: int = int8("1+", default=-1)
    is_sensitive: bool = boolean("0+")
    synonyms: list[DescribeConfigsSynonym] = array(DescribeConfigsSynonym, "1+")
    config_type: int = int8("3+")
    documentation: str | None = string("3+", nullable="3+")


@struct
class DescribeConfigsResult:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    configs: list[DescribeConfigsResourceResult] = array(DescribeConfigsResourceResult, "0+")


@message(ApiKey.DESCRIBE_CONFIGS, "1-4", flexible="4+")
class DescribeConfigsResponse:
    throttle_time_ms: int = int32("0+")
    results: list[DescribeConfigsResult] = array(DescribeConfigsResult, "0+")


@struct
class AlterableConfig:
    name: str = string("0+")
    value: str | None = string("0+", nullable="0+")


@struct
class AlterConfigsResource:
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    configs: list[AlterableConfig] = array(AlterableConfig, "0+")


@message(ApiKey.ALTER_CONFIGS, "0-2", flexible="2+")
class AlterConfigsRequest:
    """A request to replace all settings of topics or brokers."""

    resources: list[AlterConfigsResource] = array(AlterConfigsResource, "0+")
    validate_only: bool = boolean("0+")


@struct
class AlterConfigsResourceResponse:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    resource_type: int = int8("0+")
    resource_name: str = string("0+")


@message(ApiKey.ALTER_CONFIGS, "0-2", flexible="2+")
class AlterConfigsResponse:
    throttle_time_ms: int = int32("0+")
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse, "0+")


@struct
class IncrementalAlterableConfig:
    name: str = string("0+")
    config_operation: int = int8("0+")
    value: str | None = string("0+", nullable="0+")


@struct
class IncrementalAlterConfigsResource:
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    configs: list[IncrementalAlterableConfig] = array(IncrementalAlterableConfig, "0+")


@message(ApiKey.INCREMENTAL_ALTER_CONFIGS, "0-1", flexible="1+")
class IncrementalAlterConfigsRequest:
    """A request to set (0), delete (1), append to (2) or subtract from (3) single settings."""

    resources: list[IncrementalAlterConfigsResource] = array(IncrementalAlterConfigsResource, "0+")
    validate_only: bool = boolean("0+")


@message(ApiKey.INCREMENTAL_ALTER_CONFIGS, "0-1", flexible="1+")
class IncrementalAlterConfigsResponse:
    throttle_time_ms: int = int32("0+")
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse, "0+")


@message(ApiKey.LIST_CONFIG_RESOURCES, "0-1", flexible="0+")
class ListConfigResourcesRequest:
    """A request for the names of resources that have settings."""

    resource_types: list[int] = array(int8, "1+")


@struct
class ConfigResource:
    resource_name: str = string("0+")
    resource_type: int = int8("1+", default=16)


@message(ApiKey.LIST_CONFIG_RESOURCES, "0-1", flexible="0+")
class ListConfigResourcesResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    config_resources: list[ConfigResource] = array(ConfigResource, "0+")


@struct
class DescribableLogDirTopic:
    topic: str = string("0+")
    partitions: list[int] = array(int32, "0+")


@message(ApiKey.DESCRIBE_LOG_DIRS, "1-4", flexible="2+")
class DescribeLogDirsRequest:
    """A request for a broker's log directories and the sizes of the replicas in them."""

    topics: list[DescribableLogDirTopic] | None = array(DescribableLogDirTopic, "0+", nullable="0+")


@struct
class DescribeLogDirsPartition:
    partition_index: int = int32("0+")
    partition_size: int = int64("0+")
    offset_lag: int = int64("0+")
    is_future_key: bool = boolean("0+")


@struct
class DescribeLogDirsTopic:
    name: str = string("0+")
    partitions: list[DescribeLogDirsPartition] = array(DescribeLogDirsPartition, "0+")


@struct
class DescribeLogDirsResult:
    error_code: int = int16("0+")
    log_dir: str = string("0+")
    topics: list[DescribeLogDirsTopic] = array(DescribeLogDirsTopic, "0+")
    total_bytes: int = int64("4+", default=-1)
    usable_bytes: int = int64("4+", default=-1)


@message(ApiKey.DESCRIBE_LOG_DIRS, "1-4", flexible="2+")
class DescribeLogDirsResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("3+")
    results: list[DescribeLogDirsResult] = array(DescribeLogDirsResult, "0+")


@struct
class TopicPartitions:
    topic: str = string("0+")
    partitions: list[int] = array(int32, "0+")


@message(ApiKey.ELECT_LEADERS, "0-2", flexible="2+")
class ElectLeadersRequest:
    """A request to elect the preferred leaders of partitions (type 0), or unclean leaders (type 1)."""

    election_type: int = int8("1+")
    topic_partitions: list[TopicPartitions] | None = array(TopicPartitions, "0+", nullable="0+")
    timeout_ms: int = int32("0+", default=60000)


@struct
class PartitionResult:
    partition_id: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")


@struct
class ReplicaElectionResult:
    topic: str = string("0+")
    partition_result: list[PartitionResult] = array(PartitionResult, "0+")


@message(ApiKey.ELECT_LEADERS, "0-2", flexible="2+")
class ElectLeadersResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("1+")
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult, "0+")


@struct
class ReassignablePartition:
    partition_index: int = int32("0+")
    replicas: list[int] | None = array(int32, "0+", default=None, nullable="0+")


@struct
class ReassignableTopic:
    name: str = string("0+")
    partitions: list[ReassignablePartition] = array(ReassignablePartition, "0+")


@message(ApiKey.ALTER_PARTITION_REASSIGNMENTS, "0-1", flexible="0+")
class AlterPartitionReassignmentsRequest:
    """A request to move replicas, or to cancel moves."""

    timeout_ms: int = int32("0+", default=60000)
    allow_replication_factor_change: bool = boolean("1+", default=True)
    topics: list[ReassignableTopic] = array(ReassignableTopic, "0+")


@struct
class ReassignablePartitionResponse:
    partition_index: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")


@struct
class ReassignableTopicResponse:
    name: str = string("0+")
    partitions: list[ReassignablePartitionResponse] = array(ReassignablePartitionResponse, "0+")


@message(ApiKey.ALTER_PARTITION_REASSIGNMENTS, "0-1", flexible="0+")
class AlterPartitionReassignmentsResponse:
    throttle_time_ms: int = int32("0+")
    allow_replication_factor_change: bool = boolean("1+", default=True)
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    responses: list[ReassignableTopicResponse] = array(ReassignableTopicResponse, "0+")


@struct
class ListPartitionReassignmentsTopics:
    name: str = string("0+")
    partition_indexes: list[int] = array(int32, "0+")


@message(ApiKey.LIST_PARTITION_REASSIGNMENTS, "0", flexible="0+")
class ListPartitionReassignmentsRequest:
    """A request for the moves of replicas in progress."""

    timeout_ms: int = int32("0+", default=60000)
    topics: list[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, "0+", default=None, nullable="0+"
    )


@struct
class OngoingPartitionReassignment:
    partition_index: int = int32("0+")
    replicas: list[int] = array(int32, "0+")
    adding_replicas: list[int] = array(int32, "0+")
    removing_replicas: list[int] = array(int32, "0+")


@struct
class OngoingTopicReassignment:
    name: str = string("0+")
    partitions: list[OngoingPartitionReassignment] = array(OngoingPartitionReassignment, "0+")


@message(ApiKey.LIST_PARTITION_REASSIGNMENTS, "0", flexible="0+")
class ListPartitionReassignmentsResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    topics: list[OngoingTopicReassignment] = array(OngoingTopicReassignment, "0+")


@struct
class ComponentData:
    entity_type: str = string("0+")
    match_type: int = int8("0+")
    match: str | None = string("0+", nullable="0+")


@message(ApiKey.DESCRIBE_CLIENT_QUOTAS, "0-1", flexible="1+")
class DescribeClientQuotasRequest:
    """A request for the quotas of users and clients."""

    components: list[ComponentData] = array(ComponentData, "0+")
    strict: bool = boolean("0+")


@struct
class EntityData:
    entity_type: str = string("0+")
    entity_name: str | None = string("0+", nullable="0+")


@struct
class ValueData:
    key: str = string("0+")
    value: float = float64("0+")


@struct
class DescribeClientQuotasEntryData:
    entity: list[EntityData] = array(EntityData, "0+")
    values: list[ValueData] = array(ValueData, "0+")


@message(ApiKey.DESCRIBE_CLIENT_QUOTAS, "0-1", flexible="1+")
class DescribeClientQuotasResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    entries: list[DescribeClientQuotasEntryData] | None = array(DescribeClientQuotasEntryData, "0+", nullable="0+")


@struct
class OpData:
    key: str = string("0+")
    value: float = float64("0+")
    remove: bool = boolean("0+")


@struct
class AlterClientQuotasEntryData:
    entity: list[EntityData] = array(EntityData, "0+")
    ops: list[OpData] = array(OpData, "0+")


@message(ApiKey.ALTER_CLIENT_QUOTAS, "0-1", flexible="1+")
class AlterClientQuotasRequest:
    """A request to set or remove quotas of users and clients."""

    entries: list[AlterClientQuotasEntryData] = array(AlterClientQuotasEntryData, "0+")
    validate_only: bool = boolean("0+")


@struct
class AlterClientQuotasResponseEntryData:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    entity: list[EntityData] = array(EntityData, "0+")


@message(ApiKey.ALTER_CLIENT_QUOTAS, "0-1", flexible="1+")
class AlterClientQuotasResponse:
    throttle_time_ms: int = int32("0+")
    entries: list[AlterClientQuotasResponseEntryData] = array(AlterClientQuotasResponseEntryData, "0+")
