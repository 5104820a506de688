"""The offsets of a log keep their order, whatever the owners of its parts report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparklog.model import TopicPartition
from sparklog.storage.checkpoints import PartitionCheckpoint
from sparklog.storage.log_context import LogContext
from sparklog.storage.log_offsets import LogOffsets
from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import TOPIC_ID, TP, open_directory

FACTS = ("appended", "committed", "fsynced", "served", "start_raised", "truncated", "restarted", "checkpoint")
parts = st.floats(0, 1)


def services() -> LogContext:
    return open_directory(disk=SimDisk())._services


def between(low: int, high: int, part: float) -> int:
    return low + int((high - low) * part)


def report(offsets: LogOffsets, fact: str, part: float) -> None:
    """Report one fact as the owners do: within the log, and with lowered claims before a truncation."""
    start, end = offsets.log_start, offsets.log_end
    if fact == "appended":
        offsets.appended(end, end + 1 + int(9 * part))
    elif fact == "committed":
        offsets.committed(between(start - 5, end + 5, part))
    elif fact == "fsynced":
        offsets.fsynced(between(0, end, part))
    elif fact == "served":
        offsets.served(between(start, end, part))
    elif fact == "start_raised":
        offsets.start_raised(between(start, offsets.high_watermark, part))
    elif fact == "checkpoint":
        offsets.checkpoint()
    else:
        kept = between(0, end, part) if fact == "truncated" else 0
        if offsets.lower_claims(kept):
            offsets.claims_lowered()
        if fact == "truncated":
            offsets.truncated(kept)
        else:
            offsets.restarted(between(0, end + 9, part))


@given(st.lists(st.tuples(st.sampled_from(FACTS), parts), max_size=40))
def test_offsets_keep_their_order(facts: list[tuple[str, float]]) -> None:
    offsets = LogOffsets(TP, TOPIC_ID, services())
    for fact, part in facts:
        report(offsets, fact, part)
        assert 0 <= offsets.log_start <= offsets.high_watermark <= offsets.log_end, (fact, part)
        assert offsets.recovery_point <= offsets.log_end and offsets.served_end <= offsets.log_end


@given(st.lists(st.tuples(st.sampled_from(FACTS), parts), max_size=40), parts)
def test_a_checkpoint_never_claims_what_a_truncation_removes(facts: list[tuple[str, float]], part: float) -> None:
    offsets = LogOffsets(TP, TOPIC_ID, services())
    for fact, where in facts:
        report(offsets, fact, where)
    kept = between(0, offsets.log_end, part)
    offsets.lower_claims(kept)
    written = offsets.checkpoint()
    assert max(written.high_watermark, written.recovery_point) <= kept
    assert written.log_start_offset <= kept


def test_a_changed_offset_of_the_checkpoint_marks_the_log_as_moved() -> None:
    context = services()
    offsets = LogOffsets(TP, TOPIC_ID, context)
    offsets.appended(0, 5)
    context.consume_moved()
    offsets.appended(5, 8)
    assert context.consume_moved() == set(), "the checkpoint has no log end"
    offsets.committed(6)
    assert context.consume_moved() == {TP} and context.consume_moved() == set()


def test_recovered_offsets_stay_within_the_found_segments() -> None:
    offsets = LogOffsets(TopicPartition("t", 0), TOPIC_ID, services())
    offsets.recovered(PartitionCheckpoint("t", 0, TOPIC_ID, 90, 80, 40), first_segment_offset=50, log_end=70)
    assert (offsets.log_start, offsets.high_watermark, offsets.log_end, offsets.recovery_point) == (50, 70, 70, 70)
    assert offsets.lower_claims(85), "an earlier checkpoint claims up to 90"
