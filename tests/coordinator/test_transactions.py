"""Scenarios of the coordinator core: which requests it accepts, and what survives a change of the coordinator."""

from __future__ import annotations

import pytest

from sparklog.coordinator import core, transaction_end, transactions
from sparklog.coordinator.effects import Begun, Ended, Refused, SendMarkers
from sparklog.coordinator.events import MarkersWritten, OffsetsWritten
from sparklog.coordinator.records import FENCED_KEPT, PartitionPlace
from sparklog.coordinator.transactions import MAX_QUEUED, TransactionSettings
from sparklog.errors import ErrorCode
from sparklog.protocol.messages import MAX_ENTRIES, GroupOffset
from tests.coordinator.host import Host

A0, A1, B0 = ("a", 0), ("a", 1), ("b", 0)


@pytest.fixture
def host() -> Host:
    return Host()


def opened(host: Host, key: str = "k", run: str = "r1", version: int = -1) -> int:
    """Begin a transaction and let it become durable. Return the producer id."""
    ticket = host.begin(key, run, version)
    host.settle()
    return host.producer(ticket)


def test_no_response_precedes_its_durable_append(host: Host) -> None:
    begin = host.begin("k", "r1")
    assert begin not in host.answers
    host.commit_one()
    producer = host.producer(begin)
    add = host.add("k", "r1", producer, A0)
    assert add not in host.answers
    host.commit_one()
    assert host.code(add) == "Done"
    end = host.end("k", "r1", -1, producer)
    assert not host.markers, "a decision had an effect before it was durable"
    host.commit_one()
    (marker,) = host.sent_markers()
    assert (marker.topic, marker.partition, marker.committed, marker.aborted) == ("a", 0, ((producer, 0),), ())
    assert end not in host.answers
    host.settle()
    assert host.answers[end] == Ended(True)


def test_losers_and_late_tasks_are_aborted_with_the_winners_commit(host: Host) -> None:
    first = opened(host, version=7)
    second = host.producer(host.begin("k", "r1", 7))
    host.add("k", "r1", first, A0, A1)
    host.add("k", "r1", second, A0, B0)
    host.settle()
    host.end("k", "r1", 7, second)
    host.commit_one()
    marks = {(m.topic, m.partition): (m.committed, m.aborted) for m in host.sent_markers()}
    assert marks == {
        A0: (((second, 0),), ((first, 0),)),
        A1: ((), ((first, 0),)),
        B0: (((second, 0),), ()),
    }


def test_waiting_registrations_become_durable_together(host: Host) -> None:
    first = opened(host, version=1)
    others = [host.producer(host.begin("k", "r1", 1)) for _ in range(50)]
    host.add("k", "r1", first, A0)
    tickets = [host.add("k", "r1", other, A0) for other in others]
    host.commit_one()
    assert len(host.appends) == 1
    host.commit_one()
    assert {host.code(ticket) for ticket in tickets} == {"Done"}


def test_a_new_run_fences_the_old_one_and_aborts_its_transaction(host: Host) -> None:
    old = opened(host, run="old", version=3)
    host.add("k", "old", old, A0)
    host.settle()
    begin = host.begin("k", "new", 3)
    host.commit_one()  # the abort
    assert [marker.aborted for marker in host.sent_markers()] == [((old, 0),)]
    assert begin not in host.answers
    host.settle()
    new = host.producer(begin)
    assert host.answers[begin] == Begun(False, -1, new, 0, 2)
    assert host.code(host.add("k", "old", old, A1)) == "INVALID_PRODUCER_EPOCH"
    assert host.code(host.begin("k", "old", 3)) == "INVALID_PRODUCER_EPOCH"
    assert host.code(host.touch("k", "old")) == "INVALID_PRODUCER_EPOCH"
    end = host.end("k", "old", 3, old)
    assert host.code(end) == "INVALID_PRODUCER_EPOCH", "a fenced run committed"
    assert host.code(host.verify("k", old, *A0)) == "INVALID_TXN_STATE"


def test_the_first_decision_about_a_version_counts(host: Host) -> None:
    producer = opened(host, run="r1", version=5)
    host.add("k", "r1", producer, A0)
    host.settle()
    end = host.end("k", "r1", 5, producer)
    late = host.begin("k", "r2", 5)
    host.settle()
    assert host.answers[end] == Ended(True)
    assert host.answers[late] == Begun(True, 5, -1, -1, 1), "a committed version began again"
    assert host.answers[host.end("k", "r1", 5, producer)] == Ended(True), (
        "the response was lost, so the request is repeated"
    )
    assert host.code(host.end("k", "r2", 5, 999)) == "INVALID_PRODUCER_EPOCH"
    assert host.answers[host.end("k", "r2", 5)] == Ended(True, replayed=True)
    assert host.answers[host.end("k", "r1", 5, commit=False)] == Ended(True, replayed=True)
    assert isinstance(host.answers[host.begin("k", "r3", 4)], Begun)


def test_a_replay_is_detected_while_the_markers_are_in_flight(host: Host) -> None:
    producer = opened(host, version=5)
    host.add("k", "r1", producer, A0)
    host.settle()
    host.end("k", "r1", 5, producer)
    host.settle(markers=False)
    assert host.answers[host.begin("k", "r2", 5)] == Begun(True, 5, -1, -1, 1)
    later = host.begin("k", "r2", 6)
    assert later not in host.answers, "one key has two transactions"
    host.settle()
    assert host.answers[later] == Begun(False, 5, host.producer(later), 0, 2)


def test_a_version_in_which_no_task_wrote_ends(host: Host) -> None:
    opened(host, version=0)
    end = host.end("k", "r1", 0)
    host.settle()
    assert host.answers[end] == Ended(True) and not host.markers
    unbegun = host.end("k", "r2", 1)
    host.settle()
    assert host.answers[unbegun] == Ended(True)
    assert host.answers[host.begin("k", "r3", 1)] == Begun(True, 1, -1, -1, 1)


def test_winners_that_never_registered_are_refused(host: Host) -> None:
    producer = opened(host, version=0)
    host.add("k", "r1", producer, A0)
    host.settle()
    assert host.code(host.end("k", "r1", 0, producer, 777)) == "INVALID_TXN_STATE"


@pytest.mark.parametrize("kept", [0, 1])
def test_a_coordinator_dies_with_a_decision_in_flight(host: Host, kept: int) -> None:
    producer = opened(host, version=2)
    host.add("k", "r1", producer, A0)
    host.settle()
    host.end("k", "r1", 2, producer)
    host.crash(keep=kept)
    assert bool(host.markers) == bool(kept)
    again = host.end("k", "r1", 2, producer)
    host.settle()
    assert host.answers[again] == Ended(True)
    assert host.answers[host.begin("k", "r2", 2)] == Begun(True, 2, -1, -1, 1)


def test_a_coordinator_dies_between_decision_and_markers(host: Host) -> None:
    producer = opened(host, version=2)
    host.add("k", "r1", producer, A0, B0)
    host.settle()
    host.end("k", "r1", 2, producer)
    host.settle(markers=False)
    host.crash()
    assert {(m.topic, m.partition) for m in host.sent_markers()} == {A0, B0}
    assert all(marker.committed == ((producer, 0),) for marker in host.sent_markers())


@pytest.fixture
def ending(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Commit five producers in parts of two: the markers of the first part are in flight."""
    monkeypatch.setattr(transaction_end, "PARTICIPANTS_AT_ONCE", 2)
    producers = [opened(host, version=2), *(host.producer(host.begin("k", "r1", 2)) for _ in range(4))]
    for number, producer in enumerate(producers):
        host.add("k", "r1", producer, ("a", number % 2))
    host.settle()
    host.end("k", "r1", 2, *producers)
    host.commit_one()
    return producers


def marked(host: Host) -> list[int]:
    """Return the producers whose markers are in flight."""
    return sorted(producer for marker in host.sent_markers() for producer, _ in (*marker.committed, *marker.aborted))


def write_markers(host: Host) -> SendMarkers:
    """Let the leaders write the markers in flight."""
    (sent,) = host.markers
    host.markers.clear()
    host.step(written_by(sent))
    return sent


def written_by(sent: SendMarkers) -> MarkersWritten:
    places = tuple(PartitionPlace(marker.topic, marker.partition, marker.topic_id) for marker in sent.markers)
    return MarkersWritten(sent.key, sent.decision, places, sent.part)


def test_many_participants_get_their_markers_in_parts(host: Host, ending: list[int]) -> None:
    begin = host.begin("k", "r1", 3)
    for part in (ending[:2], ending[2:4], ending[4:]):
        assert marked(host) == part
        assert begin not in host.answers
        write_markers(host)
        (append,) = host.appends
        assert len(append.records) <= 2
        host.commit_one()
        assert not set(part).intersection(host.core._entries["k"].participants)
    host.settle()
    assert host.code(begin) == "Begun"


def test_a_part_has_a_bound_on_its_partitions(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_end, "PLACES_AT_ONCE", 5)
    producers = [opened(host, version=2), *(host.producer(host.begin("k", "r1", 2)) for _ in range(3))]
    for producer, count in zip(producers, (2, 3, 1, 9), strict=True):
        host.add("k", "r1", producer, *(("a", number) for number in range(count)))
    host.settle()
    host.end("k", "r1", 2, commit=False)
    host.commit_one()
    for part in (producers[:2], producers[2:3], producers[3:]):
        assert set(marked(host)) == set(part)
        write_markers(host)
        host.commit_one()
    assert not host.core._entries["k"].participants


def test_a_part_has_a_bound_on_its_pairs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the partitions of each producer, also if all of them have the same ones."""
    monkeypatch.setattr(transaction_end, "PAIRS_AT_ONCE", 5)
    monkeypatch.setattr(transaction_end, "PLACES_AT_ONCE", 2)
    producers = [opened(host, version=2), *(host.producer(host.begin("k", "r1", 2)) for _ in range(3))]
    for producer in producers:
        host.add("k", "r1", producer, A0, A1)
    host.settle()
    host.end("k", "r1", 2, *producers)
    host.commit_one()
    for part in (producers[:2], producers[2:]):
        assert set(marked(host)) == set(part)
        write_markers(host)
        host.commit_one()
    assert not host.core._entries["k"].participants


def test_a_commit_is_complete_after_the_last_part(host: Host, ending: list[int]) -> None:
    again = host.end("k", "r1", 2, *ending)
    for _ in range(2):
        write_markers(host)
        host.commit_one()
        assert again not in host.answers
    write_markers(host)
    assert host.answers[again] == Ended(True)


def test_a_repeated_marker_does_not_count_for_the_next_part(host: Host, ending: list[int]) -> None:
    first = write_markers(host)
    host.commit_one()
    host.step(written_by(first))
    assert not host.appends, "producers were removed without a marker"
    write_markers(host)
    assert len(host.appends) == 1


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_the_next_coordinator_marks_the_remaining_participants(host: Host, ending: list[int], parts: int) -> None:
    for _ in range(parts):
        write_markers(host)
        host.commit_one()
    host.crash()
    assert marked(host) == ending[2 * parts : 2 * parts + 2]
    assert all(not marker.aborted for marker in host.sent_markers())
    again = host.end("k", "r1", 2, *ending)
    host.settle()
    assert host.answers[again] == Ended(True)
    assert not host.core._entries["k"].participants
    assert host.answers[host.begin("k", "r2", 2)] == Begun(True, 2, -1, -1, 1)


def test_a_refused_part_of_the_removal_is_retried(host: Host, ending: list[int]) -> None:
    write_markers(host)
    host.refuse_one()
    assert not host.markers
    host.tick(500)
    host.commit_one()
    assert marked(host) == ending[2:4]
    host.settle()
    assert not host.core._entries["k"].participants


def test_offsets_are_handed_over_once_with_many_parts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_end, "PARTICIPANTS_AT_ONCE", 1)
    producers = [opened(host, version=2), host.producer(host.begin("k", "r1", 2))]
    for producer in producers:
        host.add("k", "r1", producer, ("a", 0), group="g", offsets=(GroupOffset("in", 0, 5),))
    host.settle()
    host.end("k", "r1", 2, *producers)
    host.commit_one()
    (handed,) = host.offsets
    write_markers(host)
    assert not host.appends, "a part ended before the group has its offsets"
    host.offsets.clear()
    host.step(OffsetsWritten(handed.key, handed.decision, handed.group))
    host.commit_one()
    assert marked(host) == producers[1:]
    host.settle()
    assert not host.offsets and not host.core._entries["k"].participants


def test_many_waiting_registrations_share_several_appends(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "_WORK_AT_ONCE", 10)
    opened(host, version=2)
    host.begin("k", "r1", 2)
    producers = [host.producer(host.begin("k", "r1", 2)) for _ in range(20)]
    tickets = [host.add("k", "r1", producer, ("a", 0), ("a", 1)) for producer in producers]
    sizes = []
    while host.appends:
        sizes.append(len(host.appends[0].records))
        host.commit_one()
    assert sum(sizes) == 20 and max(sizes) == 3
    assert all(host.code(ticket) == "Done" for ticket in tickets)


def test_a_joined_task_continues_with_the_next_coordinator(host: Host) -> None:
    opened(host, version=2)
    second = host.producer(host.begin("k", "r1", 2))
    host.crash()
    add = host.add("k", "r1", second, A0)
    host.settle()
    assert host.code(add) == "Done"
    end = host.end("k", "r1", 2, second)
    host.settle()
    assert host.answers[end] == Ended(True)


def test_an_abandoned_transaction_is_aborted_and_its_run_fenced(host: Host) -> None:
    producer = opened(host, run="r1")
    host.add("k", "r1", producer, A0)
    host.settle()
    host.tick(40_000)
    host.touch("k", "r1")
    host.tick(40_000)
    assert not host.appends, "a heartbeat did not extend the transaction"
    host.tick(30_000)
    host.settle(markers=False)
    assert host.reports == ["transactions.timed_out"]
    assert [marker.aborted for marker in host.sent_markers()] == [((producer, 0),)]
    host.settle()
    assert host.code(host.begin("k", "r1")) == "INVALID_PRODUCER_EPOCH"
    fresh = host.begin("k", "r2")
    host.settle()
    assert isinstance(host.answers[fresh], Begun)


def test_heartbeats_do_not_extend_a_transaction_without_limit() -> None:
    host = Host(TransactionSettings(max_timeout_ms=100_000))
    opened(host, run="r1", version=0)
    for _ in range(9):
        host.tick(12_000)
        host.touch("k", "r1")
    assert host.appends and host.reports == ["transactions.timed_out"]


def test_a_producer_begins_one_transaction_after_the_other(host: Host) -> None:
    ids = []
    for _ in range(3):
        producer = opened(host)
        ids.append(producer)
        host.add("k", "r1", producer, A0)
        host.settle()
        assert host.code(host.add("k", "r1", 9999, A0)) == "INVALID_PRODUCER_EPOCH"
        end = host.end("k", "r1", -1, producer)
        host.settle()
        assert host.answers[end] == Ended(True)
        assert host.answers[host.end("k", "r1", -1, producer)] == Ended(True), "the response was lost"
    assert len(set(ids)) == 3
    assert host.code(host.end("k", "r1", -1, ids[0])) == "INVALID_TXN_STATE"


def test_a_begin_whose_response_was_lost_opens_nothing_twice(host: Host) -> None:
    first = opened(host)
    again = host.begin("k", "r1", turn=0)
    assert host.answers[again] == Begun(False, -1, first, 0, 1) and not host.appends


def test_offsets_go_to_their_group_only_with_a_commit(host: Host) -> None:
    producer = opened(host)
    host.add("k", "r1", producer, A0, group="g", offsets=(GroupOffset("in", 0, 5), GroupOffset("in", 1, 6)))
    host.add("k", "r1", producer, group="g", offsets=(GroupOffset("in", 0, 9),))
    host.settle()
    end = host.end("k", "r1", -1, producer)
    host.settle(markers=False)
    (handed,) = host.offsets
    assert handed.group == "g" and {o.partition: o.offset for o in handed.offsets} == {0: 9, 1: 6}
    host.markers.clear()
    assert end not in host.answers
    host.crash()
    assert len(host.offsets) == 1, "the new coordinator does not know the group"
    host.settle()
    producer = opened(host)
    host.add("k", "r1", producer, A0, group="g", offsets=(GroupOffset("in", 0, 50),))
    host.settle()
    host.end("k", "r1", -1, commit=False)
    host.settle(markers=False)
    assert not host.offsets


def test_an_operator_aborts_an_open_transaction(host: Host) -> None:
    producer = opened(host)
    host.add("k", "r1", producer, A0)
    host.settle()
    abort = host.abort("k")
    host.settle()
    assert host.code(abort) == "Done"
    assert host.code(host.end("k", "r1", -1, producer)) == "INVALID_PRODUCER_EPOCH"
    assert host.code(host.abort("k")) == "INVALID_TXN_STATE"
    assert host.code(host.abort("unknown")) == "INVALID_TXN_STATE"


def test_verification_is_refused_once_a_decision_is_in_flight(host: Host) -> None:
    producer = opened(host)
    assert host.code(host.verify("k", producer, *A0)) == "INVALID_TXN_STATE"
    host.add("k", "r1", producer, A0)
    assert host.code(host.verify("k", producer, *A0)) == "INVALID_TXN_STATE", "the decision is not durable yet"
    host.settle()
    assert host.code(host.verify("k", producer, *A0)) == "Done"
    assert host.code(host.verify("k", producer, *A1)) == "INVALID_TXN_STATE"
    host.end("k", "r1", -1, commit=False)
    assert host.code(host.verify("k", producer, *A0)) == "INVALID_TXN_STATE", "its marker may be written first"


def test_a_request_that_waits_for_markers_gets_a_timely_response(host: Host) -> None:
    producer = opened(host)
    host.add("k", "r1", producer, A0)
    host.settle()
    end = host.end("k", "r1", -1, producer)
    host.settle(markers=False)
    host.tick(6_000)
    assert host.answers[end] == Ended(False)
    again = host.end("k", "r1", -1, producer)
    host.settle()
    assert host.answers[again] == Ended(True)


def test_a_refused_append_changes_nothing(host: Host) -> None:
    producer = opened(host, version=1)
    add = host.add("k", "r1", producer, A0)
    host.refuse_one()
    assert host.code(add) == "COORDINATOR_NOT_AVAILABLE"
    assert host.code(host.verify("k", producer, *A0)) == "INVALID_TXN_STATE"
    add = host.add("k", "r1", producer, A0)
    host.settle()
    end = host.end("k", "r1", 1, producer)
    host.refuse_one()
    assert host.code(end) == "COORDINATOR_NOT_AVAILABLE" and not host.markers
    end = host.end("k", "r1", 1, producer)
    host.settle(markers=False)
    host.settle()
    assert host.answers[end] == Ended(True)


def test_the_number_of_begins_that_wait_for_markers_is_bounded(host: Host) -> None:
    producer = opened(host)
    host.add("k", "r1", producer, A0)
    host.settle()
    begins = [host.begin("k", "r2", turn=0)]
    host.settle(markers=False)
    begins += [host.begin("k", "r2", turn=0) for _ in range(MAX_QUEUED + 10)]
    answered = [host.code(ticket) for ticket in begins if ticket in host.answers]
    assert answered == ["CONCURRENT_TRANSACTIONS"] * 11
    waits = host.end("k", "r1", -1, commit=False)
    host.settle()
    assert host.answers[waits] == Ended(True)
    assert {host.code(ticket) for ticket in begins[: MAX_QUEUED - 1]} == {"Begun"}


def test_unused_keys_are_dropped() -> None:
    host = Host(TransactionSettings(producer_expiration_ms=500_000, sink_expiration_ms=900_000, once_expiration_ms=1))
    for key, version in (("producer", -1), ("sink", 0), ("write:x", 0)):
        opened(host, key=key, version=version)
        host.end(key, "r1", version)
        host.settle()
    host.tick(100_000)
    host.settle()
    assert {key for key, *_ in host.core.entries()} == {"producer", "sink"}
    host.tick(500_000)
    host.settle()
    assert {key for key, *_ in host.core.entries()} == {"sink"}
    host.tick(500_000)
    host.settle()
    assert not len(host.core)
    host.crash()
    assert not len(host.core), "an expired key returned from the log"


def test_a_transaction_sends_a_bounded_number_of_offsets(host: Host) -> None:
    producer = opened(host)
    offsets = tuple(GroupOffset("t", number, 5) for number in range(MAX_ENTRIES))
    taken = host.add("k", "r1", producer, group="g", offsets=offsets)
    host.settle()
    again = host.add("k", "r1", producer, group="g", offsets=offsets[:10])
    more = host.add("k", "r1", producer, group="other", offsets=offsets[:1])
    host.settle()
    assert [host.code(ticket) for ticket in (taken, again, more)] == ["Done", "Done", "INVALID_REQUEST"]
    end = host.end("k", "r1", -1, producer)
    host.settle()
    assert host.answers[end] == Ended(True)


def test_a_new_key_beyond_the_bound_is_refused() -> None:
    host = Host(TransactionSettings(max_keys=2))
    opened(host, key="a")
    producer = opened(host, key="b")
    for refused in (host.begin("c", "r1", -1), host.settle_version("c", "r1"), host.end("c", "r1", 3)):
        refusal = host.answers[refused]
        assert isinstance(refusal, Refused) and refusal.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert "transactional.ids.max" in refusal.detail and "'c'" in refusal.detail
    host.add("b", "r1", producer, A0)
    end = host.end("b", "r1", -1, producer)
    host.settle()
    assert host.answers[end] == Ended(True), "known keys must continue"
    assert len(host.core) == 2


def test_an_expired_key_makes_room_for_another() -> None:
    host = Host(TransactionSettings(max_keys=1, once_expiration_ms=1))
    opened(host, key="write:x", version=0)
    assert isinstance(host.answers[host.begin("write:y", "r1", 0)], Refused)
    host.end("write:x", "r1", 0)
    host.settle()
    host.tick(100_000)
    host.settle()
    opened(host, key="write:y", version=0)


def test_all_keys_in_the_log_are_read() -> None:
    """The bound may be lower than when they were written."""
    host = Host(TransactionSettings(max_keys=3))
    for key in ("a", "b", "c"):
        opened(host, key=key)
    host.settings = TransactionSettings(max_keys=1)
    host.crash()
    assert len(host.core) == 3


def test_rewriting_live_entries_bounds_the_log(host: Host) -> None:
    for version in range(300):
        producer = opened(host, key="busy", version=version)
        host.add("busy", "r1", producer, A0)
        host.settle()
        host.end("busy", "r1", version, producer)
        host.settle()
    idle = opened(host, key="idle", version=0)
    host.add("idle", "r1", idle, A0)
    host.settle()
    moving = opened(host, key="moving", version=0)
    add = host.add("moving", "r1", moving, A0)  # in flight when the rewrite begins
    host.rewrite()
    host.settle()
    assert host.code(add) == "Done"
    assert len(host.log) - host.log_start < 10 < host.log_start
    host.crash()
    found = {key: (t.state, t.last_version, set(p)) for key, t, p, _ in host.core.entries()}
    assert found == {
        "busy": ("empty", 299, set()),
        "idle": ("open", -1, {idle}),
        "moving": ("open", -1, {moving}),
    }


def test_a_late_commit_of_an_empty_transaction_spares_the_next(host: Host) -> None:
    opened(host)
    host.end("k", "r1", -1)
    host.settle()
    producer = opened(host)
    host.add("k", "r1", producer, A0, group="g", offsets=(GroupOffset("in", 0, 5),))
    host.settle()
    late = host.end("k", "r1", -1)
    assert host.code(late) == "INVALID_TXN_STATE"
    end = host.end("k", "r1", -1, producer)
    host.settle()
    assert host.answers[end] == Ended(True)


def test_late_requests_affect_no_later_transaction(host: Host) -> None:
    """Requests of transaction n arrive when n+1 is open. None ends, extends or changes it."""
    first = opened(host)
    host.add("k", "r1", first, A0)
    host.settle()
    host.end("k", "r1", -1, first)
    host.settle()
    assert host.code(host.begin("k", "r1", turn=0)) == "INVALID_TXN_STATE", "the transaction has ended"
    second = opened(host)
    host.add("k", "r1", second, B0)
    host.settle()
    late = [
        host.end("k", "r1", -1, commit=False, turn=0),
        host.end("k", "r1", -1, first, turn=0),
        host.begin("k", "r1", turn=0),
        host.add("k", "r1", second, A1, turn=0),
        host.touch("k", "r1", turn=0),
    ]
    assert {host.code(ticket) for ticket in late} == {"INVALID_TXN_STATE"}
    assert host.code(host.add("k", "r1", first, A1, turn=1)) == "INVALID_PRODUCER_EPOCH"
    host.turns["k", "r1"] = 1
    again = host.begin("k", "r1", turn=1)
    assert host.producer(again) == second and not host.appends, "a repeated begin began a transaction"
    end = host.end("k", "r1", -1, second, turn=1)
    host.commit_one()
    assert [(m.topic, m.committed) for m in host.sent_markers()] == [("b", ((second, 0),))]
    host.settle()
    assert host.answers[end] == Ended(True)
    assert host.answers[host.end("k", "r1", -1, second, turn=1)] == Ended(True), "the response was lost"
    assert host.code(host.end("k", "r1", -1, first, turn=0)) == "INVALID_TXN_STATE"


def test_late_requests_of_a_sink_affect_no_later_version(host: Host) -> None:
    for version in (5, 6):
        producer = opened(host, version=version)
        host.add("k", "r1", producer, A0)
        host.settle()
        if version == 5:
            host.end("k", "r1", 5, producer)
            host.settle()
    late = [host.add("k", "r1", producer, B0, version=5), host.touch("k", "r1", version=5)]
    assert {host.code(ticket) for ticket in late} == {"INVALID_TXN_STATE"}
    assert host.answers[host.end("k", "r1", 5, commit=False)] == Ended(True, replayed=True)
    host.add("k", "r1", producer, A1)
    host.settle()
    open_now = next(now for _, now, _, _ in host.core.entries())
    assert (open_now.state, open_now.version) == ("open", 6)
    fast = opened(host, key="fast", version=9)
    assert host.code(host.begin("fast", "r1", 8)) == "INVALID_TXN_STATE", "its run has continued with version 9"
    add = host.add("fast", "r1", fast, A0)
    host.settle()
    assert host.code(add) == "Done"


def test_a_commit_of_a_dropped_run_is_not_reported_as_failed(host: Host) -> None:
    producer = opened(host, run="r0")
    host.add("k", "r0", producer, A0)
    host.settle()
    host.end("k", "r0", -1, producer)
    host.settle()
    for number in range(1, FENCED_KEPT + 2):
        opened(host, run=f"r{number}")
        assert host.code(host.end("k", "r0", -1, producer)) == "UNKNOWN_PRODUCER_ID"
        end = host.end("k", f"r{number}", -1, commit=False)
        host.settle()
        assert host.answers[end] == Ended(True)
        assert host.code(host.end("k", "r0", -1, producer)) == "UNKNOWN_PRODUCER_ID", number
    assert host.code(host.end("expired", "r0", -1, producer)) == "UNKNOWN_PRODUCER_ID"
    assert host.code(host.end("k", f"r{number}", -1, producer)) == "INVALID_TXN_STATE", (
        "the transaction was certainly aborted"
    )


def test_a_recreated_topic_is_a_new_participant(host: Host) -> None:
    producer = opened(host)
    host.add("k", "r1", producer, ("a", 0, "old"))
    host.add("k", "r1", producer, ("a", 0, "new"), ("b", 1, "b"))
    host.settle()
    assert host.code(host.verify("k", producer, "a", 0, "new")) == "Done"
    assert host.code(host.verify("k", producer, "b", 1, "again")) == "INVALID_TXN_STATE"
    host.crash()
    host.end("k", "r1", -1, producer)
    host.settle(markers=False)
    named = {(m.topic, m.partition, m.topic_id) for m in host.sent_markers()}
    assert named == {("a", 0, "old"), ("a", 0, "new"), ("b", 1, "b")}


def test_a_producer_id_is_known_until_its_last_marker(host: Host) -> None:
    producer = opened(host)
    assert not list(host.core.participants([producer]))
    host.add("k", "r1", producer, A0, B0)
    host.settle()
    host.crash()
    assert list(host.core.participants([producer, 12345])) == [(producer, "k")]
    host.end("k", "r1", -1, producer)
    host.commit_one()
    assert list(host.core.participants([producer])) == [(producer, "k")], "its markers are not written yet"
    host.settle()
    assert not list(host.core.participants([producer]))


def test_an_abort_whose_response_was_lost_is_repeated(host: Host) -> None:
    opened(host, version=4)
    for _ in range(2):
        end = host.end("k", "r1", 4, commit=False)
        host.settle()
        assert host.answers[end] == Ended(True)


def test_a_large_entry_is_rewritten_in_parts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RECORDS_AT_ONCE", 2)
    producers = [opened(host, version=2), *(host.producer(host.begin("k", "r1", 2)) for _ in range(4))]
    for producer in producers:
        host.add("k", "r1", producer, A0)
    host.settle()
    host.rewrite()
    between = host.add("k", "r1", producers[0], ("b", 0))
    sizes = []
    while host.appends:
        sizes.append(len(host.appends[0].records))
        host.commit_one()
    assert host.code(between) == "Done"
    assert max(sizes) == 2 and sum(sizes) == 1 + 5 + 1
    assert host.log_start == host.rewrite_from > 0
    before = host.core._entries["k"]
    host.crash()
    after = host.core._entries["k"]
    assert (after.transaction, after.participants) == (before.transaction, before.participants)


def test_a_refused_part_of_a_rewrite_is_written_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RECORDS_AT_ONCE", 2)
    for producer in [opened(host, version=2), *(host.producer(host.begin("k", "r1", 2)) for _ in range(4))]:
        host.add("k", "r1", producer, A0)
    host.settle()
    host.rewrite()
    host.commit_one()
    host.refuse_one()
    assert not host.log_start
    host.tick(500)
    host.settle()
    assert host.log_start == host.rewrite_from > 0
    before = host.core._entries["k"]
    host.crash()
    assert host.core._entries["k"].participants == before.participants
