"""Words of an old dialect become fewer: each package has a number of them that may only go down.

CONTRIBUTING.md says what to write instead. Comments, strings (and so docstrings) and pages count; code does not.

    python -m tests.test_dialect                       lower the numbers below to what is left, never raise one
    python -m tests.test_dialect sparklog/broker       print the places of a package

A package without a number has none of these words. A conflict in the table is resolved by either side and the first
command. A module that moves takes its words along: change the two numbers by hand.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

DIALECT = re.compile(
    r"\b(?:nobody|who(?:m)?ever|anew|under way|by and by|behind|looks|so many|so long|goes? on|once more|for good"
    r"|made again|says so|mend(?:s|ed|ing)?|all the same|taken for|(?:is|are|was|were|be|been) (?:told|said)"
    r"|(?:that|what|which|who) (?:is|are|was|were) there)\b",
    re.IGNORECASE,
)

#: The number of these words in each package: a folder of ``sparklog``, ``docs/adr``, or a folder of the root.
LIMITS: dict[str, int] = {
    "bench": 6,
    "docs": 5,
    "sparklog/broker": 4,
    "sparklog/demo": 1,
    "sparklog/testing": 5,
    "tests": 7,
}

#: They name the words on purpose.
EXEMPT = {"CONTRIBUTING.md", "tests/test_dialect.py"}


def package_of(path: str) -> str:
    """Return the package that a file counts for, by its path from the root."""
    folders = path.split("/")[:-1]
    depth = 2 if folders[:1] == ["sparklog"] or folders[:2] == ["docs", "adr"] else 1
    return "/".join(folders[:depth]) or "."


def files() -> Iterator[str]:
    """Yield all files with prose, as paths from the root."""
    for folder in ("sparklog", "jobs", "bench", "tests", "docs", "conf"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".md", ".conf", ".cfg", ".xml", ".sh", ".properties"}:
                yield path.relative_to(ROOT).as_posix()
    yield from (path.name for path in sorted(ROOT.iterdir()) if path.suffix in {".py", ".md", ".cfg", ".toml", ".sh"})


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each piece of prose: paragraphs, strings, and blocks of comments."""
    if not path.endswith(".py"):
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            yield line, paragraph
            line += paragraph.count("\n")
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    if "#" not in text:
        return
    block, start, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield start, block
                block, start = "", token.start[0]
            block, last = f"{block} {token.string.lstrip('#: ')}", token.start[0]
    yield start, block


def places(path: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the word of each finding in a file."""
    text = (ROOT / path).read_text("utf-8")
    if not DIALECT.search(" ".join(text.replace("#", " ").split())):
        return
    for line, piece in prose(path, text):
        for found in DIALECT.finditer(" ".join(piece.split())):
            yield line, found[0]


def counts() -> dict[str, int]:
    """Return the number of findings of each package, without those that have none."""
    found: dict[str, int] = {}
    for path in files():
        if path not in EXEMPT and (number := sum(1 for _ in places(path))):
            found[package_of(path)] = found.get(package_of(path), 0) + number
    return dict(sorted(found.items()))


def test_the_dialect_does_not_return() -> None:
    more = {package: number for package, number in counts().items() if number > LIMITS.get(package, 0)}
    if more:
        expected = {package: LIMITS.get(package, 0) for package in more}
        pytest.fail(
            f"words of the dialect: {more}, allowed {expected}; print them: python -m tests.test_dialect PACKAGE"
        )


def test_comments_strings_and_paragraphs_count_and_code_does_not() -> None:
    source = '"""Nobody\nis told."""\nwhoever = 1  # goes\n# on\nx = f"{whoever} is\\nbehind"\n'
    assert [
        (line, found[0]) for line, piece in prose("a.py", source) for found in DIALECT.finditer(" ".join(piece.split()))
    ] == [(1, "Nobody"), (1, "is told"), (5, "behind"), (3, "goes on")]
    assert [line for line, piece in prose("a.md", "one\n\ntwo\nanew\n") if DIALECT.search(piece)] == [3]


def lower() -> None:
    """Write the table again: each number is the smaller one of the table's and of today's."""
    now = counts()
    table = "".join(f'    "{name}": {min(limit, now[name])},\n' for name, limit in LIMITS.items() if name in now)
    here = Path(__file__)
    source = re.sub(r"(?m)^(LIMITS.* = )\{[^}]*\}", lambda found: f"{found[1]}{{\n{table}}}", here.read_text("utf-8"))
    here.write_text(source, "utf-8")
    print(f"{sum(min(limit, now.get(name, 0)) for name, limit in LIMITS.items())} left")


if __name__ == "__main__":
    if sys.argv[1:]:
        for path in files():
            if package_of(path) in sys.argv[1:] and path not in EXEMPT:
                for line, word in places(path):
                    print(f"{path}:{line}: {word}")
    else:
        lower()
