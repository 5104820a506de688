"""The results on the cost of many partitions: the figures with their goals and Kafka's, the table, and the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Results = dict[int, dict[str, float]]


class Figure(NamedTuple):
    """A line of the table. ``goals`` are upper bounds by number of partitions; ``kafka`` is Kafka's figure."""

    name: str
    title: str
    unit: str
    goals: Mapping[int, float] = {}
    kafka: Mapping[int, str] = {}


_EVERYWHERE = (100, 1_000, 5_000, 10_000)

#: The lines of the table. Kafka's figures were measured at another time: Kafka 4.1.1 with KRaft on two cores, three
#: brokers with 1 GB of heap each, replication factor 3.
FIGURES = (
    Figure("created_s", "created and in sync", "s", {5_000: 4, 10_000: 8}, {1_000: "11", 5_000: "38"}),
    Figure(
        "one_each_s", "one record to each, all acknowledged", "s", {5_000: 10, 10_000: 20}, {5_000: "not within 120"}
    ),
    Figure("bare_files_s", "as many files made by a program that does nothing else", "s"),
    Figure("settling_cpu_s", "processor of a broker for what these records leave to do, once", "s"),
    Figure(
        "idle_percent",
        "idle: processor of a broker",
        "% of a core",
        dict.fromkeys(_EVERYWHERE, 3),
        {1_000: "3", 5_000: "7"},
    ),
    Figure(
        "resident_mb", "resident memory of a broker", "MB", dict.fromkeys(_EVERYWHERE, 600), {1_000: "-", 5_000: "1200"}
    ),
    Figure("open_files", "open files of a broker", ""),
    Figure("stop_s", "controlled stop", "s", dict.fromkeys(_EVERYWHERE, 2), {1_000: "2.8", 5_000: "6.8"}),
    Figure("stop_gap_ms", "longest a partition waits meanwhile", "ms", dict.fromkeys(_EVERYWHERE, 300)),
    Figure("stop_restart_s", "start after that, to full ISRs", "s"),
    Figure("kill_healed_s", "SIGKILL, until the others go on", "s"),
    Figure("restart_s", "start after SIGKILL, to full ISRs", "s", {5_000: 5, 10_000: 10}, {1_000: "11", 5_000: "12"}),
    Figure("batch_us", "a batch of 10 kB spread over all partitions", "us"),
    Figure("batch_cpu_us", "processor of all brokers for it", "us"),
    Figure("spread_ratio", "time of a batch against 6 partitions", "x", dict.fromkeys(_EVERYWHERE, 1.5)),
    Figure("spread_cpu_ratio", "processor of brokers against 6 partitions", "x", dict.fromkeys(_EVERYWHERE, 1.5)),
    Figure("others", "cores that other programs took, at most", ""),
)


def text(results: Results) -> str:
    """Return the table in Markdown; a figure that misses its goal is marked."""
    counts = sorted(results)
    rows = [["three brokers, replication factor 3", "unit", *(f"{count:,}" for count in counts), "goal", "Kafka"]]
    for figure in FIGURES:
        shown = [_cell(figure, count, results[count].get(figure.name)) for count in counts]
        rows.append([figure.title, figure.unit, *shown, _goal(figure), _kafka(figure)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def missed(results: Results) -> list[str]:
    return [
        f"{count:,} partitions: {figure.title}: {number(results[count][figure.name])}, at most {goal:g}"
        for figure in FIGURES
        for count, goal in figure.goals.items()
        if count in results and results[count].get(figure.name, 0) > goal
    ]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def _cell(figure: Figure, count: int, value: float | None) -> str:
    if value is None:
        return ""
    goal = figure.goals.get(count)
    return number(value) + (" (missed)" if goal is not None and value > goal else "")


def _goal(figure: Figure) -> str:
    if len(set(figure.goals.values())) == 1:
        return f"{next(iter(figure.goals.values())):g}"
    return ", ".join(f"{goal:g} at {count:,}" for count, goal in figure.goals.items())


def _kafka(figure: Figure) -> str:
    return ", ".join(f"{value} at {count:,}" for count, value in figure.kafka.items() if value != "-")


def load(path: Path) -> Results:
    if not path.exists():
        return {}
    return {int(count): figures for count, figures in json.loads(path.read_text())["partitions"].items()}


def save(path: Path, results: Results, machine: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {str(count): results[count] for count in sorted(results)}
    path.write_text(json.dumps({"machine": machine, "partitions": found}, indent=1) + "\n")
