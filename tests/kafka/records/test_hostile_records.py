"""A test that decodes thousands of broken record batches in another process, which must neither crash nor grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

#: The longest time in which one process decodes 8000 broken batches, on a busy machine.
TIMEOUT_S = 150
#: The limit of a batch is 1 MiB. A process that trusts a declared size grows by hundreds.
MOST_MIB = 16
#: Freed memory returns to the system, so that only memory in use counts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "ARROW_DEFAULT_MEMORY_POOL": "system"}


@pytest.mark.parametrize(
    ("seed", "thousands"),
    [
        (1, 4),
        pytest.param(2, 16, marks=pytest.mark.extended),
        pytest.param(3, 1000, marks=[pytest.mark.long, pytest.mark.timeout(6 * 3600)]),
    ],
)
def test_broken_batches_give_typed_errors_or_valid_rows(seed: int, thousands: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-W", "error", "-m", "tests.kafka.records.fuzz_records"]
    done = subprocess.run(
        [*command, str(seed), str(1000 * thousands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * thousands / 8 + 30,
        check=False,
        env=os.environ | MALLOC,
        start_new_session=True,
    )
    assert done.returncode == 0, f"seed {seed} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    tally = json.loads(done.stdout)
    # The counts show that the changes reach every stage, and not only the first check.
    for found in ("accepted", "INVALID_RECORD", "INVALID_TIMESTAMP", "documents accepted", "documents refused"):
        assert tally[found] > 20, tally
    for found in ("MESSAGE_TOO_LARGE", "UNSUPPORTED_COMPRESSION_TYPE", "CORRUPT_MESSAGE"):
        assert tally.get(found, 0) > 3, tally
    assert tally["grown MiB"] <= MOST_MIB, tally
