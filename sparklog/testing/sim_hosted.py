"""The state of one partition on one simulated broker, and the protocols of its peers and its cluster."""

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
    """A simulated broker as its peers see it."""

    @abstractmethod
    def fetched(self, asked: Asked) -> None:
        """Receive a follower's fetch."""

    @abstractmethod
    def fetch_answered(self, asked: Asked, answer: ev.LeaderResponded, batches: tuple[SimBatch, ...]) -> None:
        """Receive the leader's response to a fetch."""

    @abstractmethod
    def follower_lost(self, replica_id: int) -> Callable[[], None]:
        """Return the action that notifies this broker of a follower's closed connection."""


class SimProduce(msgspec.Struct, frozen=True, gc=False):
    """One batch of a client. A broker makes a batch without sequence unique, as the network may duplicate it."""

    body: str
    count: int
    acks: int
    topic_id: str
    sequence: Sequenced = NOT_IDEMPOTENT
    timeout_ms: int = 500
    #: called with the response, which crosses the network
    told: Told | None = None


@dataclass(slots=True)
class Fetching:
    """The follower's fetch loop for one leader and epoch; a later one replaces it."""

    leader: int
    leader_epoch: int
    #: number of the request in flight; its response or its timeout starts the next one
    request: int = 0
    #: when the request was sent, by the follower's clock
    sent_ms: int = 0
    #: high watermark of the last response
    mark: int = 0


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A follower's fetch that waits for its response.

    ``mark`` is the high watermark that the follower knows. The fields after it are the follower's own, by which it
    recognises the response.
    """

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
    """One partition on one broker. ``log`` and ``checkpoint`` are on disk; the other fields die with the process.

    ``replica`` None: the start found the log, and no controller has assigned the replica to this broker yet.
    """

    topic_id: str
    log: SimLog
    checker: PartitionChecker
    checkpoint: int = 0
    replica: Replica | None = None
    #: the replica's last reported or initial high watermark
    mark: int = 0
    fetching: Fetching | None = None
    produces: dict[int, SimProduce] = field(default_factory=dict)
    #: long polls, by follower
    parked: dict[int, Asked] = field(default_factory=dict)
    #: a truncation in progress
    cut: TruncateLog | None = None
    #: a refused truncation, while the refusal holds
    refused: RefuseCut | None = None

    def forget_process(self) -> None:
        self.replica = None
        self.fetching = None
        self.produces.clear()
        self.parked.clear()
        self.cut = None
        self.refused = None


class PartitionHost(Protocol):
    """The parts of the cluster that a broker uses."""

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
