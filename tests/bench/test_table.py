"""Tests of the bench's arithmetic: medians, ratios, goals, losses, and the printed table."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bench import measure, report, values
from bench.java_producer import digest
from bench.measure import Line, Lost, Ratio, Round, Row, lines, quietest
from bench.picture import svg

COUNT, SIZE = 1000, 20


def row(*, lower: bool = False, goal: float | None = 2.0) -> Row:
    ratio = Ratio("work", "1/s", ("ours", "rate"), (("a", "rate"), ("b", "rate")), goal, lower)
    return Row("row", (ratio,), open=None)  # type: ignore[arg-type]  # nothing is run


def only(row: Row, found: dict[str, list[float]]) -> Line:
    rounds = max(map(len, found.values()))
    figures = [{name: {"rate": rates[number]} for name, rates in found.items()} for number in range(rounds)]
    (line,) = lines(row, [Round(found, others=0.1 * number) for number, found in enumerate(figures)])
    return line


def test_medians_are_compared_with_the_best_other() -> None:
    line = only(row(), {"ours": [10, 90, 30], "a": [10, 11, 12], "b": [14, 15, 1000]})
    assert (line.ours, line.theirs, line.against, line.ratio, line.met) == (30, 15, "b", 2.0, True)
    assert line.runs == {"ours rate": [10, 90, 30], "a rate": [10, 11, 12], "b rate": [14, 15, 1000]}


def test_the_quietest_rounds_count_and_the_least_quiet_is_shown() -> None:
    rounds = [Round({"ours": {"rate": rate}}, others) for rate, others in ((1, 0.9), (2, 0.1), (3, 0.4), (4, 0.0))]
    (line,) = lines(row(), quietest(rounds, 3))
    assert sorted(line.runs["ours rate"]) == [2, 3, 4]
    assert line.others == 0.4


def test_the_shortest_time_wins_and_a_goal_is_an_upper_bound() -> None:
    line = only(row(lower=True, goal=0.5), {"ours": [6], "a": [20], "b": [10]})
    assert (line.theirs, line.against, line.ratio, line.met) == (10, "b", 0.6, False)


def test_without_a_rival_the_figure_stands_without_a_ratio() -> None:
    line = only(row(), {"ours": [10]})
    assert (line.ours, line.theirs, line.ratio, line.met) == (10, None, None, None)
    assert "missing" in report.text([line])


def test_a_figure_without_a_rival_meets_its_goal_or_not() -> None:
    alone = Row("row", (Ratio("work", "%", ("ours", "rate"), goal=10, lower=True),), open=None)  # type: ignore[arg-type]
    assert only(alone, {"ours": [9]}).met is True
    assert only(alone, {"ours": [11]}).met is False


def test_compiled_modules_have_a_goal_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = (
        Ratio("both", "1/s", ("ours", "rate"), (("a", "rate"),), 1.5, compiled_goal=2.0),
        Ratio("one", "1/s", ("ours", "rate"), (("a", "rate"),), 1.5),
    )
    rounds = [Round({"ours": {"rate": 18}, "a": {"rate": 10}}, others=0.0)]
    for is_compiled, goals, met in ((False, [1.5, 1.5], [True, True]), (True, [2.0, 1.5], [False, True])):
        monkeypatch.setattr(measure, "compiled", lambda is_compiled=is_compiled: is_compiled)
        found = list(lines(Row("row", ratios, open=None), rounds))  # type: ignore[arg-type]
        assert ([line.goal for line in found], [line.met for line in found]) == (goals, met)


# --- the values of the Java producer ---


def letters(count: int, size: int) -> list[bytes]:
    whole = np.random.default_rng(1).integers(ord("A"), ord("Z") + 1, count * size, np.uint8).tobytes()
    return [whole[at : at + size] for at in range(0, len(whole), size)]


@pytest.mark.parametrize("size", [100, 1000])
def test_the_digest_is_independent_of_the_order(size: int) -> None:
    found = letters(50, size)
    expected = digest(b"".join(found), 50, size)
    assert digest(b"".join(found[::-1]), 50, size) == expected
    assert digest(b"".join([*found[:-1], found[0]]), 50, size) != expected
    changed = (b"B" if found[3].startswith(b"A") else b"A") + found[3][1:]
    assert digest(b"".join([*found[:3], changed, *found[4:]]), 50, size) != expected


def test_the_digest_refuses_other_values() -> None:
    found = b"".join(letters(50, 20))
    with pytest.raises(Lost, match="49 values"):
        digest(found[20:], 50, 20)
    with pytest.raises(Lost, match="capital letters"):
        digest(found[:-1] + b"a", 50, 20)


def arrow(numbers: list[int]) -> list[pa.RecordBatch]:
    whole = values.objects(COUNT, SIZE)
    return [pa.record_batch({"value": pa.array([whole[number] for number in numbers], pa.binary())})]


def test_values_are_the_same_in_every_form() -> None:
    batches = [batch for table in values.tables(COUNT, SIZE) for batch in table.to_batches()]
    assert pa.Table.from_batches(batches)["value"].to_pylist() == values.objects(COUNT, SIZE)
    values.check_arrow(batches, COUNT, SIZE)
    values.check_objects(values.objects(COUNT, SIZE)[::-1], COUNT, SIZE)
    values.check_arrow([arrow(list(range(COUNT)))[0].slice(500), arrow(list(range(500)))[0]], COUNT, SIZE)


@pytest.mark.parametrize(
    "numbers",
    [list(range(COUNT - 1)), [*range(COUNT), 7], [*range(COUNT - 1), 7]],
    ids=["missing", "doubled", "one for another"],
)
def test_a_lost_record_is_found(numbers: list[int]) -> None:
    with pytest.raises(Lost):
        values.check_arrow(arrow(numbers), COUNT, SIZE)


def test_a_damaged_record_is_found() -> None:
    whole = values.matrix(COUNT, SIZE)
    values.check([whole.reshape(-1)], COUNT, SIZE)
    for column, byte in ((SIZE - 1, ord("y")), (3, ord("7")), (0, ord(" "))):
        damaged = whole.copy()
        damaged[500, column] = byte
        with pytest.raises(Lost):
            values.check([np.ascontiguousarray(damaged).reshape(-1)], COUNT, SIZE)


def line_of(row: str, ours: float) -> Line:
    return Line(
        row, f"work of <{row}>", "1/s", ours, 10.0, "a", 2.0, lower=False, runs={"ours rate": [ours]}, others=0.0
    )


def test_rows_measured_at_another_time_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    report.save(path, [line_of("one", 30), line_of("two", 10)], {})
    found = report.merged(path, [line_of("two", 50), line_of("three", 40)], ["three", "two", "one"])
    assert [(line.row, line.ours) for line in found] == [("three", 40), ("two", 50), ("one", 30)]


def test_a_title_says_that_another_size_was_measured() -> None:
    line = only(row(), {"ours": [10], "a": [5], "b": [4]})
    assert [found.title for scale in (1.0, 0.4) for found in report.named([line], scale)] == ["work", "work (x 0.4)"]


def test_the_picture_has_a_bar_for_each_ratio() -> None:
    picture = ET.fromstring(svg([line_of("one", 30), line_of("two", 5), line_of("three", 1e6)]))
    bars = picture.findall(".//{*}rect")
    assert [bar.get("class") for bar in bars] == ["good", "short", "good"]
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert widths[1] < widths[0] < widths[2] < 600  # half as good, three times as good, far beyond the scale
