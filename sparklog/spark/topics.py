"""What the cluster has of what a read names: topics with their ids and columns, and the partitions to read.

Asked anew by every planning step, because Spark runs each of them in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import StructType

from sparklog.client.admin import Admin
from sparklog.client.descriptions import TopicDescription
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.spark.options import Assign, Subscribe, SubscribePattern, TopicSelection
from sparklog.spark.schema import TopicShape, one_shape, topic_columns


@dataclass(frozen=True, slots=True)
class SelectedTopic:
    """One topic of a read. ``topic_id`` tells it from a later one of the same name."""

    topic_id: str
    shape: TopicShape


@dataclass(frozen=True, slots=True)
class Selected:
    """The topics of a read by name, and its partitions in order."""

    topics: Mapping[str, SelectedTopic]
    partitions: tuple[TopicPartition, ...]

    def columns(self, *, include_headers: bool) -> StructType:
        """The columns of the read. Raises BrokerError SCHEMA_MISMATCH when its topics differ in theirs."""
        shape = one_shape({name: topic.shape for name, topic in self.topics.items()})
        return topic_columns(shape, include_headers=include_headers)


def select_topics(admin: Admin, selection: TopicSelection) -> Selected:
    """Look up the topics of ``selection``.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION naming what is not there.
        ConfigError: a pattern matches no topic, so that there are no columns to show.
    """
    match selection:
        case Subscribe(topics):
            described = admin.describe_topics(topics)
        case SubscribePattern(pattern):
            matches = re.compile(pattern).fullmatch
            described = [topic for topic in admin.describe_topics() if matches(topic.name)]
            if not described:
                raise ConfigError(f"option subscribePattern={pattern!r} matches no topic")
        case Assign(partitions):
            described = admin.describe_topics(sorted({partition.topic for partition in partitions}))
    existing = [partition for topic in described for partition in topic.topic_partitions()]
    if isinstance(selection, Assign):
        if unknown := [str(partition) for partition in selection.partitions if partition not in set(existing)]:
            raise BrokerError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"option assign: {', '.join(unknown)}")
        existing = list(selection.partitions)
    return Selected(
        {topic.name: SelectedTopic(topic.topic_id, topic_shape(topic)) for topic in described},
        tuple(sorted(existing)),
    )


def topic_shape(topic: TopicDescription) -> TopicShape:
    """What decides the columns of a described topic."""
    stamped_by_log = topic.config.get("message.timestamp.type") == "LogAppendTime"
    return TopicShape(topic.schema, topic.event_time, stamped_by_log)
