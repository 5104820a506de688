"""Tests that ZooKeeper values survive encoding, and that newer and foreign ones are refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.model import (
    BrokerRegistration,
    LeaderAndIsr,
    ListenerEndpoint,
    TopicPartition,
    TopicRecord,
    TopicSchema,
    TopicStates,
    VersionedState,
)
from sparklog.zk import codecs

ids = st.integers(0, 2**31 - 1)


@given(st.builds(LeaderAndIsr, st.integers(-1, 100), ids, st.lists(ids).map(tuple), ids), ids)
def test_a_partition_state_survives_encoding(state: LeaderAndIsr, incarnation: int) -> None:
    data = codecs.encode_state(state, incarnation)
    assert codecs.decode_state("/p", data, 7) == VersionedState(state, 7, incarnation)


@given(
    st.builds(
        TopicRecord,
        name=st.just("t"),
        topic_id=st.from_regex(r"[a-zA-Z0-9_-]{1,249}", fullmatch=True),
        assignment=st.lists(st.lists(ids, min_size=1, unique=True).map(tuple), min_size=1).map(tuple),
        schemas=st.lists(st.builds(TopicSchema, ids, st.binary())).map(tuple),
        key_columns=st.lists(st.text()).map(tuple),
        event_time=st.none() | st.text(),
        config=st.dictionaries(st.text(), st.text()),
    )
)
def test_a_topic_record_survives_encoding(record: TopicRecord) -> None:
    assert codecs.decode_topic("/t", codecs.encode_topic(record), "t") == record


def test_a_broker_registration_survives_encoding() -> None:
    registration = BrokerRegistration(
        3,
        "h",
        9092,
        "boot",
        "c",
        trusted=False,
        rack="r1",
        incarnation=5,
        pid=7,
        pid_namespace=8,
        start_time=9,
        endpoints=(ListenerEndpoint("CLIENT", "SASL_SSL", "h", 9092), ListenerEndpoint("BROKER", "SSL", "h", 9093)),
    )
    assert codecs.decode_broker("/b", codecs.encode_broker(registration), 3) == registration


def test_isr_changes_survive_encoding() -> None:
    told = (
        TopicStates("a", "id-1", {0: VersionedState(LeaderAndIsr(1, 2, (1, 3), 4), 5, 6)}),
        TopicStates("b", "id-2", {12: VersionedState(LeaderAndIsr(1, 0, (1,), 4), 0, 6)}),
    )
    assert codecs.decode_isr_changes("/n", codecs.encode_isr_changes(told)) == (told, ())


def test_isr_changes_are_exchanged_between_releases() -> None:
    """An earlier release names partitions, and treats a node without names as a change of any partition."""
    earlier = b'{"version":1,"partitions":[["a",0],["b",12]]}'
    named = (TopicPartition("a", 0), TopicPartition("b", 12))
    assert codecs.decode_isr_changes("/n", earlier) == ((), named)
    assert codecs.decode_isr_changes("/n", b'{"version":1,"partitions":[]}') == ((), ())
    told = TopicStates("a", "id-1", {0: VersionedState(LeaderAndIsr(1, 2, (1, 3), 4), 5, 6)})
    assert json.loads(codecs.encode_isr_changes([told]))["partitions"] == []


def test_a_newer_version_is_refused_even_with_other_fields() -> None:
    with pytest.raises(
        codecs.ZkFormatError, match=r"/x/state has format version 2; this version of sparklog supports up to 1"
    ):
        codecs.decode_state("/x/state", b'{"version":2,"quorum":[1]}', 0)


def test_fields_of_a_later_release_within_the_version_are_ignored() -> None:
    value = json.loads(codecs.encode_state(LeaderAndIsr(1, 2, (1,), 3), 4)) | {"witness": 9}
    assert codecs.decode_state("/s", json.dumps(value).encode(), 0).state.leader_epoch == 2


@pytest.mark.parametrize("data", [b"", b"\xff\x00", b"[1]", b'{"version":1}', b'{"version":1,"leader":"x"}'])
def test_an_invalid_state_is_refused_with_its_path(data: bytes) -> None:
    with pytest.raises(codecs.ZkFormatError, match="/x/state"):
        codecs.decode_state("/x/state", data, 0)
