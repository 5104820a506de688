"""Tests of the settings of topics as Kafka clients see them."""

from __future__ import annotations

from sparklog.broker.kafka.admin.config_names import READ_ONLY
from sparklog.broker.kafka.admin.describe_configs import ConfigSource, ConfigType, TopicConfigs
from sparklog.config import TOPIC_SETTINGS


def test_a_topic_has_all_settings_once() -> None:
    names = [entry.name for entry in TopicConfigs({}).of({"retention.ms": "5"})]
    assert names == list(TOPIC_SETTINGS)


def test_a_value_names_all_its_origins() -> None:
    configs = TopicConfigs({"retention.ms": "7"})
    own = {entry.name: entry for entry in configs.of({"retention.ms": "5"})}["retention.ms"]
    assert (own.value, own.source) == ("5", ConfigSource.TOPIC)
    assert [(value, source) for _, value, source in own.origins] == [
        ("5", ConfigSource.TOPIC),
        ("7", ConfigSource.STATIC_BROKER),
        ("604800000", ConfigSource.DEFAULT),
    ]
    default = configs.defaults["retention.ms"]
    assert (default.value, default.source) == ("7", ConfigSource.STATIC_BROKER)


def test_settings_without_an_own_value_are_shared() -> None:
    configs = TopicConfigs({})
    for entry in configs.of({"retention.ms": "5"}):
        assert (entry is configs.defaults[entry.name]) == (entry.name != "retention.ms")


def test_settings_have_kafkas_types() -> None:
    types = {name: entry.config_type for name, entry in TopicConfigs({}).defaults.items()}
    assert types["cleanup.policy"] is ConfigType.LIST
    assert types["retention.ms"] is ConfigType.LONG
    assert types["segment.bytes"] is ConfigType.INT
    assert types["min.cleanable.dirty.ratio"] is ConfigType.DOUBLE
    assert types["unclean.leader.election.enable"] is ConfigType.BOOLEAN
    assert types["message.timestamp.type"] is ConfigType.STRING


def test_only_the_settings_of_a_restore_are_read_only() -> None:
    assert {name for name, entry in TopicConfigs({}).defaults.items() if entry.read_only} == READ_ONLY
