"""Tests which Python the workers of a session run; tests/integration/test_local_cluster.py lets them run it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.spark.worker_python import choose_worker_python


def chosen(master: str, settings: dict[str, str] | None = None) -> str:
    context = SimpleNamespace(master=master, pythonExec="python3", getConf=lambda: settings or {})
    choose_worker_python(cast(Any, context))
    return str(context.pythonExec)


def test_local_workers_run_the_programs_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert [chosen("local[2]"), chosen("local-cluster[1,1,1024]")] == [sys.executable] * 2
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    assert chosen("local[2]") == "python3", "pyspark already read the variable"
    assert caplog.text == ""


def test_a_warning_names_the_python_setting_for_remote_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert chosen("spark://host:7077", {"spark.pyspark.python": "/opt/python"}) == "python3"
    assert caplog.text == ""
    assert chosen("spark://host:7077") == "python3"
    assert "run python3: if it does not have sparklog, set PYSPARK_PYTHON, or spark.pyspark.python" in caplog.text
