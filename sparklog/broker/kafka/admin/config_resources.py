"""ListConfigResources requests of Kafka clients: the names of the resources that have settings. Source: KIP-1142."""

from __future__ import annotations

from sparklog.broker.kafka.admin.describe_configs import ConfigResource
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import admin as wire
from sparklog.model import is_internal
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType

#: Types of Kafka whose resources have no settings in sparklog.
_EMPTY = frozenset({ConfigResource.BROKER_LOGGER, ConfigResource.CLIENT_METRICS, ConfigResource.GROUP})


class ListConfigResourcesHandler:
    """The handler of ListConfigResources."""

    def __init__(self, broker: Broker, permissions: Permissions) -> None:
        self._cache = broker.context.cache
        self._permissions = permissions

    async def handle(
        self, call: KafkaCall, request: wire.ListConfigResourcesRequest
    ) -> wire.ListConfigResourcesResponse:
        self._permissions.require(
            call, "ListConfigResources", Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME
        )
        # Version 0 is only for the settings of clients' metrics.
        kinds = request.resource_types or (
            [ConfigResource.CLIENT_METRICS] if call.version == 0 else [ConfigResource.TOPIC, ConfigResource.BROKER]
        )
        names = {
            ConfigResource.TOPIC: sorted(name for name in self._cache.topics() if not is_internal(name)),
            ConfigResource.BROKER: [str(broker.broker_id) for broker in self._cache.brokers],
        }
        found: list[wire.ConfigResource] = []
        for kind in dict.fromkeys(kinds):
            if kind not in names and kind not in _EMPTY:
                raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, f"resources of type {kind} are unknown")
            listed = names.get(ConfigResource(kind), [])
            found += [wire.ConfigResource(resource_name=name, resource_type=kind) for name in listed]
        return wire.ListConfigResourcesResponse(config_resources=found)
