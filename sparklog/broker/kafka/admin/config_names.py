"""The settings of topics as Kafka clients name them and write their values.

This module is pure. sparklog has Kafka's names for settings with Kafka's meaning. Three kinds of settings need a
translation:

- Kafka writes "never" as the largest number, where sparklog has 0 or a smaller limit (``_NEVER``).
- Some of Kafka's settings concern only its storage of records. A client may set them, but they have no effect here.
- Other settings of Kafka change what clients see, and sparklog does not have them. A client may only set them to
  Kafka's default.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparklog.config import TOPIC_SETTINGS
from sparklog.errors import BrokerError, ErrorCode

_MAX = 2**63 - 1
#: The values that mean "never" in sparklog, where Kafka has its largest number.
_NEVER = {
    "flush.messages": "0",
    "flush.ms": "0",
    "max.compaction.lag.ms": str(TOPIC_SETTINGS["max.compaction.lag.ms"].high),
}
#: Settings whose value is a list, to which a client may append.
LISTS = frozenset({"cleanup.policy", "retention.wait.for.groups"})
#: Settings that a client sees but cannot change.
READ_ONLY = frozenset({"restoring", "restored.from"})
#: Kafka's settings of topics that concern only its own storage. They have no effect here.
NO_EFFECT = frozenset(
    {
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.type",
        "compression.zstd.level",
        "file.delete.delay.ms",
        "index.interval.bytes",
        "message.downconversion.enable",
        "message.format.version",
        "preallocate",
        "segment.index.bytes",
        "segment.jitter.ms",
    }
)
#: Kafka's settings of topics that sparklog does not have, with the values that turn each of them off.
OFF: dict[str, frozenset[str]] = {
    "follower.replication.throttled.replicas": frozenset({""}),
    "leader.replication.throttled.replicas": frozenset({""}),
    "local.retention.bytes": frozenset({"-2"}),
    "local.retention.ms": frozenset({"-2"}),
    "message.timestamp.after.max.ms": frozenset({str(_MAX), "3600000"}),
    "message.timestamp.before.max.ms": frozenset({str(_MAX)}),
    "message.timestamp.difference.max.ms": frozenset({str(_MAX)}),
    "remote.log.copy.disable": frozenset({"false"}),
    "remote.log.delete.on.disable": frozenset({"false"}),
    "remote.storage.enable": frozenset({"false"}),
}


def settings_to_set(configs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Convert the settings that a Kafka client sets to sparklog's settings.

    Raises:
        BrokerError: INVALID_CONFIG, a setting is unknown or has no value, or it is one that sparklog does not have.
    """
    settings: dict[str, str] = {}
    for name, value in configs:
        if value is None:
            raise BrokerError(ErrorCode.INVALID_CONFIG, f"setting {name[:100]!r} has no value")
        if is_stored(name, value):
            settings[name] = native_value(name, value)
    return settings


def is_stored(name: str, value: str | None) -> bool:
    """Return whether sparklog has the setting. ``value`` is None if the client resets it.

    Raises:
        BrokerError: INVALID_CONFIG, neither sparklog nor Kafka has the setting, or the value needs a feature of Kafka
            that sparklog does not have.
    """
    if name in READ_ONLY:
        raise BrokerError(ErrorCode.INVALID_CONFIG, f"only a restore of a topic sets {name}")
    if name in TOPIC_SETTINGS:
        return True
    if name in NO_EFFECT:
        return False
    if name not in OFF:
        raise BrokerError(ErrorCode.INVALID_CONFIG, f"Unknown topic config name: {name[:100]}")
    if value is not None and value.strip() not in OFF[name]:
        detail = f"sparklog has no {name}: {value[:100]!r} found, {sorted(OFF[name])[0]!r} expected"
        raise BrokerError(ErrorCode.INVALID_CONFIG, detail)
    return False


def native_value(name: str, value: str) -> str:
    """Return the value that sparklog stores for a value of Kafka."""
    if name in LISTS:
        return ",".join(filter(None, map(str.strip, value.split(","))))
    if name in _NEVER and value.strip() == str(_MAX):
        return _NEVER[name]
    return value


def kafka_value(name: str, value: str) -> str:
    """Return the value that Kafka clients see for a value of sparklog."""
    return str(_MAX) if _NEVER.get(name) == value else value
