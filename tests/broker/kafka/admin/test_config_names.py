"""Tests of the settings of topics under Kafka's names and with Kafka's values."""

from __future__ import annotations

import pytest

from sparklog.broker.kafka.admin.config_names import NO_EFFECT, OFF, is_stored, kafka_value, settings_to_set
from sparklog.config import TOPIC_SETTINGS, default_text, topic_config
from sparklog.errors import BrokerError, ErrorCode

NEVER = str(2**63 - 1)


@pytest.mark.parametrize("name", ["flush.messages", "flush.ms", "max.compaction.lag.ms"])
def test_kafkas_never_is_sparklogs_never_in_both_directions(name: str) -> None:
    stored = settings_to_set([(name, NEVER)])
    assert topic_config(stored) == topic_config({})
    assert kafka_value(name, stored[name]) == NEVER
    assert kafka_value(name, default_text(TOPIC_SETTINGS[name])) == NEVER


def test_other_values_stay_as_they_are() -> None:
    wanted = {"retention.ms": "-1", "flush.ms": "10", "segment.bytes": "1048576", "min.insync.replicas": "1"}
    assert settings_to_set(wanted.items()) == wanted
    assert {name: kafka_value(name, value) for name, value in wanted.items()} == wanted


def test_spaces_in_a_list_do_not_matter() -> None:
    assert settings_to_set([("cleanup.policy", " compact, delete ")]) == {"cleanup.policy": "compact,delete"}


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_settings_of_kafkas_storage_are_accepted_without_effect(name: str) -> None:
    assert settings_to_set([(name, "anything")]) == {}
    assert not is_stored(name, None)


@pytest.mark.parametrize("name", sorted(OFF))
def test_features_of_kafka_can_only_be_off(name: str) -> None:
    assert settings_to_set([(name, next(iter(OFF[name])))]) == {}
    assert not is_stored(name, None)
    with pytest.raises(BrokerError, match=name) as caught:
        settings_to_set([(name, "12")])
    assert caught.value.code is ErrorCode.INVALID_CONFIG


@pytest.mark.parametrize(
    ("name", "value"), [("retention.hours", "1"), ("retention.ms", None), ("restoring", "true"), ("restored.from", "x")]
)
def test_other_settings_are_refused(name: str, value: str | None) -> None:
    with pytest.raises(BrokerError) as caught:
        settings_to_set([(name, value)])
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_no_setting_is_in_two_tables() -> None:
    assert not (NO_EFFECT & OFF.keys() or TOPIC_SETTINGS.keys() & (NO_EFFECT | OFF.keys()))
