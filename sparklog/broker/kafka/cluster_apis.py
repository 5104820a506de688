"""Kafka's Metadata, DescribeCluster and FindCoordinator.

A response names the addresses of the listener through which the client has sent the request, as in Kafka. Kafka's
controller is a broker, and sparklog's is not. Every broker accepts the requests that Kafka sends to its controller, so
the responses name this broker as the controller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from sparklog.broker.kafka.call import Handler, KafkaCall
from sparklog.broker.kafka.error_codes import kafka_error
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import ZERO_UUID, ApiKey
from sparklog.kafka.wire.metadata import (
    Coordinator,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from sparklog.model import NO_LEADER, TRANSACTIONAL_ID_PREFIX, is_internal
from sparklog.protocol.messages import (
    CreateTopic,
    FindCoordinator,
    FindCoordinatorReply,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    TopicMetadata,
)
from sparklog.security.acls import CLUSTER_NAME, ResourceType

#: The kinds of coordinators by the key type of FindCoordinator, and the prefix of their keys in sparklog.
_COORDINATORS = {0: ("group", ""), 1: ("transaction", TRANSACTIONAL_ID_PREFIX)}
#: The number of partitions that are converted between two pauses, which takes about 1 ms. It is also the number of
#: names in one of sparklog's own requests.
_AT_ONCE = 500
#: The maximum wait for the leaders of a topic that Metadata creates.
_CREATE_MS = 5000
#: The error code of a request for the endpoints of controllers, which are no brokers in sparklog.
_UNSUPPORTED_ENDPOINT_TYPE = 115
_BROKERS = 1
#: The value of authorized operations in a response whose request does not ask for them.
_NOT_ASKED = -(2**31)


def cluster_handlers(broker: Broker) -> dict[int, Handler]:
    """Return the handlers of requests for the cluster's metadata."""
    requests = _ClusterRequests(broker)
    return {
        ApiKey.METADATA: requests.metadata,
        ApiKey.DESCRIBE_CLUSTER: requests.describe_cluster,
        ApiKey.FIND_COORDINATOR: requests.find_coordinator,
    }


class _ClusterRequests:
    """The handlers of requests for the cluster's metadata in one broker."""

    def __init__(self, broker: Broker) -> None:
        self._permissions = Permissions(broker)
        self._context = broker.context
        self._cache = broker.context.cache

    # --- Metadata ---

    async def metadata(self, call: KafkaCall, request: MetadataRequest) -> MetadataResponse:
        topics = await self._topics(call, request)
        operations = _NOT_ASKED
        if request.include_cluster_authorized_operations:
            operations = self._cluster_operations(call)
        return MetadataResponse(
            brokers=[
                MetadataResponseBroker(node_id=one.broker_id, host=one.host, port=one.port, rack=one.rack)
                for one in self._cache.shown(call.connection.listener).values()
            ],
            cluster_id=self._context.cluster_id,
            controller_id=self._controller_id(call),
            topics=topics,
            cluster_authorized_operations=operations,
        )

    async def _topics(self, call: KafkaCall, request: MetadataRequest) -> list[MetadataResponseTopic]:
        if request.topics is None or (call.version == 0 and not request.topics):
            return await self._converted(call, request, await self._describe(call, None))
        names: dict[str, None] = {}
        ids: list[bytes] = []
        for topic in request.topics:
            await call.pause()
            if topic.name is not None:  # An id has no meaning beside a name.
                names[topic.name] = None
            elif topic.topic_id != ZERO_UUID:
                ids.append(topic.topic_id)
        found = await self._describe_named(call, list(names))
        if request.allow_auto_topic_creation and self._context.config.kafka_auto_create_topics:
            found = [await self._created(call, topic) for topic in found]
        return await self._converted(call, request, found) + await self._topics_by_id(call, request, ids)

    async def _converted(
        self, call: KafkaCall, request: MetadataRequest, topics: list[TopicMetadata]
    ) -> list[MetadataResponseTopic]:
        return [await self._topic(call, request, topic) for topic in topics]

    async def _topics_by_id(
        self, call: KafkaCall, request: MetadataRequest, ids: list[bytes]
    ) -> list[MetadataResponseTopic]:
        """Return an entry for each topic id. A topic that the client may not see has the error of an unknown id."""
        names: dict[bytes, str | None] = {}
        for topic_id in ids:
            await call.pause()
            names[topic_id] = self._cache.name_of(topic_id.hex())
        described = await self._describe_named(call, [name for name in names.values() if name is not None])
        found = {topic.name: topic for topic in described if topic.code == ErrorCode.NONE}
        entries = []
        for topic_id, name in names.items():
            await call.pause()
            topic = found.get(name) if name is not None else None
            if topic is not None and topic.topic_id == topic_id.hex():
                entries.append(await self._topic(call, request, topic))
            else:
                # Until version 12 a name cannot be null.
                no_name = None if call.version >= 12 else ""
                code = ErrorCode.UNKNOWN_TOPIC_ID
                entries.append(MetadataResponseTopic(error_code=code, name=no_name, topic_id=topic_id))
        return entries

    async def _describe_named(self, call: KafkaCall, names: list[str]) -> list[TopicMetadata]:
        found: list[TopicMetadata] = []
        for first in range(0, len(names), _AT_ONCE):
            found += await self._describe(call, names[first : first + _AT_ONCE])
        return found

    async def _describe(self, call: KafkaCall, names: list[str] | None) -> list[TopicMetadata]:
        """Return the metadata of the named topics, or of all topics that the client may see."""
        found: list[TopicMetadata] = []
        start: tuple[str, int] | None = None
        while True:
            wanted = tuple(names) if names is not None else None
            reply = await call.native(Metadata(0, wanted, schemas=False, start=start))
            assert isinstance(reply, MetadataReply)
            for topic in reply.topics:
                if found and found[-1].name == topic.name and found[-1].topic_id == topic.topic_id:
                    topic = msgspec.structs.replace(topic, partitions=(*found.pop().partitions, *topic.partitions))
                found.append(topic)
            if reply.next is None:
                return found
            start = reply.next

    async def _created(self, call: KafkaCall, topic: TopicMetadata) -> TopicMetadata:
        """Create the topic if it does not exist, and return its metadata."""
        if topic.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or is_internal(topic.name):
            return topic
        try:
            await call.native(CreateTopic(0, topic.name, -1, -1, _CREATE_MS))
        except BrokerError as error:
            if error.code is ErrorCode.REQUEST_TIMED_OUT:
                return TopicMetadata(ErrorCode.LEADER_NOT_AVAILABLE, topic.name, detail=error.detail)
            if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                return TopicMetadata(error.code, topic.name, detail=error.detail)
        return (await self._describe(call, [topic.name]))[0]

    async def _topic(self, call: KafkaCall, request: MetadataRequest, topic: TopicMetadata) -> MetadataResponseTopic:
        await call.pause()
        if topic.code != ErrorCode.NONE:
            return MetadataResponseTopic(
                error_code=kafka_error(BrokerError(topic.code, topic.detail))[0],
                name=topic.name,
                is_internal=is_internal(topic.name),
            )
        live = self._cache.shown(call.connection.listener)
        operations = _NOT_ASKED
        if request.include_topic_authorized_operations:
            operations = self._permissions.operations(call, ResourceType.TOPIC, topic.name)
        partitions: list[MetadataResponsePartition] = []
        for first in range(0, len(topic.partitions), _AT_ONCE):
            if first:
                await call.pause()
            partitions += [_partition(one, live) for one in topic.partitions[first : first + _AT_ONCE]]
        return MetadataResponseTopic(
            name=topic.name,
            topic_id=bytes.fromhex(topic.topic_id),
            is_internal=is_internal(topic.name),
            partitions=partitions,
            topic_authorized_operations=operations,
        )

    def _cluster_operations(self, call: KafkaCall) -> int:
        return self._permissions.operations(call, ResourceType.CLUSTER, CLUSTER_NAME)

    def _controller_id(self, call: KafkaCall) -> int:
        shown = self._cache.shown(call.connection.listener)
        own = self._context.broker_id
        return own if own in shown else next(iter(shown), -1)

    # --- DescribeCluster ---

    async def describe_cluster(self, call: KafkaCall, request: DescribeClusterRequest) -> DescribeClusterResponse:
        if request.endpoint_type != _BROKERS:
            return DescribeClusterResponse(
                error_code=_UNSUPPORTED_ENDPOINT_TYPE,
                error_message="the controller of this cluster has no listener for Kafka clients",
                endpoint_type=request.endpoint_type,
            )
        operations = _NOT_ASKED
        if request.include_cluster_authorized_operations:
            operations = self._cluster_operations(call)
        return DescribeClusterResponse(
            cluster_id=self._context.cluster_id,
            controller_id=self._controller_id(call),
            brokers=[
                DescribeClusterBroker(broker_id=one.broker_id, host=one.host, port=one.port, rack=one.rack)
                for one in self._cache.shown(call.connection.listener).values()
            ],
            cluster_authorized_operations=operations,
        )

    # --- FindCoordinator ---

    async def find_coordinator(self, call: KafkaCall, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        if call.version >= 4:
            return FindCoordinatorResponse(
                coordinators=await self._coordinators(call, request.key_type, request.coordinator_keys)
            )
        only = (await self._coordinators(call, request.key_type, [request.key]))[0]
        return FindCoordinatorResponse(
            error_code=only.error_code,
            error_message=only.error_message,
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )

    async def _coordinators(self, call: KafkaCall, key_type: int, keys: Iterable[str]) -> list[Coordinator]:
        found: list[Coordinator] = []
        for key in keys:
            await call.pause()
            last = found[-1] if found else None
            if last is not None and last.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:
                # The first failure has waited for the coordinators, and the others fail for the same reason.
                found.append(_no_coordinator(key, last.error_code, last.error_message))
            else:
                found.append(await self._coordinator(call, key_type, key))
        return found

    async def _coordinator(self, call: KafkaCall, key_type: int, key: str) -> Coordinator:
        if key_type not in _COORDINATORS:
            return _no_coordinator(key, ErrorCode.INVALID_REQUEST, f"key type {key_type} found, expected 0 or 1")
        kind, beginning = _COORDINATORS[key_type]
        try:
            reply = await call.native(FindCoordinator(0, kind, beginning + key))
        except BrokerError as error:
            return _no_coordinator(key, *kafka_error(error))
        assert isinstance(reply, FindCoordinatorReply)
        broker = reply.broker
        return Coordinator(key=key, node_id=broker.broker_id, host=broker.host, port=broker.port, error_message=None)


def _no_coordinator(key: str, code: int, text: str | None) -> Coordinator:
    return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=code, error_message=text)


def _partition(partition: PartitionMetadata, live: dict[int, Any]) -> MetadataResponsePartition:
    has_leader = partition.leader in live
    return MetadataResponsePartition(
        error_code=ErrorCode.NONE if has_leader else ErrorCode.LEADER_NOT_AVAILABLE,
        partition_index=partition.partition,
        leader_id=partition.leader if has_leader else NO_LEADER,
        leader_epoch=partition.leader_epoch,
        replica_nodes=list(partition.replicas),
        isr_nodes=list(partition.isr),
        offline_replicas=[replica for replica in partition.replicas if replica not in live],
    )
