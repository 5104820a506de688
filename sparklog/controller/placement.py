"""The placement of a topic's replicas: on different hosts, racks and brokers, and evenly over all brokers.

The leaders and replicas of each topic are spread evenly over the brokers. Within that, the leaders and replicas of all
topics together are spread as evenly as possible. The module is pure and deterministic: the same brokers and the same
load give the same assignment. The first replica of each partition is its preferred leader. ``assignment_spread`` has
the algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparklog.controller.assignment_spread import Site, Spread
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import BrokerEndpoint

MAX_PARTITIONS = 100_000
#: The number of new partitions that one request may add. Kafka's controller has such a limit, too.
MAX_NEW_PARTITIONS = 10_000
#: The number of new partitions up to which the event loop computes the placement itself; for more, a thread does.
FEW_PARTITIONS = 100

TopicAssignment = tuple[tuple[int, ...], ...]


class Placement(NamedTuple):
    """An assignment of replicas to brokers.

    ``warning`` describes a weakness of the assignment, such as replicas on the same host, or is empty.
    """

    assignment: TopicAssignment
    warning: str = ""


class Load(NamedTuple):
    """The current load: the number of partitions that each broker leads, and the number of replicas that it holds."""

    leaders: Mapping[int, int] = {}
    replicas: Mapping[int, int] = {}


def place(
    brokers: Sequence[BrokerEndpoint],
    *,
    partitions: int,
    replication_factor: int,
    load: Load | None = None,
    beside: TopicAssignment = (),
) -> Placement:
    """Assign ``partitions`` new partitions with ``replication_factor`` replicas each to live brokers.

    ``beside`` has the assignment of the topic's existing partitions. They stay, and the new partitions are placed so
    that the whole topic is even.

    Raises:
        BrokerError: the number of partitions or replicas is out of range (INVALID_PARTITIONS,
            INVALID_REPLICATION_FACTOR).
    """
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise BrokerError(
            ErrorCode.INVALID_PARTITIONS, f"found {partitions} partitions; expected 1 to {MAX_PARTITIONS}"
        )
    if not 1 <= replication_factor <= len(brokers):
        raise BrokerError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"found replication factor {replication_factor}; expected 1 to {len(brokers)}, the live brokers"
            f"{': ' + ', '.join(str(broker.broker_id) for broker in brokers) if brokers else ''}",
        )
    known = sorted(brokers, key=lambda broker: broker.broker_id)
    spread = Spread(_sites(known, load or Load(), beside)).replicas(partitions, replication_factor)
    assignment = tuple(tuple(known[i].broker_id for i in replicas) for replicas in spread)
    return Placement(assignment, shared_hosts(assignment, brokers))


def check_new(added: int) -> None:
    """Raise BrokerError INVALID_PARTITIONS if ``added`` is more partitions than one request may add."""
    if added > MAX_NEW_PARTITIONS:
        detail = f"found {added} new partitions in one request; expected at most {MAX_NEW_PARTITIONS}"
        raise BrokerError(ErrorCode.INVALID_PARTITIONS, f"{detail}: add the others with more requests")


def _sites(brokers: Sequence[BrokerEndpoint], load: Load, beside: TopicAssignment) -> list[Site]:
    led = Counter(replicas[0] for replicas in beside)
    held = Counter(broker_id for replicas in beside for broker_id in replicas)
    return [
        Site(
            broker.host,
            broker.rack,
            led=led[broker.broker_id],
            held=held[broker.broker_id],
            all_led=load.leaders.get(broker.broker_id, 0),
            all_held=load.replicas.get(broker.broker_id, 0),
        )
        for broker in brokers
    ]


def check_assignment(assignment: TopicAssignment, brokers: Sequence[BrokerEndpoint]) -> Placement:
    """Check an assignment that a client requested. Return it, with a warning if replicas share a host.

    Raises:
        BrokerError: the assignment is not possible (INVALID_REPLICA_ASSIGNMENT).
    """
    known = {broker.broker_id for broker in brokers}
    for partition, replicas in enumerate(assignment):
        reason = ""
        if not replicas:
            reason = "has no replica"
        elif len(set(replicas)) != len(replicas):
            reason = f"names a broker twice: {list(replicas)}"
        elif unknown := sorted(set(replicas) - known):
            reason = f"names brokers {unknown}; live are {sorted(known)}"
        elif len(replicas) != len(assignment[0]):
            reason = f"has {len(replicas)} replicas; partition 0 has {len(assignment[0])}"
        if reason:
            raise BrokerError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"partition {partition} {reason}")
    return Placement(assignment, shared_hosts(assignment, brokers))


def shared_hosts(assignment: TopicAssignment, brokers: Sequence[BrokerEndpoint]) -> str:
    """Return a warning if replicas of one partition are on the same host, otherwise an empty string."""
    host_of = {broker.broker_id: broker.host for broker in brokers}
    sharing = [
        partition
        for partition, replicas in enumerate(assignment)
        if len({host_of.get(broker_id, str(broker_id)) for broker_id in replicas}) < len(replicas)
    ]
    if not sharing:
        return ""
    hosts = len(set(host_of.values()))
    return (
        f"replicas of {len(sharing)} of {len(assignment)} partitions share a host: replication factor "
        f"{len(assignment[sharing[0]])}, live hosts {hosts}; losing one host can lose acknowledged records"
    )
