"""Tests of the answers to requests of which the principal may see or do only a part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparklog.protocol import messages as m
from sparklog.protocol.messages import Reply
from sparklog.record.header import HEADER_BYTES
from sparklog.security.acls import Operation, ResourceType
from sparklog.security.partial_answers import REFUSED, Allows, merged, shown, without

TOPICS = ("mine", "other", "mine", "secret")
REFUSALS = {1: "may not", 3: "may not either"}


def allows(*names: str) -> Allows:
    return lambda operation, kind, name: name in names


def answer(reply: Reply, may: Allows, *, over: Callable[[], bool] = lambda: False) -> Reply:
    work = shown(reply, may, over)
    try:
        while True:
            next(work)
    except StopIteration as done:
        found: Reply = done.value
        return found


# --- entries ---


def test_a_produce_request_loses_the_bodies_of_its_refused_partitions() -> None:
    parts = [bytes([n]) * (HEADER_BYTES + n) for n in range(4)]
    request = m.Produce(7, 1, 0, tuple(m.ProducePartition(topic, 0, "", 1, n) for n, topic in enumerate(TOPICS)))
    kept, body = without(request, memoryview(b"".join(parts)), REFUSALS)
    assert isinstance(kept, m.Produce)
    assert [wanted.topic for wanted in kept.partitions] == ["mine", "mine"]
    assert bytes(body) == parts[0] + parts[2]


def test_a_produce_request_with_wrong_sizes_keeps_its_body() -> None:
    request = m.Produce(7, 1, 0, (m.ProducePartition("other", 0, "", 1, 5),))
    _, body = without(request, memoryview(b"xyz"), {0: ""})
    assert bytes(body) == b"xyz"


def test_results_and_refusals_keep_the_order_of_the_request() -> None:
    results = tuple(m.ProduceResult(0, offset, 1, 0) for offset in (10, 20))
    request = m.Produce(7, 1, 0, tuple(m.ProducePartition(topic, 0, "", 0, 0) for topic in TOPICS))
    reply = merged(request, m.ProduceReply(7, results), REFUSALS)
    assert isinstance(reply, m.ProduceReply)
    assert [(one.code, one.base_offset) for one in reply.results] == [(0, 10), (REFUSED, -1), (0, 20), (REFUSED, -1)]


def test_each_kind_of_entry_gets_its_refusal() -> None:
    listing = m.ListOffsets(1, 0, tuple(m.ListOffsetsPartition(topic, 0, -1) for topic in TOPICS))
    ok = m.ListedOffset(0, 5, -1, 1)
    deletion = m.DeleteRecords(1, tuple(m.DeleteRecordsPartition(topic, 0, 1) for topic in TOPICS))
    commit = m.CommitOffsets(1, "g", tuple(m.GroupOffset(topic, n, 1) for n, topic in enumerate(TOPICS)))
    done = [m.PartitionResult("mine", n, 0) for n in (0, 2)]
    cases: list[tuple[m.ListOffsets | m.DeleteRecords | m.CommitOffsets, Reply]] = [
        (listing, m.ListOffsetsReply(1, (ok, ok))),
        (deletion, m.DeleteRecordsReply(1, (m.DeletedRecords(0, 1), m.DeletedRecords(0, 1)))),
        (commit, m.CommitOffsetsReply(1, tuple(done))),
    ]
    for request, reply in cases:
        whole = merged(request, reply, REFUSALS)
        assert not isinstance(whole, m.ErrorReply)
        assert [one.code for one in whole.results] == [0, REFUSED, 0, REFUSED]  # type: ignore[union-attr]
        assert [one.detail for one in whole.results][1::2] == ["may not", "may not either"]  # type: ignore[union-attr]
    assert [one.partition for one in whole.results] == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_an_error_of_the_whole_request_stays() -> None:
    request = m.ListOffsets(1, 0, (m.ListOffsetsPartition("other", 0, -1),))
    error = m.ErrorReply(1, 5, "no")
    assert merged(request, error, {0: ""}) is error


# --- lists ---


def test_a_list_of_groups_has_only_those_allowed() -> None:
    reply = m.ListGroupsReply(1, ("a", "b", "c"), (("empty", 0), ("stable", 2), ("stable", 1)))
    found = answer(reply, allows("a", "c"), over=iter((False, True, False)).__next__)
    assert found == m.ListGroupsReply(1, ("a", "c"), (("empty", 0), ("stable", 1)))
    assert answer(reply, allows("kafka-cluster")) is reply, "Describe on the cluster shows all groups"


def test_a_list_of_transactions_hides_keys_and_topics() -> None:
    places = (("mine", 0), ("secret", 0))

    def one(key: str) -> m.DescribedTransaction:
        return m.DescribedTransaction(key, "open", "r", 1, -1, -1, 0, 0, ((7, 0, places),))

    found = answer(m.ListTransactionsReply(1, (one("a"), one("b"))), allows("a", "mine"))
    assert isinstance(found, m.ListTransactionsReply)
    assert [(one.key, one.participants) for one in found.transactions] == [("a", ((7, 0, (("mine", 0),)),))]


def test_committed_offsets_hide_other_topics() -> None:
    reply = m.FetchOffsetsReply(1, (m.GroupOffset("mine", 0, 1), m.GroupOffset("secret", 0, 1)), (("secret", 1),))
    assert answer(reply, allows("mine")) == m.FetchOffsetsReply(1, (m.GroupOffset("mine", 0, 1),), ())


def test_hanging_transactions_need_read() -> None:
    one = m.FoundHangingTransaction("mine", 0, 1, 0, 5, 0)
    reply = m.FindHangingReply(1, (one,))
    assert answer(reply, lambda operation, kind, name: operation is Operation.READ) == reply
    assert answer(reply, lambda operation, kind, name: operation is Operation.DESCRIBE) == m.FindHangingReply(1, ())


def test_a_member_is_assigned_only_the_topics_it_may_describe() -> None:
    given = [m.TopicPartitions(topic, "id", (0,)) for topic in ("mine", "secret")]
    assert answer(m.HeartbeatReply(1, 3, tuple(given)), allows("mine")) == m.HeartbeatReply(1, 3, (given[0],))


@pytest.mark.parametrize("where", ["topics", "owned", "target"])
def test_a_group_with_a_hidden_topic_is_not_described(where: str) -> None:
    place = (m.TopicPartitions("secret", "id", (0,)),)
    member = m.MemberDescription(
        "m",
        "",
        "c",
        "h",
        "",
        1,
        ("secret",) if where == "topics" else ("mine",),
        "",
        place if where == "owned" else (),
        place if where == "target" else (),
    )
    reply = m.DescribeGroupReply(1, m.DescribedGroup("g", "stable", 1, (member,)))
    refused = answer(reply, allows("mine"))
    assert isinstance(refused, m.ErrorReply)
    assert refused.code == REFUSED
    assert "secret" not in refused.detail
    assert answer(reply, allows("mine", "secret")) == reply
    assert answer(m.DescribeGroupReply(1, None), allows()) == m.DescribeGroupReply(1, None)


def test_settings_of_a_broker_need_describe_configs() -> None:
    reply = m.DescribeBrokerReply(1, 0, 1, 2, "v", "/d", "running", (), {}, {"a": "b"})

    def may(operation: Operation, kind: ResourceType, name: str) -> bool:
        return operation is Operation.DESCRIBE

    hidden = answer(reply, may)
    assert isinstance(hidden, m.DescribeBrokerReply)
    assert hidden.settings == {}
    assert answer(reply, allows("kafka-cluster")) is reply
