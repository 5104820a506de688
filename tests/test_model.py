"""Tests of the model: names of topics, and values that compare, hash, pickle and are sent over the wire."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.model import (
    NO_LEADER,
    BrokerEndpoint,
    EpochEnd,
    LeaderAndIsr,
    OffsetRange,
    TopicPartition,
    TopicRecord,
    TopicSchema,
    VersionedState,
    check_topic_name,
    producer_id_floor,
)

STATE = LeaderAndIsr(leader=2, leader_epoch=5, isr=(2, 3), controller_epoch=1)
RECORD = TopicRecord(
    name="flights",
    topic_id="id-1",
    assignment=((1, 2, 3), (2, 3, 1)),
    schemas=(TopicSchema(0, b"old"), TopicSchema(1, b"new")),
    key_columns=("carrier",),
    event_time="time_hour",
    config={"segment.bytes": "4096"},
)
VALUES = [
    TopicPartition("t", 0),
    OffsetRange(0, 5),
    EpochEnd(-1, 0),
    BrokerEndpoint(1, "localhost", 9092, 4, "rack-a"),
    STATE,
    VersionedState(STATE, 9),
    TopicSchema(0, b"\x00\xff"),
    RECORD,
]


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "_schemas"])
def test_valid_topic_names_are_accepted(name: str) -> None:
    assert check_topic_name(name) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "x" * 250, "a b", "a/b", "ä", "a\n", "topic\0", "../escape", "a:b", "a" * 5000]
)
def test_invalid_topic_names_are_refused(name: str) -> None:
    reason = check_topic_name(name)
    assert reason is not None
    assert f"({len(name)} characters)" in reason and len(reason) < 300


@settings(deadline=None)
@given(st.text(max_size=300))
def test_allowed_names_are_safe_as_directories_and_paths(name: str) -> None:
    if check_topic_name(name) is None:
        assert name and name not in {".", ".."} and len(name.encode()) <= 249
        assert not set(name) & set("/\\\0 \n:*?\"'")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_pickle_and_messagepack(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@pytest.mark.parametrize("value", VALUES[:7], ids=lambda value: type(value).__name__)
def test_values_are_frozen_and_hashable(value: Any) -> None:
    fields = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value._fields
    field = fields[0]
    with pytest.raises(AttributeError):
        setattr(value, field, None)
    assert len({value, pickle.loads(pickle.dumps(value))}) == 1


def test_a_partition_is_printed_as_its_directory() -> None:
    assert str(TopicPartition("my-topic", 12)) == "my-topic-12"


def test_a_topic_record_derives_its_properties() -> None:
    assert RECORD.latest_schema == TopicSchema(1, b"new")
    assert RECORD.replication_factor == 3
    assert TopicRecord("t", "id", (), (TopicSchema(0, b""),)).replication_factor == 0
    assert TopicRecord("t", "id", (), ()).config is not TopicRecord("u", "id", (), ()).config


def test_no_leader_is_not_a_broker_id() -> None:
    assert NO_LEADER < 0


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(min_value=0, max_value=1e10))
@settings(max_examples=200)
def test_producer_ids_of_a_later_second_are_higher(any_s: float, now_s: float) -> None:
    assert 0 <= producer_id_floor(any_s) <= 2**62
    assert producer_id_floor(now_s + 1) - producer_id_floor(now_s) >= 2**20
