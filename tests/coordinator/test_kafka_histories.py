"""Random histories of Kafka's transactional producers, with retries, late copies, and failovers of all roles.

The coordinator and the tables of the partitions' leaders are the real ones. The leaders' rule about which batches need
a confirmation is that of ``TransactionVerification``. A history checks the four promises of ADR 31: epochs fence; a
late batch of one transaction never enters the next one; a retry after the marker is still a duplicate; and each record
has the fate of its own transaction, once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from sparklog.broker.transactions.fenced_producers import FencedProducers
from sparklog.coordinator.effects import Done, Ended, KafkaProducerGiven, Refused
from sparklog.coordinator.events import MarkersWritten
from sparklog.coordinator.records import PartitionPlace
from sparklog.errors import BrokerError
from sparklog.model import TopicPartition
from sparklog.protocol.messages import TransactionMarker
from sparklog.record.header import BatchHeader, Flag
from sparklog.record.marker import Marker
from sparklog.storage.producers import ProducerTable, replay
from tests.coordinator.test_kafka_transactions import Identity, KafkaHost
from tests.storage.batches import batch

PARTITIONS = 2
_PLAIN, _ = batch(1)
_UNCERTAIN = "NOT_LEADER_OR_FOLLOWER"


class Batch(NamedTuple):
    """One copy of a batch in the network. The same batch may arrive many times, at any time."""

    producer: Identity
    partition: int
    sequence: int
    instance: int
    transaction: int
    adds: bool  #: whether the leader adds the partition, as for clients with transaction.version 2

    @property
    def header(self) -> BatchHeader:
        return _PLAIN._replace(
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            first_sequence=self.sequence,
            flags=int(Flag.TRANSACTIONAL),
            offset_span=1,
            record_count=1,
        )


@dataclass(eq=False)
class Leader:
    """The leader of one partition: its log, which survives failovers, and its tables."""

    number: int
    log: list[tuple[Batch | None, Marker | None, BatchHeader]] = field(default_factory=list)
    table: ProducerTable = field(default_factory=ProducerTable)
    fences: FencedProducers = field(default_factory=FencedProducers)
    #: The batches that wait for the coordinator, by producer id, with the ticket of the question.
    waiting: dict[int, tuple[int, list[Batch]]] = field(default_factory=dict)
    results: dict[Batch, str] = field(default_factory=dict)
    #: The decisions whose markers have arrived since the last failover.
    decisions: set[int] = field(default_factory=set)

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition("t", self.number)

    @property
    def place(self) -> PartitionPlace:
        return PartitionPlace("t", self.number, "id")

    def fail_over(self) -> None:
        """Elect a leader that has the log, and nothing from the memory of this one."""
        self.table = ProducerTable()
        replay(self.table, ((header, marker) for _, marker, header in self.log))
        self.fences = FencedProducers()
        self.decisions.clear()
        for _, batches in self.waiting.values():
            for one in batches:
                self.results[one] = _UNCERTAIN
        self.waiting.clear()

    def append(self, one: Batch) -> None:
        try:
            known = self.table.known([(one.header, None)], self.tp, begins_anywhere=True)
        except BrokerError as error:
            self.results[one] = error.code.name
            return
        if not known:
            header = one.header._replace(base_offset=len(self.log))
            self.log.append((one, None, header))
            self.table.record(header)
        self.results[one] = "duplicate" if known else "appended"

    def produce(self, host: KafkaHost, one: Batch) -> None:
        producer_id, epoch = one.producer
        if producer_id in self.waiting:
            self.waiting[producer_id][1].append(one)
            return
        opened = self.table.transactions.get(producer_id)
        confirmed = opened is not None and opened.epoch == epoch and not self.fences.has(self.tp, producer_id)
        try:
            known = self.table.known([(one.header, None)], self.tp, begins_anywhere=True)
        except BrokerError as error:
            self.results[one] = error.code.name
            return
        if confirmed or known:
            self.append(one)
            return
        ask = host.put if one.adds else host.ask
        self.waiting[producer_id] = (ask(one.producer, self.place), [one])

    def on_answers(self, host: KafkaHost) -> None:
        for producer_id, (ticket, batches) in list(self.waiting.items()):
            outcome = host.answers.get(ticket)
            if outcome is None:
                continue
            del self.waiting[producer_id]
            for one in batches:
                if isinstance(outcome, Refused) or one.producer != batches[0].producer:
                    self.results[one] = outcome.code.name if isinstance(outcome, Refused) else "INVALID_TXN_STATE"
                    continue
                assert isinstance(outcome, Done)
                self.fences.begin(self.tp, producer_id, outcome.decision)
                self.append(one)

    def fence(self, marker: TransactionMarker, decision: int) -> set[int]:
        """Begin to write a marker, as ``MarkerAppend`` does. Return the producers whose transaction is over."""
        over = set()
        self.decisions.add(decision)
        for producer_id, _ in (*marker.committed, *marker.aborted):
            if self.fences.is_over(self.tp, producer_id, decision):
                over.add(producer_id)
            elif self.fences.add(self.tp, producer_id, decision):
                for one in self.waiting.pop(producer_id, (0, []))[1]:
                    self.results[one] = "INVALID_TXN_STATE"
        return over

    def write(self, marker: TransactionMarker, decision: int) -> None:
        over = self.fence(marker, decision)
        alive = self.table.transactions
        written = Marker(
            tuple(one for one in marker.committed if one[0] in alive and one[0] not in over),
            tuple(one for one in marker.aborted if one[0] in alive and one[0] not in over),
        )
        if written.committed or written.aborted:
            header = _PLAIN._replace(base_offset=len(self.log), offset_span=1)
            self.log.append((None, written, header))
            self.table.record(header, written)


@dataclass(eq=False)
class Client:
    """One life of a producer. It behaves as a client of Kafka with or without transaction.version 2."""

    number: int
    raises: bool
    producer: Identity = (-1, -1)
    transaction: int = 0
    sequences: Counter[int] = field(default_factory=Counter)
    sent: list[Batch] = field(default_factory=list)
    fenced: bool = False


class History:
    """One random history of the producers that share a transactional id, one after the other or at the same time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.host = KafkaHost()
        self.leaders = [Leader(number) for number in range(PARTITIONS)]
        self.clients: list[Client] = []
        self.network: list[Batch] = []
        self.markers: list[tuple[TransactionMarker, int]] = []
        #: The outcome of each transaction that its client has learned, by client and number.
        self.decided: dict[tuple[int, int], bool] = {}
        self.acked: set[Batch] = set()
        #: The newest client that has its producer id, and what was appended after each takeover.
        self.newest = -1
        self.seen: Counter[str] = Counter()

    # --- the world ---

    def turn(self) -> None:
        """Let time pass: commit appends, write markers, deliver late copies, and elect leaders."""
        for _ in range(self.random.randrange(3)):
            self.world_event()

    def world_event(self) -> None:
        what = self.random.random()
        if what < 0.3 and self.host.appends:
            self.host.commit_one()
        elif what < 0.55:
            self.deliver_markers(repeat=self.random.random() < 0.2)
        elif what < 0.8 and self.network:
            self.deliver(self.random.choice(self.network))
        elif what < 0.84:
            self.host.crash(keep=self.random.randrange(3))
            self.seen["coordinators"] += 1
        elif what < 0.9:
            self.random.choice(self.leaders).fail_over()
            self.seen["leaders"] += 1
        self.answer_leaders()

    def answer_leaders(self) -> None:
        for leader in self.leaders:
            leader.on_answers(self.host)

    def deliver(self, one: Batch) -> None:
        """Deliver a copy. A producer that was replaced must not append any more."""
        leader = self.leaders[one.partition]
        before = len(leader.log)
        leader.produce(self.host, one)
        self.answer_leaders()
        if one.instance < self.newest:
            self.seen["late copies of fenced producers"] += 1
            assert all(found is not one for found, _, _ in leader.log[before:]), "a fenced producer has appended"

    def deliver_markers(self, *, repeat: bool = False) -> None:
        """Write one of the markers in flight. A repeated one may arrive after the next transaction has begun."""
        if not repeat and self.host.markers:
            number = self.random.randrange(len(self.host.markers))
            for marker in self.host.markers[number].markers if self.random.random() < 0.5 else ():
                # The leader has begun to write the marker, and the marker is not in the log yet.
                self.leaders[marker.partition].fence(marker, self.host.markers[number].decision)
                self.seen["markers in progress"] += 1
                return
            sent = self.host.markers.pop(number)
            for marker in sent.markers:
                self.leaders[marker.partition].write(marker, sent.decision)
                self.markers.append((marker, sent.decision))
            places = tuple(PartitionPlace(one.topic, one.partition, one.topic_id) for one in sent.markers)
            self.host.step(_written(sent.key, sent.decision, places, sent.part))
        elif repeat and self.markers:
            marker, decision = self.random.choice(self.markers)
            leader = self.leaders[marker.partition]
            if decision in leader.decisions:  # A new leader has no memory of decisions, see ADR 31.
                leader.write(marker, decision)
                self.seen["repeated markers"] += 1

    # --- a client ---

    def request(self, send: object) -> object | None:
        """Send a request until it has a response. A failover of the coordinator loses requests."""
        for _ in range(50):
            ticket = send()  # type: ignore[operator]
            for _ in range(200):
                if ticket in self.host.answers:
                    break
                if not (self.host.appends or self.host.markers):
                    break
                self.world_event()
            outcome = self.host.answers.get(ticket)
            if outcome is None:
                continue
            if isinstance(outcome, Refused) and outcome.code.name in {
                "CONCURRENT_TRANSACTIONS",
                "COORDINATOR_NOT_AVAILABLE",
            }:
                self.host.settle(markers=False)
                self.deliver_markers()
                continue
            return outcome
        raise AssertionError("no response")

    def init(self, client: Client, producer: Identity = (-1, -1)) -> None:
        outcome = self.request(lambda: self.host.init(producer=producer))
        if not isinstance(outcome, KafkaProducerGiven):
            client.fenced = True
            return
        client.producer = (outcome.producer_id, outcome.producer_epoch)
        client.sequences.clear()
        self.newest = max(self.newest, client.number)

    def send(self, client: Client) -> bool:
        """Send one batch until it is acknowledged. Return False if the client gives up, and so must abort."""
        partition = self.random.randrange(PARTITIONS)
        one = Batch(
            client.producer,
            partition,
            client.sequences[partition],
            client.number,
            client.transaction,
            client.raises,
        )
        client.sequences[partition] += 1
        if not client.raises:
            outcome = self.request(lambda: self.host.put(client.producer, self.leaders[partition].place))
            if not isinstance(outcome, Done):
                client.fenced = True
                return False
        client.sent.append(one)
        self.network.append(one)
        for _ in range(self.random.randrange(1, 5)):
            if self.random.random() < 0.2:
                self.seen["lost requests"] += 1
                continue
            leader = self.leaders[partition]
            leader.results.pop(one, None)
            self.deliver(one)
            for _ in range(40):
                if one in leader.results or not any(one in found for _, found in leader.waiting.values()):
                    break
                self.world_event()
            result = leader.results.get(one)
            if result in {"appended", "duplicate"} and self.random.random() < 0.85:
                self.acked.add(one)
                return True
            self.turn()
        return False

    def play_transaction(self, client: Client) -> None:
        client.transaction += 1
        fine = True
        for _ in range(self.random.randrange(1, 4)):
            fine = fine and self.send(client)
            self.turn()
            if client.fenced:
                return
        if self.random.random() < 0.1:
            return  # The client dies here.
        commit = fine and self.random.random() < 0.75
        outcome = self.request(lambda: self.host.decide(client.producer, commit=commit, raises=client.raises))
        if isinstance(outcome, Refused) and outcome.code.name == "INVALID_TXN_STATE" and not fine:
            outcome = Ended(True)  # No batch has begun the transaction.
        elif not isinstance(outcome, Ended):
            client.fenced = True
            return
        self.decided[client.number, client.transaction] = commit
        self.seen["commits" if commit else "aborts"] += 1
        if client.raises and isinstance(outcome, Ended) and outcome.producer_epoch >= 0:
            client.producer = (outcome.producer_id, outcome.producer_epoch)
            client.sequences.clear()
        elif not fine:
            self.init(client, client.producer)  # KIP-360

    def play(self) -> None:
        for number in range(self.random.randrange(1, 4)):
            client = Client(number, self.random.random() < 0.5)
            self.clients.append(client)
            self.init(client)
            for _ in range(self.random.randrange(1, 6)):
                if client.fenced:
                    break
                self.play_transaction(client)
            if self.random.random() < 0.5 and len(self.clients) > 1:
                zombie = self.random.choice(self.clients[:-1])
                if not zombie.fenced:
                    self.play_transaction(zombie)
                    assert (
                        zombie.fenced
                        or (zombie.number, zombie.transaction) not in self.decided
                        or not (self.decided[zombie.number, zombie.transaction])
                    ), "a fenced producer has committed"
        last = Client(99, raises=False)
        self.init(last)
        while self.host.appends or self.host.markers:
            self.host.settle(markers=False)
            self.deliver_markers()
            self.answer_leaders()

    # --- the promises ---

    def check(self) -> None:
        for leader in self.leaders:
            for one in self.network:  # Every copy arrives again at the end.
                if one.partition == leader.number:
                    leader.fences = FencedProducers() if self.random.random() < 0.2 else leader.fences
                    self.deliver(one)
                    self.host.settle()
                    self.answer_leaders()
            assert not leader.table.transactions.open(), "a late batch has opened a transaction"
            fates = self.fates(leader)
            records = [one for one, _, _ in leader.log if one is not None]
            assert len(set(records)) == len(records), "a record is twice in the log"
            for one in self.network:
                if one.partition == leader.number:
                    commit = self.decided.get((one.instance, one.transaction))
                    if commit:
                        assert fates.get(one) == "committed", f"{one} belongs to a committed transaction: {fates}"
                    elif commit is not None:
                        assert fates.get(one) in {None, "aborted"}, f"{one} belongs to an aborted transaction"
                    self.seen[str(fates.get(one))] += 1

    @staticmethod
    def fates(leader: Leader) -> dict[Batch, str]:
        fates: dict[Batch, str] = {}
        for at, (one, _, _) in enumerate(leader.log):
            if one is None:
                continue
            for _, marker, _ in leader.log[at:]:
                if marker is not None and one.producer[0] in {found for found, _ in marker.committed}:
                    fates[one] = "committed"
                elif marker is not None and one.producer[0] in {found for found, _ in marker.aborted}:
                    fates[one] = "aborted"
                else:
                    continue
                break
        return fates


def _written(key: str, decision: int, places: tuple[PartitionPlace, ...], part: int) -> MarkersWritten:
    return MarkersWritten(key, decision, places, part)


@pytest.mark.parametrize("block", range(8))
def test_the_promises_to_kafka_producers_hold(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        history = History(seed)
        try:
            history.play()
            history.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_kafka_histories_contain_enough_events() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        history = History(seed)
        history.play()
        history.check()
        seen += history.seen
    for what in ("commits", "aborts", "committed", "aborted", "leaders", "coordinators", "repeated markers"):
        assert seen[what] > 20, seen
    assert seen["late copies of fenced producers"] > 20 and seen["lost requests"] > 20, seen
