"""The state of one partition on one simulated broker, and the interfaces of the other brokers and of the cluster."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.replica import events as ev
from sparklog.replica.effects import RefuseTruncation, TruncateLog
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_log import NOT_IDEMPOTENT, Content, Sequenced, SimBatch, SimLog
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_process import SimProcess
from sparklog.testing.sim_zk import SimZk

Told = Callable[[ErrorCode], None]


class PeerBroker(SimProcess):
    """The part of a simulated broker that the other brokers use."""

    @abstractmethod
    def fetched(self, asked: Asked) -> None:
        """Receive a follower's fetch."""

    @abstractmethod
    def fetch_answered(self, asked: Asked, answer: ev.LeaderResponded, batches: tuple[SimBatch, ...]) -> None:
        """Receive the leader's response to a fetch."""

    @abstractmethod
    def follower_lost(self, replica_id: int) -> Callable[[], None]:
        """Return the function that the network calls when the connection of a follower is closed."""


class SimProduce(msgspec.Struct, frozen=True, gc=False):
    """A request to append one batch of a client.

    If the batch has no sequence, the broker makes its ``body`` unique, because the network may duplicate the request.
    """

    body: str
    count: int
    acks: int
    topic_id: str
    sequence: Sequenced = NOT_IDEMPOTENT
    timeout_ms: int = 500
    #: The function to call with the response, which is sent over the network.
    told: Told | None = None
    content: Content = None
    #: Whether the first batch of an unknown producer may have any sequence, as for clients of Kafka.
    begins_anywhere: bool = False
    #: The function of the broker itself to call with the response. It is called after the replica's step.
    on_result: Told | None = None


@dataclass(slots=True)
class Fetching:
    """The state of a follower's fetch loop, which fetches from one leader in one leader epoch.

    The loop for a later epoch replaces it.
    """

    leader: int
    leader_epoch: int
    #: The number of the request in flight. The response or the timeout starts the next request.
    request: int = 0
    #: The time when the request was sent, by the follower's clock.
    sent_ms: int = 0
    #: The high watermark in the last response.
    mark: int = 0


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A follower's fetch that has no response so far.

    ``mark`` is the high watermark that the follower knows. The follower uses the fields after ``mark`` to recognize the
    response.
    """

    event: ev.FollowerFetched
    mark: int
    follower: PeerBroker
    process: int
    tp: TopicPartition
    hosted: Hosted
    fetching: Fetching
    #: The number of the request in its fetch loop.
    request: int


@dataclass(slots=True)
class Hosted:
    """The state of one partition on one broker. ``log`` and ``checkpoint`` are on disk. A crash loses the other fields.

    ``replica`` is None if the broker's start has found the log, but no controller has assigned the replica to this
    broker yet.
    """

    topic_id: str
    log: SimLog
    checker: PartitionChecker
    checkpoint: int = 0
    replica: Replica | None = None
    #: The last high watermark that the replica has reported, or its initial one.
    mark: int = 0
    fetching: Fetching | None = None
    produces: dict[int, SimProduce] = field(default_factory=dict)
    #: The fetches that wait for data (long polls), by follower.
    parked: dict[int, Asked] = field(default_factory=dict)
    #: The truncation in progress.
    truncation: TruncateLog | None = None
    #: The truncation that the replica refuses.
    refused: RefuseTruncation | None = None

    def forget_process(self) -> None:
        self.replica = None
        self.fetching = None
        self.produces.clear()
        self.parked.clear()
        self.truncation = None
        self.refused = None


class SimBrokerHost(Protocol):
    """The part of the simulated cluster that the brokers use."""

    world: SimNetwork
    zk: SimZk
    settings: ReplicaSettings
    replica_type: type[Replica]
    log_type: type[SimLog]

    @property
    def brokers(self) -> Mapping[int, PeerBroker]: ...

    #: Whether to call ``Replica.check_invariants`` after each event.
    check_cores: bool
    #: The probability that a batch fails the checks before its append.
    append_failure: float
    #: Whether the clients send nothing more, so that the logs can settle before the end.
    clients_stopped: bool

    def checker(self, tp: TopicPartition, topic_id: str) -> PartitionChecker: ...
