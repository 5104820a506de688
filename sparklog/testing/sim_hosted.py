"""What one simulated broker holds of one partition, and what a broker asks of the cluster it is in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.replica import events as ev
from sparklog.replica.effects import RefuseCut, TruncateLog
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_log import NOT_IDEMPOTENT, Sequenced, SimBatch, SimLog
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_zk import SimZk

Told = Callable[[ErrorCode], None]


class PeerBroker(SimProcess):
    """A simulated broker as other simulated brokers send messages to it."""

    @abstractmethod
    def fetched(self, asked: Asked) -> None:
        """Receive a follower's fetch."""

    @abstractmethod
    def fetch_answered(self, asked: Asked, answer: ev.LeaderAnswered, batches: tuple[SimBatch, ...]) -> None:
        """Receive the leader's response to a fetch."""

    @abstractmethod
    def follower_lost(self, replica_id: int) -> Callable[[], None]:
        """Return the action that tells this broker that a follower's connection was closed."""


class Produce(msgspec.Struct, frozen=True, gc=False):
    """One batch a client sent. What is not idempotent is made unique at each arrival: the network may double it."""

    body: str
    count: int
    acks: int
    topic_id: str
    sequence: Sequenced = NOT_IDEMPOTENT
    timeout_ms: int = 500
    #: hears the answer, over the network
    told: Told | None = None


@dataclass(slots=True)
class Fetching:
    """The follower's fetch loop for one leader and epoch; a later one replaces it."""

    leader: int
    leader_epoch: int
    #: number of the request under way; its answer or its time-out starts the next
    request: int = 0
    #: when it was sent, by the own clock
    sent_ms: int = 0
    #: high watermark in the last answer
    mark: int = 0


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A follower's fetch, waiting to be answered. ``mark`` is the high watermark that the follower knows; what follows
    is its own, by which it knows the answer again."""

    event: ev.FollowerFetched
    mark: int
    follower: PeerBroker
    process: int
    tp: TopicPartition
    hosted: Hosted
    fetching: Fetching
    #: number of the request in its loop
    request: int


@dataclass(slots=True)
class Hosted:
    """One partition on one broker. ``log`` and ``checkpoint`` are on disk; the rest dies with the process. ``replica``
    None: found on the disk, and not told yet whether it is this broker's."""

    topic_id: str
    log: SimLog
    checker: PartitionChecker
    checkpoint: int = 0
    replica: Replica | None = None
    #: the replica's high watermark as it last told, or began with
    mark: int = 0
    fetching: Fetching | None = None
    produces: dict[int, Produce] = field(default_factory=dict)
    #: long polls, by follower
    parked: dict[int, Asked] = field(default_factory=dict)
    #: a cut that was ordered and takes its time
    cut: TruncateLog | None = None
    #: a cut that was refused, as long as the refusal stands
    refused: RefuseCut | None = None

    def forget_process(self) -> None:
        self.replica = None
        self.fetching = None
        self.produces.clear()
        self.parked.clear()
        self.cut = None
        self.refused = None


class PartitionHost(Protocol):
    """What a broker asks of the cluster it is in."""

    world: SimNetwork
    zk: SimZk
    settings: ReplicaSettings
    replica_type: type[Replica]
    log_type: type[SimLog]

    @property
    def brokers(self) -> Mapping[int, PeerBroker]: ...

    #: whether to call ``Replica.check_invariants`` after each event
    check_cores: bool
    #: chance that an append fails its checks
    append_failure: float

    def checker(self, tp: TopicPartition, topic_id: str) -> PartitionChecker: ...
