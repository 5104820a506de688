"""Clients of the simulated cluster: idempotent producers that retry, and writers that do not.

A producer sends its batches in order, and has at most five batches in flight, like ``PartitionQueues``. It retries them
in order until each has a response, and gives up after its delivery timeout. The producer then does not know whether the
batches are in the log, so it continues with a new epoch of its producer id, from sequence 0.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Protocol

from sparklog.errors import ErrorCode
from sparklog.model import NO_LEADER, TopicPartition
from sparklog.testing.sim_broker import SimBroker
from sparklog.testing.sim_hosted import SimProduce
from sparklog.testing.sim_log import Sequenced
from sparklog.testing.sim_network import SimNetwork
from sparklog.testing.sim_zk import SimZk

#: A broker remembers only the last five batches of a producer. It cannot recognize an older batch that is sent again.
MAX_IN_FLIGHT = 5
REQUEST_MS = 250
RETRY_MS = 100
DELIVERY_MS = 3000


class ServedCluster(Protocol):
    """The part of the simulated cluster that the clients use."""

    world: SimNetwork
    zk: SimZk
    brokers: dict[int, SimBroker]


class Write:
    """A batch that a producer has sent and that has no response so far."""

    __slots__ = ("began_ms", "body", "count", "number", "sequence")

    def __init__(self, number: int, body: str, count: int, sequence: Sequenced, began_ms: int) -> None:
        #: The number of the write among the writes of its producer.
        self.number = number
        self.body = body
        self.count = count
        self.sequence = sequence
        self.began_ms = began_ms


def find_leader(cluster: ServedCluster, tp: TopicPartition, chance: Random) -> SimBroker:
    """Return the broker to which a client sends: in nine of ten cases the leader, otherwise any broker.

    Real clients may have outdated metadata in the same way.
    """
    node = cluster.zk.read(tp)
    if node is not None and node.state.leader != NO_LEADER and chance.random() < 0.9:
        return cluster.brokers[node.state.leader]
    return cluster.brokers[chance.choice(list(cluster.brokers))]


def send(cluster: ServedCluster, tp: TopicPartition, produce: SimProduce) -> None:
    broker = find_leader(cluster, tp, cluster.world.random)
    cluster.world.send("client", broker.name, (broker, broker.process, partial(broker.produce, tp, produce)))


class SimProducer:
    """An idempotent producer of one partition. If the topic is recreated, it writes to the new topic."""

    def __init__(self, cluster: ServedCluster, tp: TopicPartition, producer_id: int, *, pause_ms: int) -> None:
        self.cluster = cluster
        self.tp = tp
        self.world = cluster.world
        self.pending: list[Write] = []
        self.acked = 0
        #: The start time (ms) of the last write that this producer gave up. If a write was refused because a power cut
        #: had removed earlier acknowledged writes from the log, the time of the newest acknowledgement counts if it is
        #: earlier.
        self.gave_up_ms = -1
        #: The number of the newest acknowledged write, and the time of its response.
        self._newest_acked = (0, -1)
        self.last_acked_ms = -1
        self.stopped = False
        self._pause_ms = pause_ms
        self._producer_id = producer_id
        self._name = f"{tp}/p{producer_id}."
        self._epoch = 0
        self._sequence = 0
        self._topic_id = ""
        self._numbers = 0
        self._retrying = False
        self._sent_ms = 0
        self.world.at(1 + self.world.random.randrange(2 * pause_ms), self._write)

    def _write(self) -> None:
        chance = self.world.random
        self.world.at(1 + int(chance.random() * 2 * self._pause_ms), self._write)
        self._look_for_topic()
        if self.pending and self.world.now_ms - self._sent_ms > REQUEST_MS:
            self._answered(self.pending[0], None)
        if self.stopped or not self._topic_id or self._in_flight_span() >= MAX_IN_FLIGHT:
            return
        count = chance.randint(1, 3)
        self._numbers += 1
        sequence = Sequenced(self._producer_id, self._epoch, self._sequence)
        write = Write(self._numbers, f"{self._name}{self._numbers}", count, sequence, self.world.now_ms)
        self._sequence += count
        self.pending.append(write)
        self._send(write)

    def _in_flight_span(self) -> int:
        """Return how many writes were sent since the oldest write in flight, including it."""
        return self._numbers - self.pending[0].number + 1 if self.pending else 0

    def _look_for_topic(self) -> None:
        """Drop the batches in flight if the topic was deleted, or created again under the same name."""
        record = self.cluster.zk.topics.get(self.tp.topic)
        found = record.topic_id if record is not None and self.tp.partition < len(record.assignment) else ""
        if found != self._topic_id:
            self._topic_id = found
            self._begin_again()

    def _begin_again(self) -> None:
        self.pending.clear()
        self._epoch += 1
        self._sequence = 0

    def _send(self, write: Write) -> None:
        self._sent_ms = self.world.now_ms
        foremost = write is self.pending[0]

        def told(code: ErrorCode) -> None:
            self._answered(write, code, foremost=foremost)

        produce = SimProduce(write.body, write.count, -1, self._topic_id, write.sequence, told=told)
        send(self.cluster, self.tp, produce)

    def _answered(self, write: Write, code: ErrorCode | None, *, foremost: bool = False) -> None:
        """Handle the response to a write. ``code`` is None if no response came in time.

        A late or repeated response counts like the first one. ``foremost``: all earlier writes had responses when this
        write was sent, so no earlier write can be missing in the log.
        """
        if write not in self.pending:
            return
        if code == ErrorCode.NONE:
            self.pending.remove(write)
            self.acked += 1
            self.last_acked_ms = self.world.now_ms
            self._newest_acked = max(self._newest_acked, (write.number, self.world.now_ms))
            return
        self._look_for_topic()
        if write not in self.pending:
            return
        lost_place = code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and foremost
        if code == ErrorCode.INVALID_PRODUCER_EPOCH or self.world.now_ms - write.began_ms > DELIVERY_MS or lost_place:
            self.world.happened["write given up"] += 1
            began_ms = min(write.began_ms, self._newest_acked[1]) if lost_place else write.began_ms
            self.gave_up_ms = max(self.gave_up_ms, began_ms)
            self._begin_again()
        elif not self._retrying:
            self._retrying = True
            self.world.at(RETRY_MS, self._again)

    def _again(self) -> None:
        """Retry all batches in flight, in order."""
        self._retrying = False
        self.world.happened["write sent again"] += len(self.pending)
        for write in self.pending:
            self._send(write)


class SimWriter:
    """A client that sends batches to one partition with random acks, and ignores the responses."""

    def __init__(self, cluster: ServedCluster, tp: TopicPartition, *, pause_ms: int) -> None:
        self.cluster = cluster
        self.tp = tp
        self.stopped = False
        self._pause_ms = pause_ms
        self._name = f"{tp}/w"
        self._numbers = 0
        cluster.world.at(pause_ms, self._write)

    def _write(self) -> None:
        chance = self.cluster.world.random
        self.cluster.world.at(1 + int(chance.random() * 2 * self._pause_ms), self._write)
        record = self.cluster.zk.topics.get(self.tp.topic)
        if self.stopped or record is None or self.tp.partition >= len(record.assignment):
            return
        self._numbers += 1
        of_eleven = chance.random() * 11
        acks = -1 if of_eleven < 8 else 1 if of_eleven < 10 else 0
        send(
            self.cluster,
            self.tp,
            SimProduce(f"{self._name}{self._numbers}", chance.randint(1, 3), acks, record.topic_id),
        )
