"""Tests of ``bench/run --quick``: every row works, at any speed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from bench.machine import CpuTime
from bench.measure import Lost
from bench.rows import ROWS, compression
from bench.rows.produce import one_write, write_tables
from bench.sides import Bench
from bench.values import tables
from sparklog import Consumer
from sparklog.demo.flights import load_flights
from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.extended]

#: It takes a minute on an otherwise idle machine, and five beside other tests.
_TIMEOUT_S = 900


@pytest.mark.timeout(_TIMEOUT_S + 60)
def test_the_quick_command_measures_every_row_without_delta() -> None:
    command = [str(ROOT / "bench" / "run"), "--quick"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # the bench stops its brokers
            raise
    assert process.returncode == 0, errors[-3000:]
    assert "ratios: not asked for" in output
    for row in ROWS:
        for ratio in row.ratios:
            expected = not row.needs_delta and not ratio.title.startswith("Kafka: ")
            assert (ratio.title in output) == expected, ratio.title


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


def test_compressed_data_is_read_back_or_reported_lost(bench: Bench) -> None:
    flights = load_flights().slice(1000, 500)
    typed = compression.records(compression.TYPED, flights, flights.schema)
    values = pa.table({"value": pa.array(compression.as_json(flights), pa.binary())})
    plain = compression.records(compression.JSON, values, None)
    for data in (typed, plain):
        disk = [compression.one_run(bench, data, codec)["disk"] for codec in compression.CODECS]
        assert disk[0] > 3 > disk[1] > disk[2]
        missing = data._replace(pieces=[piece.slice(1) for piece in data.pieces])
        with pytest.raises(Lost):
            compression.one_run(bench, missing, "lz4")


def test_a_paused_side_resumes_and_is_whole_for_its_turn(bench: Bench) -> None:
    class Other:
        """A stand-in for Kafka in ``Bench``."""

        paused = False

        def pause(self) -> None:
            self.paused = True

        def resume(self) -> None:
            self.paused = False

    ours, other = bench.ours, Other()
    bench.started.append(other)  # type: ignore[arg-type]
    sessions_s = 6.0  # the brokers' default session timeout in ZooKeeper
    try:
        with bench.topic(ours, partitions=6) as topic:
            write_tables(ours.bootstrap, topic, tables(1000, 100))
            (before,) = ours.admin.describe_topics([topic])
            bench.give_machine_to(other)  # type: ignore[arg-type]
            with CpuTime(ours.pids()) as cpu:
                time.sleep(sessions_s + 1)
            bench.give_machine_to(ours)
            assert other.paused
            (after,) = ours.admin.describe_topics([topic])
            assert cpu.seconds < 0.001
            assert [part.leader for part in after.partitions] == [part.leader for part in before.partitions]
            assert all(len(part.isr) == 3 for part in after.partitions)
            write_tables(ours.bootstrap, topic, tables(1000, 100))
            with Consumer(ours.bootstrap, topic, start="earliest") as consumer:
                assert consumer.to_table().num_rows == 2000
    finally:
        bench.give_machine_to(None)
        bench.started.remove(other)  # type: ignore[arg-type]
    assert not other.paused
