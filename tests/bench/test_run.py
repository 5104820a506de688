"""``bench/run --quick`` on some rows: that they still work, not how fast."""

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

#: One of each module, and none that takes long: no Spark, no broker that goes and comes.
CHOSEN = ("tables-100", "send", "latency-all", "consume-1000", "end-to-end", "tailing", "compaction", "limits")


def test_chosen_rows_of_the_command_work_and_say_that_kafka_is_missing() -> None:
    done = subprocess.run(
        [str(ROOT / "bench" / "run"), "--quick", "--kafka", "no", "--rows", ",".join(CHOSEN)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ratios: not asked for" in done.stdout
    for row in ROWS:
        for ratio in row.ratios:
            assert (ratio.title in done.stdout) == (row.name in CHOSEN), ratio.title


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
