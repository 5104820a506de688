"""IncrementalAlterConfigs and AlterConfigs requests of Kafka clients.

Both change the settings of topics. AlterConfigs lists all settings that a topic should have, and resets all other
settings.

The settings of a broker are fixed when it starts, so a request that sets one is refused. A request that only resets
settings of a broker succeeds without an effect, because ``kafka-reassign-partitions`` sends such requests to reset
Kafka's throttles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from typing import TypeVar

from sparklog.broker.kafka.admin.config_names import LISTS, READ_ONLY, is_stored, native_value, settings_to_set
from sparklog.broker.kafka.admin.describe_configs import ConfigResource
from sparklog.broker.kafka.admin.item_errors import FAILURES, SUCCESS, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.broker.requests.alter_topic import AlterTopicRequests
from sparklog.config import TOPIC_SETTINGS
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from sparklog.model import check_topic_name
from sparklog.protocol.messages import AlterTopic
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType

_Resource = TypeVar("_Resource", AlterConfigsResource, IncrementalAlterConfigsResource)
#: The timeout of sparklog's own requests, because Kafka's requests have none. A Kafka client waits for 30 seconds by
#: default.
_TIMEOUT_MS = 25_000


class _Change(IntEnum):
    """The kinds of changes of one setting. Source: Kafka's ``AlterConfigOp.OpType``."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AlterConfigsHandlers:
    """The handlers of IncrementalAlterConfigs and AlterConfigs."""

    def __init__(self, broker: Broker, permissions: Permissions) -> None:
        self._cache = broker.context.cache
        self._requests = AlterTopicRequests(broker.context, broker.registry)
        self._permissions = permissions

    async def alter_incrementally(
        self, call: KafkaCall, request: IncrementalAlterConfigsRequest
    ) -> IncrementalAlterConfigsResponse:
        async def alter(resource: IncrementalAlterConfigsResource) -> None:
            check_unique(config.name for config in resource.configs)
            if resource.resource_type == ConfigResource.BROKER:
                kept = [config.name for config in resource.configs if config.config_operation != _Change.DELETE]
                self._refuse_broker_settings(call, kept)
                return
            config, unset = self._changes(resource.resource_name, resource.configs)
            await self._alter_topic(call, resource.resource_name, config, unset, validate_only=request.validate_only)

        return IncrementalAlterConfigsResponse(responses=await _attempt_all(call, request.resources, alter))

    async def alter(self, call: KafkaCall, request: AlterConfigsRequest) -> AlterConfigsResponse:
        async def alter(resource: AlterConfigsResource) -> None:
            check_unique(config.name for config in resource.configs)
            if resource.resource_type == ConfigResource.BROKER:
                self._refuse_broker_settings(call, [config.name for config in resource.configs])
                return
            config = settings_to_set((one.name, one.value) for one in resource.configs)
            topic = self._cache.topic(resource.resource_name)
            own = topic.change.config.keys() if topic is not None else frozenset()
            unset = sorted(own - config.keys() - READ_ONLY)
            await self._alter_topic(call, resource.resource_name, config, unset, validate_only=request.validate_only)

        return AlterConfigsResponse(responses=await _attempt_all(call, request.resources, alter))

    def _changes(self, topic: str, configs: Iterable[IncrementalAlterableConfig]) -> tuple[dict[str, str], list[str]]:
        """Return the settings that the request sets, and the names of those that it resets. Raises BrokerError."""
        settings: dict[str, str] = {}
        unset: list[str] = []
        for one in configs:
            if one.config_operation == _Change.DELETE:
                if is_stored(one.name, None):
                    unset.append(one.name)
            elif one.value is None:
                raise BrokerError(ErrorCode.INVALID_REQUEST, f"setting {one.name[:100]!r} has no value")
            elif one.config_operation == _Change.SET:
                if is_stored(one.name, one.value):
                    settings[one.name] = native_value(one.name, one.value)
            elif one.config_operation in {_Change.APPEND, _Change.SUBTRACT}:
                settings[one.name] = self._merged(topic, one, one.value)
            else:
                detail = f"setting {one.name[:100]!r}: unknown kind of change {one.config_operation}"
                raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        return settings, unset

    def _merged(self, topic: str, change: IncrementalAlterableConfig, value: str) -> str:
        """Return the current list of a setting with the elements of ``value`` added or removed. Raises BrokerError."""
        if change.name not in LISTS:
            detail = f"setting {change.name[:100]!r} is no list, so nothing can be appended or subtracted"
            raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
        setting = TOPIC_SETTINGS[change.name]
        known = self._cache.topic(topic)
        present = getattr(known.config, setting.field) if known is not None else setting.default
        elements = [one for one in present.split(",") if one]
        named = [one for one in native_value(change.name, value).split(",") if one]
        if change.config_operation == _Change.APPEND:
            return ",".join([*elements, *(one for one in named if one not in elements)])
        return ",".join(one for one in elements if one not in named)

    async def _alter_topic(
        self, call: KafkaCall, topic: str, config: dict[str, str], unset: Sequence[str], *, validate_only: bool
    ) -> None:
        native = AlterTopic(0, topic, config, tuple(unset), _TIMEOUT_MS)
        bad_name = check_topic_name(topic)
        if validate_only or bad_name:
            self._permissions.require_rule(call, native)
            if bad_name:
                raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad_name)
            await self._requests.check(native)
        else:
            await call.native(native)

    def _refuse_broker_settings(self, call: KafkaCall, names: Sequence[str]) -> None:
        """Check the client's permission, and raise BrokerError if it wants to set any settings of a broker."""
        self._permissions.require(call, "AlterConfigs", Operation.ALTER_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME)
        if names:
            detail = f"Cannot update these configs dynamically: {', '.join(sorted(names))[:500]}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)


def check_unique(names: Iterable[str]) -> None:
    """Raise BrokerError INVALID_REQUEST if a name occurs twice."""
    name, count = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"setting {name[:100]!r} is named more than once")


async def _attempt_all(
    call: KafkaCall, resources: Sequence[_Resource], alter: Callable[[_Resource], Awaitable[None]]
) -> list[AlterConfigsResourceResponse]:
    """Alter the resources one after the other, and return their results."""
    named = Counter((one.resource_type, one.resource_name) for one in resources)
    results = []
    for one in resources:
        await call.pause()
        results.append(await _attempt(named, one, alter))
    return results


async def _attempt(
    named: Counter[tuple[int, str]], resource: _Resource, alter: Callable[[_Resource], Awaitable[None]]
) -> AlterConfigsResourceResponse:
    """Alter one resource, and return its result."""
    kind, name = resource.resource_type, resource.resource_name
    error = SUCCESS
    try:
        if named[kind, name] > 1:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"resource {name[:249]!r} is named more than once")
        if kind not in {ConfigResource.TOPIC, ConfigResource.BROKER}:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"resources of type {kind} have no settings here")
        await alter(resource)
    except FAILURES as failure:
        error = item_error(failure)
    return AlterConfigsResourceResponse(
        error_code=error.code, error_message=error.message, resource_type=kind, resource_name=name
    )
