"""Events of a controller: facts about the cluster, in the past tense.

The performer (the controller's loop, or the simulator) gives them to ``Controller.step(event, now_ms)`` one at a time.
Facts read from ZooKeeper are levels, not edges: each event has the complete value of its kind. A change that happens
while a watch is being renewed is therefore not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparklog.model import BrokerRegistration, TopicPartition, TopicRecord, TopicStates, VersionedState


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic, the states of its partitions that have one, and the version of the topic's own node."""

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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first event of a term: the complete state, read after the controller epoch was taken.

    ``cautious`` means that this process's own session had expired, so its view of the brokers may be an artifact.
    ``retired`` has the meaning of BrokersRead. ``absent`` are the last registrations of brokers that have none now;
    their processes may still run. ``unreadable`` are the names of topics of which the record or some states cannot be
    read. No broker may treat them as deleted in this term.
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
    """All live registrations. ``retired`` are brokers without a registration whose last process was seen to end."""

    brokers: tuple[BrokerRegistration, ...]
    retired: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoppingRead:
    """All brokers that request a controlled shutdown: broker id to the incarnation that requested it."""

    stopping: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """A topic that is new, has a changed record (schemas, settings, partitions, moves), or was read by ReadTopic."""

    topic: TopicSnapshot


@dataclass(frozen=True, slots=True)
class TopicWritten:
    """All writes of a WriteTopic are durable: each node has the version after the expected one."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TopicNotWritten:
    """A WriteTopic that lost a compare-and-set, or that has an unknown outcome after a broken connection.

    The controller orders reads.
    """

    name: str
    topic_id: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicGone:
    """A topic whose nodes another actor deleted.

    ``deleted`` means that ZooKeeper lists its id as deleted. Otherwise no client requested the deletion, and brokers
    keep their logs.
    """

    name: str
    deleted: bool = False
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class DeletionsRead:
    """All deletion requests: topic name to the id of the topic to delete."""

    deletions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ElectionsRead:
    """All requests for elections, by the name of their node."""

    requests: Mapping[str, ElectionRequested]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The topic of a DeleteTopic is gone from ZooKeeper, and its request with it."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TruncationRefused:
    """A replica's refusal to truncate committed records.

    The replica holds committed records up to ``high_watermark``. Its leader of ``leader_epoch`` lacks those from
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
    """All truncations that replicas refuse now."""

    refusals: tuple[TruncationRefused, ...]


@dataclass(frozen=True, slots=True)
class StatesReported:
    """The states that leaders report as written. Nodes may hold newer states by now, and topics may be gone."""

    topics: tuple[TopicStates, ...]


@dataclass(frozen=True, slots=True)
class StatesRead:
    """The nodes of these partitions, read now.

    None means that there is no node.

    ReadStates ordered the read, or a leader changed ISRs without a report of the new states.
    """

    states: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesWritten:
    """The WriteStates writes that are durable: partition to the new version of its node."""

    versions: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class StatesRefused:
    """The WriteStates writes that lost their compare-and-set, with the nodes' current states (None: no node)."""

    found: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesUnknown:
    """Writes whose connection broke: they may or may not be durable. The controller orders a read."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class UpdateReplied:
    """A broker's response to an update.

    ``code`` is for the whole update; ``failed`` (topic, partition, code, detail) is for parts of it.
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
    """The log ends of a broker: partition to (leader epoch of the last batch, log end offset)."""

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
    """The return of the connection in the same session, which continues the term. Reads of all levels follow."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """A higher controller epoch that another controller has taken."""

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
