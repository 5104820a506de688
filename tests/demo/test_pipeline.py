"""The pipeline as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_every_step_holds_what_a_batch_job_computes(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("wb") as sink:
        job = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "jobs" / "pipeline.py"),
                "--flights",
                "25000",
                "--data-dir",
                str(tmp_path / "data"),
            ],
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            # What is shown does not hang on executors of their own, which take the most of its time to start.
            env={**os.environ, "PYSPARK_SUBMIT_ARGS": "--master local[4] pyspark-shell"},
            start_new_session=True,
        )
        try:
            code = job.wait(280)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # the job stops its cluster, then itself
                job.wait(60)
    text = output.read_text()
    assert code == 0, text
    assert "flights-clean: 24," in text
    assert ": 0 rows missing, 0 too many" in text
    assert "Every day that has ended is there once." in text
