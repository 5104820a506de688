"""Tests of the ZooKeeper content for given log directories, computed without a broker."""

from __future__ import annotations

import pytest

from sparklog.controller.rebuild import rebuild_cluster
from sparklog.errors import ClusterError
from sparklog.model import NO_LEADER, DirectoryInventory, LogCopy, SeenNumbers, TopicNote, TopicSchema
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message

SCHEMA = TopicSchema(0, schema_message(DEFAULT_SCHEMA))
LATER = TopicSchema(1, schema_message(DEFAULT_SCHEMA))


def log(
    broker_id: int, last_epoch: int, end: int, *, partition: int = 0, topic_id: str = "id", topic: str = "t"
) -> LogCopy:
    return LogCopy(broker_id, "t", partition, topic_id, (SCHEMA,), last_epoch, end)


def note(*replicas: tuple[int, ...], topic_id: str = "id", order: int = 1, noted_ms: int = 1) -> TopicNote:
    config = {"retention.ms": str(noted_ms)}
    return TopicNote("t", topic_id, (SCHEMA, LATER), ("key",), "timestamp", config, replicas, order, noted_ms)


def directory(
    broker_id: int,
    *logs: LogCopy,
    notes: tuple[TopicNote, ...] = (),
    seen: SeenNumbers = SeenNumbers(),  # noqa: B008 - a frozen value
    incarnation: int = 3,
    cluster_id: str = "cluster",
) -> DirectoryInventory:
    return DirectoryInventory(f"/log-{broker_id}", cluster_id, broker_id, seen, incarnation, logs, notes)


def test_the_log_with_the_latest_end_leads_in_the_highest_epoch() -> None:
    found = rebuild_cluster(
        [
            directory(1, log(1, 4, 900), notes=(note((1, 2, 3)),)),
            directory(2, log(2, 5, 20), notes=(note((1, 2, 3)),)),
            directory(3, log(3, 5, 30), notes=(note((1, 2, 3)),)),
        ]
    )
    [(record, states)] = found.topics
    assert record.assignment == ((1, 2, 3),)
    assert (states[0].leader, states[0].isr) == (NO_LEADER, (3,))
    assert states[0].leader_epoch > 5
    assert found.findings == ()


def test_counters_begin_above_all_known_values() -> None:
    found = rebuild_cluster(
        [
            directory(1, seen=SeenNumbers(40, "c", 7000), incarnation=12),
            directory(6, seen=SeenNumbers(41, "d", 5000), incarnation=0),
        ]
    )
    assert found.controller_epoch > 141
    assert found.producer_ids > 7000
    assert found.brokers == {1: 12, 6: 0}
    # Directories of release 0.1.0 contain no epoch. They get one that no cluster reaches.
    assert rebuild_cluster([directory(1)]).controller_epoch >= 100_000


def test_a_topic_is_rebuilt_from_its_latest_note() -> None:
    older, newer = note((1, 2), (2, 1), noted_ms=5), note((1, 2), (2, 3), noted_ms=9)
    found = rebuild_cluster([directory(2, log(2, 0, 5), notes=(newer,)), directory(1, log(1, 0, 5), notes=(older,))])
    [(record, states)] = found.topics
    assert record.config == {"retention.ms": "9"}
    assert record.schemas == (SCHEMA, LATER)
    assert record.assignment == ((1, 2), (2, 3))
    assert states.keys() == {0}, "the controller treats a partition without a log as new"
    assert found.findings == ()


def test_a_topic_without_a_log_returns_empty() -> None:
    [(record, states)] = rebuild_cluster([directory(1, notes=(note((1, 2), (2, 1)),))]).topics
    assert (record.assignment, states) == (((1, 2), (2, 1)), {})


def test_a_topic_without_notes_keeps_all_logs_and_is_named() -> None:
    found = rebuild_cluster([directory(1, log(1, 0, 5), log(1, 0, 5, partition=2)), directory(2, log(2, 0, 9))])
    [(record, states)] = found.topics
    assert record.assignment == ((2, 1), (1, 2), (1,))
    assert (record.key_columns, record.event_time, record.config) == (("key",), "timestamp", {"retention.ms": "-1"})
    assert states.keys() == {0, 2}
    [finding] = found.findings
    assert finding.startswith("t: its settings are not known")


def test_the_later_of_two_topics_of_one_name_counts() -> None:
    first, second = note((1, 2), order=7), note((1, 2), order=8, topic_id="id-2")
    found = rebuild_cluster(
        [
            directory(1, log(1, 3, 900), notes=(first,)),
            directory(2, log(2, 0, 1, topic_id="id-2"), notes=(first, second)),
        ]
    )
    [(record, states)] = found.topics
    assert (record.topic_id, states[0].isr) == ("id-2", (2,))
    [finding] = found.findings
    assert finding == "t: logs of topic id id on brokers [1] are of an earlier topic"


def test_a_directory_that_was_not_given_is_reported() -> None:
    found = rebuild_cluster([directory(1, log(1, 0, 5), notes=(note((1, 2)),))])
    assert found.findings == ("t-0: the logs of brokers [2] are unknown and may have more",)


def test_directories_of_different_clusters_are_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"expected log directories of one cluster, found 2: /log-1 of cluster, /log-2 of other"
    ):
        rebuild_cluster([directory(1), directory(2, cluster_id="other")])
    with pytest.raises(ClusterError, match=r"both belong to broker 1"):
        rebuild_cluster([directory(1), directory(1)])
    with pytest.raises(ClusterError, match="no log directory given"):
        rebuild_cluster([])
