"""Messages of administration: topics, replicas, leaders, brokers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparklog.model import Int31, Replicas
from sparklog.protocol.fields import (
    MAX_LISTED,
    MAX_SETTINGS,
    Columns,
    Entries,
    Listed,
    Message,
    PartitionResult,
    Settings,
)


class CreateTopic(Message, frozen=True, tag="create_topic"):
    """``schema`` empty: the default schema. ``assignment`` empty: placed by the broker. Waits for the leaders."""

    name: str
    partitions: int
    replication_factor: int
    timeout_ms: int
    schema: bytes = b""
    key_columns: Columns[str] = ()
    event_time: str | None = None
    config: Settings = msgspec.field(default_factory=dict)
    assignment: Entries[Replicas[int]] = ()


class CreateTopicReply(Message, frozen=True, tag="create_topic_reply"):
    """``warning``: why the placement is weaker than asked (replicas on one host)."""

    topic_id: str
    warning: str = ""


class DeleteTopic(Message, frozen=True, tag="delete_topic"):
    name: str
    timeout_ms: int


class CreatePartitions(Message, frozen=True, tag="create_partitions"):
    """``partitions`` is the topic's new number. ``assignment``: replicas of the added ones; empty: placed by the
    broker. Waits for the leaders; answered by a CreateTopicReply."""

    topic: str
    partitions: int
    timeout_ms: int
    assignment: Entries[Replicas[Int31]] = ()


class AddColumns(Message, frozen=True, tag="add_columns"):
    """``columns``: an Arrow IPC Schema message of nullable columns; what the topic has of them already is left as it
    is. Answered when the broker asked knows of them."""

    topic: str
    columns: bytes
    timeout_ms: int


class AlterTopic(Message, frozen=True, tag="alter_topic"):
    """Set settings of a topic, and take others back to the cluster's defaults (``unset``); those that are not named
    stay. Answered when the broker asked knows of it."""

    topic: str
    config: Settings
    unset: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SETTINGS)]
    timeout_ms: int


class DeleteRecordsPartition(msgspec.Struct, frozen=True, array_like=True):
    """``offset``: the log is to begin there; -1: at the high watermark."""

    topic: str
    partition: int
    offset: int
    leader_epoch: Int31 = -1


class DeleteRecords(Message, frozen=True, tag="delete_records"):
    """To the partitions' leader. Answered when its new log starts are durable; followers hear of them with their next
    fetch."""

    partitions: Entries[DeleteRecordsPartition]


class DeletedRecords(msgspec.Struct, frozen=True, array_like=True):
    code: int
    log_start_offset: int
    detail: str = ""


class DeleteRecordsReply(Message, frozen=True, tag="delete_records_reply"):
    """One result a partition, in order."""

    results: Listed[DeletedRecords]


class RestoreRecords(Message, frozen=True, tag="restore_records"):
    """Batches of one partition with the offsets they had before its topic was lost, to its leader; the body is as of
    Produce. The first begins at the log's end, each of the others where the one before it ends; they may have gaps
    inside. Answered when all are committed."""

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int
    timeout_ms: int


class RestoreRecordsReply(Message, frozen=True, tag="restore_records_reply"):
    """``log_end_offset``: with OFFSET_OUT_OF_RANGE, where the next batch has to begin."""

    code: int
    log_end_offset: int
    detail: str = ""


class ReplicaMove(msgspec.Struct, frozen=True, array_like=True):
    """``target``: the replicas wanted, preferred leader first; None takes a move under way back."""

    topic: str
    partition: int
    target: Replicas[Int31] | None


class AlterReassignments(Message, frozen=True, tag="alter_reassignments"):
    """Begin, change or cancel moves; does not wait for them to end. ``throttle_bytes``: bytes per second each broker
    copies at most, 0: no limit; naming a move's target again changes its throttle."""

    moves: Entries[ReplicaMove]
    timeout_ms: int
    throttle_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class AlterReassignmentsReply(Message, frozen=True, tag="alter_reassignments_reply"):
    """One result a move, in order. ``warning`` as in CreateTopicReply."""

    results: Listed[PartitionResult]
    warning: str = ""


class ListReassignments(Message, frozen=True, tag="list_reassignments"):
    """Which moves are under way."""


class ReassignmentStatus(msgspec.Struct, frozen=True, array_like=True):
    """How far each replica's copy is stands in the brokers' descriptions."""

    topic: str
    partition: int
    target: Replicas[int]
    original: Replicas[int]
    replicas: Replicas[int]
    isr: Replicas[int]
    leader: int
    throttle_bytes: int


class ListReassignmentsReply(Message, frozen=True, tag="list_reassignments_reply"):
    moves: Listed[ReassignmentStatus]


class ElectLeaders(Message, frozen=True, tag="elect_leaders"):
    """``kind``: "preferred" or "unclean", as in ``codecs.ElectionRequest``. ``partitions`` None: all. Waits until the
    controller has carried it out."""

    kind: str
    timeout_ms: int
    partitions: Entries[tuple[str, int]] | None = None


class ElectLeadersReply(Message, frozen=True, tag="elect_leaders_reply"):
    """Results of the partitions asked for; of all of them, only those that did not get the leader wanted."""

    results: Listed[PartitionResult]


class RestartBroker(Message, frozen=True, tag="restart_broker"):
    """Stop in an orderly way, and be started again by the supervisor. ``incarnation``: the one that is meant (so that
    a request told twice restarts once). Answered by an Ack when the stop begins."""

    incarnation: int


class Ack(Message, frozen=True, tag="ack"):
    """Done; for requests that have nothing else to say."""


class DescribeBroker(Message, frozen=True, tag="describe_broker"):
    """What this broker process is doing: for people, tests and counters."""


class ReplicaDescription(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    role: str  #: leader, follower, offline
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    size_bytes: int
    directory: str
    last_epoch: int = -1  #: leader epoch of the last batch, -1 for an empty log


class DescribeBrokerReply(Message, frozen=True, tag="describe_broker_reply"):
    broker_id: int
    incarnation: int
    pid: int
    version: str
    log_dir: str
    state: str  #: running, stopping
    replicas: Listed[ReplicaDescription]
    counters: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_LISTED)]
    #: In force, with the topic defaults that were set.
    settings: Settings = msgspec.field(default_factory=dict)
