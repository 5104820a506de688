"""Tests of settings: defaults are within their bounds, and an error names the wrong and the right value."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.config import (
    BROKER_SETTINGS,
    TOPIC_SETTINGS,
    BrokerConfig,
    Setting,
    TopicConfig,
    broker_config,
    topic_config,
)
from sparklog.errors import ConfigError

TABLES = [*TOPIC_SETTINGS.items(), *BROKER_SETTINGS.items()]
NUMBERS = [(key, setting) for key, setting in TABLES if type(setting.default) is int]


def resolved(key: str, value: str) -> object:
    """Return the value of ``key`` after it was set to ``value``."""
    if key in TOPIC_SETTINGS:
        return getattr(topic_config({key: value}), TOPIC_SETTINGS[key].field)
    return getattr(broker_config({key: value}), BROKER_SETTINGS[key].field)


def test_the_tables_and_the_values_have_the_same_fields() -> None:
    assert [setting.field for setting in TOPIC_SETTINGS.values()] == list(TopicConfig.__struct_fields__)
    fields = [setting.field for setting in BROKER_SETTINGS.values()]
    assert [*fields, "topic_defaults"] == list(BrokerConfig.__struct_fields__)
    assert not set(TOPIC_SETTINGS) & set(BROKER_SETTINGS)


@pytest.mark.parametrize(("key", "setting"), TABLES, ids=[key for key, _ in TABLES])
def test_defaults_are_allowed(key: str, setting: Setting) -> None:
    text = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
    assert resolved(key, text) == setting.default
    assert not setting.choices or setting.default in setting.choices


@pytest.mark.parametrize(("key", "setting"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_bounds_are_inclusive_and_named(key: str, setting: Setting) -> None:
    assert resolved(key, str(setting.low)) == setting.low
    assert resolved(key, str(setting.high)) == setting.high
    for outside in (setting.low - 1, setting.high + 1):
        with pytest.raises(ConfigError) as caught:
            resolved(key, str(outside))
        assert str(caught.value) == f"{key}={outside}: expected {setting.low} to {setting.high}"


def test_the_defaults_promise_durability() -> None:
    """No record is committed by one broker alone, no replica leads without the records, and no leadership moves
    without a request."""
    topic, broker = topic_config({}), broker_config({})
    assert (topic.min_insync_replicas, topic.unclean_leader_election) == (2, False)
    assert (topic.replica_lag_time_max_ms, topic.replica_lag_max_messages) == (10_000, 0)
    assert (broker.default_replication_factor, broker.session_timeout_ms) == (3, 6_000)
    assert (broker.broker_replace_after_ms, broker.orphan_max_ms) == (-1, -1)
    assert broker.preferred_leader_rebalance


def test_names_of_numbers_end_with_their_unit() -> None:
    for key, setting in NUMBERS:
        if key.endswith((".ms", ".bytes")):
            assert setting.field.endswith(key.rpartition(".")[2]), key


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("retention.ms", "a week", "retention.ms='a week': expected a whole number"),
        ("retention.ms", "1.5", "expected a whole number"),
        ("retention.ms", "", "expected a whole number"),
        ("unclean.leader.election.enable", "yes", "expected true or false"),
        ("cleanup.policy", "archive", "expected one of delete, compact, compact,delete"),
        ("message.timestamp.type", "createtime", "expected one of CreateTime, LogAppendTime"),
    ],
)
def test_values_of_the_wrong_type_are_refused(key: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topic_config({key: value})
    assert reason in str(caught.value)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'retention\.msec'; did you mean 'retention\.ms'\?"):
        topic_config({"retention.msec": "1"})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz'$"):
        broker_config({"zzz": "1"})
    with pytest.raises(ConfigError, match="unknown setting"):
        topic_config({"num.partitions": "1"})


def test_a_topics_settings_take_precedence_over_the_brokers() -> None:
    defaults = {"segment.bytes": "4096", "flush.ms": "10"}
    config = topic_config({"segment.bytes": "8192"}, defaults)
    assert (config.segment_bytes, config.flush_ms, config.retention_bytes) == (8192, 10, -1)
    with pytest.raises(ConfigError, match=r"flush\.ms"):
        topic_config({}, {"flush.ms": "often"})


def test_topic_keys_among_a_brokers_become_topic_defaults() -> None:
    config = broker_config({"segment.bytes": "4096", "num.partitions": " 3 "})
    assert config.num_partitions == 3
    assert config.topic_defaults == {"segment.bytes": "4096"}
    with pytest.raises(ConfigError, match=r"segment\.bytes=1:"):
        broker_config({"segment.bytes": "1"})


def test_settings_are_frozen_and_can_be_pickled() -> None:
    config = broker_config({"segment.bytes": "4096"})
    with pytest.raises(AttributeError):
        config.num_partitions = 5  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=BrokerConfig) == config


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*TOPIC_SETTINGS, "made.up"]), st.text(max_size=8), max_size=4))
def test_any_text_gives_settings_or_a_configuration_error(overrides: dict[str, str]) -> None:
    try:
        config = topic_config(overrides)
    except ConfigError:
        return
    for key, text in overrides.items():
        setting = TOPIC_SETTINGS[key]
        value = getattr(config, setting.field)
        if isinstance(setting.default, str):
            assert value in (setting.choices or (text.strip(),))
        else:
            assert isinstance(value, bool) or setting.low <= value <= setting.high


def test_kafkas_names_of_key_stores_are_aliases() -> None:
    config = broker_config({"ssl.keystore.location": "/broker.pem", "ssl.truststore.location": "/ca.pem"})
    assert (config.ssl_certificate_location, config.ssl_ca_location) == ("/broker.pem", "/ca.pem")
    with pytest.raises(ConfigError, match=r"ssl\.keystore\.location and ssl\.certificate\.location are the same"):
        broker_config({"ssl.keystore.location": "/a", "ssl.certificate.location": "/b"})
