"""The table of mutants: variants of the code with a bug, which the simulator must find.

Each mutant breaks one rule (``sim_variants``). It runs without the assertions of the cores, so that only its behavior
shows the bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparklog.broker.lifecycle.supervisor_lease import SupervisorLease
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.controller import reassignments
from sparklog.coordinator import kafka_transactions
from sparklog.coordinator.records import LAST_EPOCH
from sparklog.replica.replica import Replica
from sparklog.storage import producers
from sparklog.testing import sim_variants as variants
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_log import SimLog
from sparklog.testing.sim_network import NetworkFaults
from sparklog.testing.sim_schedule import FAULTS
from sparklog.testing.sim_transactions import TransactionBroker

NOTHING = "nothing"
#: A patch: a module or class, the name of a function or constant in it, and the broken replacement.
Patch = tuple[object, str, Any]


class Caught(NamedTuple):
    """The rule that a mutant violates, and the seeds that catch the mutant.

    ``seed`` is a seed that finds the bug now. Of the first ``within`` seeds, at least one must find it.
    """

    rule: str
    seed: int
    within: int


@dataclass(frozen=True, slots=True)
class Mutant:
    """A variant of the code that is broken on purpose. ``caught`` says which check catches it.

    Some bugs show only in rare cases. For these, ``weather``, ``restless`` and ``page_cache_loss`` make such cases more
    likely. Other mutants are caught with any values.
    """

    name: str
    broken: str
    caught: Caught
    replica_type: type[Replica] = Replica
    controller_type: type[CoreController] = CoreController
    broker_type: type[SimBroker] = SimBroker
    log_type: type[SimLog] = SimLog
    lease_type: type[SupervisorLease] = SupervisorLease
    patches: tuple[Patch, ...] = ()
    weather: NetworkFaults | None = None
    restless: float | None = None
    page_cache_loss: float = 0.3
    #: The weights of faults and operations that differ from the defaults.
    likely: tuple[tuple[str, float], ...] = ()
    partitions: int = 1
    #: Whether the producers are Kafka's; ``broker_type`` is then a ``TransactionBroker``.
    kafka: bool = False

    @property
    def sound(self) -> bool:
        """Return whether the variant has no bug. Then no seed may find a violation."""
        return self.broken == NOTHING

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the patched functions by broken ones until the ``with`` block ends."""
        with ExitStack() as restored:
            for module, name, broken in self.patches:
                restored.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, broken)
            yield


_DOUBLED = NetworkFaults(loss=0.02, duplicate=0.5, slow=0.1, duplicate_ms=500)
#: A network that only doubles messages. Apart from the copies, they arrive in order.
_COPIES_ALONE = NetworkFaults(loss=0.0, duplicate=0.5, slow=0.0, delay_ms=1, duplicate_ms=2500)
_LATE_COPIES = NetworkFaults(loss=0.02, duplicate=0.5, slow=0.1, duplicate_ms=2500)
_MOVING_LEADERS = (
    ("withdrawn stop", 40),
    ("elect preferred", 40),
    ("restart broker", 10),
    ("create topic", 0),
    ("reassign", 0),
)
_LEADERS_TO_AND_FRO = (
    ("withdrawn stop", 60),
    ("elect preferred", 60),
    ("restart broker", 0),
    ("elect uncleanly", 0),
    ("create topic", 0),
    ("create topic again", 0),
    ("delete topic", 0),
    ("add partitions", 0),
    ("reassign", 0),
    ("cancel reassignment", 0),
)
#: Only crashes and full disks. Full disks delay the replication of lost data.
_CRASHES_ALONE = (
    ("crash", 10),
    ("full disk", 30),
    *((kind, 0) for kind in FAULTS if kind not in {"crash", "full disk"}),
)
_DRIVERLESS = (("driver away", 20),)
#: For Kafka's producers: their transactions promise nothing if all hosts lose power at once.
_NO_POWER_CUT = (("power cut", 0),)
_LOSING_LOGS = (("lose a log", 15), ("exchange logs", 10))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "high watermark from the committed instead of the maximal ISR",
        "leader",
        Caught("StrongIsr", 0, 40),
        replica_type=variants.CommittedOnlyReplica,
    ),
    Mutant(
        "truncate to the high watermark", "follower", Caught("StrongIsr", 3, 40), replica_type=variants.ToMarkReplica
    ),
    Mutant(
        "KIP-101 without KIP-279",
        "leader, follower",
        Caught("core", 40, 200),
        replica_type=variants.Kip101Replica,
        restless=0.3,
        likely=_MOVING_LEADERS,
    ),
    Mutant(
        "histories not compared",
        "leader",
        Caught("unclean elections where allowed", 1, 40),
        replica_type=variants.NoDivergenceReplica,
    ),
    Mutant(
        "no epoch fence on fetches",
        "leader, follower",
        Caught("StrongIsr", 6, 200),
        replica_type=variants.NoFenceReplica,
        weather=NetworkFaults(loss=0.01, duplicate=0.3, slow=0.02, slow_ms=300, late_updates=0.5),
        restless=1.0,
        likely=_LEADERS_TO_AND_FRO,
        partitions=6,
    ),
    Mutant(
        "decisions followed in any order",
        "replica, broker",
        Caught("ISRs are full", 5, 40),
        replica_type=variants.AnyOrderReplica,
        patches=((MetadataCache, "is_overtaken", variants.never),),
        weather=_DOUBLED,
        restless=0.3,
        likely=_MOVING_LEADERS,
    ),
    Mutant(
        "fetches of an earlier incarnation believed",
        "leader",
        Caught("StrongIsr", 58, 200),
        replica_type=variants.AnyIncarnationReplica,
        weather=NetworkFaults(loss=0.2, duplicate=0.7, slow=0.0, duplicate_ms=1500),
        restless=0.0,
        likely=_CRASHES_ALONE,
        page_cache_loss=1.0,
    ),
    Mutant("ISR used before it is written", "leader", Caught("StrongIsr", 0, 40), replica_type=variants.HastyReplica),
    Mutant(
        "high watermark moves below min ISR",
        "leader",
        Caught("min.insync.replicas", 0, 40),
        replica_type=variants.BelowMinIsrReplica,
    ),
    Mutant(
        "high watermark raised before truncating",
        "follower",
        Caught("consistent reads", 4, 40),
        replica_type=variants.EagerMarkReplica,
    ),
    Mutant(
        "rejoin before the epoch's start",
        "leader",
        Caught("StrongIsr", 3, 40),
        replica_type=variants.EarlyRejoinReplica,
        restless=1.0,
        likely=_MOVING_LEADERS,
    ),
    Mutant(
        "an ISR addition not bound to the incarnation",
        "leader",
        Caught("StrongIsr", 0, 200),
        replica_type=variants.UnboundReplica,
        likely=(("crash", 30),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "a deposed controller obeyed",
        "broker",
        Caught("control requests fenced", 0, 40),
        broker_type=variants.ObedientBroker,
        patches=((MetadataCache, "is_overtaken", variants.never),),
        weather=_LATE_COPIES,
        likely=(("resign", 30), ("crash controller", 30)),
    ),
    Mutant(
        "an epoch resumed by a new incarnation",
        "controller",
        Caught("one leader an epoch", 0, 40),
        controller_type=variants.ResumingController,
    ),
    Mutant(
        "a lost page cache trusted",
        "controller",
        Caught("StrongIsr", 2, 40),
        controller_type=variants.TrustingController,
        likely=(("crash", 30),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "a lost log taken for a new one",
        "broker",
        Caught("StrongIsr", 7, 40),
        broker_type=variants.CredulousBroker,
        likely=_LOSING_LOGS,
        partitions=2,
    ),
    Mutant(
        "members voted out by an election",
        "controller",
        Caught("StrongIsr", 73, 200),
        controller_type=variants.VotingOutController,
        page_cache_loss=0.9,
        likely=(("crash", 30), ("restart broker", 20)),
    ),
    Mutant(
        "unclean elections where they are not allowed",
        "controller",
        Caught("unclean elections where allowed", 2, 40),
        controller_type=variants.UncleanController,
    ),
    Mutant(
        "an unclean election that does not wait",
        "controller",
        Caught("unclean elections at last", 6, 100),
        controller_type=variants.HurriedController,
        restless=0.3,
        likely=(("create topic", 40), ("expire session", 20), ("restart zookeeper", 10), ("delete topic", 0)),
    ),
    Mutant(
        "table of producers not rebuilt",
        "log",
        Caught("idempotence", 47, 100),
        log_type=variants.ForgetfulLog,
        likely=(("crash", 20),),
        page_cache_loss=0.9,
    ),
    Mutant(
        "an unverified tail trusted",
        "log",
        Caught("consistent reads", 0, 40),
        log_type=variants.CredulousLog,
        likely=(("torn write", 30),),
    ),
    Mutant(
        "replicas told to leave stay",
        "leader",
        Caught("reassignments finish", 1, 40),
        replica_type=variants.StayingReplica,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
        restless=0.15,
    ),
    Mutant(
        "an order to leave that is never withdrawn",
        "leader",
        Caught("ISRs are full", 39, 100),
        replica_type=variants.LatchedLeavingReplica,
        likely=(
            ("reassign", 30),
            ("cancel reassignment", 20),
            ("delete topic", 0),
            ("create topic", 0),
            ("create topic again", 0),
        ),
        restless=0.15,
        partitions=6,
    ),
    Mutant(
        "a removed replica still counted",
        "controller",
        Caught("moves end in sync", 2, 40),
        patches=((reassignments, "finish", variants.with_the_removed),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "min.insync.replicas too small in a move",
        "replica",
        Caught("min.insync.replicas", 0, 40),
        replica_type=variants.SmallFactorReplica,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
        restless=0.15,
    ),
    Mutant(
        "a move ends before its target is in sync",
        "controller",
        Caught("moves end in sync", 8, 40),
        patches=((reassignments, "may_leave", variants.done_too_early),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "a move ends in the epoch it began in",
        "controller",
        Caught("moves end in a new epoch", 2, 40),
        patches=((reassignments, "finish", variants.in_the_same_epoch),),
        restless=0.03,
        likely=(("reassign", 30), ("cancel reassignment", 0), ("delete topic", 0), ("create topic again", 0)),
    ),
    Mutant(
        "an orphaned cluster that stops itself",
        "lease",
        Caught("orphans serve on", 1, 40),
        lease_type=variants.ImpatientLease,
        likely=_DRIVERLESS,
    ),
    Mutant(
        "orphans that go though their driver is dead",
        "lease",
        Caught("orphans serve on", 2, 40),
        lease_type=variants.ForsakenLease,
        likely=_DRIVERLESS,
    ),
    Mutant(
        "epochs that do not fence",
        "coordinator, log",
        Caught("epochs fence", 2, 40),
        broker_type=TransactionBroker,
        patches=((kafka_transactions, "not_current", variants.any_epoch),),
        likely=_NO_POWER_CUT,
        partitions=2,
        kafka=True,
    ),
    Mutant(
        "a transaction confirmed for the next one too",
        "leader",
        Caught("late batches stay out", 0, 40),
        broker_type=variants.EagerLeader,
        weather=_LATE_COPIES,
        likely=_NO_POWER_CUT,
        partitions=2,
        kafka=True,
    ),
    Mutant(
        "a marker that removes the producer",
        "log",
        Caught("retries are duplicates", 11, 40),
        broker_type=TransactionBroker,
        patches=((producers, "ONE_TRANSACTION", LAST_EPOCH),),
        weather=_COPIES_ALONE,
        likely=_NO_POWER_CUT,
        partitions=2,
        kafka=True,
    ),
    Mutant(
        "unknown producers that begin at 0 only",
        "log",
        Caught("unknown producers begin anywhere", 0, 40),
        broker_type=TransactionBroker,
        patches=((producers, "check_sequence", variants.from_zero),),
        likely=_NO_POWER_CUT,
        partitions=2,
        kafka=True,
    ),
    Mutant(
        "a repeated marker that ends the next transaction",
        "leader",
        Caught("late batches stay out", 0, 40),
        broker_type=TransactionBroker,
        patches=((FencedProducers, "is_over", variants.never),),
        weather=_LATE_COPIES,
        likely=_NO_POWER_CUT,
        partitions=2,
        kafka=True,
    ),
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
#: The production code.
SOUND = Mutant("sound", NOTHING, Caught("", 0, 0), partitions=6)
#: The production code, in a cluster whose driver ends now and then.
DRIVERLESS = Mutant("sound, without its driver at times", NOTHING, Caught("", 0, 0), partitions=6, likely=_DRIVERLESS)
BY_NAME[DRIVERLESS.name] = DRIVERLESS
#: The production code, in a cluster where log directories are lost or swapped.
LOSING_LOGS = Mutant("sound, losing logs at times", NOTHING, Caught("", 0, 0), partitions=6, likely=_LOSING_LOGS)
BY_NAME[LOSING_LOGS.name] = LOSING_LOGS
#: The production code, with Kafka's producers. No power cut loses their acknowledged batches.
KAFKA = Mutant(
    "sound, with Kafka's producers",
    NOTHING,
    Caught("", 0, 0),
    broker_type=TransactionBroker,
    partitions=2,
    likely=_NO_POWER_CUT,
    kafka=True,
)
BY_NAME[KAFKA.name] = KAFKA
