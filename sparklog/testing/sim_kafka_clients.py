"""Kafka's producers in a simulated cluster: transactional producers of both protocol versions, and idempotent ones.

A client of the older version keeps its producer id and epoch, continues its sequences in the next transaction, and
sends AddPartitionsToTxn. A client with transaction.version 2 gets the next epoch from EndTxn, and the partitions'
leaders add the partitions to the transaction. Both send up to three batches of a partition before the first response,
and retry them in order.

Each client is a generator: it yields a function that begins a wait, and is resumed with the result. Responses may come
late, twice or never. A copy of a batch may come at any time. The connection to a coordinator keeps the order of
requests if an older client relies on this order (ADR 31).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from random import Random
from typing import Any, Protocol, cast

from sparklog.broker.internal_topics import TRANSACTIONS
from sparklog.coordinator.effects import Done, Ended, KafkaProducerGiven, Outcome, Refused
from sparklog.coordinator.events import KafkaAddRequested, KafkaEndRequested, KafkaInitRequested
from sparklog.coordinator.records import PartitionPlace
from sparklog.errors import ErrorCode
from sparklog.model import TRANSACTIONAL_ID_PREFIX, TopicPartition
from sparklog.protocol.messages import ACKS_ALL
from sparklog.record.header import Flag
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_checks import PartitionChecker
from sparklog.testing.sim_clients import find_leader
from sparklog.testing.sim_hosted import SimProduce
from sparklog.testing.sim_kafka_checks import KafkaChecks
from sparklog.testing.sim_log import Sequenced
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_transactions import TransactionBroker
from sparklog.testing.sim_zk import SimZk

#: The topic of Kafka's producers, and the partition of their coordinator.
TOPIC = "t"
COORDINATOR = TopicPartition(TRANSACTIONS, 0)
#: The first producer id. Producers of sparklog have lower ones.
FIRST_ID = 1000
REQUEST_MS, PAUSE_MS = 200, 40
#: How long a client tries to deliver a batch.
DELIVERY_MS = 1500
TRANSACTION_TIMEOUT_MS = 3000
#: How long EndTxn waits for markers.
MARKERS_MS = 50
#: The time after which brokers may forget a producer that has sent nothing. It is longer than the delay of any copy of
#: a message.
FORGET_MS = 5000
#: The share of batches that are sent again, perhaps to another leader, and the longest delay of the second copy.
REPEATED, LATE_MS = 0.3, 1500
#: The possible numbers of batches in a burst. A client sends a burst before the first response.
BURSTS = (1, 1, 1, 2, 3)

_RETRIED = frozenset({"CONCURRENT_TRANSACTIONS", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS",
                      "NOT_COORDINATOR", "BROKER_STOPPING"})  # fmt: skip
#: The errors of a batch after which a client gives up its transaction or its epoch.
_FATAL = frozenset({"INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE", "UNKNOWN_PRODUCER_ID"})

Resume = Callable[[Any], None]
Wait = Callable[[Resume], None]
Steps = Generator[Wait, Any, Any]


class KafkaServedCluster(Protocol):
    """The part of the simulated cluster that the clients use."""

    world: SimNetwork
    zk: SimZk
    brokers: dict[int, SimBroker]
    checkers: dict[TopicPartition, PartitionChecker]


class KafkaClients:
    """All Kafka clients of one cluster."""

    def __init__(self, cluster: KafkaServedCluster, *, transactional_ids: int = 3) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.checks = KafkaChecks()
        self.stopped = False
        self._ids = FIRST_ID
        self._instances = 0
        #: The number of transactional ids whose last producer is initialized, so that no transaction is open.
        self.ended = 0
        self.transactional_ids = transactional_ids
        for number in range(transactional_ids):
            self._start(self._succession(f"{TRANSACTIONAL_ID_PREFIX}k{number}"))
        for number in range(self.partition_count):
            self._start(KafkaIdempotent(self, number).live())

    @property
    def partition_count(self) -> int:
        return len(self.cluster.zk.topics[TOPIC].assignment)

    def fresh_id(self) -> int:
        self._ids += 1
        return self._ids

    def watch(self, checker: PartitionChecker) -> None:
        """Check the committed batches of a partition of the topic."""
        checker.on_commit = partial(self.checks.committed, checker)

    def stop(self) -> None:
        """Begin no more transactions. A last producer of each transactional id ends a transaction that is open."""
        self.stopped = True

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _start(self, steps: Steps) -> None:
        self._resume(steps, None)

    def _resume(self, steps: Steps, result: Any) -> None:
        try:
            wait = steps.send(result)
        except StopIteration:
            return
        waiting = [True]

        def resume(found: Any) -> None:
            if waiting:
                waiting.clear()
                self._resume(steps, found)

        wait(resume)

    def sleep(self, ms: int) -> Wait:
        return lambda resume: self.world.at(max(1, ms), lambda: resume(None))

    # --- a transactional id ----------------------------------------------------------------------------------------

    def _succession(self, key: str) -> Steps:
        """Start one producer of the transactional id after the other. The earlier one may still be active."""
        chance = self.world.random
        yield self.sleep(chance.randrange(400))
        while not self.stopped:
            self._instances += 1
            producer = KafkaTransactional(self, key, f"{key}.{self._instances}", raises=chance.random() < 0.5)
            self._start(producer.live(chance.randrange(1, 12)))
            next_ms = self.world.now_ms + chance.randrange(300, 6000)
            while self.world.now_ms < next_ms and not self.stopped:
                yield self.sleep(PAUSE_MS)
        while not (yield from KafkaTransactional(self, key, f"{key}.last", raises=False).init()):
            yield self.sleep(PAUSE_MS)
        self.ended += 1

    def may_forget(self, producer_id: int, partition: int, chance: Random) -> None:
        """Let some brokers forget an idle producer."""
        tp = TopicPartition(TOPIC, partition)
        self.checks.forgotten(self.cluster.checkers[tp], producer_id)
        for broker in self.cluster.brokers.values():
            hosted = broker.hosted.get(tp)
            if hosted is not None and producer_id not in hosted.log.transactions and chance.random() < 0.8:
                hosted.log.forget_producer(producer_id)
                self.world.happened["kafka producer forgotten"] += 1


class _Batch:
    """A batch of a burst."""

    def __init__(self, body: str, count: int, sequence: Sequenced, transaction: str | None) -> None:
        self.body = body
        self.count = count
        self.sequence = sequence
        self.transaction = transaction
        self.acked = False
        self.code = ""


class _Producer:
    """The common part of Kafka's producers: bursts of batches, with their retries."""

    raises = False

    def __init__(self, clients: KafkaClients, key: str, name: str) -> None:
        self.clients = clients
        self.cluster = clients.cluster
        self.world = clients.world
        self.key = key
        self.name = name
        self.identity = (-1, -1)
        self.sequences: Counter[int] = Counter()
        self._numbers = 0

    def burst(self, partition: int, transaction: str | None) -> Steps:
        """Send some batches, and retry them in order. Return whether all of them were acknowledged."""
        chance = self.world.random
        batches = []
        flags = 0 if transaction is None else int(Flag.TRANSACTIONAL)
        for _ in range(chance.choice(BURSTS)):
            self._numbers += 1
            count = chance.randint(1, 3)
            sequence = Sequenced(*self.identity, self.sequences[partition], flags)
            self.sequences[partition] += count
            batches.append(_Batch(f"{self.name}/{self._numbers}", count, sequence, transaction))
        deadline_ms, refused = self.world.now_ms + DELIVERY_MS, 0
        while self.world.now_ms < deadline_ms and refused < 2 and not self.clients.stopped:
            missing = [batch for batch in batches if not batch.acked]
            yield lambda resume, missing=missing: self._send_all(missing, partition, resume)  # type: ignore[misc]
            if all(batch.acked for batch in batches):
                return True
            if any(batch.code in _FATAL for batch in batches):
                return False
            # All earlier batches are in the log, so this one will never be the next.
            refused += missing[0].code == "OUT_OF_ORDER_SEQUENCE_NUMBER" and not missing[0].acked
            yield self.clients.sleep(chance.randrange(1, PAUSE_MS))
        self.world.happened["kafka batch given up"] += 1
        return False

    def _send_all(self, batches: list[_Batch], partition: int, resume: Resume) -> None:
        missing = set(range(len(batches)))

        def told(number: int, code: ErrorCode) -> None:
            batch = batches[number]
            batch.code = code.name
            if code in {ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER}:
                batch.acked = True
                if batch.transaction is not None and code is ErrorCode.NONE:
                    self.clients.checks.acked(batch.transaction, batch.body)
            else:
                self.world.happened[f"kafka batch: {code.name}"] += 1
            missing.discard(number)
            if not missing:
                resume(None)

        tp, chance = TopicPartition(TOPIC, partition), self.world.random
        broker = find_leader(self.cluster, tp, chance)
        for number, batch in enumerate(batches):
            self._send(batch, tp, broker, partial(told, number))
            if chance.random() < REPEATED:
                self.world.at(chance.randrange(LATE_MS), partial(self._send_again, batch, tp))
        self.world.at(REQUEST_MS, lambda: resume(None))

    def _send_again(self, batch: _Batch, tp: TopicPartition) -> None:
        if not self.clients.stopped:
            self._send(batch, tp, find_leader(self.cluster, tp, self.world.random))

    def _send(
        self, batch: _Batch, tp: TopicPartition, broker: SimBroker, told: Callable[[ErrorCode], None] | None = None
    ) -> None:
        topic_id = self.cluster.zk.topics[TOPIC].topic_id
        produce = SimProduce(
            batch.body,
            batch.count,
            ACKS_ALL,
            topic_id,
            batch.sequence,
            told=told,
            content=batch.transaction,
            begins_anywhere=True,
        )
        key = self.key if batch.transaction is not None else ""
        action = partial(cast(TransactionBroker, broker).produce_for_kafka, tp, produce, key=key, adds=self.raises)
        self.world.send("client", broker.name, (broker, broker.process, action))


class KafkaIdempotent(_Producer):
    """An idempotent producer of one partition. Brokers may drop its producer state while it pauses."""

    def __init__(self, clients: KafkaClients, partition: int) -> None:
        super().__init__(clients, "", f"i{partition}")
        self.partition = partition
        self.identity = (clients.fresh_id(), 0)

    def live(self) -> Steps:
        chance = self.world.random
        while not self.clients.stopped:
            for _ in range(chance.randrange(1, 8)):
                if self.clients.stopped or not (yield from self._write()):
                    break
                yield self.clients.sleep(chance.randrange(100))
            yield self.clients.sleep(FORGET_MS)
            self.clients.may_forget(self.identity[0], self.partition, chance)

    def _write(self) -> Steps:
        if (yield from self.burst(self.partition, None)):
            return True
        # It is unknown whether the batches are in the log. As in Kafka, the client raises its epoch itself.
        self.identity = (self.identity[0], self.identity[1] + 1)
        self.sequences.clear()
        self.world.happened["kafka epoch of an idempotent producer"] += 1
        return False


class KafkaTransactional(_Producer):
    """A transactional producer, from its start to its end.

    ``raises`` is true if the producer uses transaction.version 2, in which EndTxn raises the producer epoch.
    """

    def __init__(self, clients: KafkaClients, key: str, name: str, *, raises: bool) -> None:
        super().__init__(clients, key, name)
        self.raises = raises
        self.fenced = False
        self._added: set[int] = set()
        self._transactions = 0

    def live(self, transactions: int) -> Steps:
        chance = self.world.random
        if not (yield from self.init()):
            return
        for _ in range(transactions):
            if self.clients.stopped or self.fenced:
                return
            if not (yield from self._transaction()):
                return
            if chance.random() < 0.05:
                yield self.clients.sleep(FORGET_MS)
                for partition in range(self.clients.partition_count):
                    self.clients.may_forget(self.identity[0], partition, chance)
            yield self.clients.sleep(chance.randrange(20))

    def _transaction(self) -> Steps:
        """Play one transaction. Return False if the producer ends here, perhaps in the middle."""
        chance, fine = self.world.random, True
        self._transactions += 1
        self._added.clear()
        transaction = f"{self.name}.{self._transactions}"
        for _ in range(chance.randrange(1, 4)):
            partition = chance.randrange(self.clients.partition_count)
            fine = fine and (yield from self._add(partition)) and (yield from self.burst(partition, transaction))
            if self.fenced or not fine:
                break
            yield self.clients.sleep(chance.randrange(20))
        if self.fenced or chance.random() < 0.08:
            return False
        commit = fine and chance.random() < 0.75
        return (yield from self._end(transaction, commit=commit, fine=fine))

    def _end(self, transaction: str, *, commit: bool, fine: bool) -> Steps:
        """End the transaction, and get the identity for the next one."""
        outcome = yield from self._request(
            lambda ticket: KafkaEndRequested(
                ticket,
                self.key,
                *self.identity,
                commit,
                self._coordinator_ms() + MARKERS_MS,
                self.raises,
                self.clients.fresh_id(),
            )
        )
        if isinstance(outcome, Ended):
            self.world.happened["kafka commit" if commit else "kafka abort"] += 1
            if not outcome.complete:
                self.world.happened["kafka end before its markers"] += 1
            checker = self.cluster.checkers[TopicPartition(TOPIC, 0)]
            self.clients.checks.learned(checker, transaction, commit=commit)
        elif not (isinstance(outcome, Refused) and outcome.code is ErrorCode.INVALID_TXN_STATE and not commit):
            self.fenced = True
            return False
        if self.raises and isinstance(outcome, Ended):
            self.identity = (outcome.producer_id, outcome.producer_epoch)
            self.sequences.clear()
            return True
        return fine or (yield from self.init())

    def _coordinator_ms(self) -> int:
        node = self.cluster.zk.read(COORDINATOR)
        known = self.cluster.brokers.get(node.state.leader) if node is not None else None
        return known.now_ms if known is not None else self.world.now_ms

    # --- requests --------------------------------------------------------------------------------------------------

    def init(self) -> Steps:
        """Get a producer id and an epoch. A producer that has them already raises its epoch (KIP-360)."""
        identity, fresh = self.identity, self.clients.fresh_id()
        outcome = yield from self._request(
            lambda ticket: KafkaInitRequested(ticket, self.key, TRANSACTION_TIMEOUT_MS, fresh, *identity),
            ordered=True,
        )
        if not isinstance(outcome, KafkaProducerGiven):
            self.fenced = True
            return False
        self.identity = (outcome.producer_id, outcome.producer_epoch)
        self.sequences.clear()
        self.world.happened["kafka producer initialized"] += 1
        return True

    def _add(self, partition: int) -> Steps:
        """Add a partition to the transaction. The leader does it for clients with transaction.version 2."""
        if self.raises or partition in self._added:
            return True
        place = PartitionPlace(TOPIC, partition, self.cluster.zk.topics[TOPIC].topic_id)
        outcome = yield from self._request(lambda ticket: KafkaAddRequested(ticket, self.key, *self.identity, (place,)))
        if isinstance(outcome, Done):
            self._added.add(partition)
            return True
        self.fenced = True
        return False

    def _request(self, event_of: Callable[[int], object], *, ordered: bool = False) -> Steps:
        """Send a request to the coordinator until it has a response, and return the outcome; None at the end.

        With ``ordered`` no copy of the request is late.
        """
        ordered = ordered or not self.raises
        for _ in range(200):
            outcome: Outcome | None = yield lambda resume: self._ask(event_of, resume, ordered=ordered)
            if outcome is not None and not (isinstance(outcome, Refused) and outcome.code.name in _RETRIED):
                if isinstance(outcome, Refused):
                    self.world.happened[f"kafka request: {outcome.code.name}"] += 1
                return outcome
            yield self.clients.sleep(self.world.random.randrange(1, PAUSE_MS))
        return None

    def _ask(self, event_of: Callable[[int], object], resume: Resume, *, ordered: bool) -> None:
        """Send a request once. ``resume`` gets the outcome, or None if there is no response in time.

        With ``ordered`` the client closes the connection then, and the coordinator does not handle the request later.
        """
        broker = cast(TransactionBroker, find_leader(self.cluster, COORDINATOR, self.world.random))
        waiting = [True]

        def told(outcome: Outcome) -> None:
            if isinstance(outcome, KafkaProducerGiven):
                self.clients.checks.given(outcome.producer_id, outcome.producer_epoch)
            if waiting:
                waiting.clear()
                resume(outcome)

        def ended() -> None:
            if waiting:
                waiting.clear()
                resume(None)

        def arrive() -> None:
            if waiting or not ordered:
                broker.coordinate(self.key, event_of, told, ordered=ordered)

        self.world.send("client", broker.name, (broker, broker.process, arrive), ordered=ordered)
        self.world.at(REQUEST_MS, ended)
