"""What a Delta table says about the topic it was archived from, so that the topic can be made again. Pure.

It stands as JSON in the table's property ``sparklog.topic``: rows alone do not tell how many partitions there were,
which columns decide the partition, or which Arrow type a column had before it became one of Delta's.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pyarrow as pa

from sparklog.client.admin.descriptions import TopicDescription
from sparklog.delta.origin import Origin
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA, parse_schema, schema_message

PROPERTY = "sparklog.topic"
VERSION = 1
#: Settings that belong to one life of a topic, not to what it is.
_NOT_KEPT = frozenset({"restoring", "restored.from"})


class ArchivedTopic(msgspec.Struct, frozen=True):
    """A topic as it was when the archive last looked. ``schema``: the newest one's Arrow IPC message, in base64."""

    name: str
    topic_id: str
    partitions: int
    replication_factor: int
    schema: str
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    #: only what was set for this topic
    config: dict[str, str] = {}
    version: int = VERSION

    @property
    def columns(self) -> pa.Schema:
        """Raises BrokerError CORRUPT_MESSAGE, SCHEMA_MISMATCH as ``parse_schema``."""
        return parse_schema(base64.b64decode(self.schema))

    @property
    def is_default(self) -> bool:
        """It has Kafka's columns, and was created without a schema as far as anyone can tell."""
        return self.columns is DEFAULT_SCHEMA and self.event_time == DEFAULT_EVENT_TIME


def archived(topic: TopicDescription) -> ArchivedTopic:
    return ArchivedTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=len(topic.partitions),
        replication_factor=topic.replication_factor,
        schema=base64.b64encode(schema_message(topic.schema)).decode(),
        key_columns=tuple(topic.key),
        event_time=topic.event_time,
        config={name: value for name, value in sorted(topic.config.items()) if name not in _NOT_KEPT},
    )


def to_json(topic: TopicDescription) -> str:
    """The same text for the same topic, so that it is written again only where something has changed."""
    return msgspec.json.encode(archived(topic), order="sorted").decode()


def origin(topic: TopicDescription) -> Origin:
    return Origin(topic.topic_id, topic.config.get("restored.from", ""))


def from_json(text: str) -> ArchivedTopic:
    """Raises ConfigError for text that is not a topic's description, or one of a newer version (named)."""
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(f"table property {PROPERTY}: version {version} found, up to {VERSION} is understood")
        return msgspec.json.decode(text, type=ArchivedTopic)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"table property {PROPERTY}: {error}") from None
