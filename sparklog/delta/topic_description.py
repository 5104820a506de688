"""The description of the archived topic in its Delta table, from which the topic can be recreated.

It is JSON in the table property ``sparklog.topic``. Rows do not show the number of partitions, the key columns, or the
Arrow type that a column had before its conversion to a Delta type.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pyarrow as pa

from sparklog.client.admin.descriptions import TopicDescription
from sparklog.delta.origin import ArchiveOrigin
from sparklog.errors import ConfigError
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_SCHEMA, parse_schema, schema_message

PROPERTY = "sparklog.topic"
VERSION = 1
#: The settings that apply only to one topic id, and so not to a recreated topic.
_NOT_KEPT = frozenset({"restoring", "restored.from"})


class ArchivedTopic(msgspec.Struct, frozen=True):
    """A description of the archived topic, as the archive last stored it in the table.

    ``schema`` is the topic's newest schema, as an Arrow IPC message in base64.
    """

    name: str
    topic_id: str
    partitions: int
    replication_factor: int
    schema: str
    key_columns: tuple[str, ...] = ()
    event_time: str | None = None
    #: The settings of the topic itself, without defaults.
    config: dict[str, str] = {}
    version: int = VERSION

    @property
    def columns(self) -> pa.Schema:
        """Return the columns of the topic. Raises BrokerError if the stored schema cannot be decoded."""
        return parse_schema(base64.b64decode(self.schema))

    @property
    def is_default(self) -> bool:
        """Return whether the topic has the columns, and the event-time column, of a topic without a schema."""
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
    """Return the description of a topic as JSON.

    The text is equal for equal topics, so the archive can write it only after a change.
    """
    return msgspec.json.encode(archived(topic), order="sorted").decode()


def origin(topic: TopicDescription) -> ArchiveOrigin:
    return ArchiveOrigin(topic.topic_id, topic.config.get("restored.from", ""))


def from_json(text: str) -> ArchivedTopic:
    """Parse a description. Raises ConfigError if the text is not a description, or if a newer release wrote it."""
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(f"table property {PROPERTY}: expected version {VERSION} or lower, found {version}")
        return msgspec.json.decode(text, type=ArchivedTopic)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"table property {PROPERTY}: {error}") from None
