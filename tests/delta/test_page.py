"""A test that runs the first example of docs/delta.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sparklog.cluster.local import LocalCluster
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(300)]

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "delta.md"
#: Lines that the example prints, in their order. Other lines may come between them.
PRINTED = [
    "|     ann|      12.0|",  # table and log
    "|     eve|       6.0|",
    "3 records restored, 3 compared with the table",
    "|     ann|  5.0|",
    "|     ann|  8.0|",  # written after the restore
    "|     eve|  6.0|",
]


def test_the_example_runs(
    plain_spark: SparkSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The page names no port. Other tests may search for free ports from the default one upwards.
    defaults = LocalCluster.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "port", FirstPort.DELTA_PAGE)
    text = PAGE.read_text("utf-8")
    example = re.search(r"^## Quick start$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert example is not None
    shell: dict[str, Any] = {"__name__": "__main__"}
    line = text.count("\n", 0, example.start(1))
    exec(compile("\n" * line + example[1], str(PAGE), "exec"), shell)
    assert shell["spark"] is plain_spark
    printed = iter(capsys.readouterr().out.splitlines())
    for wanted in PRINTED:
        assert any(wanted in found for found in printed), f"{wanted!r} is not printed after the lines before it"
