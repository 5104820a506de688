"""The benchmark of compaction works, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compaction import main


def test_a_small_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mib", "1", "--keys", "50", "--batch-records", "200", "--directory", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 50 <= found["kept"] < found["records"] and found["cleaned_mib_s"] > 0
