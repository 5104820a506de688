"""Lines that thousands of partitions have at once."""

from __future__ import annotations

import logging

import pytest

from sparklog.broker.logs import Lines


def test_a_burst_of_lines_is_cut_and_what_was_held_back_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("sparklog.broker.logs.time.monotonic", lambda: now)
    lines = Lines(logging.getLogger("sparklog.test"))
    with caplog.at_level(logging.INFO, logger="sparklog.test"):
        for number in range(1000):
            lines.info("partition %d", number)
        assert caplog.messages == [f"partition {number}" for number in range(20)]
        now += 10
        lines.info("partition %d", 1000)
        lines.info("partition %d", 1001)
    assert caplog.messages[20:] == ["partition 1000 (980 more like this were held back)", "partition 1001"]
    assert caplog.records[-1].filename == "test_logs.py"
