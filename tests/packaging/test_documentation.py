"""Tests of the documentation site: Sphinx builds it without a warning, which covers every link within the site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.extended]


def build(pages: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder of pages with the documented command, with all caches in ``site``."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", pages, site],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "docs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if not (tmp_path / page).is_file()]
    assert not missing


def test_links_without_a_target_fail_the_build(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    (pages / "_static").mkdir(parents=True)
    for file in ("conf.py", "_static/sparklog.css"):
        (pages / file).write_bytes((ROOT / "docs" / file).read_bytes())
    (tmp_path / "README.md").write_text(
        "# Index\n\n[page](docs/page.md#page), [file](README.md), [a](docs/no-page.md)\n"
    )
    (pages / "index.md").write_text("Only a forge shows this.\n\n```{toctree}\npage\n```\n")
    links = (
        "[b](index.md#no-section)",
        "![c](no-picture.svg)",
        "[d](../no-file.py)",
        "[e](../README.md)",
        "[f](#page)",
    )
    (pages / "page.md").write_text("\n\n".join(["# Page", *links]))
    done = build(pages, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 4, done.stderr
    for missing in ("no-page", "no-section", "no-picture", "no-file"):
        assert any(missing in warning for warning in warnings), missing
