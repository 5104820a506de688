"""A test that validates thousands of randomly broken batches and schemas in another process, which must not crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


#: The longest time in which one process validates 8000 broken batches, on a busy machine.
TIMEOUT_S = 150


@pytest.mark.parametrize(
    ("seed", "thousands"),
    [
        (1, 4),
        pytest.param(2, 8, marks=pytest.mark.extended),
        pytest.param(3, 1000, marks=[pytest.mark.long, pytest.mark.timeout(3 * 3600)]),
    ],
)
def test_broken_batches_give_typed_errors_and_never_end_the_process(seed: int, thousands: int) -> None:
    rounds = str(1000 * thousands)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-m", "tests.record.fuzz_batches", str(seed), rounds],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * thousands / 8,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, f"seed {seed} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    tally = json.loads(done.stdout)
    # The counts show that the changes reach every stage, and not only the first check.
    for outcome in ("accepted", "CORRUPT_MESSAGE", "MESSAGE_TOO_LARGE", "SCHEMA_MISMATCH", "INVALID_RECORD", "schema"):
        assert tally[outcome] > 20, tally
