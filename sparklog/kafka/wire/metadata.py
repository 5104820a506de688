"""The messages about the cluster's metadata: versions, brokers, topics, partitions and coordinators."""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import array, boolean, int8, int16, int32, int64, message, nested, string, struct, uuid


@message(ApiKey.API_VERSIONS, "0-4", flexible="3+")
class ApiVersionsRequest:
    """A request for the APIs and versions that a broker supports. Clients send it first on a connection."""

    client_software_name: str = string("3+")
    client_software_version: str = string("3+")


@struct
class ApiVersion:
    api_key: int = int16("0+")
    min_version: int = int16("0+")
    max_version: int = int16("0+")


@struct
class SupportedFeatureKey:
    name: str = string("3+")
    min_version: int = int16("3+")
    max_version: int = int16("3+")


@struct
class FinalizedFeatureKey:
    name: str = string("3+")
    max_version_level: int = int16("3+")
    min_version_level: int = int16("3+")


@message(ApiKey.API_VERSIONS, "0-4", flexible="3+")
class ApiVersionsResponse:
    error_code: int = int16("0+")
    api_keys: list[ApiVersion] = array(ApiVersion, "0+")
    throttle_time_ms: int = int32("1+")
    supported_features: list[SupportedFeatureKey] = array(SupportedFeatureKey, "3+", tag=0)
    finalized_features_epoch: int = int64("3+", default=-1, tag=1)
    finalized_features: list[FinalizedFeatureKey] = array(FinalizedFeatureKey, "3+", tag=2)
    zk_migration_ready: bool = boolean("3+", tag=3)


@struct
class MetadataRequestTopic:
    topic_id: bytes = uuid("10+")
    name: str | None = string("0+", nullable="10+")


@message(ApiKey.METADATA, "0-13", flexible="9+")
class MetadataRequest:
    """A request for brokers, topics and partitions. If ``topics`` is None, it asks for all topics."""

    topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, "0+", nullable="1+")
    allow_auto_topic_creation: bool = boolean("4+", default=True)
    include_cluster_authorized_operations: bool = boolean("8-10")
    include_topic_authorized_operations: bool = boolean("8+")


@struct
class MetadataResponseBroker:
    node_id: int = int32("0+")
    host: str = string("0+")
    port: int = int32("0+")
    rack: str | None = string("1+", default=None, nullable="1+")


@struct
class MetadataResponsePartition:
    error_code: int = int16("0+")
    partition_index: int = int32("0+")
    leader_id: int = int32("0+")
    leader_epoch: int = int32("7+", default=-1)
    replica_nodes: list[int] = array(int32, "0+")
    isr_nodes: list[int] = array(int32, "0+")
    offline_replicas: list[int] = array(int32, "5+")


@struct
class MetadataResponseTopic:
    error_code: int = int16("0+")
    name: str | None = string("0+", nullable="12+")
    topic_id: bytes = uuid("10+")
    is_internal: bool = boolean("1+")
    partitions: list[MetadataResponsePartition] = array(MetadataResponsePartition, "0+")
    topic_authorized_operations: int = int32("8+", default=-0x80000000)


@message(ApiKey.METADATA, "0-13", flexible="9+")
class MetadataResponse:
    throttle_time_ms: int = int32("3+")
    brokers: list[MetadataResponseBroker] = array(MetadataResponseBroker, "0+")
    cluster_id: str | None = string("2+", default=None, nullable="2+")
    controller_id: int = int32("1+", default=-1)
    topics: list[MetadataResponseTopic] = array(MetadataResponseTopic, "0+")
    cluster_authorized_operations: int = int32("8-10", default=-0x80000000)
    error_code: int = int16("13+")


@message(ApiKey.DESCRIBE_CLUSTER, "0-2", flexible="0+")
class DescribeClusterRequest:
    """A request for the brokers of the cluster."""

    include_cluster_authorized_operations: bool = boolean("0+")
    endpoint_type: int = int8("1+", default=1)
    include_fenced_brokers: bool = boolean("2+")


@struct
class DescribeClusterBroker:
    broker_id: int = int32("0+")
    host: str = string("0+")
    port: int = int32("0+")
    rack: str | None = string("0+", default=None, nullable="0+")
    is_fenced: bool = boolean("2+")


@message(ApiKey.DESCRIBE_CLUSTER, "0-2", flexible="0+")
class DescribeClusterResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", default=None, nullable="0+")
    endpoint_type: int = int8("1+", default=1)
    cluster_id: str = string("0+")
    controller_id: int = int32("0+", default=-1)
    brokers: list[DescribeClusterBroker] = array(DescribeClusterBroker, "0+")
    cluster_authorized_operations: int = int32("0+", default=-0x80000000)


@struct
class TopicRequest:
    name: str = string("0+")


@struct
class Cursor:
    topic_name: str = string("0+")
    partition_index: int = int32("0+")


@message(ApiKey.DESCRIBE_TOPIC_PARTITIONS, "0", flexible="0+")
class DescribeTopicPartitionsRequest:
    """A request for one page of the partitions of topics."""

    topics: list[TopicRequest] = array(TopicRequest, "0+")
    response_partition_limit: int = int32("0+", default=2000)
    cursor: Cursor | None = nested(Cursor, "0+", default=None, nullable="0+")


@struct
class DescribeTopicPartitionsResponsePartition:
    error_code: int = int16("0+")
    partition_index: int = int32("0+")
    leader_id: int = int32("0+")
    leader_epoch: int = int32("0+", default=-1)
    replica_nodes: list[int] = array(int32, "0+")
    isr_nodes: list[int] = array(int32, "0+")
    eligible_leader_replicas: list[int] | None = array(int32, "0+", default=None, nullable="0+")
    last_known_elr: list[int] | None = array(int32, "0+", default=None, nullable="0+")
    offline_replicas: list[int] = array(int32, "0+")


@struct
class DescribeTopicPartitionsResponseTopic:
    error_code: int = int16("0+")
    name: str | None = string("0+", nullable="0+")
    topic_id: bytes = uuid("0+")
    is_internal: bool = boolean("0+")
    partitions: list[DescribeTopicPartitionsResponsePartition] = array(DescribeTopicPartitionsResponsePartition, "0+")
    topic_authorized_operations: int = int32("0+", default=-0x80000000)


@message(ApiKey.DESCRIBE_TOPIC_PARTITIONS, "0", flexible="0+")
class DescribeTopicPartitionsResponse:
    throttle_time_ms: int = int32("0+")
    topics: list[DescribeTopicPartitionsResponseTopic] = array(DescribeTopicPartitionsResponseTopic, "0+")
    next_cursor: Cursor | None = nested(Cursor, "0+", default=None, nullable="0+")


@message(ApiKey.FIND_COORDINATOR, "0-6", flexible="3+")
class FindCoordinatorRequest:
    """A request for the coordinators of groups (key type 0) or transactional ids (key type 1)."""

    key: str = string("0-3")
    key_type: int = int8("1+")
    coordinator_keys: list[str] = array(string, "4+")


@struct
class Coordinator:
    key: str = string("4+")
    node_id: int = int32("4+")
    host: str = string("4+")
    port: int = int32("4+")
    error_code: int = int16("4+")
    error_message: str | None = string("4+", nullable="4+")


@message(ApiKey.FIND_COORDINATOR, "0-6", flexible="3+")
class FindCoordinatorResponse:
    throttle_time_ms: int = int32("1+")
    error_code: int = int16("0-3")
    error_message: str | None = string("1-3", nullable="1-3")
    node_id: int = int32("0-3")
    host: str = string("0-3")
    port: int = int32("0-3")
    coordinators: list[Coordinator] = array(Coordinator, "4+")
