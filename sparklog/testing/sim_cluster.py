"""A simulated cluster in one thread: it runs the production replica and controller cores under random faults.

``SimCluster(seed).run()`` plays a schedule: processes crash, pause and restart, connections are cut, disks fill up and
fail, clocks run fast or slow, and operators create, move and delete topics (``sim_faults``, ``sim_admin``). All
invariants are checked after every step (``sim_checks``). Then the faults stop. By the end of the run, all ISRs must be
full, all reassignments must be complete, and every replica must have all acknowledged records. A violation raises
``SimViolation`` with the seed. The same seed always fails in the same way.

::

    clients --produce--> SimBroker (Replica cores, SimLog) --fetch--> SimBroker
                              |  WriteIsr                       ^ updates
                              v                                 |
                            SimZk <-- compare-and-set -- CoreController (Controller core), one of two
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from sparklog.broker.internal_topics import TRANSACTIONS
from sparklog.broker.lifecycle.supervisor_lease import SupervisorLease
from sparklog.model import LeaderAndIsr, TopicPartition, TopicRecord, TopicSchema, VersionedState
from sparklog.replica.replica import Replica, ReplicaSettings
from sparklog.testing.sim_admin import AdminActions
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import PartitionChecker, SimViolation
from sparklog.testing.sim_clients import SimProducer, SimWriter
from sparklog.testing.sim_controller_core import CoreController
from sparklog.testing.sim_driver import Driver
from sparklog.testing.sim_faults import SimFaults
from sparklog.testing.sim_kafka_clients import TOPIC, KafkaClients
from sparklog.testing.sim_log import SimLog
from sparklog.testing.sim_network import CONTROLLERS, FINE, WEATHERS, NetworkFaults, SimNetwork
from sparklog.testing.sim_schedule import Action, draw_schedule
from sparklog.testing.sim_zk import SimZk

#: The mean pause between two batches of all idempotent producers together.
PRODUCE_MS = 25
UNCLEAN_KEY = "unclean.leader.election.enable"
#: The time between the last write of the clients and the end of the run.
QUIET_MS = 1500


class SimCluster:
    """A simulated cluster for one run.

    Not thread-safe. Without ``check_cores``, only the checkers of ``sim_checks`` find violations, and not the
    assertions inside the cores.
    """

    def __init__(
        self,
        seed: int,
        *,
        brokers: int = 3,
        partitions: int = 1,
        min_isr: int = 2,
        replica_type: type[Replica] = Replica,
        controller_type: type[CoreController] = CoreController,
        broker_type: type[SimBroker] = SimBroker,
        log_type: type[SimLog] = SimLog,
        lease_type: type[SupervisorLease] = SupervisorLease,
        check_cores: bool = True,
        weather: NetworkFaults | None = None,
        restless: float | None = None,
        page_cache_loss: float = 0.3,
        accidents: bool = True,
        salt: int = 0,
        produce_ms: int | None = None,
        kafka: bool = False,
    ) -> None:
        """Create the cluster of a seed.

        The seed chooses ``weather`` (the faults of the network) and ``restless`` (the activity of operators) if they
        are not given. ``page_cache_loss`` is the probability that a crash loses unflushed data, where the guarantees of
        the log allow that. Without ``accidents``, only the actions of the test happen. Another ``salt`` plays the same
        schedule with other delays and losses of messages. ``produce_ms`` is the mean pause between two batches of a
        partition's producer; by default, the load of the whole cluster does not depend on the number of partitions.
        With ``kafka`` the idempotent producers of the permanent topic are Kafka's, and some of them have transactions;
        ``broker_type`` must be a ``TransactionBroker``.
        """
        self.seed = seed
        self.world = SimNetwork(seed, weather=FINE, salt=salt)
        self.world.weather = weather or self.world.random.choice(WEATHERS)
        self.zk = SimZk(self.world, self._written, self._serve)
        self.settings = ReplicaSettings(lag_time_max_ms=400, connection_grace_ms=60, isr_retry_ms=100)
        self.replica_type = replica_type
        self.log_type = log_type
        self.check_cores = check_cores
        self.append_failure = 0.01
        self.page_cache_loss = page_cache_loss
        self.min_isr = min_isr
        self.produce_ms = PRODUCE_MS * partitions if produce_ms is None else produce_ms
        self.checkers: dict[TopicPartition, PartitionChecker] = {}
        self.producers: dict[TopicPartition, SimProducer] = {}
        self.faults_over = False
        self.clients_stopped = False
        #: The time after which no fault has an effect and no process is paused.
        self._sound_ms = 0
        self.restless = self.world.random.choice((0.0, 0.03, 0.15)) if restless is None else restless
        self._accidents = accidents
        self._by_id: dict[tuple[str, int], PartitionChecker] = {}
        self._writers: list[SimWriter] = []
        self._kafka_topics = frozenset({TOPIC, TRANSACTIONS} if kafka else ())
        self.kafka: KafkaClients | None = None
        self.brokers = {broker_id: broker_type(broker_id, self) for broker_id in range(1, brokers + 1)}
        self.controllers = [controller_type(name, self) for name in CONTROLLERS]
        self.faults = SimFaults(self)
        self.operators = AdminActions(self)
        self.driver = Driver(self, lease_type=lease_type)
        self._kinds: dict[str, Callable[[Random], None]] = {
            **self.faults.kinds,
            **self.operators.kinds,
            **self.driver.kinds,
        }
        ids = list(self.brokers)
        replicas = (tuple(ids[n % brokers :] + ids[: n % brokers]) for n in range(partitions))
        self.create_topic(TOPIC, tuple(replicas))
        if kafka:
            self.create_topic(TRANSACTIONS, (tuple(ids[:3]),))
            self.kafka = KafkaClients(self)
            for number in range(partitions):
                self.kafka.watch(self.checkers[TopicPartition(TOPIC, number)])

    # --- topics -------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, assignment: tuple[tuple[int, ...], ...], *, unclean: bool = False) -> None:
        topic_id = f"{name}.{self.world.now_ms}"
        config = {"min.insync.replicas": str(self.min_isr), UNCLEAN_KEY: str(unclean).lower()}
        self.zk.put_topic(TopicRecord(name, topic_id, assignment, (TopicSchema(0, b""),), config=config))

    def _serve(self, record: TopicRecord) -> None:
        """Create checkers and clients for new partitions."""
        for number, replicas in enumerate(record.assignment):
            tp = TopicPartition(record.name, number)
            checker = self._by_id.get((record.topic_id, number))
            if checker is None:
                checker = PartitionChecker(str(tp), replicas, min_isr=self.min_isr)
                checker.unclean_allowed = record.config[UNCLEAN_KEY] == "true"
                self._by_id[record.topic_id, number] = checker
                if record.name in self._kafka_topics and record.name != TRANSACTIONS:
                    self._writers.append(SimWriter(self, tp, pause_ms=2 * self.produce_ms))
            checker.assigned(replicas, record.reassigning.get(number))
            self.checkers[tp] = checker
            if tp not in self.producers and record.name not in self._kafka_topics:
                number_of = len(self.producers) + 1
                self.producers[tp] = SimProducer(self, tp, number_of, pause_ms=self.produce_ms)
                self._writers.append(SimWriter(self, tp, pause_ms=2 * self.produce_ms))

    def checker(self, tp: TopicPartition, topic_id: str) -> PartitionChecker:
        return self._by_id[topic_id, tp.partition]

    def _written(self, tp: TopicPartition, before: VersionedState | None, after: VersionedState) -> None:
        self.world.note(f"zk: {tp} version {after.version}: {after.state}")
        if before is not None and after.state.leader != before.state.leader:
            self.world.happened["leader changed"] += 1
        checker = self.checkers[tp]
        unclean = checker.unclean
        checker.written(before, after, controller_epoch=self.zk.controller_epoch, incarnation=self.zk.incarnation)
        self.world.happened["unclean election"] += checker.unclean - unclean

    # --- the run ------------------------------------------------------------------------------------------------

    def schedule(self, fault_ms: int) -> tuple[Action, ...]:
        """Return the random actions on this cluster within ``fault_ms``, which its seed determines."""
        if not self._accidents:
            return ()
        return draw_schedule(Random(f"schedule {self.seed}"), until_ms=fault_ms, restless=self.restless)

    def run(self, *, fault_ms: int = 6000, heal_ms: int = 4000) -> None:
        """Play the seed's schedule.

        Raises:
            SimViolation: a guarantee was violated; the message has seed, time and the end of the trace.
        """
        try:
            for action in self.schedule(fault_ms):
                self.world.at(action.at_ms, partial(self._play, action))
            self._start()
            self.world.run_until(fault_ms)
            self._heal()
            self.world.run_until(fault_ms + heal_ms - QUIET_MS)
            self._stop_clients()
            self.world.run_until(fault_ms + heal_ms)
            self._check_settled()
        except AssertionError as broken:
            trace = "\n".join(list(self.world.trace)[-40:])
            rule, partition = (broken.rule, broken.partition) if isinstance(broken, SimViolation) else ("core", "")
            message = f"seed {self.seed} at {self.world.now_ms} ms: {broken}\n{trace}"
            raise SimViolation(message, rule=rule, partition=partition) from broken

    def _start(self) -> None:
        self.zk.start()
        for broker in self.brokers.values():
            broker.start()
        for controller in self.controllers:
            controller.start()

    def _play(self, action: Action) -> None:
        self._kinds[action.kind](Random(action.seed))

    def _heal(self) -> None:
        self.faults_over = True
        self.world.weather = FINE
        self.world.cut.clear()
        self.append_failure = 0.0
        self.world.note("faults stop")
        self.driver.come_back()
        self.operators.lift_limits()
        self._sound_ms = self.faults.end()

    def _stop_clients(self) -> None:
        self.clients_stopped = True
        for producer in self.producers.values():
            producer.stopped = True
        for writer in self._writers:
            writer.stopped = True
        if self.kafka is not None:
            self.kafka.stop()

    # --- the end ------------------------------------------------------------------------------------------------

    def _check_settled(self) -> None:
        if self.zk.deletions or self.zk.elections:
            raise SimViolation(f"left undone: {self.zk.deletions} {self.zk.elections}", rule="requests are carried out")
        for record in self.zk.topics.values():
            if record.reassigning:
                raise SimViolation(f"{record.name}: {record.reassigning} does not end", rule="reassignments finish")
            for number, replicas in enumerate(record.assignment):
                self._check_partition(TopicPartition(record.name, number), replicas)
        self._check_disks()
        for tp, producer in self.producers.items():
            left = [write.body for write in producer.pending]
            if left or producer.gave_up_ms > self._sound_ms + 500:
                what = f"writes {left} do not end" if left else f"one begun at {producer.gave_up_ms} ms was given up"
                raise SimViolation(f"{tp}: {what}", rule="every write ends", partition=str(tp))
        if self.kafka is not None:
            self._check_kafka(self.kafka)

    def _check_kafka(self, clients: KafkaClients) -> None:
        self.world.happened.update(clients.checks.counts)
        if clients.ended < clients.transactional_ids:
            raise SimViolation("a producer is not initialized after the faults", rule="transactions end")
        for number in range(clients.partition_count):
            tp = TopicPartition(TOPIC, number)
            clients.checks.settled(self.checkers[tp])
            for broker in self.brokers.values():
                if tp in broker.hosted and broker.hosted[tp].log.transactions.any_open:
                    what = f"broker {broker.broker_id} has {broker.hosted[tp].log.transactions.open()}"
                    raise SimViolation(f"{tp}: {what}", rule="transactions end", partition=str(tp))

    def _check_partition(self, tp: TopicPartition, replicas: tuple[int, ...]) -> None:
        def fail(rule: str, what: str) -> None:
            raise SimViolation(f"{tp}: {what}", rule=rule, partition=str(tp))

        node = self.zk.read(tp)
        state = node.state if node is not None else LeaderAndIsr(-1, -1, (), -1)
        if set(state.isr) != set(replicas) or state.leader not in replicas:
            fail("ISRs are full", f"after the faults the state is {state}, replicas are {replicas}")
        checker = self.checkers[tp]
        hosting = [broker for broker in replicas if tp in self.brokers[broker].hosted]
        if len(hosting) < len(replicas):
            fail("replicas settle", f"only {hosting} of {replicas} host it")
        leader = self.brokers[state.leader].hosted[tp]
        checker.settled(leader.log)
        for broker_id in replicas:
            hosted = self.brokers[broker_id].hosted[tp]
            replica = hosted.replica
            if replica is None or replica.high_watermark != leader.log.log_end_offset:
                fail("replicas settle", f"broker {broker_id} has not reached the log end")
            elif replica.in_flight or replica.waiting or hosted.produces:
                fail("every write ends", f"broker {broker_id} still waits")
        for broker in self.brokers.values():
            known = broker.cache.partition(tp)
            if known is None or (known.state, known.replicas) != (state, replicas):
                fail("metadata converges", f"broker {broker.broker_id} takes {known} for {state}")

    def _check_disks(self) -> None:
        """Check that no disk holds a deleted topic or a replica that has moved away."""
        for broker in self.brokers.values():
            for tp, hosted in broker.hosted.items():
                record = self.zk.topics.get(tp.topic)
                own = record is not None and record.topic_id == hosted.topic_id
                if not own or record is None or broker.broker_id not in record.assignment[tp.partition]:
                    what = f"{tp} of topic id {hosted.topic_id} is still on broker {broker.broker_id}"
                    raise SimViolation(what, rule="deleted topics are gone", partition=str(tp))
