"""Thousands of batches and schemas broken at random, validated in another process: it must live to the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("seed", [1, 2])
def test_broken_batches_give_typed_errors_and_never_end_the_process(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-m", "tests.record.fuzz_batches", str(seed), "8000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, f"seed {seed} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    tally = json.loads(done.stdout)
    # The tally shows that the changes reach every stage, not just the first check.
    for outcome in ("accepted", "CORRUPT_MESSAGE", "MESSAGE_TOO_LARGE", "SCHEMA_MISMATCH", "INVALID_RECORD", "schema"):
        assert tally[outcome] > 20, tally
