"""AlterTopic requests: changes of an existing topic's settings.

All settings of a request are checked together. They take effect on all brokers without a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sparklog.broker.context import BrokerContext
from sparklog.broker.internal_topics import refuse_internal
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.requests.delayed_replies import reply_later, wait_for_metadata
from sparklog.config import BrokerConfig, check_topic_settings, topic_config
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicRecord
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, AlterTopic, Reply
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema

_log = logging.getLogger(__name__)


class AlterTopicRequests:
    """The handler of AlterTopic requests, which change the settings of an existing topic."""

    def __init__(self, context: BrokerContext, registry: ZkRegistration) -> None:
        self._context = context
        self._registry = registry

    def handle(self, connection: ServerConnection, request: AlterTopic, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._alter_topic(request))

    async def _alter_topic(self, request: AlterTopic) -> Reply:
        record = await self._changed(request, self._altered(request))
        _log.info("topic %s now has the settings %s", record.name, record.config)

        def is_updated() -> bool:
            topic = self._context.cache.topic(record.name)
            return topic is not None and (
                topic.change.topic_id != record.topic_id or topic.change.config == record.config
            )

        if not await wait_for_metadata(self._context, is_updated, request.timeout_ms):
            raise BrokerError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"topic {record.name!r} has the settings, but brokers do not know of them yet",
            )
        return Ack(request.cid)

    async def check(self, request: AlterTopic) -> None:
        """Raise the BrokerError with which the request would be refused, and change nothing."""
        altered = self._altered(request)

        def checked(record: TopicRecord) -> TopicRecord:
            altered(record)
            return record

        await self._changed(request, checked)

    def _altered(self, request: AlterTopic) -> Callable[[TopicRecord], TopicRecord]:
        """Return the function that applies the request to the topic's record. It raises BrokerError."""

        def altered(record: TopicRecord) -> TopicRecord:
            kept = {key: value for key, value in record.config.items() if key not in request.unset}
            config = {**kept, **request.config}
            check_config(self._context.config, record, config)
            if _is_restoring(config) and not _is_restoring(record.config):
                detail = f"topic {record.name!r}: only a restore creates a topic with restoring=true"
                raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
            return msgspec.structs.replace(record, config=config)

        return altered

    async def _changed(self, request: AlterTopic, change: Callable[[TopicRecord], TopicRecord]) -> TopicRecord:
        refuse_internal(request.topic, "not altered")
        _check_unset(request.unset)
        record = await self._registry.change_topic(request.topic, change)
        if record is None:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {request.topic!r} does not exist")
        return record


def _is_restoring(config: Mapping[str, str]) -> bool:
    return topic_config(config).restoring


def check_config(settings: BrokerConfig, record: TopicRecord, config: Mapping[str, str]) -> None:
    """Check the settings ``config`` for the topic of ``record``.

    Raises:
        BrokerError: INVALID_CONFIG, a setting is unknown, out of range or not possible for this topic.
    """
    try:
        effective = topic_config(config, settings.topic_defaults)
    except ConfigError as error:
        raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from None
    if effective.compacted and not record.key_columns:
        detail = f"topic {record.name!r}: cleanup.policy={effective.cleanup_policy} needs key columns, none found"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
    if config.get("kafka.value.format") == "json" and parse_schema(record.latest_schema.message) is DEFAULT_SCHEMA:
        detail = f"topic {record.name!r}: kafka.value.format=json needs a topic with a schema of its own"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)


def _check_unset(names: Sequence[str]) -> None:
    try:
        check_topic_settings(names)
    except ConfigError as error:
        raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from None
