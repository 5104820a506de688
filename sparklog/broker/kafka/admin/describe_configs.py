"""DescribeConfigs requests of Kafka clients: the settings of topics and of brokers.

A topic has sparklog's settings, which have Kafka's names where they have Kafka's meaning. Settings that only Kafka has
are left out. A broker has its own settings, and the defaults of topics under the names that Kafka's brokers have for
them. Settings of brokers are read-only, because they are fixed when the broker starts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from sparklog.broker.kafka.admin.config_names import LISTS, READ_ONLY, kafka_value
from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.permissions import Permissions
from sparklog.broker.lifecycle.broker import Broker
from sparklog.config import BROKER_SETTINGS, TOPIC_SETTINGS, Setting, default_text, in_force
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from sparklog.model import check_topic_name
from sparklog.security.acls import CLUSTER_NAME, Operation, ResourceType


class ConfigResource(IntEnum):
    """The types of resources that have settings. Source: Kafka's ``ConfigResource.Type``."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigSource(IntEnum):
    """The source of a setting's value. Source: Kafka's ``DescribeConfigsResponse.ConfigSource``."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5


class ConfigType(IntEnum):
    """The type of a setting's value. Source: Kafka's ``DescribeConfigsResponse.ConfigType``."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigEntry(NamedTuple):
    """One setting of a resource as Kafka clients see it.

    ``origins`` has a name, a value and a source for each place where the setting is set. The first one is in effect.
    """

    name: str
    value: str
    source: ConfigSource
    read_only: bool
    config_type: ConfigType
    doc: str
    origins: Sequence[tuple[str, str, ConfigSource]]


#: The names that Kafka's brokers have for the defaults of topics, where they differ from the names for topics.
_BROKER_NAMES = {
    "cleanup.policy": "log.cleanup.policy",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "segment.bytes": "log.segment.bytes",
    "segment.ms": "log.roll.ms",
}
#: Settings whose type is INT in Kafka. Other numbers are LONG or DOUBLE.
_INTS = frozenset({"max.message.bytes", "min.insync.replicas", "segment.bytes"})


class TopicConfigs:
    """The settings of topics as Kafka clients see them. ``cluster_defaults`` are the defaults that the cluster has set.

    All topics share the same objects for the settings that they do not set themselves.
    """

    def __init__(self, cluster_defaults: Mapping[str, str]) -> None:
        self.defaults = {
            name: _default_entry(name, setting, cluster_defaults) for name, setting in TOPIC_SETTINGS.items()
        }

    def of(self, own: Mapping[str, str]) -> Iterator[ConfigEntry]:
        """Return all settings of a topic. ``own`` are the settings that the topic sets itself."""
        for name, default in self.defaults.items():
            if name not in own:
                yield default
                continue
            value = kafka_value(name, own[name])
            origins = [(name, value, ConfigSource.TOPIC), *default.origins]
            yield default._replace(value=value, source=ConfigSource.TOPIC, origins=origins)


def _default_entry(name: str, setting: Setting, cluster_defaults: Mapping[str, str]) -> ConfigEntry:
    origins = [(name, kafka_value(name, default_text(setting)), ConfigSource.DEFAULT)]
    if name in cluster_defaults:
        origins.insert(0, (name, kafka_value(name, cluster_defaults[name]), ConfigSource.STATIC_BROKER))
    _, value, source = origins[0]
    return ConfigEntry(name, value, source, name in READ_ONLY, _type(name, setting), setting.doc, origins)


def _broker_configs(
    settings: Mapping[str, str], topic_defaults: Mapping[str, str], broker_id: int, log_dir: str
) -> Iterator[ConfigEntry]:
    """Return the settings of a broker. ``settings`` are the settings in effect, by sparklog's names."""
    for name in ("broker.id", "node.id"):
        yield _fixed(name, str(broker_id), ConfigType.INT, "The id of this broker.")
    yield _fixed("log.dirs", log_dir, ConfigType.STRING, "The directory of the broker's logs.")
    yield _fixed("delete.topic.enable", "true", ConfigType.BOOLEAN, "Topics can be deleted.")
    for name, setting in BROKER_SETTINGS.items():
        yield _broker_config(name, setting, settings[name], default_text(setting))
    for name, setting in TOPIC_SETTINGS.items():
        if name not in READ_ONLY:
            default = kafka_value(name, default_text(setting))
            value = kafka_value(name, topic_defaults[name]) if name in topic_defaults else default
            yield _broker_config(_BROKER_NAMES.get(name, name), setting, value, default)


def _fixed(name: str, value: str, config_type: ConfigType, doc: str) -> ConfigEntry:
    origins = [(name, value, ConfigSource.STATIC_BROKER)]
    return ConfigEntry(name, value, ConfigSource.STATIC_BROKER, True, config_type, doc, origins)


def _broker_config(name: str, setting: Setting, value: str, default: str) -> ConfigEntry:
    origins = [(name, default, ConfigSource.DEFAULT)]
    if value != default:
        origins.insert(0, (name, value, ConfigSource.STATIC_BROKER))
    return ConfigEntry(name, value, origins[0][2], True, _type(name, setting), setting.doc, origins)


def _type(name: str, setting: Setting) -> ConfigType:
    if name in LISTS or name == "log.cleanup.policy":
        return ConfigType.LIST
    if isinstance(setting.default, bool):
        return ConfigType.BOOLEAN
    if isinstance(setting.default, str):
        return ConfigType.STRING
    if isinstance(setting.default, float):
        return ConfigType.DOUBLE
    return ConfigType.INT if name in _INTS else ConfigType.LONG


class DescribeConfigsHandler:
    """The handler of DescribeConfigs. A request may name thousands of topics, so it is handled in slices."""

    def __init__(self, broker: Broker, permissions: Permissions, topic_configs: TopicConfigs) -> None:
        self._context = broker.context
        self._slices = broker.slices
        self._permissions = permissions
        self._topic_configs = topic_configs
        #: A cache of results for the topics' default settings. The key is the name of the setting, whether the result
        #: has synonyms, and whether it has documentation.
        self._built: dict[tuple[str, bool, bool], DescribeConfigsResourceResult] = {}

    async def handle(self, call: KafkaCall, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
        return await self._slices.result(self._describe_all(call, request))

    def _describe_all(
        self, call: KafkaCall, request: DescribeConfigsRequest
    ) -> Generator[None, None, DescribeConfigsResponse]:
        results: list[DescribeConfigsResult] = []
        # Each resource once, as by Kafka: it has a hundred settings.
        resources = {(one.resource_type, one.resource_name): one for one in request.resources}
        for resource in resources.values():
            if self._slices.over():
                yield
            results.append(self._describe(call, request, resource))
        return DescribeConfigsResponse(results=results)

    def _describe(
        self, call: KafkaCall, request: DescribeConfigsRequest, resource: DescribeConfigsResource
    ) -> DescribeConfigsResult:
        kind, name = resource.resource_type, resource.resource_name
        try:
            entries = list(self._entries(call, kind, name))
        except FAILURES as failure:
            error = item_error(failure)
            return DescribeConfigsResult(
                error_code=error.code, error_message=error.message, resource_type=kind, resource_name=name
            )
        keys = None if resource.configuration_keys is None else frozenset(resource.configuration_keys)
        return DescribeConfigsResult(
            error_message=None,
            resource_type=kind,
            resource_name=name,
            configs=[self._result(request, entry) for entry in entries if keys is None or entry.name in keys],
        )

    def _result(self, request: DescribeConfigsRequest, entry: ConfigEntry) -> DescribeConfigsResourceResult:
        if self._topic_configs.defaults.get(entry.name) is not entry:
            return _result(request, entry)
        key = entry.name, request.include_synonyms, request.include_documentation
        found = self._built.get(key)
        if found is None:
            found = self._built[key] = _result(request, entry)
        return found

    def _entries(self, call: KafkaCall, kind: int, name: str) -> Iterable[ConfigEntry]:
        """Return the settings of one resource. Raises BrokerError."""
        if kind == ConfigResource.TOPIC:
            return self._of_topic(call, name)
        if kind == ConfigResource.BROKER:
            return self._of_broker(call, name)
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"resources of type {kind} have no settings here")

    def _of_topic(self, call: KafkaCall, name: str) -> Iterable[ConfigEntry]:
        self._permissions.require(call, "DescribeConfigs", Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, name)
        topic = self._context.cache.topic(name)
        if topic is None:
            bad = check_topic_name(name)
            if bad:
                raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, bad)
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know topic {name!r}")
        return self._topic_configs.of(topic.change.config)

    def _of_broker(self, call: KafkaCall, name: str) -> Iterable[ConfigEntry]:
        self._permissions.require(
            call, "DescribeConfigs", Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME
        )
        if not name:  # the defaults that Kafka's clients can set for all brokers
            return ()
        context = self._context
        if name != str(context.broker_id):
            detail = f"this is broker {context.broker_id}, and broker {name[:20]!r} has its own settings"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        return _broker_configs(
            in_force(context.config), context.config.topic_defaults, context.broker_id, context.log_dir
        )


def _result(request: DescribeConfigsRequest, entry: ConfigEntry) -> DescribeConfigsResourceResult:
    return DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        synonyms=[
            DescribeConfigsSynonym(name=name, value=value, source=source) for name, value, source in entry.origins
        ]
        if request.include_synonyms
        else [],
        config_type=entry.config_type,
        documentation=entry.doc if request.include_documentation else None,
    )
