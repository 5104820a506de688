"""``bench/run --quick``: that every row still works, not how fast."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bench.measure import Lost
from bench.rows import ROWS
from bench.rows.produce import one_write, write_tables
from bench.sides import Bench
from bench.values import tables
from tests.conftest import ROOT

pytestmark = pytest.mark.integration

#: It takes a minute on a machine with nothing else to do.
_TIMEOUT_S = 280


def test_the_quick_command_measures_every_row_but_deltas_and_says_that_kafka_is_missing() -> None:
    done = subprocess.run(
        [str(ROOT / "bench" / "run"), "--quick"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ratios: not asked for" in done.stdout
    for row in ROWS:
        for ratio in row.ratios:
            assert (ratio.title in done.stdout) == (not row.needs_delta), ratio.title


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(quick=True, with_kafka=False) as bench:
        yield bench


def test_a_run_that_loses_a_record_has_no_figure(bench: Bench) -> None:
    def careless(bootstrap: str, topic: str, pieces: Sequence[Any]) -> float:
        return write_tables(bootstrap, topic, [pieces[0].slice(1)])

    figures = one_write(bench, bench.ours, write_tables, tables(1000, 100), count=1000, size=100)
    assert figures["rate"] > 0
    with pytest.raises(Lost):
        one_write(bench, bench.ours, careless, tables(1000, 100), count=1000, size=100)
