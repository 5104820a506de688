"""The content that ZooKeeper needs after the loss of its data, derived from the logs in the brokers' directories.

The module is pure. The next leader of each partition is the broker with the longest log: the highest last leader epoch
and, among those, the greatest log end offset. This log has every committed record of all given directories. The broker
is the partition's only in-sync replica at first; the others join as they catch up. Every number starts above the
highest that any directory has seen.

Only the given directories count. A finding names each partition with fewer logs than replicas: the missing logs may
have records that these lack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sparklog.errors import ClusterError
from sparklog.model import (
    NO_LEADER,
    NO_LOSS,
    DirectoryInventory,
    LeaderAndIsr,
    LogCopy,
    TopicNote,
    TopicRecord,
    TopicSchema,
    is_internal,
)
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_KEY_COLUMNS, parse_schema

#: The numbers that are skipped above the highest that a directory has seen: other directories may have seen more.
_CONTROLLER_EPOCHS = 1000
_PRODUCER_IDS = 1_000_000
_LEADER_EPOCHS = 100
#: The epoch for directories that have recorded none, as those of release 0.1.0.
_UNKNOWN_CONTROLLER_EPOCH = 100_000


class RebuiltTopic(NamedTuple):
    """A topic and the states of its partitions that have a log.

    A partition without a log is new to the controller, because it holds nothing.
    """

    record: TopicRecord
    states: dict[int, LeaderAndIsr]


class RebuiltCluster(NamedTuple):
    """The metadata to write to an empty ZooKeeper.

    ``brokers`` has the last registered incarnation by broker id. ``findings`` are sentences for the operator.
    """

    cluster_id: str
    controller_epoch: int
    producer_ids: int
    brokers: dict[int, int]
    topics: tuple[RebuiltTopic, ...]
    findings: tuple[str, ...]


def rebuild_cluster(inventories: Sequence[DirectoryInventory]) -> RebuiltCluster:
    """Return the metadata to write to an empty ZooKeeper.

    Raises:
        ClusterError: the directories are of several clusters, or two are of one broker.
    """
    if not inventories:
        raise ClusterError("no log directory given")
    clusters = {found.cluster_id: found.path for found in inventories}
    if len(clusters) > 1:
        named = ", ".join(f"{path} of {cluster_id}" for cluster_id, path in clusters.items())
        raise ClusterError(f"expected log directories of one cluster, found {len(clusters)}: {named}")
    by_broker: dict[int, str] = {}
    for found in inventories:
        if found.broker_id in by_broker:
            raise ClusterError(f"{found.path} and {by_broker[found.broker_id]} both belong to broker {found.broker_id}")
        by_broker[found.broker_id] = found.path
    findings = [problem for found in inventories for problem in found.problems]
    topics = rebuild_topics(
        [log for found in inventories for log in found.logs],
        [note for found in inventories for note in found.topics],
        asked=frozenset(by_broker),
        findings=findings,
    )
    epochs = [found.seen.controller_epoch for found in inventories if found.seen.controller_epoch >= 0]
    return RebuiltCluster(
        cluster_id=inventories[0].cluster_id,
        controller_epoch=max(epochs) + _CONTROLLER_EPOCHS if epochs else _UNKNOWN_CONTROLLER_EPOCH,
        producer_ids=max(found.seen.producer_ids for found in inventories) + _PRODUCER_IDS,
        brokers={found.broker_id: max(found.incarnation, 0) for found in inventories},
        topics=tuple(topics),
        findings=tuple(findings),
    )


def rebuild_topics(
    logs: Iterable[LogCopy], notes: Iterable[TopicNote], *, asked: Collection[int], findings: list[str]
) -> list[RebuiltTopic]:
    """Return the topics of these logs, by name.

    ``asked`` are brokers whose logs are all given.

    If several topics have one name, the latest counts. ``findings`` names the logs of the others; their brokers set
    these logs aside.
    """
    newest: dict[str, TopicNote] = {}
    for note in notes:
        known = newest.get(note.topic_id)
        if known is None or (known.order, known.noted_ms) < (note.order, note.noted_ms):
            newest[note.topic_id] = note
    by_id: defaultdict[str, list[LogCopy]] = defaultdict(list)
    for log in logs:
        by_id[log.topic_id].append(log)
    ids_by_name: defaultdict[str, list[str]] = defaultdict(list)
    for topic_id, copies in by_id.items():
        ids_by_name[copies[0].topic].append(topic_id)
    for note in newest.values():  # Such a topic has no record yet.
        if note.topic_id not in by_id:
            ids_by_name[note.name].append(note.topic_id)
    rebuilt = []
    for name, topic_ids in sorted(ids_by_name.items()):

        def liveness(topic_id: str) -> tuple[int, int]:
            known = newest.get(topic_id)
            return (known.order if known is not None else -1, len(by_id[topic_id]))

        chosen = max(topic_ids, key=liveness)
        for other in topic_ids:
            if other != chosen and by_id[other]:
                brokers = sorted({log.broker_id for log in by_id[other]})
                findings.append(f"{name}: logs of topic id {other} on brokers {brokers} are of an earlier topic")
        rebuilt.append(
            rebuild_topic(name, chosen, by_id[chosen], note=newest.get(chosen), asked=asked, findings=findings)
        )
    return rebuilt


def rebuild_topic(
    name: str,
    topic_id: str,
    logs: Sequence[LogCopy],
    *,
    note: TopicNote | None,
    asked: Collection[int],
    findings: list[str],
) -> RebuiltTopic:
    """Return one topic. Without a note it gets the default settings."""
    copies: defaultdict[int, list[LogCopy]] = defaultdict(list)
    for log in logs:
        copies[log.partition].append(log)
    noted = note.replicas if note is not None else ()
    count = max([*(number + 1 for number in copies), len(noted)])
    every = sorted({log.broker_id for log in logs})
    assignment = []
    states = {}
    for number in range(count):
        found = sorted(copies[number], key=lambda log: (-log.last_epoch, -log.log_end_offset, log.broker_id))
        known = noted[number] if number < len(noted) else ()
        replicas = known or tuple(log.broker_id for log in found) or tuple(every)
        added = tuple(log.broker_id for log in found[:1] if log.broker_id not in replicas)
        assignment.append(replicas + added)
        if found:
            best = found[0]
            epoch = max(best.last_epoch, 0) + _LEADER_EPOCHS
            # A copy that appears later with more committed records is not truncated.
            states[number] = LeaderAndIsr(NO_LEADER, epoch, (best.broker_id,), 0, lossy_epoch=NO_LOSS)
            missing = sorted(set(known) - {log.broker_id for log in found} - set(asked))
            if missing:
                findings.append(f"{name}-{number}: the logs of brokers {missing} are unknown and may have more")
    if note is None:
        findings.append(f"{name}: its settings are not known: it has the defaults; `sparklog topics alter` sets others")
    schemas = _schemas(logs, note)
    columns = parse_schema(schemas[-1].message).names if schemas else []
    event_time = DEFAULT_EVENT_TIME if DEFAULT_EVENT_TIME in columns else None
    record = TopicRecord(
        name=name,
        topic_id=topic_id,
        assignment=tuple(assignment),
        schemas=schemas,
        key_columns=note.key_columns if note is not None else tuple(k for k in DEFAULT_KEY_COLUMNS if k in columns),
        event_time=note.event_time if note is not None else event_time,
        config=dict(note.config) if note is not None else _default_config(name),
    )
    return RebuiltTopic(record, states)


def _schemas(logs: Sequence[LogCopy], note: TopicNote | None) -> tuple[TopicSchema, ...]:
    found = {schema.schema_id: schema for log in logs for schema in log.schemas}
    found |= {schema.schema_id: schema for schema in (note.schemas if note is not None else ())}
    return tuple(found[schema_id] for schema_id in sorted(found))


def _default_config(name: str) -> dict[str, str]:
    """Return the settings of a topic without a note.

    Nothing is deleted before an operator decides what may go. The internal topic of group offsets is compacted.
    """
    kept = {"retention.ms": "-1"}
    return {**kept, "cleanup.policy": "compact"} if is_internal(name) and name.endswith("offsets") else kept
