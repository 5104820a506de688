"""Tests of the partition queues: order, sequences, retries; by hand, and against a broker with random failures."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.client.cluster.backoff import Backoff
from sparklog.client.producer.partition_queues import BatchState, PartitionQueues, ProducerBatch, ProducerIdentity
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record.codec import EncodedBatch
from sparklog.record.header import BatchHeader, Flag
from sparklog.storage.producers import ProducerTable, check_sequence

TP = TopicPartition("t", 0)
OTHER = TopicPartition("t", 1)
STEADY = Backoff(first_ms=100, max_ms=1000, jitter=0.0)
ID = ProducerIdentity(7, 0)


def batch(tp: TopicPartition = TP, *, count: int = 1, deadline_ms: float = 1e9, size: int = 64) -> ProducerBatch:
    header = BatchHeader(*[0] * 17)._replace(record_count=count, offset_span=count, length=size, producer_id=-1)
    return ProducerBatch(tp, EncodedBatch(header, pa.py_buffer(b"")), topic_id="", deadline_ms=deadline_ms)


def accumulator(*, idempotent: bool = True, max_in_flight: int = 5) -> PartitionQueues:
    made = PartitionQueues(idempotent=idempotent, max_in_flight=max_in_flight, backoff=STEADY)
    made.set_identity(ID)
    return made


def drain(
    acc: PartitionQueues, now_ms: float = 0, *, leader: int | None = 1, max_bytes: int = 10_000
) -> list[ProducerBatch]:
    """Return all batches that are sent now, in order."""
    sent: list[ProducerBatch] = []
    while True:
        requests = acc.drain(now_ms, lambda _: leader, can_accept=lambda _: True, max_request_bytes=max_bytes)
        if not requests:
            return sent
        for batches in requests.values():
            sent += batches


def sequences(batches: list[ProducerBatch]) -> list[int]:
    return [one.encoded.header.first_sequence for one in batches]


def fail(acc: PartitionQueues, one: ProducerBatch, code: ErrorCode, now_ms: float = 0) -> bool:
    return acc.failed(one, code, now_ms=now_ms, roll=0.5)


def test_sequences_count_records_and_five_batches_are_in_flight() -> None:
    acc = accumulator()
    batches = [batch(count=3) for _ in range(7)]
    for one in batches:
        acc.add(one)
    sent = drain(acc)
    assert sent == batches[:5]
    assert sequences(sent) == [0, 3, 6, 9, 12]
    assert {one.encoded.header.producer_id for one in sent} == {7}
    acc.succeeded(sent[1])
    assert drain(acc) == [], "the broker would store the sixth instead of the first, which may be lost"
    acc.succeeded(sent[0])
    assert sequences(drain(acc)) == [15, 18]


def test_a_request_has_one_batch_of_each_partition_of_a_leader() -> None:
    acc = accumulator()
    first, second, other = batch(), batch(), batch(OTHER)
    for one in (first, second, other):
        acc.add(one)
    requests = acc.drain(0, lambda _: 1, can_accept=lambda _: True, max_request_bytes=1000)
    assert requests == {1: [first, other]}


def test_a_full_request_leaves_the_rest_to_head_the_next() -> None:
    acc = accumulator()
    partitions = [TopicPartition("t", index) for index in range(3)]
    for tp in partitions * 2:
        acc.add(batch(tp, size=400))
    taken = [
        [one.tp.partition for one in acc.drain(0, lambda _: 1, can_accept=lambda _: True, max_request_bytes=900)[1]]
        for _ in range(3)
    ]
    assert taken == [[0, 1], [2, 0], [1, 2]]


def test_a_batch_larger_than_a_request_is_sent_alone() -> None:
    acc = accumulator()
    acc.add(batch(size=5000))
    assert len(drain(acc, max_bytes=1000)) == 1


def test_a_retry_keeps_its_sequence_and_precedes_later_batches() -> None:
    acc = accumulator()
    batches = [batch() for _ in range(3)]
    for one in batches[:2]:
        acc.add(one)
    drain(acc)
    assert fail(acc, batches[0], ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert fail(acc, batches[1], ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER), "the earlier batch was refused"
    acc.add(batches[2])
    assert drain(acc, 99) == [], "the delay is 100 ms, and nothing may overtake"
    assert acc.next_time_ms(0) == 100
    sent = drain(acc, 100)
    assert sent == batches
    assert sequences(sent) == [0, 1, 2]
    assert acc.sequence_resets == 0


def test_a_delay_applies_to_the_broker_that_refused() -> None:
    acc = accumulator()
    one = batch()
    acc.add(one)
    drain(acc, leader=1)
    fail(acc, one, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert drain(acc, 1, leader=1) == []
    assert drain(acc, 1, leader=2) == [one]
    assert sequences([one]) == [0]


def test_delays_increase() -> None:
    acc = accumulator()
    one = batch()
    acc.add(one)
    now = 0.0
    for delay in (100, 200, 400, 800, 1000, 1000):
        assert drain(acc, now) == [one]
        fail(acc, one, ErrorCode.REQUEST_TIMED_OUT, now)
        assert acc.next_time_ms(now) == now + delay
        now += delay


def test_a_lost_sequence_needs_a_new_producer_id() -> None:
    acc = accumulator()
    batches = [batch() for _ in range(3)]
    for one in batches:
        acc.add(one)
    drain(acc)
    for one in batches:
        assert fail(acc, one, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 0)
    assert acc.sequence_resets == 1
    assert drain(acc, 500) == []
    assert acc.identity_wanted
    acc.set_identity(ProducerIdentity(8, 0))
    assert not acc.identity_wanted
    sent = drain(acc, 500)
    assert sent == batches, "the batches must keep their order"
    assert sequences(sent) == [0, 1, 2]
    assert {one.identity for one in sent} == {ProducerIdentity(8, 0)}


def test_a_new_producer_id_waits_for_all_outstanding_batches() -> None:
    acc = accumulator()
    first, second, third = batch(), batch(), batch()
    acc.add(first)
    acc.add(second)
    drain(acc)
    fail(acc, first, ErrorCode.UNKNOWN_PRODUCER_ID)
    acc.set_identity(ProducerIdentity(8, 0))
    acc.add(third)
    assert drain(acc, 1000) == [], "the second batch may still be appended with the old id"
    acc.succeeded(second)
    assert drain(acc, 1000) == [first, third]


def test_a_lost_sequence_ends_its_transaction_only() -> None:
    acc = PartitionQueues(idempotent=True, transactional=True, backoff=STEADY)
    acc.begin(ProducerIdentity(7, 0))
    first, second, third = (batch() for _ in range(3))
    for one in (first, second, third):
        acc.add(one)
        assert drain(acc) == [one]
        assert one.encoded.header.flags & Flag.TRANSACTIONAL
        assert one.encoded.header.producer_id == 7
    # Later batches wait for the first one, which has nothing to wait for.
    assert acc.failed(second, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, now_ms=0, roll=0.5)
    assert not acc.failed(first, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, now_ms=0, roll=0.5)
    assert not acc.failed(third, ErrorCode.INVALID_PRODUCER_EPOCH, now_ms=0, roll=0.5)
    acc.drop(second)
    acc.begin(ProducerIdentity(8, 0))
    next_one = batch()
    acc.add(next_one)
    assert drain(acc) == [next_one]
    assert next_one.encoded.header.producer_id == 8
    assert next_one.encoded.header.first_sequence == 0
    assert not acc.identity_wanted


def test_other_partitions_keep_their_producer_id() -> None:
    acc = accumulator()
    lost, fine = batch(), batch(OTHER)
    acc.add(lost)
    acc.add(fine)
    drain(acc)
    fail(acc, lost, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    acc.set_identity(ProducerIdentity(8, 0))
    acc.succeeded(fine)
    again = batch(OTHER)
    acc.add(again)
    drain(acc, 1000)
    assert (again.identity, sequences([again])) == (ID, [1])


def test_a_new_leader_waits_for_the_old_ones_outstanding_response() -> None:
    acc = accumulator()
    first, second = batch(), batch()
    acc.add(first)
    drain(acc, leader=1)
    acc.add(second)
    assert drain(acc, leader=2) == []
    fail(acc, first, ErrorCode.NETWORK_EXCEPTION)
    assert drain(acc, 100, leader=2) == [first, second]


def test_a_permanent_error_removes_its_batch() -> None:
    acc = accumulator()
    one = batch()
    acc.add(one)
    drain(acc)
    assert not fail(acc, one, ErrorCode.MESSAGE_TOO_LARGE)
    assert one.state is BatchState.DONE
    assert acc.empty
    assert not acc.topic_busy("t")


def test_expiry_spares_batches_in_flight() -> None:
    acc = accumulator(max_in_flight=1)
    flying, queued = batch(deadline_ms=50), batch(deadline_ms=50)
    acc.add(flying)
    acc.add(queued)
    drain(acc)
    assert acc.next_time_ms(0) == 50
    assert acc.expire(50) == [queued]
    fail(acc, flying, ErrorCode.REQUEST_TIMED_OUT, 60)
    assert acc.expire(60) == [flying]
    assert acc.empty


def test_an_expired_batch_does_not_stop_later_ones() -> None:
    acc = accumulator()
    gone, next_one = batch(deadline_ms=50), batch()
    acc.add(gone)
    acc.add(next_one)
    drain(acc)
    fail(acc, gone, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    fail(acc, next_one, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    assert acc.expire(60) == [gone]
    assert drain(acc, 60) == [next_one], "with its old sequence: the earlier batch may have been appended"
    fail(acc, next_one, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 60)
    acc.set_identity(ProducerIdentity(8, 0))
    assert sequences(drain(acc, 1000)) == [0]


def test_without_idempotence_there_are_no_sequences() -> None:
    acc = PartitionQueues(idempotent=False, backoff=STEADY)
    one = batch()
    acc.add(one)
    assert sequences(drain(acc)) == [0]
    assert one.encoded.header.producer_id == -1
    assert not acc.identity_wanted


def test_batches_wait_for_the_first_producer_id() -> None:
    acc = PartitionQueues(idempotent=True, backoff=STEADY)
    acc.add(batch())
    assert drain(acc) == []
    assert acc.identity_wanted
    acc.set_identity(ID)
    assert len(drain(acc)) == 1


class _Broker:
    """A log that checks sequences as brokers do, and loses requests, responses and sometimes its end."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.table = ProducerTable()
        self.log: list[ProducerBatch] = []
        self.cut: list[ProducerBatch] = []

    def produce(self, one: ProducerBatch) -> ErrorCode:
        roll = self.rng.random()
        if roll < 0.15:
            return self.rng.choice([ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NETWORK_EXCEPTION])
        header = one.encoded.header
        try:
            earlier = check_sequence(self.table.get(header.producer_id), header)
        except BrokerError as error:
            return error.code
        if earlier is None:
            self.log.append(one)
            self.table.record(header)
        return ErrorCode.NETWORK_EXCEPTION if roll > 0.85 else ErrorCode.NONE


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), lossy=st.booleans())
def test_every_batch_is_stored_once_and_in_order(seed: int, count: int, lossy: bool) -> None:
    """Responses of one connection come in order. Requests are refused, responses are lost, and with ``lossy`` the
    broker sometimes forgets the producer, as a broker that lost the end of its log does."""
    rng = random.Random(seed)
    acc = accumulator()
    broker = _Broker(rng)
    batches = [batch(count=rng.randint(1, 5)) for _ in range(count)]
    waiting = list(batches)
    flying: list[tuple[ProducerBatch, ErrorCode]] = []
    now = 0.0
    next_id = 8
    for _ in range(5000):
        if waiting and rng.random() < 0.6:
            one = waiting.pop(0)
            if rng.random() < 0.5 and acc.next_number(one.tp):  # alone and out of turn
                start(acc, one)
                flying.append((one, broker.produce(one)))
            else:
                acc.add(one)
        if lossy and rng.random() < 0.02:
            broker.table.clear()
        flying.extend((one, broker.produce(one)) for one in drain(acc, now))
        if flying and rng.random() < 0.7:
            one, code = flying.pop(0)
            if code == ErrorCode.NONE:
                acc.succeeded(one)
            else:
                assert code != ErrorCode.DUPLICATE_SEQUENCE_NUMBER, "its offset would be unknown"
                assert fail(acc, one, code, now)
        if acc.identity_wanted:
            acc.set_identity(ProducerIdentity(next_id, 0))
            next_id += 1
        if not waiting and acc.empty:
            break
        now += 50
    assert acc.empty, acc.batches()
    if not lossy:
        assert broker.log == batches
        assert acc.sequence_resets == 0
    else:
        assert set(broker.log) == set(batches), "no record may be lost"


def start(acc: PartitionQueues, one: ProducerBatch) -> None:
    """Send a batch alone, with the direct sender's numbers."""
    number = acc.next_number(one.tp)
    assert number is not None
    header = one.encoded.header._replace(producer_id=number[0], producer_epoch=number[1], first_sequence=number[2])
    one.encoded = EncodedBatch(header, one.encoded.body)
    acc.start(one, 1)


def test_only_a_partitions_single_batch_starts_directly() -> None:
    acc = accumulator()
    assert acc.next_number(TP) is None, "its partition has no sequence yet"
    first = batch(count=2)
    acc.add(first)
    assert drain(acc) == [first] and acc.next_number(TP) is None
    acc.succeeded(first)
    assert acc.next_number(TP) == (*ID, 2) and acc.next_number(OTHER) is None
    alone = batch(count=3)
    start(acc, alone)
    assert sequences([alone]) == [2] and alone.state is BatchState.IN_FLIGHT and alone.identity == ID
    assert not acc.empty and not acc.sendable and acc.next_number(TP) is None
    assert fail(acc, alone, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert drain(acc, 1000, leader=2) == [alone] and alone.broker_id == 2
    assert fail(acc, alone, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    acc.drop(alone)
    assert acc.empty and acc.next_number(TP) is None, "its sequence is broken"


def test_without_sequences_a_batch_starts_directly_if_no_other_waits() -> None:
    acc = accumulator(idempotent=False)
    assert acc.next_number(TP) == (-1, -1, -1)
    start(acc, batch())
    assert acc.next_number(TP) is None and acc.next_number(OTHER) is None


def test_sequence_numbers_wrap_as_the_broker_expects() -> None:
    acc = accumulator()
    first, second = batch(count=2**31 - 1), batch(count=3)
    third = batch()
    for one in (first, second, third):
        acc.add(one)
    assert sequences(drain(acc)) == [0, 2**31 - 1, 2]


@pytest.mark.parametrize(("attempt", "low", "high"), [(0, 20, 30), (1, 40, 60), (10, 800, 1200), (10_000, 800, 1200)])
def test_backoff_is_bounded(attempt: int, low: float, high: float) -> None:
    delays = [Backoff().delay_ms(attempt, roll) for roll in (0.0, 0.5, 0.999)]
    assert delays[0] == pytest.approx(low)
    assert low < delays[1] < delays[2] <= high


def test_topics_without_a_leader_are_listed_until_they_have_one() -> None:
    acc = accumulator()
    acc.add(batch())
    acc.add(batch(TopicPartition("other", 0)))
    assert drain(acc, leader=None) == []
    assert acc.leaderless == {"t", "other"}
    assert len(drain(acc)) == 2
    assert acc.leaderless == set()


def test_partitions_with_an_outstanding_batch_are_not_visited() -> None:
    acc = accumulator()
    many = [batch(TopicPartition("t", number)) for number in range(50)]
    for one in many:
        acc.add(one)
    assert len(drain(acc)) == 50
    asked: list[TopicPartition] = []

    def leader(tp: TopicPartition) -> int:
        asked.append(tp)
        return 2

    assert acc.drain(0, leader, can_accept=lambda _: True, max_request_bytes=10_000) == {}
    assert asked == []
    assert acc.next_time_ms(0) is None
    fail(acc, many[7], ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert acc.drain(0, leader, can_accept=lambda _: True, max_request_bytes=10_000) == {2: [many[7]]}
    assert asked == [many[7].tp]
