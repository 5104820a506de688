"""Tests of the demonstration's comparison: it finds missing, changed and duplicate rows."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest
from rich.console import Console

from sparklog.demo.evidence import Duplicates, compare_rows
from sparklog.demo.story import Story

SOURCE = pa.table(
    {
        "row_id": pa.array(range(10), pa.int64()),
        "carrier": ["AA"] * 6 + ["UA"] * 4,
        "delay": pa.array([1, 2, None, 4, 5, 6, 7, 8, 9, 10], pa.int64()),
    }
)


def compared(found: pa.Table) -> tuple[Story, Duplicates]:
    story = Story(Console(file=io.StringIO(), width=200))
    duplicates = compare_rows(
        SOURCE, found.append_column("_offset", [range(found.num_rows)]), slice_rows=4, story=story
    )
    return story, duplicates


def different(story: Story) -> set[str]:
    return {check.what for check in story.checks if not check.equal}


def test_the_same_rows_in_another_order_are_equal() -> None:
    story, duplicates = compared(SOURCE.take([3, 1, 2, 0, 9, 8, 7, 6, 5, 4]))
    assert story.all_equal
    assert duplicates == Duplicates(rows=0, slices=0)
    story.print_tables()
    assert "DIFFERENT" not in story.console.file.getvalue()  # type: ignore[attr-defined]


def test_duplicates_are_counted_but_are_no_difference() -> None:
    story, duplicates = compared(SOURCE.take([*range(10), 4, 5, 5, 9]))
    assert story.all_equal
    assert duplicates == Duplicates(rows=4, slices=2)


def test_a_lost_row_is_found_even_if_another_one_is_duplicated() -> None:
    story, _ = compared(SOURCE.take([0, 1, 2, 3, 4, 5, 6, 7, 8, 8]))
    assert different(story) >= {"rows", "rows lost", "rows of each of 2 carriers", "sum of delay"}
    assert not story.all_equal
    story.print_tables()
    assert "DIFFERENT" in story.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("column", "value"), [("carrier", "UA"), ("delay", 3)])
def test_a_changed_value_is_found(column: str, value: object) -> None:
    values = SOURCE.column(column).to_pylist()
    values[2] = value
    story, _ = compared(SOURCE.set_column(SOURCE.schema.get_field_index(column), column, [values]))
    assert "every value of every row" in different(story)


def test_an_empty_comparison_is_not_equal() -> None:
    assert not Story(Console(file=io.StringIO())).all_equal
