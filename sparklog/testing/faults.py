"""Faults to inject into a real cluster, and their repair.

At most one broker, one controller and ZooKeeper fail at a time.

A fault is a pair of actions, which break and heal, with a description. ``Faults`` creates the faults. The caller
decides how long each fault lasts. Before the next fault, the caller waits until all replicas are in sync.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sparklog.errors import BrokerError, ClusterError
from sparklog.testing.final_logs import metadata_of
from sparklog.testing.network import CLIENT, CONTROLLER, ZOOKEEPER, broker_party
from sparklog.testing.process_cluster import ProcessCluster, wait_until

#: A group of processes. A fault breaks one process of a group. Only one process of a group is broken at a time.
FaultTarget = Literal["broker", "controller", "zookeeper"]
Method = Literal["kill", "crash", "pause", "stop"]
METHODS: tuple[Method, ...] = ("kill", "crash", "pause", "stop")
_ELECTION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a test can inject and end: ``apply`` breaks something, and ``heal`` repairs it.

    ``lasts_s`` is the range of sensible durations in seconds.
    """

    text: str
    group: FaultTarget
    apply: Callable[[], object]
    heal: Callable[[], object]
    lasts_s: tuple[float, float] = (0.0, 2.0)

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            self.heal()


class Faults:
    """A source of faults for one cluster.

    ``session_s`` is the ZooKeeper session timeout. Long pauses and cuts last longer than this time.
    """

    def __init__(self, cluster: ProcessCluster, topics: Sequence[str], *, session_s: float, seed: int = 0) -> None:
        self.cluster = cluster
        self._topics = list(topics)
        self._random = random.Random(seed)
        self._long = (1.5 * session_s, 2.5 * session_s)

    # --- brokers ---

    def leader(self, topic: str, partition: int = 0) -> int:
        """Wait for a leader of the partition and return its id.

        Raises:
            ClusterError: no leader was elected in time.
        """

        def found() -> bool:
            return metadata_of(self.cluster, topic)[partition].leader >= 0

        wait_until(found, _ELECTION_TIMEOUT_S, f"a leader of {topic}-{partition}")
        return metadata_of(self.cluster, topic)[partition].leader

    def broker(self, method: Method, broker_id: int, role: str = "") -> Fault:
        """Return a fault of one broker.

        ``kill``: SIGKILL, after which the registration stays until the session expires. ``crash``: SIGKILL, after which
        the registration is removed at once, as by a supervisor. ``pause``: SIGSTOP. ``stop``: SIGTERM, a controlled
        shutdown.
        """
        cluster, name = self.cluster, f"broker {broker_id}{role and f', {role}'}"

        def restart() -> None:
            cluster.start_broker(broker_id)

        match method:
            case "kill":
                return Fault(f"SIGKILL {name}", "broker", lambda: cluster.kill(broker_id, retire=False), restart)
            case "crash":
                return Fault(
                    f"SIGKILL {name}, seen by its supervisor", "broker", lambda: cluster.kill(broker_id), restart
                )
            case "stop":
                return Fault(f"SIGTERM {name}", "broker", lambda: cluster.stop_broker(broker_id), restart)
            case "pause":
                return Fault(
                    f"SIGSTOP {name}",
                    "broker",
                    lambda: cluster.kill(broker_id, signal.SIGSTOP),
                    lambda: cluster.kill(broker_id, signal.SIGCONT),
                    self._random.choice(((0.2, 1.0), self._long)),
                )

    # --- controller and ZooKeeper ---

    def controller(self, method: Method) -> Fault:
        """Return a fault of the active controller process. The standby process takes over."""
        cluster = self.cluster
        struck: list[int] = []

        def strike(number: signal.Signals) -> None:
            def found() -> bool:
                active = cluster.active_controller()
                if active is not None:
                    struck.append(active)
                return active is not None

            wait_until(found, _ELECTION_TIMEOUT_S, "a controller")
            cluster.kill_controller(struck[-1], number)

        def resume() -> None:
            if struck:
                cluster.kill_controller(struck[-1], signal.SIGCONT)

        if method == "pause":
            return Fault(
                "SIGSTOP the controller",
                "controller",
                lambda: strike(signal.SIGSTOP),
                resume,
                self._random.choice(((0.2, 1.0), self._long)),
            )
        number = signal.SIGTERM if method == "stop" else signal.SIGKILL
        return Fault(f"{number.name} the controller", "controller", lambda: strike(number), cluster.start_controller)

    def zookeeper(self, method: Method) -> Fault:
        cluster = self.cluster
        if method == "pause":
            return Fault(
                "SIGSTOP ZooKeeper",
                "zookeeper",
                lambda: cluster.signal_zookeeper(signal.SIGSTOP),
                lambda: cluster.signal_zookeeper(signal.SIGCONT),
                self._random.choice(((0.2, 1.0), self._long)),
            )
        number = signal.SIGTERM if method == "stop" else signal.SIGKILL
        return Fault(
            f"{number.name} ZooKeeper",
            "zookeeper",
            lambda: cluster.signal_zookeeper(number),
            cluster.start_zookeeper,
            self._random.choice(((0.0, 1.0), self._long)),
        )

    # --- network ---

    def cut(self, text: str, *pairs: tuple[str, str], group: FaultTarget = "broker", one_way: bool = False) -> Fault:
        network = self.cluster.network
        assert network is not None, "the cluster was started without a network that can be cut"

        def apply() -> None:
            for sender, receiver in pairs:
                network.cut(sender, receiver, one_way=one_way)

        return Fault(f"cut: {text}", group, apply, network.heal, self._random.choice(((0.3, 1.0), self._long)))

    def cut_broker(self, broker_id: int) -> Fault:
        """Return a network fault of a random kind, which cuts some connections of one broker or all of them."""
        me = broker_party(broker_id)
        others = [broker_party(other) for other in self.cluster.slots if other != broker_id]
        other = self._random.choice(others)
        ways = (
            (f"{me} from ZooKeeper", [(me, ZOOKEEPER)], False),
            (f"{me} from the controller", [(me, CONTROLLER)], False),
            (f"{me} from the other brokers", [(me, peer) for peer in others], False),
            (
                f"{me} from ZooKeeper and brokers, not from clients",
                [(me, peer) for peer in (ZOOKEEPER, *others)],
                False,
            ),
            (f"{me} from all", [(me, peer) for peer in (ZOOKEEPER, CONTROLLER, CLIENT, *others)], False),
            (f"{me} to {other}", [(me, other)], True),
            (f"{other} to {me}", [(other, me)], True),
            (f"{me} to ZooKeeper", [(me, ZOOKEEPER)], True),
            (f"ZooKeeper to {me}", [(ZOOKEEPER, me)], True),
            (f"the controller to {me}", [(CONTROLLER, me)], True),
            (f"{me} to the controller", [(me, CONTROLLER)], True),
        )
        text, pairs, one_way = self._random.choice(ways)
        return self.cut(text, *pairs, one_way=one_way)

    # --- at random ---

    def any_fault(self, groups: Sequence[FaultTarget] = ("broker", "controller", "zookeeper")) -> Fault:
        """Return a random fault of the given groups. Most faults concern brokers, because brokers store the log."""
        weights = {"broker": 6, "controller": 2, "zookeeper": 2}
        group = self._random.choices(groups, [weights[group] for group in groups])[0]
        method = self._random.choice(METHODS)
        if group == "controller":
            if self.cluster.network is not None and self._random.random() < 0.25:
                return self.cut("the controller from ZooKeeper", (CONTROLLER, ZOOKEEPER), group="controller")
            return self.controller(method)
        if group == "zookeeper":
            return self.zookeeper(method)
        broker_id, role = self._any_broker()
        if self.cluster.network is not None and self._random.random() < 0.35:
            return self.cut_broker(broker_id)
        return self.broker(method, broker_id, role)

    def _any_broker(self) -> tuple[int, str]:
        topic = self._random.choice(self._topics)
        with contextlib.suppress(ClusterError, BrokerError):
            partition = self._random.choice(metadata_of(self.cluster, topic))
            if partition.leader >= 0:
                place = f"{topic}-{partition.partition}"
                if self._random.random() < 0.6:
                    return partition.leader, f"leader of {place}"
                followers = [replica for replica in partition.replicas if replica != partition.leader]
                if followers:
                    return self._random.choice(followers), f"follower of {place}"
        return self._random.choice(list(self.cluster.slots)), ""


def kill_all(cluster: ProcessCluster) -> Fault:
    """Return the fault that kills every broker at once.

    The page cache survives, so no acknowledged record may be lost.
    """

    def apply() -> None:
        for broker_id in cluster.slots:
            cluster.kill(broker_id, retire=False)

    return Fault("SIGKILL all brokers", "broker", apply, cluster.start_brokers)
