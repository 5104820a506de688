"""The check that every broker of a cluster is alive and every replica is in sync. All brokers must agree.

The metadata of one broker is not sufficient: a broker that has just started has no metadata, and right after a restart,
the ISR in the metadata may be out of date. So the client asks every broker for its own state. Each replica must have
the leader's epoch, and must have reached the high watermark that its leader had in the previous snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sparklog.client.cluster.blocking_cluster import BlockingCluster, Deadline
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_LEADER, TopicPartition
from sparklog.protocol.messages import (
    DescribeBroker,
    DescribeBrokerReply,
    Metadata,
    MetadataReply,
    PartitionMetadata,
    ReplicaDescription,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
#: The maximum number of problems that an error names.
_NAMED = 3


@dataclass(slots=True)
class ClusterSnapshot:
    """The state that all registered brokers have reported, one after the other."""

    metadata: dict[int, MetadataReply] = field(default_factory=dict)
    replicas: dict[tuple[TopicPartition, int], ReplicaDescription] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def newest(self) -> dict[TopicPartition, PartitionMetadata]:
        """Return the metadata of each partition from the broker that knows the newest leader epoch."""
        found: dict[TopicPartition, PartitionMetadata] = {}
        for reply in self.metadata.values():
            for topic in reply.topics:
                for part in topic.partitions:
                    tp = TopicPartition(topic.name, part.partition)
                    known = found.get(tp)
                    if known is None or part.leader_epoch > known.leader_epoch:
                        found[tp] = part
        return found


def take_snapshot(cluster: BlockingCluster, expected: Collection[int]) -> ClusterSnapshot:
    """Ask every registered broker for its state. A broker that does not respond is one of the snapshot's problems.

    Raises:
        BrokerError: no broker is reachable.
    """
    snapshot = ClusterSnapshot()
    cluster.refresh(())
    registered = sorted(cluster.metadata.brokers)
    for broker_id in sorted(set(expected) - set(registered)):
        snapshot.problems.append(f"broker {broker_id} is not registered")
    for broker_id in registered:
        try:
            snapshot.metadata[broker_id] = cluster.ask_metadata(
                Metadata(0, None, schemas=False, internal=True), broker_id
            )
            described = cluster.ask_broker(broker_id, DescribeBroker(0), DescribeBrokerReply)
        except BrokerError as error:
            snapshot.problems.append(f"broker {broker_id} does not respond: {error}")
            continue
        if described.state != "running":
            snapshot.problems.append(f"broker {broker_id} is {described.state}")
        for replica in described.replicas:
            snapshot.replicas[TopicPartition(replica.topic, replica.partition), broker_id] = replica
    return snapshot


def problems_of(snapshot: ClusterSnapshot, before: ClusterSnapshot) -> list[str]:
    """Return the problems that a snapshot shows, one sentence each. ``before`` is the previous snapshot.

    The result is empty if every broker is alive and every replica is in sync.
    """
    found = list(snapshot.problems)
    epochs = {broker_id: reply.controller_epoch for broker_id, reply in snapshot.metadata.items()}
    newest = max(epochs.values(), default=-1)
    found += [f"broker {b} does not know controller {newest} yet" for b, epoch in epochs.items() if epoch < newest]
    partitions = snapshot.newest
    for broker_id, reply in snapshot.metadata.items():
        known = {
            TopicPartition(topic.name, part.partition): part.leader_epoch
            for topic in reply.topics
            for part in topic.partitions
        }
        behind = [tp for tp, part in partitions.items() if known.get(tp, -1) < part.leader_epoch]
        if behind:
            found.append(f"broker {broker_id} does not know the leader of {behind[0]} yet")
    for tp, part in partitions.items():
        problem = _problem(tp, part, snapshot, before)
        if problem:
            found.append(problem)
    return found


def _problem(tp: TopicPartition, part: PartitionMetadata, snapshot: ClusterSnapshot, before: ClusterSnapshot) -> str:
    if part.leader == NO_LEADER:
        return f"{tp} has no leader"
    missing = sorted(set(part.replicas) - set(part.isr))
    if missing:
        return f"{tp}: replicas {missing} are not in sync"
    leader = before.replicas.get((tp, part.leader))
    if leader is None or (leader.role, leader.leader_epoch) != ("leader", part.leader_epoch):
        return f"{tp}: broker {part.leader} does not lead it yet"
    for broker_id in part.replicas:
        replica = snapshot.replicas.get((tp, broker_id))
        if replica is None or replica.role == "offline" or replica.leader_epoch != part.leader_epoch:
            return f"{tp}: broker {broker_id} does not follow in leader epoch {part.leader_epoch}"
        if replica.log_end_offset < leader.high_watermark:
            missing_records = leader.high_watermark - replica.log_end_offset
            return f"{tp}: broker {broker_id} lacks {missing_records} committed offsets"
    return ""


def wait_until_whole(
    cluster: BlockingCluster,
    *,
    expected: Collection[int],
    timeout_s: float,
    what: str,
    also: Callable[[ClusterSnapshot], str] = lambda snapshot: "",
) -> ClusterSnapshot:
    """Take snapshots until every broker is alive and every replica is in sync. Return the last snapshot.

    ``also`` is a further check of each snapshot. It returns a problem as text, or "" if there is none.

    Raises:
        ClientTimeout: there are still problems after ``timeout_s``. The message has ``what`` and the problems.
    """
    deadline = Deadline(timeout_s)
    before: ClusterSnapshot | None = None
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            snapshot = take_snapshot(cluster, expected)
            problems = ["only one snapshot so far"] if before is None else problems_of(snapshot, before)
            extra = also(snapshot)
            problems += [extra] if extra else []
            before = snapshot
        except BrokerError as error:
            if not error.retriable and error.code != ErrorCode.NETWORK_EXCEPTION:
                raise
            problems = [str(error)]
        if not problems:
            return snapshot
        if deadline.left_s() <= 0:
            more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            raise ClientTimeout(f"{what}: not reached within {timeout_s:g} s: {'; '.join(problems[:_NAMED])}{more}")
        time.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
