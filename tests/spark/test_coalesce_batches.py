"""Tests of joined batches in a task: the same rows in the same order, and no small batch except the last."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.spark.coalesce_batches import gathered


def batch(first: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"number": pa.array(range(first, first + rows), pa.int64())})


def rows_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [number for found in batches for number in found.column(0).to_pylist()]


def test_small_batches_are_joined_in_order() -> None:
    found = list(gathered((batch(10 * at, 10) for at in range(10)), 300))  # 80 bytes each
    assert rows_of(found) == list(range(100))
    assert [one.num_rows for one in found] == [40, 40, 20]


def test_a_large_batch_is_passed_on_unchanged() -> None:
    large = batch(0, 100)
    (found,) = gathered(iter([large]), 800)
    assert found is large


def test_a_large_batch_joins_the_small_ones_before_it() -> None:
    found = list(gathered(iter([batch(0, 1), batch(1, 100), batch(101, 1)]), 800))
    assert [one.num_rows for one in found] == [101, 1]
    assert rows_of(found) == list(range(102))


def test_empty_batches_are_left_out() -> None:
    assert list(gathered(iter([batch(0, 0), batch(0, 0)]), 1)) == []
    assert rows_of(list(gathered(iter([batch(0, 0), batch(0, 2), batch(2, 0)]), 1000))) == [0, 1]


def test_rows_without_columns_are_not_lost() -> None:
    headers = batch(0, 7).select([])
    assert [one.num_rows for one in gathered(iter([headers, headers]), 1000)] == [7, 7]


def test_batches_with_few_bytes_are_passed_on_in_time() -> None:
    flags = pa.record_batch({"flag": pa.array([True] * (1 << 17))})
    assert [one.num_rows for one in gathered(iter([flags] * 3), 1 << 30)] == [1 << 18, 1 << 17]


def test_held_rows_survive_an_error_of_the_source() -> None:
    """Yield a batch in an ``except`` block, as ``read_range`` does after a loss; earlier batches are not yielded
    again."""

    def source() -> object:
        yield batch(0, 1)
        try:
            raise OSError
        except OSError:
            yield batch(1, 1)

    assert rows_of(list(gathered(source(), 1000))) == [0, 1]  # type: ignore[arg-type]


def test_an_error_of_the_source_is_raised() -> None:
    def source() -> object:
        yield batch(0, 1)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(gathered(source(), 1000))  # type: ignore[arg-type]
