"""A test in which a writing process is killed with SIGKILL: all records that it had reported as appended exist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparklog.errors import StorageError
from tests.storage.batches import TP, commit_and_seal, fill, open_directory, read_numbers

WRITER = """
import itertools, sys
from pathlib import Path
from tests.storage.batches import *
directory = open_directory(Path(sys.argv[1]))
log = create_log(directory, segment_bytes=20_000)
print(directory.trust.clean, directory.trusted, flush=True)
for number in itertools.count(1):
    fill(log, 1)
    if number % 10 == 0:
        commit_and_seal(log, log.log_end_offset - 10)
        directory.checkpoint()
    if number % 25 == 0:
        log.truncate(log.log_end_offset - 3)
    print(log.log_end_offset, flush=True)
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    )


def read_until_end(writer: subprocess.Popen[bytes], wanted: int) -> None:
    """Wait until the writer reports ``wanted`` offsets."""
    assert writer.stdout is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        line = writer.stdout.readline()
        assert line, "the writer exited early"
        if line.split()[0].isdigit() and int(line) >= wanted:
            return
    raise AssertionError("the writer is too slow")


@pytest.mark.parametrize("offsets", [40, 700])
def test_a_killed_writer_loses_no_reported_record(tmp_path: Path, offsets: int) -> None:
    end = 0
    for _ in range(2):
        with start_writer(tmp_path / "log") as writer:
            try:
                read_until_end(writer, end + offsets)
                with pytest.raises(StorageError, match="in use by another broker process"):
                    open_directory(tmp_path / "log")
            finally:
                writer.send_signal(signal.SIGKILL)
            assert writer.stdout is not None
            reported = [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        directory = open_directory(tmp_path / "log")
        assert (directory.trust.clean, directory.trusted) == (False, True)
        log = directory.get(TP)
        assert log is not None and log.findings == ()
        # a truncation by 3 may have been in progress, or an append may have finished without a report
        end = log.log_end_offset
        assert end >= (reported[-1] if reported else offsets) - 3
        assert read_numbers(log) == list(range(end))
        fill(log, 3)
        commit_and_seal(log)
        assert read_numbers(log) == list(range(end + 9))
        directory.write_clean_marker()
        directory.close()
        end += 9
