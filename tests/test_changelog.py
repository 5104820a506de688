"""CHANGELOG.md keeps the form of Keep a Changelog, also after git has merged the bullets of several branches."""

from __future__ import annotations

import re
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_every_bullet_is_under_a_heading_of_its_release() -> None:
    kind = None
    kinds: dict[str, list[str]] = {}
    for number, line in enumerate(CHANGELOG.read_text("utf-8").splitlines(), 1):
        if release := re.fullmatch(r"## \[(.+)\]", line):
            assert release[1] not in kinds, f"line {number}: a second {line!r}"
            kinds[release[1]], kind = [], None
        elif line.startswith("#") and not line.startswith("# "):
            kind = line.removeprefix("### ")
            assert kind in KINDS, f"line {number}: {line!r} is not one of {KINDS}"
            kinds[next(reversed(kinds))].append(kind)
        elif line.startswith("- "):
            assert kind, f"line {number}: no heading such as '### Fixed' above: {line!r}"
    assert next(iter(kinds)) == "Unreleased"
    for release_name, found in kinds.items():
        assert found == [each for each in KINDS if each in found], f"{release_name}: headings {found}"


def test_no_bullet_is_duplicated() -> None:
    bullets = re.findall(r"(?ms)^- (.+?)(?=^- |^#|\Z)", CHANGELOG.read_text("utf-8"))
    assert len(bullets) > 100
    assert sorted(bullets) == sorted(set(bullets))
