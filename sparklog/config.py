"""Settings: one declarative table each for topics and brokers, checked once, frozen afterwards.

Keys are Kafka's where the meaning is Kafka's. Every setting has a unit in its Python name and a range in its table
entry; what is out of range is refused with the allowed range, what is unknown with the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from sparklog.errors import ConfigError

_MAX = 2**63 - 1
#: Keys and values may come from anyone who creates a topic: this much of one is looked at and quoted.
_LONGEST_KEY = 100
MIB = 1024 * 1024


class Setting(NamedTuple):
    """One row of a settings table. For numbers ``low`` and ``high`` are the inclusive bounds."""

    field: str
    default: Any
    doc: str
    low: int = 0
    high: int = _MAX
    choices: tuple[str, ...] = ()


TOPIC_SETTINGS: dict[str, Setting] = {
    "cleanup.policy": Setting(
        "cleanup_policy",
        "delete",
        "what becomes of old segments",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
    ),
    "retention.ms": Setting(
        "retention_ms", 7 * 86_400_000, "age at which records are deleted, by segments; -1: never", -1
    ),
    "retention.bytes": Setting("retention_bytes", -1, "size above which the oldest segments go; -1: no limit", -1),
    "retention.wait.for.groups": Setting(
        "retention_wait_for_groups", "", "records that one of these groups (a,b) has not committed past are kept"
    ),
    "retention.hard.ms": Setting(
        "retention_hard_ms", -1, "age at which a sealed segment is deleted whatever groups have read; -1: never", -1
    ),
    "delete.retention.ms": Setting(
        "delete_retention_ms", 86_400_000, "compacted topics keep tombstones for so long after a cleaning"
    ),
    "min.compaction.lag.ms": Setting("min_compaction_lag_ms", 0, "records younger than this are not compacted"),
    "max.compaction.lag.ms": Setting(
        "max_compaction_lag_ms", _MAX // 1_000_000, "older ones are, however few", 1, _MAX // 1_000_000
    ),
    "min.cleanable.dirty.ratio": Setting(
        "min_cleanable_dirty_ratio", 0.5, "part of a log's bytes that has to be new for a cleaning", 0, 1
    ),
    "segment.bytes": Setting("segment_bytes", 1024 * MIB, "size at which the leader rolls a segment", 1024, 2**31 - 1),
    "segment.ms": Setting("segment_ms", 7 * 86_400_000, "age at which the leader rolls a segment", 1),
    "max.message.bytes": Setting(
        "max_message_bytes", 16 * MIB, "largest batch, as sent and uncompressed", 1024, 1024 * MIB
    ),
    "min.insync.replicas": Setting(
        "min_insync_replicas", 2, "in-sync replicas needed to commit; at most the replication factor counts", 1, 32
    ),
    "unclean.leader.election.enable": Setting(
        "unclean_leader_election", False, "elect an out-of-sync replica rather than wait: may lose records"
    ),
    "replica.lag.time.max.ms": Setting(
        "replica_lag_time_max_ms", 10_000, "a follower not caught up for so long leaves the ISR", 100
    ),
    "replica.lag.max.messages": Setting(
        "replica_lag_max_messages", 0, "records a follower may lag before it leaves the ISR; 0: no limit"
    ),
    "message.timestamp.type": Setting(
        "timestamp_type", "CreateTime", "whose clock", choices=("CreateTime", "LogAppendTime")
    ),
    "flush.messages": Setting("flush_messages", 0, "records after which the log is fsynced; 0: left to the OS"),
    "flush.ms": Setting("flush_ms", 0, "milliseconds after which the log is fsynced; 0: left to the OS"),
    "restoring": Setting("restoring", False, "a restore fills the topic: producers wait, nothing is deleted"),
    "restored.from": Setting("restored_from", "", "topic id and table, at a version, that the topic was restored from"),
}

BROKER_SETTINGS: dict[str, Setting] = {
    "default.replication.factor": Setting("default_replication_factor", 3, "for topics created without one", 1, 32),
    "num.partitions": Setting("num_partitions", 1, "for topics created without a number", 1, 100_000),
    "zookeeper.session.timeout.ms": Setting("session_timeout_ms", 6000, "a silent broker is dead after", 500, 600_000),
    "zookeeper.connection.timeout.ms": Setting("zk_connection_timeout_ms", 15_000, "first connection", 100, 600_000),
    "preferred.leader.rebalance": Setting(
        "preferred_leader_rebalance", True, "leaderships go back to the first replica once it is in sync again"
    ),
    "preferred.leader.rebalance.interval.ms": Setting(
        "preferred_leader_rebalance_interval_ms", 30_000, "between two looks for such leaderships", 100, 86_400_000
    ),
    "broker.replace.after.ms": Setting(
        "broker_replace_after_ms", -1, "replicas of a broker away for so long are rebuilt elsewhere; -1: never", -1
    ),
    "unclean.recovery.timeout.ms": Setting(
        "unclean_recovery_timeout_ms",
        30_000,
        "every in-sync replica lost its page cache: wait for all log ends, then the greatest leads",
        0,
        86_400_000,
    ),
    "replica.fetch.wait.max.ms": Setting("replica_fetch_wait_max_ms", 500, "a follower's long poll", 1, 60_000),
    "replica.fetch.max.bytes": Setting("replica_fetch_max_bytes", 8 * MIB, "per partition and answer", 1024, 512 * MIB),
    "replica.fetch.response.max.bytes": Setting(
        "replica_fetch_response_max_bytes", 32 * MIB, "per answer", 1024, 1024 * MIB
    ),
    "socket.request.max.bytes": Setting("max_frame_bytes", 128 * MIB, "largest frame", 4096, 2**31 - 1),
    "max.in.flight.requests.per.connection": Setting("max_in_flight", 64, "per connection, then not read", 1, 10_000),
    "max.connections": Setting(
        "max_connections", 10_000, "open at the same time; fewer where descriptors are short", 8, 1_000_000
    ),
    "connections.max.idle.ms": Setting(
        "connections_max_idle_ms", 600_000, "a client's connection without requests is closed after", 1000, 2**40
    ),
    "queued.max.bytes": Setting("queued_max_bytes", 256 * MIB, "request bytes in flight per broker", MIB, 2**40),
    "controlled.stop.timeout.ms": Setting("controlled_stop_timeout_ms", 8000, "wait for a successor", 0, 600_000),
    "log.checkpoint.interval.ms": Setting("checkpoint_interval_ms", 5000, "high watermark checkpoints", 100, 600_000),
    "log.retention.check.interval.ms": Setting(
        "retention_check_interval_ms",
        30_000,
        "between two looks for segments that are old enough to go",
        100,
        86_400_000,
    ),
    "log.set.aside.retention.ms": Setting(
        "set_aside_retention_ms",
        7 * 86_400_000,
        "a log that no topic claims is kept at least for so long, and until its leader has all of it; -1: for ever",
        -1,
    ),
    "log.cleaner.enable": Setting("cleaner_enable", True, "compact the topics whose cleanup.policy says so"),
    "log.cleaner.backoff.ms": Setting(
        "cleaner_backoff_ms", 15_000, "between two looks for a log to clean", 10, 86_400_000
    ),
    "log.cleaner.io.max.bytes.per.second": Setting(
        "cleaner_io_bytes", 2**40, "the cleaner reads and writes at most", 1024
    ),
    "log.cleaner.dedupe.buffer.size": Setting(
        "cleaner_buffer_bytes", 128 * MIB, "for keys in memory, 96 bytes each; more go to disk", 96 * 1024, 2**40
    ),
    "producer.id.expiration.ms": Setting("producer_id_expiration_ms", 86_400_000, "idle producer ids expire", 1000),
    "producer.ids.max": Setting(
        "producer_ids_max", 1_000_000, "remembered by all logs of a broker, 650 bytes each; then new ones wait", 100
    ),
    "groups.max": Setting("groups_max", 500_000, "consumer groups of the cluster; then new ones are refused", 100),
    "internal.topic.replication.factor": Setting(
        "internal_replication_factor", 3, "of internal topics, which are made when so many brokers are alive", 1, 32
    ),
    "transaction.state.log.num.partitions": Setting(
        "transaction_partitions", 16, "of the internal topic of transactions; fixed when that is made", 1, 1000
    ),
    "offsets.topic.num.partitions": Setting(
        "offsets_partitions", 16, "of the internal topic of group offsets; fixed when that is made", 1, 1000
    ),
    "transaction.max.timeout.ms": Setting(
        "transaction_max_timeout_ms", 86_400_000, "longest life of a transaction, signs of life or not", 1000
    ),
    "transaction.hanging.after.ms": Setting(
        "transaction_hanging_after_ms", 900_000, "open in a partition for so long: coordinators are asked why", 1000
    ),
    "transactional.id.expiration.ms": Setting(
        "transactional_id_expiration_ms", 7 * 86_400_000, "idle transactional producers are forgotten", 1000
    ),
    "sink.id.expiration.ms": Setting(
        "sink_id_expiration_ms", 30 * 86_400_000, "last committed batch of an idle query is forgotten", 1000
    ),
    "offsets.retention.ms": Setting(
        "offsets_retention_ms", 7 * 86_400_000, "offsets of a group that commits no more are forgotten", 1000
    ),
    "group.min.session.timeout.ms": Setting(
        "group_min_session_timeout_ms", 1000, "smallest session.timeout.ms of a group's member", 100, 3_600_000
    ),
    "group.max.session.timeout.ms": Setting(
        "group_max_session_timeout_ms", 1_800_000, "greatest session.timeout.ms of a group's member", 1000
    ),
    "group.min.heartbeat.interval.ms": Setting(
        "group_min_heartbeat_interval_ms", 100, "smallest heartbeat.interval.ms of a group's member", 10, 60_000
    ),
    "group.max.heartbeat.interval.ms": Setting(
        "group_max_heartbeat_interval_ms", 60_000, "greatest heartbeat.interval.ms of a group's member", 100, 600_000
    ),
    "group.max.size": Setting("group_max_size", 10_000, "members of one group", 1, 100_000),
    "broker.orphan.timeout.ms": Setting("orphan_timeout_ms", 60_000, "left out by the driver: asks for relief", 1000),
    "broker.orphan.max.ms": Setting("orphan_max_ms", -1, "without supervisor: stop; -1: serve on", -1),
    "fetch.max.bytes": Setting("fetch_max_bytes", 55 * MIB, "per answer to a consumer", 1024, 1024 * MIB),
    "fetch.session.slots": Setting("fetch_session_slots", 1000, "incremental fetch sessions kept", 1, 1_000_000),
    "local.reads.enable": Setting(
        "local_reads", True, "readers of the same host are handed segment files, over a Unix socket"
    ),
    "unix.sockets.enable": Setting(
        "unix_sockets", True, "clients and followers of the same host go on over a Unix socket once they are connected"
    ),
    "hot.batches.bytes": Setting("hot_batches_bytes", 64 * MIB, "newest batches kept in memory, per broker", 0, 2**40),
}


class TopicConfig(msgspec.Struct, frozen=True):
    """Effective settings of one topic; see TOPIC_SETTINGS for units and bounds."""

    cleanup_policy: str
    retention_ms: int
    retention_bytes: int
    retention_wait_for_groups: str
    retention_hard_ms: int
    delete_retention_ms: int
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    min_cleanable_dirty_ratio: float
    segment_bytes: int
    segment_ms: int
    max_message_bytes: int
    min_insync_replicas: int
    unclean_leader_election: bool
    replica_lag_time_max_ms: int
    replica_lag_max_messages: int
    timestamp_type: str
    flush_messages: int
    flush_ms: int
    restoring: bool
    restored_from: str

    @property
    def compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def awaited_groups(self) -> tuple[str, ...]:
        """Groups whose offsets retention waits for."""
        return tuple(name.strip() for name in self.retention_wait_for_groups.split(",") if name.strip())


class BrokerConfig(msgspec.Struct, frozen=True):
    """Effective settings of one broker; see BROKER_SETTINGS. ``topic_defaults`` apply below a topic's own."""

    default_replication_factor: int
    num_partitions: int
    session_timeout_ms: int
    zk_connection_timeout_ms: int
    preferred_leader_rebalance: bool
    preferred_leader_rebalance_interval_ms: int
    broker_replace_after_ms: int
    unclean_recovery_timeout_ms: int
    replica_fetch_wait_max_ms: int
    replica_fetch_max_bytes: int
    replica_fetch_response_max_bytes: int
    max_frame_bytes: int
    max_in_flight: int
    max_connections: int
    connections_max_idle_ms: int
    queued_max_bytes: int
    controlled_stop_timeout_ms: int
    checkpoint_interval_ms: int
    retention_check_interval_ms: int
    set_aside_retention_ms: int
    cleaner_enable: bool
    cleaner_backoff_ms: int
    cleaner_io_bytes: int
    cleaner_buffer_bytes: int
    producer_id_expiration_ms: int
    producer_ids_max: int
    groups_max: int
    internal_replication_factor: int
    transaction_partitions: int
    offsets_partitions: int
    transaction_max_timeout_ms: int
    transaction_hanging_after_ms: int
    transactional_id_expiration_ms: int
    sink_id_expiration_ms: int
    offsets_retention_ms: int
    group_min_session_timeout_ms: int
    group_max_session_timeout_ms: int
    group_min_heartbeat_interval_ms: int
    group_max_heartbeat_interval_ms: int
    group_max_size: int
    orphan_timeout_ms: int
    orphan_max_ms: int
    fetch_max_bytes: int
    fetch_session_slots: int
    local_reads: bool
    unix_sockets: bool
    hot_batches_bytes: int
    topic_defaults: dict[str, str]


def topic_config(overrides: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> TopicConfig:
    """Check and merge a topic's own settings over ``defaults`` (the broker's) over the built-in ones.

    Raises:
        ConfigError: unknown key (names the nearest), a value of the wrong kind or out of range (names the range).
    """
    return TopicConfig(**_resolve(TOPIC_SETTINGS, {**(defaults or {}), **overrides}))


def broker_config(overrides: Mapping[str, str]) -> BrokerConfig:
    """Check broker settings; topic keys among them become the cluster's topic defaults.

    Raises:
        ConfigError: as ``topic_config``.
    """
    topic_defaults = {key: value for key, value in overrides.items() if key in TOPIC_SETTINGS}
    topic_config(topic_defaults)
    own = {key: value for key, value in overrides.items() if key not in topic_defaults}
    return BrokerConfig(**_resolve(BROKER_SETTINGS, own), topic_defaults=topic_defaults)


def in_force(config: BrokerConfig) -> dict[str, str]:
    """All settings of a broker as text, and the topic defaults among those that were given."""
    own = {key: _text(getattr(config, setting.field)) for key, setting in BROKER_SETTINGS.items()}
    return own | config.topic_defaults


def default_text(setting: Setting) -> str:
    return _text(setting.default)


def allowed(setting: Setting) -> str:
    """What a setting may be, in words."""
    if isinstance(setting.default, bool):
        return "true or false"
    if setting.choices:
        return " | ".join(setting.choices)
    if isinstance(setting.default, str):
        return "text"
    return f"from {setting.low}" if setting.high == _MAX else f"{setting.low} to {setting.high}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_topic_settings(names: Iterable[str]) -> None:
    """Raises ConfigError for the first name that is no setting of topics; names the nearest."""
    _check_names(TOPIC_SETTINGS, names)


def _check_names(table: Mapping[str, Setting], names: Iterable[str]) -> None:
    for key in names:
        if key not in table:
            near = difflib.get_close_matches(key[:_LONGEST_KEY], table, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown setting {key[:_LONGEST_KEY]!r}{hint}")


def _resolve(table: Mapping[str, Setting], overrides: Mapping[str, str]) -> dict[str, Any]:
    _check_names(table, overrides)
    return {
        setting.field: _parse(key, setting, overrides[key]) if key in overrides else setting.default
        for key, setting in table.items()
    }


def _parse(key: str, setting: Setting, text: str) -> Any:
    value = str(text).strip()
    if len(value) > _LONGEST_KEY:
        raise ConfigError(f"{key}: a value of {len(value)} characters found, at most {_LONGEST_KEY} expected")
    if isinstance(setting.default, bool):
        if value.lower() not in {"true", "false"}:
            raise ConfigError(f"{key}={value!r}: expected true or false")
        return value.lower() == "true"
    if setting.choices:
        if value not in setting.choices:
            raise ConfigError(f"{key}={value!r}: expected one of {', '.join(setting.choices)}")
        return value
    if isinstance(setting.default, str):
        return value
    is_part = isinstance(setting.default, float)
    try:
        number = float(value) if is_part else int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r}: expected a {'' if is_part else 'whole '}number") from None
    if not setting.low <= number <= setting.high:
        raise ConfigError(f"{key}={number}: expected {setting.low} to {setting.high}")
    return number
