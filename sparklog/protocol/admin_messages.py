"""Messages of administration: topics, replicas, leaders and brokers."""

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
    """A request to create a topic. The broker replies when the partitions have leaders.

    An empty ``schema`` means the default schema. If ``assignment`` is empty, the broker places the replicas.
    """

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
    """The reply to CreateTopic.

    ``warning`` is empty, or explains that replicas had to be placed less safely, for example on one host.
    """

    topic_id: str
    warning: str = ""
    throttle_time_ms: int = 0


class DeleteTopic(Message, frozen=True, tag="delete_topic"):
    """A request to delete a topic."""

    name: str
    timeout_ms: int


class CreatePartitions(Message, frozen=True, tag="create_partitions"):
    """A request to add partitions to a topic. When they have leaders, the broker sends a CreateTopicReply.

    ``partitions`` is the topic's new number of partitions. ``assignment`` has the replicas of the added partitions. If
    ``assignment`` is empty, the broker places the replicas.
    """

    topic: str
    partitions: int
    timeout_ms: int
    assignment: Entries[Replicas[Int31]] = ()


class AddColumns(Message, frozen=True, tag="add_columns"):
    """A request to add ``columns``, an Arrow IPC Schema message of nullable columns, to a topic.

    Columns that the topic already has are not changed. The broker replies when it knows the new columns itself.
    """

    topic: str
    columns: bytes
    timeout_ms: int


class AlterTopic(Message, frozen=True, tag="alter_topic"):
    """A request to set settings of a topic (``config``), and to reset others (``unset``) to the cluster's defaults.

    All other settings keep their values. The broker replies when it knows the change itself.
    """

    topic: str
    config: Settings
    unset: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_SETTINGS)]
    timeout_ms: int


class DeleteRecordsPartition(msgspec.Struct, frozen=True, array_like=True):
    """One partition of a DeleteRecords request. ``offset`` is the new log start offset; -1 means the high watermark."""

    topic: str
    partition: int
    offset: int
    leader_epoch: Int31 = -1


class DeleteRecords(Message, frozen=True, tag="delete_records"):
    """A request to the partitions' leader to delete records at the start of their logs.

    The leader replies when the new log start offsets are durable. Followers get these offsets with their next fetch.
    """

    partitions: Entries[DeleteRecordsPartition]


class DeletedRecords(msgspec.Struct, frozen=True, array_like=True):
    """The result of DeleteRecords for one partition, with its new log start offset."""

    code: int
    log_start_offset: int
    detail: str = ""


class DeleteRecordsReply(Message, frozen=True, tag="delete_records_reply"):
    """The reply to DeleteRecords: one result per partition, in the order of the request."""

    results: Listed[DeletedRecords]
    throttle_time_ms: int = 0


class RestoreRecords(Message, frozen=True, tag="restore_records"):
    """A request to append batches with the offsets that they had before their topic was lost.

    The client sends it to the partition's leader. The body has the same format as in Produce. The first batch must
    start at the log end offset, and each further batch at the end of the previous batch. The offsets within a batch may
    have gaps. The leader replies when all batches are committed.
    """

    topic: str
    partition: int
    topic_id: str
    batch_count: int
    body_bytes: int
    timeout_ms: int


class RestoreRecordsReply(Message, frozen=True, tag="restore_records_reply"):
    """The reply to RestoreRecords.

    If ``code`` is OFFSET_OUT_OF_RANGE, the client's next request must start at ``log_end_offset``.
    """

    code: int
    log_end_offset: int
    detail: str = ""
    throttle_time_ms: int = 0


class ReplicaMove(msgspec.Struct, frozen=True, array_like=True):
    """The requested reassignment of one partition.

    ``target`` lists the new replicas, the preferred leader first. If it is None, the reassignment in progress is
    cancelled.
    """

    topic: str
    partition: int
    target: Replicas[Int31] | None


class AlterReassignments(Message, frozen=True, tag="alter_reassignments"):
    """A request to start, change or cancel reassignments. The reply does not wait until they are complete.

    ``throttle_bytes`` is the maximum number of bytes per second that each broker copies; 0 means no limit. If the
    target is the same as in the reassignment in progress, only the throttle changes.
    """

    moves: Entries[ReplicaMove]
    timeout_ms: int
    throttle_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class AlterReassignmentsReply(Message, frozen=True, tag="alter_reassignments_reply"):
    """The reply to AlterReassignments: one result per move, in the order of the request.

    ``warning`` has the same meaning as in CreateTopicReply.
    """

    results: Listed[PartitionResult]
    warning: str = ""
    throttle_time_ms: int = 0


class ListReassignments(Message, frozen=True, tag="list_reassignments"):
    """A request for the reassignments in progress."""


class ReassignmentStatus(msgspec.Struct, frozen=True, array_like=True):
    """The state of one reassignment in progress. The reply to DescribeBroker shows how much each replica has copied."""

    topic: str
    partition: int
    target: Replicas[int]
    original: Replicas[int]
    replicas: Replicas[int]
    isr: Replicas[int]
    leader: int
    throttle_bytes: int


class ListReassignmentsReply(Message, frozen=True, tag="list_reassignments_reply"):
    """The reply to ListReassignments: all reassignments in progress."""

    moves: Listed[ReassignmentStatus]
    throttle_time_ms: int = 0


class ElectLeaders(Message, frozen=True, tag="elect_leaders"):
    """A request to elect leaders. The broker replies when the controller has finished the elections.

    ``kind`` is "preferred" or "unclean" (see ``codecs.ElectionRequest``). If ``partitions`` is None, the request is for
    all partitions.
    """

    kind: str
    timeout_ms: int
    partitions: Entries[tuple[str, int]] | None = None


class ElectLeadersReply(Message, frozen=True, tag="elect_leaders_reply"):
    """The reply to ElectLeaders: the results of the requested partitions.

    If all partitions were requested, the reply contains only partitions that did not get the wanted leader.
    """

    results: Listed[PartitionResult]
    throttle_time_ms: int = 0


class RestartBroker(Message, frozen=True, tag="restart_broker"):
    """A request to a broker for a controlled shutdown, after which its supervisor starts it again.

    ``incarnation`` identifies the broker process, so that a repeated request restarts the broker only once. The broker
    replies with an Ack when its shutdown begins.
    """

    incarnation: int


class Ack(Message, frozen=True, tag="ack"):
    """The reply to a request that has succeeded and has no result to return."""

    throttle_time_ms: int = 0


class DescribeBroker(Message, frozen=True, tag="describe_broker"):
    """A request for the state of the receiving broker process, for operators, tests and metrics."""


class ReplicaDescription(msgspec.Struct, frozen=True, array_like=True):
    """The state of one replica on the described broker, in a DescribeBrokerReply."""

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
    """The reply to DescribeBroker: the broker's process, replicas, counters and settings."""

    broker_id: int
    incarnation: int
    pid: int
    version: str
    log_dir: str
    state: str  #: running, stopping
    replicas: Listed[ReplicaDescription]
    counters: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_LISTED)]
    #: The settings in effect. Defaults for topics are included only if they were set.
    settings: Settings = msgspec.field(default_factory=dict)
    #: The broker's addresses for Kafka clients, separated by commas.
    kafka: str = ""
    throttle_time_ms: int = 0
