"""docs/file-map.md names every file of the package. ``python -m tests.test_file_map`` writes the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "file-map.md"
INTRODUCTION = """# File map

What each file of the package is for: the first sentence of its docstring. `python -m tests.test_file_map` writes this
page. `jobs/` holds the applications that `spark-submit.sh` submits, `conf/` their settings; `tests/` mirrors the
package. [architecture.md](architecture.md) says how the parts work together."""


def packages() -> Iterator[tuple[Path, list[Path]]]:
    """Yield each directory of the package with its modules, without an empty ``__init__``."""
    for directory in sorted({path.parent for path in (ROOT / "sparklog").rglob("*.py")}):
        modules = [
            path
            for path in sorted(directory.glob("*.py"))
            if path.name != "__init__.py" or directory.name == "sparklog"
        ]
        if modules:
            yield directory.relative_to(ROOT), modules


def first_sentence(path: Path) -> str:
    """Return the start of the module's docstring, up to the first full stop or colon that ends a clause."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.])\.(?:\s|$)", text)[0]
    return sentence.replace("``", "`").replace("|", "\\|")


def file_map() -> str:
    parts = [INTRODUCTION]
    for directory, modules in packages():
        rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in modules]
        parts.append("\n".join([f"## {directory.as_posix()}/", "", "| file | what it is for |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def listed() -> set[str]:
    found, directory = set(), ""
    for line in PAGE.read_text("utf-8").splitlines():
        if heading := re.match(r"## (.+)/", line):
            directory = heading[1]
        elif row := re.match(r"\| `(.+?)` \|", line):
            found.add(f"{directory}/{row[1]}")
    return found


def test_the_architecture_names_modules_that_exist() -> None:
    modules = {path.stem for path in (ROOT / "sparklog").rglob("*.py")}
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z]+_[a-z_]+|(?:[a-z_]+/)+[a-z_]+)`", page))
    assert len(named) > 10
    missing = {name for name in named if name.split("/")[-1] not in modules and not (ROOT / name).is_dir()}
    assert not missing, f"not modules of the package: {sorted(missing)}"


def test_the_file_map_names_every_file_and_no_other() -> None:
    there = {path.relative_to(ROOT).as_posix() for _, modules in packages() for path in modules}
    assert listed() == there, f"run python -m tests.test_file_map; differ: {sorted(listed() ^ there)}"


if __name__ == "__main__":
    PAGE.write_text(file_map(), "utf-8")
