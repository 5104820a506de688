"""Tests of the pipeline as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def running(tmp_path: Path, *, flights: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the job with an output file. It is ended with the test."""
    output = tmp_path / "output"
    with output.open("wb") as sink:
        job = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "jobs" / "pipeline.py"),
                "--flights",
                flights,
                "--data-dir",
                str(tmp_path / "data"),
            ],
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            # The pages do not depend on separate executors, which need most of its time to start.
            env={**os.environ, "PYSPARK_SUBMIT_ARGS": "--master local[4] pyspark-shell"},
            start_new_session=True,
        )
        try:
            yield job, output
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # the job stops its cluster and then exits
                try:
                    job.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    raise


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_step_equals_a_batch_computation(tmp_path: Path) -> None:
    with running(tmp_path, flights="25000") as (job, output):
        code = job.wait(280)
    text = output.read_text()
    assert code == 0, text
    assert "flights-clean: 24," in text
    assert ": 0 rows missing, 0 too many" in text
    assert "Every complete day occurs exactly once." in text


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_sigterm_stops_the_cluster_while_a_query_runs(tmp_path: Path) -> None:
    """The signal comes during a request to the JVM: no part may wait for it, and no process may remain."""
    with running(tmp_path, flights="336776") as (job, output):
        wait_until(lambda: "cluster ready" in output.read_text() or job.poll() is not None, timeout_s=120)
        time.sleep(4)  # during the first of its queries: any moment must work
        assert job.poll() is None, output.read_text()
        for _ in range(2):  # as `timeout` does
            job.terminate()
        code = job.wait(60)
    text = output.read_text()
    assert code == 128 + signal.SIGTERM, text
    assert not list((tmp_path / "data" / "spark").glob("*")), "Spark's files must be removed"
    wait_until(lambda: not processes_of(str(tmp_path)), timeout_s=30)


def processes_of(name: str) -> list[str]:
    """Return the command lines of the processes that contain it."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(line.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if name in line]
