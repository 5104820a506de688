"""A test of a truncation whose copy is in progress and a cleaning of the same segment."""

from __future__ import annotations

from sparklog.testing.sim_disk import SimDisk
from tests.storage.batches import append, open_directory
from tests.storage.compacting import WRITTEN_US, clean, keyed, keyed_log


def test_nothing_is_cleaned_during_a_truncation() -> None:
    """A cleaning would rewrite a segment that is sealed meanwhile, and its copy would fail as on a damaged disk."""
    disk = SimDisk()
    log = keyed_log(open_directory(disk=disk), segment_bytes=2500)
    for n in range(12):
        append(log, keyed([(b"k", n), (b"k", n + 1), (b"k", n + 2)]), leader_epoch=1, now_us=WRITTEN_US)
    disk.restart(page_cache_lost=False)
    log = keyed_log(open_directory(disk=disk), segment_bytes=2500)
    end = log._files.chain.segments[0].end_offset
    log.set_high_watermark(end)
    seals = log.durability.seals_due()
    cut = log.truncation.begin(end)
    assert cut is not None
    assert seals
    for seal in seals:
        seal.run()
        log.durability.seal_finished(seal)
    assert clean(log) is None
    cut.run()
    assert cut.done
    assert log.truncate(end, cut) == end
    append(log, keyed([(b"k", 1)]), leader_epoch=2, now_us=WRITTEN_US)
    log.set_high_watermark(log.log_end_offset)
    assert clean(log) is not None
