"""A test that types docs/tutorial.md: shell and Python, on the cluster that its first commands start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "tutorial.md"
#: Lines that the page's commands print, in this order. Other lines may come between them.
PRINTED = [
    f"127.0.0.1:{FirstPort.TUTORIAL + 2}",  # three brokers
    "RecordMetadata(topic='events', partition=",  # the offset of a record
    "|book|  7500|22497.0|",  # a batch
    "|      c0| 59.0|",  # a stream
    "10000",  # a group
    "2001",  # no record is lost with a broker
    "under replicated   0",  # the broker has returned
    "stopped in ",
]


def in_shell(commands: str) -> str:
    """Run the commands in one shell that stops at the first failure, and return the output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", f"127.0.0.1:{FirstPort.TUTORIAL}")
    Path("conf").symlink_to(ROOT / "conf")
    Path("bin").mkdir()
    Path("bin/sparklog").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sparklog.cli.main "$@"\n')
    Path("bin/sparklog").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    # The environment exists, and other tests may use the default port.
    text = PAGE.read_text("utf-8").replace("./spark-submit.sh --setup\n. .venv/bin/activate\n", "true\n")
    text = text.replace("127.0.0.1:9092", f"127.0.0.1:{FirstPort.TUTORIAL}")
    text = text.replace("cluster start --data-dir", f"cluster start --port {FirstPort.TUTORIAL} --data-dir")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```") // 2, "the page has a code block that the test does not run"
    printed: list[str] = []
    python: dict[str, Any] = {"__name__": "__main__"}
    try:
        for language, block in blocks:
            if language == "sh":
                printed += in_shell(block).splitlines()
            else:
                exec(compile(block, str(PAGE), "exec"), python)
                printed += capsys.readouterr().out.splitlines()
    finally:
        if "spark" in python:
            python["spark"].stop()
        if "stopped in " not in "\n".join(printed):
            subprocess.run(["sparklog", "cluster", "stop", "--data-dir", "tutorial", "--yes"], check=False)
    lines = iter(printed)
    for wanted in PRINTED:
        assert any(wanted in line for line in lines), f"{wanted!r} is not in {printed} after the lines before it"
