"""The rebuild of ZooKeeper's lost data from the logs in the brokers' directories.

The module is pure. The next leader of each partition is the broker with the longest log: the log with the highest last
leader epoch and, among logs with this epoch, the greatest log end offset. This log has every committed record of all
given directories. At first this broker is the partition's only in-sync replica; the other replicas join the ISR as they
catch up. Every epoch and id starts above the highest one that any directory has seen.

Directories that are not given cannot be considered. For each partition with fewer logs than replicas the result has a
finding, because the missing logs may have more records.
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

#: The distance between the highest epoch or id that a given directory has seen and the first new one. Directories that
#: are not given may have seen higher epochs and ids.
_CONTROLLER_EPOCHS = 1000
_PRODUCER_IDS = 1_000_000
_LEADER_EPOCHS = 100
#: The controller epoch for directories that have not recorded one, such as directories of release 0.1.0.
_UNKNOWN_CONTROLLER_EPOCH = 100_000


class RebuiltTopic(NamedTuple):
    """The rebuilt metadata of a topic: its record, and the states of its partitions that have a log.

    A partition without a log gets no state, so the controller treats it as new.
    """

    record: TopicRecord
    states: dict[int, LeaderAndIsr]


class RebuiltCluster(NamedTuple):
    """The rebuilt metadata of a cluster, to be written to an empty ZooKeeper.

    ``brokers`` has the last registered incarnation of each broker, by broker id. ``findings`` are messages for the
    operator.
    """

    cluster_id: str
    controller_epoch: int
    producer_ids: int
    brokers: dict[int, int]
    topics: tuple[RebuiltTopic, ...]
    findings: tuple[str, ...]


def rebuild_cluster(inventories: Sequence[DirectoryInventory]) -> RebuiltCluster:
    """Rebuild a cluster's metadata from the contents of its log directories.

    Raises:
        ClusterError: no directory is given, the directories are of several clusters, or two are of one broker.
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
    """Return the topics that these logs and notes describe, ordered by name.

    ``logs`` has all logs of the brokers in ``asked``.

    If several topics have the same name, rebuild only the latest topic. Brokers will move the logs of the earlier
    topics aside. Add a message about these logs to ``findings``.
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
    for note in newest.values():  # No broker has a log of this topic.
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
    """Return one rebuilt topic. If there is no ``note``, the topic gets the default settings."""
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
            # NO_LOSS: a log that appears later with more committed records must not be truncated.
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

    Retention deletes no records until an operator sets the topic's retention. The internal topic of group offsets is
    compacted.
    """
    kept = {"retention.ms": "-1"}
    return {**kept, "cleanup.policy": "compact"} if is_internal(name) and name.endswith("offsets") else kept
