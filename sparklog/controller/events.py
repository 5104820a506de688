"""Events of a controller: facts about the cluster. The names are in the past tense.

The performer (the controller's loop, or the simulator) gives them to ``Controller.step(event, now_ms)`` one at a time.
An event that was read from ZooKeeper has the complete current value, not the change since the last one. A change that
happens while a watch is being renewed is therefore not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparklog.model import BrokerRegistration, TopicPartition, TopicRecord, TopicStates, VersionedState


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as read from ZooKeeper: its record, the version of its node, and the states of its partitions.

    A partition that has no state in ZooKeeper has no entry in ``states``.
    """

    record: TopicRecord
    states: Mapping[int, VersionedState]
    version: int = 0


#: A value of ``ElectionRequested.kind``.
PREFERRED = "preferred"
UNCLEAN = "unclean"


@dataclass(frozen=True, slots=True)
class ElectionRequested:
    """A request to elect leaders.

    The kind PREFERRED requests the election of the first replica if it is in sync. The kind UNCLEAN requests one
    election of any live replica if no member of the ISR is alive. If ``partitions`` is None, the request concerns all
    partitions.
    """

    kind: str
    partitions: tuple[TopicPartition, ...] | None = None
    #: The ids of the topics at the time of the request. The request does not concern a topic that has been recreated
    #: since. The controller does not check a topic whose id is missing. The requests of older brokers have no ids.
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first event of a term. It has the complete state, which was read after this controller took its epoch.

    ``cautious`` means that this process's own session had expired, so brokers that seem absent may be alive.
    ``retired`` means the same as in BrokersRead. ``absent`` are the last registrations of brokers that are not
    registered now; their processes may still run. ``unreadable`` are the names of topics whose record, or some of whose
    states, cannot be read. In this term no broker may treat these topics as deleted.
    """

    brokers: tuple[BrokerRegistration, ...]
    stopping: Mapping[int, int]
    topics: tuple[TopicSnapshot, ...]
    deletions: Mapping[str, str]
    cautious: bool = False
    retired: frozenset[int] = frozenset()
    elections: Mapping[str, ElectionRequested] = field(default_factory=dict)
    absent: tuple[BrokerRegistration, ...] = ()
    unreadable: frozenset[str] = frozenset()
    refusals: tuple[TruncationRefused, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokersRead:
    """The event that the registrations of brokers were read. ``brokers`` has all of them.

    ``retired`` are brokers without a registration whose last process is known to have ended.
    """

    brokers: tuple[BrokerRegistration, ...]
    retired: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoppingRead:
    """The event that the requests for controlled shutdowns were read.

    ``stopping`` has each broker that requests one, with the incarnation that requested it.
    """

    stopping: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """The event that a topic was read because it is new or has changed, or because ReadTopic requested it.

    A change concerns the topic's metadata: schemas, settings, partitions or reassignments.
    """

    topic: TopicSnapshot


@dataclass(frozen=True, slots=True)
class TopicWritten:
    """The event that all writes of a WriteTopic are durable. Each node now has the version after the expected one."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TopicNotWritten:
    """The event that a WriteTopic failed because a node had another version, or that its outcome is unknown.

    The outcome is unknown if the connection broke. In both cases the controller reads the topic and the states again.
    """

    name: str
    topic_id: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicGone:
    """The event that a topic's nodes no longer exist, although this controller did not delete them.

    ``deleted`` means that ZooKeeper lists the topic's id as deleted. Otherwise no client requested the deletion, and
    brokers keep their logs.
    """

    name: str
    deleted: bool = False
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class DeletionsRead:
    """The event that the deletion requests were read. ``deletions`` has the id of the topic to delete by topic name."""

    deletions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ElectionsRead:
    """The event that the requests for elections were read. ``requests`` has all of them by the names of their nodes."""

    requests: Mapping[str, ElectionRequested]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The event that a DeleteTopicNodes is complete: the topic and its deletion request are no longer in ZooKeeper."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TruncationRefused:
    """A replica's refusal to truncate committed records, as read from ZooKeeper.

    The replica holds committed records up to ``high_watermark``. The leader of ``leader_epoch`` lacks the records from
    ``offset`` on.
    """

    tp: TopicPartition
    topic_id: str
    broker_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    high_watermark: int


@dataclass(frozen=True, slots=True)
class RefusalsRead:
    """The event that the refused truncations were read.

    ``refusals`` has the truncations that replicas currently refuse.
    """

    refusals: tuple[TruncationRefused, ...]


@dataclass(frozen=True, slots=True)
class StatesReported:
    """The event that leaders report states that they have written to ZooKeeper.

    By now the nodes may have newer states, and the topics may no longer exist.
    """

    topics: tuple[TopicStates, ...]


@dataclass(frozen=True, slots=True)
class StatesRead:
    """The event that the nodes of these partitions were read. A state of None means that the node does not exist.

    The read follows ReadStates, or a notification that a leader changed ISRs without reporting the new states.
    """

    states: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesWritten:
    """The event that writes of a WriteStates are durable. ``versions`` has the new version of each partition's node."""

    versions: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class StatesRefused:
    """The event that writes of a WriteStates failed because the nodes had other versions.

    ``found`` has the current state of each node, or None if the node does not exist.
    """

    found: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesUnknown:
    """The event that the connection broke during writes, which may or may not be durable.

    The controller then reads the nodes of these partitions.
    """

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class UpdateReplied:
    """The event that a broker has responded to an update.

    ``code`` is the result of the whole update. ``failed`` lists the partitions that failed, each as topic, partition
    number, error code and detail.
    """

    broker_id: int
    update_id: int
    code: int
    failed: tuple[tuple[str, int, int, str], ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateLost:
    """The event that an update got no response: the broker was unreachable, or the connection broke."""

    broker_id: int
    update_id: int


@dataclass(frozen=True, slots=True)
class LogEndsRead:
    """The event that a broker has reported its log ends.

    ``ends`` has for each partition the leader epoch of the last batch and the log end offset.
    """

    broker_id: int
    incarnation: int
    ends: Mapping[TopicPartition, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The event that the connection to ZooKeeper is lost.

    The session may still exist. The controller decides and sends nothing until Reconnected.
    """


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The event that the connection to ZooKeeper is restored in the same session.

    The term continues, and the controller's loop reads everything again.
    """


@dataclass(frozen=True, slots=True)
class Fenced:
    """The event that another controller has taken over. The term then ends."""

    detail: str


@dataclass(frozen=True, slots=True)
class ControllerTicked:
    """The event that time has passed. The caller sends it at ``Controller.deadline_ms`` or later."""


Event = (
    Loaded
    | BrokersRead
    | StoppingRead
    | TopicRead
    | TopicWritten
    | TopicNotWritten
    | TopicGone
    | DeletionsRead
    | ElectionsRead
    | TopicDeleted
    | StatesRead
    | RefusalsRead
    | StatesReported
    | StatesWritten
    | StatesRefused
    | StatesUnknown
    | UpdateReplied
    | UpdateLost
    | LogEndsRead
    | Disconnected
    | Reconnected
    | Fenced
    | ControllerTicked
)
