"""What can happen to the cluster, as its controller learns it: facts, in the past tense.

The performer (the controller's loop, or the simulator) hands them to ``Controller.step(event, now_ms)`` one at a
time. Facts read from ZooKeeper are levels, not edges: each says all there is of its kind, so that a change missed
while a watch was being renewed is not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparklog.model import BrokerRegistration, TopicPartition, TopicRecord, TopicStates, VersionedState


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic, the states of those of its partitions that have one, and the version of the topic's own node."""

    record: TopicRecord
    states: Mapping[int, VersionedState]
    version: int = 0


#: ``ElectionAsked.kind``
PREFERRED = "preferred"
UNCLEAN = "unclean"


@dataclass(frozen=True, slots=True)
class ElectionAsked:
    """Elect leaders anew. ``kind`` PREFERRED: the first replica, where it is in sync; UNCLEAN: any live replica, once,
    where no member of the ISR is alive. ``partitions`` None: all."""

    kind: str
    partitions: tuple[TopicPartition, ...] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """First event of a term: all there is, read after the controller epoch was taken.

    ``cautious``: this process's own session had expired, so what it saw of brokers may be an artefact. ``retired`` as
    in BrokersRead. ``absent``: last registrations of brokers that have none now, where their processes would be found.
    ``unreadable`` are names of topics that cannot be read, or not all of their states: no broker may take those for
    deleted in this term.
    """

    brokers: tuple[BrokerRegistration, ...]
    stopping: Mapping[int, int]
    topics: tuple[TopicSnapshot, ...]
    deletions: Mapping[str, str]
    cautious: bool = False
    retired: frozenset[int] = frozenset()
    elections: Mapping[str, ElectionAsked] = field(default_factory=dict)
    absent: tuple[BrokerRegistration, ...] = ()
    unreadable: frozenset[str] = frozenset()
    refusals: tuple[CutRefused, ...] = ()


@dataclass(frozen=True, slots=True)
class BrokersRead:
    """All live registrations. ``retired``: brokers without one whose last process was seen to end."""

    brokers: tuple[BrokerRegistration, ...]
    retired: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StoppingRead:
    """All brokers that ask to be relieved: id to the incarnation that asked."""

    stopping: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class TopicRead:
    """A topic appeared, its record changed (schemas, configuration, more partitions, moves), or ReadTopic's answer."""

    topic: TopicSnapshot


@dataclass(frozen=True, slots=True)
class TopicWritten:
    """What WriteTopic ordered is durable, all of it: each node has the version that follows the expected one."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class TopicNotWritten:
    """WriteTopic lost a compare-and-set, or the connection broke under it and its fate is unknown. The core orders
    reads."""

    name: str
    topic_id: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TopicGone:
    """A topic's nodes are not there any more, by someone else's hand. ``deleted``: ZooKeeper names its id as deleted.
    Otherwise nobody asked for that: brokers keep what they have."""

    name: str
    deleted: bool = False
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class DeletionsRead:
    """All deletion requests: topic name to the id of the topic that is meant."""

    deletions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ElectionsRead:
    """All requests for elections there are, by the name of their node."""

    requests: Mapping[str, ElectionAsked]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """What DeleteTopic ordered is done: the topic is gone from ZooKeeper, and its request with it."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class CutRefused:
    """A replica holds committed records up to ``high_watermark`` and does not cut them, though its leader of
    ``leader_epoch`` lacks those from ``offset`` on."""

    tp: TopicPartition
    topic_id: str
    broker_id: int
    incarnation: int
    leader_epoch: int
    offset: int
    high_watermark: int


@dataclass(frozen=True, slots=True)
class RefusalsRead:
    """All cuts that replicas refuse now."""

    refusals: tuple[CutRefused, ...]


@dataclass(frozen=True, slots=True)
class StatesTold:
    """What leaders say they wrote. Nodes may hold newer states by now, and topics be gone."""

    topics: tuple[TopicStates, ...]


@dataclass(frozen=True, slots=True)
class StatesRead:
    """These partitions' nodes, read now: ordered by ReadStates, or because a leader changed ISRs and did not say how.
    None: there is no node."""

    states: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesWritten:
    """Writes ordered by WriteStates are durable: partition to its node's new version."""

    versions: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class StatesRefused:
    """Writes ordered by WriteStates lost their compare-and-set; this is what the nodes hold now (None: no node)."""

    found: Mapping[TopicPartition, VersionedState | None]


@dataclass(frozen=True, slots=True)
class StatesUnknown:
    """The connection broke under these writes: they may or may not be durable. The core orders a read."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class UpdateAnswered:
    """A broker answered the update: ``code`` for all of it, ``failed`` (topic, partition, code, detail) for parts."""

    broker_id: int
    update_id: int
    code: int
    failed: tuple[tuple[str, int, int, str], ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateLost:
    """No answer to the update: the broker could not be reached, or the connection broke under it."""

    broker_id: int
    update_id: int


@dataclass(frozen=True, slots=True)
class LogEndsRead:
    """What a broker's logs end with: partition to (leader epoch of the last batch, log end offset)."""

    broker_id: int
    incarnation: int
    ends: Mapping[TopicPartition, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """ZooKeeper cannot be reached; the session may live on. Until Reconnected nothing is decided or sent."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The same session, and with it this term, goes on. Levels read anew follow."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another controller has taken a higher epoch."""

    detail: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; sent when ``Controller.deadline_ms`` is reached or later."""


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
    | StatesTold
    | StatesWritten
    | StatesRefused
    | StatesUnknown
    | UpdateAnswered
    | UpdateLost
    | LogEndsRead
    | Disconnected
    | Reconnected
    | Fenced
    | Ticked
)
