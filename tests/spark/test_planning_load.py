"""Every planning step is a new Python process: what it loads is most of what it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What takes long to load and only tasks use.
_OF_TASKS = {"asyncio", "uvloop", "pyarrow.compute", "sparklog.client.producer", "sparklog.client.reader"}


@pytest.mark.parametrize("step", ["reader", "stream", "writer"])
def test_planning_loads_nothing_that_only_tasks_use(step: str) -> None:
    code = (
        f"import sys; import sparklog.spark.source, sparklog.spark.{step};"
        f"assert not {_OF_TASKS} & set(sys.modules), {_OF_TASKS} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
