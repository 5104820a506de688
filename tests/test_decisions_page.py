"""Tests that docs/adr/README.md lists every decision record with its title."""

from __future__ import annotations

import re
from pathlib import Path

RECORDS = Path(__file__).resolve().parent.parent / "docs" / "adr"
ROW = re.compile(r"\| (?P<number>\d+) \| \[(?P<title>.+)\]\((?P<file>.+?)\) \| (?P<status>.+?) \| (?P<line>.+) \|")


def listed() -> list[re.Match[str]]:
    lines = (RECORDS / "README.md").read_text("utf-8").splitlines()
    return [row for line in lines if (row := ROW.fullmatch(line))]


def test_every_decision_record_is_listed_with_its_title() -> None:
    written = [(path.name, path.read_text("utf-8").partition("\n")[0]) for path in sorted(RECORDS.glob("[0-9]*.md"))]
    assert [(row["file"], f"# {row['number']}. {row['title']}") for row in listed()] == written


def test_a_decision_is_accepted_or_names_its_successor() -> None:
    for row in listed():
        later = re.fullmatch(r"replaced by \[(\d+)\]\(.+\.md\)", row["status"])
        assert row["status"] == "accepted" or (later and int(later[1]) > int(row["number"])), row["number"]
