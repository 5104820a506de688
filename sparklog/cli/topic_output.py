"""The output of topics, and the filters for partitions with a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Annotated, Any, NamedTuple

import typer

from sparklog.cli.output import ids, print_line, print_table
from sparklog.client.admin.admin import Admin
from sparklog.client.admin.descriptions import PartitionDescription, TopicDescription
from sparklog.config import TOPIC_SETTINGS
from sparklog.errors import ConfigError

UnderReplicated = Annotated[bool, typer.Option("--under-replicated", help="Only partitions with out-of-sync replicas.")]
Unavailable = Annotated[bool, typer.Option("--unavailable", help="Only partitions without a leader.")]
UnderMinIsr = Annotated[
    bool,
    typer.Option(
        "--under-min-isr", help="Only partitions with fewer in-sync replicas than min.insync.replicas; writes fail."
    ),
]
AtMinIsr = Annotated[
    bool,
    typer.Option(
        "--at-min-isr", help="Only partitions with exactly min.insync.replicas in sync; losing one more stops writes."
    ),
]

_MIN_ISR = "min.insync.replicas"


class PartitionFilter(NamedTuple):
    """The filter for partitions with one kind of problem. At most one field may be true."""

    under_replicated: bool = False
    unavailable: bool = False
    under_min_isr: bool = False
    at_min_isr: bool = False

    @property
    def asked(self) -> bool:
        return any(self)

    def pick(self, admin: Admin, found: Iterable[TopicDescription]) -> list[TopicDescription]:
        """Return the topics that have partitions with the problem, each with only these partitions.

        Raises:
            ConfigError: several filters are set, or no broker returned the default of min.insync.replicas.
        """
        if sum(self) > 1:
            raise ConfigError("pass only one of --under-replicated, --unavailable, --under-min-isr, --at-min-isr")
        default = cluster_default(admin, _MIN_ISR) if self.under_min_isr or self.at_min_isr else ""
        picked = [self.only(topic, default) for topic in found]
        return [topic for topic in picked if topic.partitions]

    def only(self, topic: TopicDescription, default_min_isr: str) -> TopicDescription:
        """Return the topic with only the partitions that have the problem."""
        wanted = self._wanted(topic, default_min_isr)
        return replace(topic, partitions=tuple(part for part in topic.partitions if wanted(part)))

    def _wanted(self, topic: TopicDescription, default: str) -> Callable[[PartitionDescription], bool]:
        if self.unavailable:
            return lambda part: part.leader is None
        if self.under_replicated:
            return lambda part: part.under_replicated
        minimum = int(topic.config.get(_MIN_ISR, default))
        if self.under_min_isr:
            return lambda part: len(part.isr) < min(minimum, len(part.replicas))
        return lambda part: len(part.isr) == min(minimum, len(part.replicas)) and part.under_replicated


def cluster_default(admin: Admin, setting: str) -> str:
    """Ask a broker for the cluster's default of a topic setting, and return it."""
    for broker in admin.describe_brokers():
        if broker.settings:
            return broker.settings.get(setting, str(TOPIC_SETTINGS[setting].default))
    raise ConfigError(f"no broker returned the cluster's {setting}")


def state(topic: TopicDescription) -> str:
    leaderless = sum(part.leader is None for part in topic.partitions)
    behind = sum(part.under_replicated for part in topic.partitions)
    if leaderless:
        return f"{leaderless} without a leader"
    return f"{behind} under-replicated" if behind else "in sync"


def print_topic(topic: TopicDescription) -> None:
    print_line(f"topic      {topic.name} ({topic.topic_id})")
    print_line(f"columns    {', '.join(f'{field.name} {field.type}' for field in topic.schema)}")
    for title, values in {
        "key": ", ".join(topic.key),
        "event time": topic.event_time or "",
        "settings": ", ".join(f"{name}={value}" for name, value in sorted(topic.config.items())),
    }.items():
        if values:
            print_line(f"{title:<10} {values}")
    rows = [
        (part.partition, part.leader, part.leader_epoch, ids(part.replicas), ids(part.isr)) for part in topic.partitions
    ]
    print_table(("partition", "leader", "epoch", "replicas", "in sync"), rows, numeric=("partition", "leader", "epoch"))


def plain_topic(topic: TopicDescription) -> dict[str, Any]:
    """Return a topic as values for JSON. The schema becomes a list of columns."""
    fields = [{"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in topic.schema]
    return {
        "name": topic.name,
        "topic_id": topic.topic_id,
        "replication_factor": topic.replication_factor,
        "schema_id": topic.schema_id,
        "columns": fields,
        "key": topic.key,
        "event_time": topic.event_time,
        "config": dict(topic.config),
        "partitions": [asdict(part) for part in topic.partitions],
        "warning": topic.warning,
    }
