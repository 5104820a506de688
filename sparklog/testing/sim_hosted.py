"""What one simulated broker holds of one partition, and what a broker asks of the cluster it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from sparklog.errors import ErrorCode
from sparklog.model import TopicPartition
from sparklog.replica import events as ev
from sparklog.replica.effects import RefuseCut, TruncateLog
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_log import NOT_IDEMPOTENT, Sequenced, SimLog
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_zk import SimZk

if TYPE_CHECKING:
    from sparklog.testing.sim_broker import SimBroker
    from sparklog.testing.sim_performer import ReplicaPerformer

Told = Callable[[ErrorCode], None]


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
    follower: ReplicaPerformer
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
    brokers: dict[int, SimBroker]
    #: whether to call ``Replica.check_invariants`` after each event
    check_cores: bool
    #: chance that an append fails its checks
    append_failure: float

    def checker(self, tp: TopicPartition, topic_id: str) -> PartitionChecker: ...
