"""Tests of the documentation site: Sphinx builds it without a warning, which covers every link within the site.

The third tier requests the links to other sites.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.integration

#: What a browser loads by itself: a script, a style sheet, a font, or a picture of another site.
FOREIGN = re.compile(r'''<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//[^"]*|<link[^>]*\shref="(?:https?:)?//[^"]*'''
                     r'''|url\(["']?(?:https?:)?//[^)]*|\bimport\b[^;\n]*["'](?:https?:)?//[^"']*''')  # fmt: skip


def build(pages: Path, site: Path, builder: str = "html") -> subprocess.CompletedProcess[str]:
    """Build the site of a folder of pages with the documented command, with all caches in ``site``."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, pages, site],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.extended
def test_the_site_builds_without_a_warning_and_is_complete(tmp_path: Path) -> None:
    """The pages load nothing from another site, so that a copy of the site works without a network."""
    done = build(ROOT / "docs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if not (tmp_path / page).is_file()]
    assert not missing
    texts = {path: path.read_text("utf-8") for path in tmp_path.rglob("*") if path.suffix in {".html", ".css"}}
    loaded = {str(path): found for path, text in texts.items() if (found := FOREIGN.findall(text))}
    assert not loaded
    with_diagrams = [text for text in texts.values() if '<pre class="mermaid">' in text]
    assert len(with_diagrams) == sum("\n```mermaid\n" in path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for text in with_diagrams:
        scripts = re.findall(r'<script defer="defer" src="[./]*(_static/[a-z]+\.js)', text)
        assert scripts[-2:] == ["_static/mermaid.js", "_static/diagrams.js"]
        assert all((tmp_path / script).is_file() for script in scripts)


@pytest.mark.long
def test_every_link_to_another_site_has_a_target(tmp_path: Path) -> None:
    try:
        socket.create_connection(("github.com", 443), 20).close()
    except OSError as error:
        pytest.skip(f"the links need the internet: {error}")
    done = build(ROOT / "docs", tmp_path, "linkcheck")
    assert done.returncode == 0, (tmp_path / "output.txt").read_text()


@pytest.mark.extended
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
