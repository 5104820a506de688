"""Tests of the driver's loop over generations when Spark has stopped and has dropped the job that waits for slots."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.cluster import barrier
from sparklog.cluster.barrier import Generations
from sparklog.cluster.options import Sizing
from sparklog.errors import ClusterError


class ForgottenJob(threading.Thread):
    """A job that no call ends, like ``collect`` of a barrier stage that Spark was about to retry when it stopped."""

    submitted = threading.Event()
    error: BaseException | None = None
    endings: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        self.submitted.set()
        threading.Event().wait()


class WithoutSpark(Generations):
    """Generations for which Spark is alive until the job is submitted."""

    def _tasks(self) -> int:
        return 2

    def _next_spec(self, *, adopt_only: bool) -> Any:
        return None

    def _spark_is_alive(self) -> bool:
        return not ForgottenJob.submitted.is_set()


def test_a_driver_notices_that_spark_stopped_while_a_generation_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(barrier, "_Job", ForgottenJob)
    monkeypatch.setattr(barrier, "_FAREWELL_S", 0.1)
    registration = SimpleNamespace(
        epoch=1, lost=threading.Event(), direct=lambda directive: None, report=lambda generation: None
    )
    generations = WithoutSpark(cast(Any, None), cast(Any, registration), cast(Any, None), sizing=Sizing(2, 0))
    generations.start()
    with pytest.raises(ClusterError, match="Spark has stopped"):
        generations.wait_ready(timeout_s=60)
    assert str(generations.failure) == "Spark has stopped"
