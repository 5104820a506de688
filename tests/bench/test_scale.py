"""Tests of ``bench/scale``: it works, it reports missed goals, and the controller's core runs at a small size."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import scale_core, scale_table
from bench.scale_picture import svg
from bench.scale_table import FIGURES
from tests.conftest import ROOT


@pytest.mark.integration
@pytest.mark.extended
def test_the_scale_command_measures_everything_it_names() -> None:
    done = subprocess.run(
        [str(ROOT / "bench" / "scale"), "--quick", "--partitions", "12"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in done.stdout.splitlines() if "|" in line}
    assert all(rows[figure.title] for figure in FIGURES), rows


def test_a_missed_goal_is_reported() -> None:
    results = {5_000: {"created_s": 4.5, "idle_percent": 2.0}, 100: {"created_s": 9.0}}
    assert scale_table.missed(results) == ["5,000 partitions: created and in sync: 4.5, at most 4"]
    assert "4.5 (missed)" in scale_table.text(results)
    assert "9 (missed)" not in scale_table.text(results), "there is no goal for that few partitions"


def test_results_are_kept_and_drawn(tmp_path: Path) -> None:
    results = {count: {"created_s": count / 1000, "idle_percent": 2.0, "stop_s": 0.0} for count in (100, 1_000, 10_000)}
    scale_table.save(tmp_path / "new" / "results.json", results, {"cores": 2})
    assert scale_table.load(tmp_path / "new" / "results.json") == results
    assert scale_table.load(tmp_path / "none.json") == {}
    picture = ET.fromstring(svg(results))
    assert sum(element.tag.endswith("circle") for element in picture.iter()) == 6, "0 has no logarithm"


def test_a_dead_broker_affects_only_its_own_partitions() -> None:
    cost = scale_core.measure(brokers=20, partitions=4_000)
    assert (cost.elected, cost.shrunk) == (200, 600)
    assert cost.requests == 200 / 50, "fifty writes at a time"
    assert cost.round_trips == 2, "two requests at a time"
    assert 200 * 150 < cost.request_bytes < 200 * 250
    assert cost.updates >= 2 * 19
    assert cost.update_bytes > 19 * (cost.elected + cost.shrunk) * 50
