"""Tests of the topic that a table's records belong to, after a restore."""

from __future__ import annotations

import pytest

from sparklog.delta.origin import ArchiveOrigin

RESTORED = ArchiveOrigin("new", "old/table-a@7")


def test_a_topic_is_in_the_table_that_names_it() -> None:
    assert ArchiveOrigin("new").is_in("new", table_id="table-a", progress_version=3)
    assert RESTORED.is_in("new", table_id="table-a", progress_version=9), "its archive continued"
    assert not ArchiveOrigin("new").is_in("old", table_id="table-a", progress_version=3)


@pytest.mark.parametrize(
    ("table_id", "progress_version", "expected"),
    [("table-a", 7, True), ("table-a", 5, True), ("table-a", 8, False), ("table-b", 5, False)],
)
def test_a_restored_topic_shares_its_source_table_until_the_restore(
    table_id: str, progress_version: int, expected: bool
) -> None:
    """Another archive of the earlier topic has other records above the offset where the restored topic continued."""
    assert RESTORED.is_in("old", table_id=table_id, progress_version=progress_version) == expected
    assert RESTORED.ids == ("new", "old")
    assert ArchiveOrigin("new").ids == ("new",)
