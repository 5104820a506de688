"""Tests that imports only go down, and that the pure packages use no clock, loop, thread, socket, file or log.

The layers are those of docs/architecture.md. Imports inside functions and under TYPE_CHECKING count as well: a
dependency is one at any time of its import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparklog"

#: The layers from top to bottom. Packages of one layer do not import each other.
LAYERS = (
    ("demo", "testing"),
    ("cli",),
    # Above spark: LocalCluster gives its session a source with the cluster's addresses.
    ("cluster",),
    ("console", "spark"),
    # Below spark, whose source plans reads of history with it.
    ("delta",),
    ("broker", "client"),
    ("storage", "replica", "controller", "coordinator", "zk", "net"),
    ("security", "kafka"),
    ("record", "protocol"),
)
#: Below all packages, in this order: each module may import those before it.
FOUNDATION = ("escaping", "errors", "extras", "model", "config")
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

PURE = {"record", "protocol", "security", "kafka", "replica", "controller", "coordinator", *FOUNDATION}
IMPURE_MODULES = {"asyncio", "threading", "socket", "time", "random", "os", "logging"}
#: The names of the package itself that any module may import.
ABOUT_THE_PACKAGE = {"sparklog.__version__", "sparklog.__file__"}
#: Libraries that only one package may import.
ONLY_IN = {"kazoo": "zk", "uvloop": "net"}


def imported(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Return the full names of all modules that ``source``, the text of ``module``, imports or reaches through
    sparklog."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "sparklog")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sparklog":
            # After ``import sparklog`` alone, only the version and the path of the package are known.
            yield f"sparklog.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module.split("."), is_package)
            # ``from sparklog import x`` and ``from sparklog.record import x`` may import a module as well.
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == "sparklog" else (base,)


def _absolute(node: ast.ImportFrom, module: list[str], is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    package = module[: len(module) + is_package - node.level]
    return ".".join([*package, node.module] if node.module else package)


def part_of(module: str) -> str:
    """Return the package or foundation module that ``module`` belongs to, or "" for sparklog itself."""
    return module.split(".")[1] if "." in module else ""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the forbidden imports of ``module``."""
    importer = part_of(module)
    found = []
    for target in imported(source, module, is_package=is_package):
        if target in ABOUT_THE_PACKAGE:
            continue
        top = target.split(".")[0]
        if top == "sparklog":
            if not may_import(importer, part_of(target)):
                found.append(f"{module} imports {target}")
        elif (importer in PURE and top in IMPURE_MODULES) or ONLY_IN.get(top, importer) != importer:
            found.append(f"{module} imports {target}")
    return found


def may_import(importer: str, target: str) -> bool:
    """Return whether code of ``importer`` may import ``target``. The package itself, "", shows what is public."""
    if importer == "":
        return target != "testing"
    if importer == target:
        return True
    if importer in FOUNDATION:
        return target in FOUNDATION and FOUNDATION.index(target) < FOUNDATION.index(importer)
    if target in FOUNDATION:
        return True
    if importer not in DEPTH or target not in DEPTH:
        return False
    return DEPTH[target] > DEPTH[importer]


def modules() -> list[tuple[Path, str]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return found


def test_imports_go_down_only_and_pure_packages_stay_pure() -> None:
    checked = modules()
    assert len(checked) > 20
    found = [
        violation
        for path, module in checked
        for violation in violations(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def known_modules(source: str, module: str, names: set[str], *, is_package: bool) -> set[str]:
    """Return the modules of sparklog that ``source``, the text of ``module``, imports anywhere, including for types
    alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module.split("."), is_package)
            found.update(name if (name := f"{base}.{alias.name}") in names else base for alias in node.names)
    return (found & names) - {module}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that reach each other by imports."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in imports[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        return seen

    reach = {module: reached(module) for module in imports}
    found: list[set[str]] = []
    for module in imports:
        if module in reach[module] and not any(module in circle for circle in found):
            found.append({other for other in reach[module] if module in reach[other]})
    return found


def test_imports_have_no_circle() -> None:
    checked = modules()
    names = {module for _, module in checked}
    imports = {
        module: known_modules(path.read_text("utf-8"), module, names, is_package=path.name == "__init__.py")
        for path, module in checked
    }
    # The names that ``import sparklog`` offers to type checkers are not a dependency of the package.
    imports["sparklog"] = set()
    assert not [sorted(circle) for circle in circles(imports)]


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def test_every_package_has_its_layer() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(DEPTH), f"without a layer: {sorted(packages - set(DEPTH))}"
    alone = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert alone == set(FOUNDATION)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import sparklog.storage.log", "sparklog.record.codec"),
        ("from sparklog.protocol import messages", "sparklog.record.codec"),
        ("from sparklog import zk", "sparklog.replica.replica"),
        ("from ..storage import log", "sparklog.replica.replica"),
        ("from .. import storage", "sparklog.replica.replica"),
        ("def late():\n    from sparklog.broker.lifecycle.process import main", "sparklog.client.producer.producer"),
        ("if TYPE_CHECKING:\n    import sparklog.cluster.local", "sparklog.spark.source"),
        ("import time", "sparklog.replica.replica"),
        ("from os import path", "sparklog.record.codec"),
        ("import asyncio.events", "sparklog.protocol.frames"),
        ("import logging", "sparklog.config"),
        ("from sparklog.model import TopicPartition", "sparklog.errors"),
        ("from sparklog.record import header", "sparklog.model"),
        ("from kazoo.client import KazooClient", "sparklog.broker.lifecycle.process"),
        ("import uvloop", "sparklog.broker.lifecycle.process"),
        ("from sparklog.testing import x", "sparklog.broker.lifecycle.process"),
        ("import sparklog.unheard_of", "sparklog.broker.lifecycle.process"),
        ("import sparklog\nx = sparklog.Producer", "sparklog.broker.lifecycle.process"),
        ("from sparklog import Producer", "sparklog.broker.lifecycle.process"),
    ],
)
def test_the_check_finds_forbidden_imports(source: str, module: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from sparklog.record.header import BatchHeader", "sparklog.storage.log"),
        ("from .header import BatchHeader\nfrom . import header", "sparklog.record.codec"),
        ("from sparklog.errors import BrokerError", "sparklog.config"),
        ("import time, asyncio", "sparklog.broker.lifecycle.process"),
        ("from kazoo.client import KazooClient", "sparklog.zk.session"),
        ("import sparklog.client.producer.producer", "sparklog.spark.source"),
        ("import numpy", "sparklog.record.codec"),
        ("import sparklog\nprint(sparklog.__version__)", "sparklog.broker.lifecycle.process"),
        ("from sparklog import __version__", "sparklog.cli.main"),
    ],
)
def test_the_check_accepts_allowed_imports(source: str, module: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("from .a import b", "sparklog.record", True, "sparklog.record.a"),
        ("from ..a import b", "sparklog.record", True, "sparklog.a"),
        ("from .a import b", "sparklog.record.codec", False, "sparklog.record.a"),
        ("from ..a import b", "sparklog.record.codec", False, "sparklog.a"),
        ("from .. import b", "sparklog.record.codec", False, "sparklog.b"),
        ("from . import b", "sparklog.record.codec", False, "sparklog.record"),
        ("from . import b", "sparklog", True, "sparklog.b"),
    ],
)
def test_relative_imports_are_resolved(source: str, module: str, is_package: bool, expected: str) -> None:
    assert list(imported(source, module, is_package=is_package)) == [expected]
