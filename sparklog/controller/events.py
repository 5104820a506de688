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

    Partitions without a state are missing.
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

    The kind PREFERRED elects the first replica if it is in sync. UNCLEAN elects any live replica, once, if no member of
    the ISR is alive. ``partitions`` None means all partitions.
    """

    kind: str
    partitions: tuple[TopicPartition, ...] | None = None
    #: The ids of the topics at the time of the request. A topic that was recreated since is not concerned. The id of a
    #: topic that is not in it (the request of an older broker) is not checked.
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first event of a term: the complete state, read after this controller took its epoch.

    ``cautious`` means that this process's own session had expired, so brokers may seem absent that are alive.
    ``retired`` means the same as in BrokersRead. ``absent`` are the last registrations of brokers that have none now;
    their processes may still run. ``unreadable`` are the names of topics whose record, or some of whose states, cannot
    be read. In this term no broker may treat these topics as deleted.
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
    """All live registrations.

    ``retired`` are brokers without a registration whose last process is known to have ended.
    """

    brokers: tuple[BrokerRegistration, ...]
    retired: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoppingRead:
    """All brokers that request a controlled shutdown, each with the incarnation that requested it."""

    stopping: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """A topic that is new or changed, or that ReadTopic requested.

    A change concerns the record: schemas, settings, partitions or moves.
    """

    topic: TopicSnapshot


@dataclass(frozen=True, slots=True)
class TopicWritten:
    """All writes of a WriteTopic are durable: each node has the version after the expected one."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TopicNotWritten:
    """A WriteTopic that failed because a node had another version, or that has an unknown outcome.

    The outcome is unknown if the connection broke. The controller then reads the topic and the states again.
    """

    name: str
    topic_id: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicGone:
    """A topic whose nodes were deleted, but not by this controller.

    ``deleted`` means that ZooKeeper lists its id as deleted. Otherwise no client requested the deletion, and brokers
    keep their logs.
    """

    name: str
    deleted: bool = False
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class DeletionsRead:
    """All deletion requests: for each topic name the id of the topic to delete."""

    deletions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ElectionsRead:
    """All requests for elections, by the name of their node."""

    requests: Mapping[str, ElectionRequested]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The completion of a DeleteTopicNodes: the topic and its deletion request are gone from ZooKeeper."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TruncationRefused:
    """A replica's refusal to truncate committed records.

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
    """All truncations that replicas currently refuse."""

    refusals: tuple[TruncationRefused, ...]


@dataclass(frozen=True, slots=True)
class StatesReported:
    """The states that leaders have written and report. By now nodes may have newer states, and topics may be gone."""

    topics: tuple[TopicStates, ...]


@dataclass(frozen=True, slots=True)
class StatesRead:
    """The content of the nodes of these partitions.

    None means that the node does not exist. The read follows ReadStates, or a notification that a leader changed ISRs
    without reporting the new states.
    """

    states: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesWritten:
    """The writes of a WriteStates that are durable: each partition with the new version of its node."""

    versions: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class StatesRefused:
    """The writes of a WriteStates that failed because the node had another version.

    Each has the node's current state, or None if the node does not exist.
    """

    found: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesUnknown:
    """Writes whose connection broke, so that they may or may not be durable. The controller then reads the nodes."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class UpdateReplied:
    """A broker's response to an update.

    ``code`` is the result of the whole update. ``failed`` lists the partitions that failed: topic, partition, code,
    detail.
    """

    broker_id: int
    update_id: int
    code: int
    failed: tuple[tuple[str, int, int, str], ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateLost:
    """An update without a response: the broker was unreachable, or the connection broke."""

    broker_id: int
    update_id: int


@dataclass(frozen=True, slots=True)
class LogEndsRead:
    """The log ends of a broker: for each partition the leader epoch of the last batch and the log end offset."""

    broker_id: int
    incarnation: int
    ends: Mapping[TopicPartition, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The loss of the connection to ZooKeeper.

    The session may still live. The controller decides and sends nothing until Reconnected.
    """


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The return of the connection in the same session. The term continues, and everything is read again."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Proof that another controller has taken a higher controller epoch."""

    detail: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """The passage of time; sent at ``Controller.deadline_ms`` or later."""


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
    | Ticked
)
