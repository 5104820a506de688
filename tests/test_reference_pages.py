"""Tests that the pages of docs/reference equal the code's tables and docstrings.

``python -m tests.test_reference_pages`` writes them. They are in the repository because a forge shows them without a
build.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import sparklog
from sparklog.broker.counters import BROKER_COUNTERS
from sparklog.client.consumer.read_counters import ReadCounters
from sparklog.config import BROKER_SETTINGS, TOPIC_SETTINGS, Setting, allowed, default_text
from sparklog.controller.counters import CONTROLLER_COUNTERS
from sparklog.errors import TRAITS
from sparklog.security.acls import OPERATIONS, ResourceType
from sparklog.security.request_rules import RULES

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"

_UNITS = {
    "bytes": ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")),
    "ms": ((86_400_000, "days"), (3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds")),
}
_API = {
    "Clients": ("Producer", "Consumer", "Admin"),
    "Spark": ("configure", "read", "read_history", "locate_moment", "LocalCluster"),
    "What clients return and take": (
        *("RecordMetadata", "WriteResult", "Origin", "origin", "TopicPartition", "OffsetRange"),
    ),
}


def table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table; ``head`` names the columns, separated by commas."""
    names = head.split(", ")
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *(f"| {row} |" for row in cells)])


# --- settings --------------------------------------------------------------------------------------------------------


def with_unit(setting: Setting) -> str:
    """Return a setting's default as the cluster prints it, in a larger unit if that gives a whole number."""
    text = default_text(setting)
    kind = next((kind for kind in _UNITS if setting.field.endswith(kind)), None)
    if kind is None or not isinstance(setting.default, int):
        return f"`{text}`" if text else "(empty)"
    for size, unit in _UNITS[kind]:
        if setting.default >= size and setting.default % size == 0:
            count = setting.default // size
            return f"`{text}` ({count} {unit if count != 1 else unit.removesuffix('s')})"
    return f"`{text}`"


def setting_rows(settings: dict[str, Setting]) -> Iterator[tuple[str, ...]]:
    for name, setting in settings.items():
        yield f"`{name}`", with_unit(setting), allowed(setting), setting.doc


def settings_page() -> str:
    head = "setting, default, allowed, meaning"
    topics, brokers = table(head, setting_rows(TOPIC_SETTINGS)), table(head, setting_rows(BROKER_SETTINGS))
    return f"""# Settings

Names are Kafka's where the meaning is Kafka's. Values of names that end with `.ms` are milliseconds. An unknown name is
refused with the nearest one, a value out of range with the range. `sparklog config list topics` and
`sparklog config list brokers` print these tables.

## Topics

`sparklog topics create -c NAME=VALUE` sets them at creation, `sparklog topics alter -c NAME=VALUE` at any later time,
without a restart. Given to a cluster (`--set`, `conf/broker.conf`), they are the defaults of its topics.

{topics}

## Brokers

They are fixed when a cluster is started: `--set NAME=VALUE`, or `conf/broker.conf`.

{brokers}

## Clients and Spark

Producers, consumers and the admin client take their settings as arguments: see [the Python API](api.md).
[spark.md](../spark.md) has the options of `format("sparklog")`, [delta.md](../delta.md) those of the archive.
"""


# --- metrics ---------------------------------------------------------------------------------------------------------


def reader_rows() -> Iterator[tuple[str, ...]]:
    """Yield the fields of ReadCounters with the comments above them."""
    meaning = ""
    for line in inspect.getsource(ReadCounters).splitlines():
        if comment := re.match(r" +#: (.+)", line):
            meaning = f"{meaning} {comment[1]}".strip()
        elif field := re.match(r" +(\w+): int = 0", line):
            yield f"`{field[1]}`", meaning.rstrip(".")
            meaning = ""


def metrics_page() -> str:
    head = "counter, what it counts"
    brokers, controller = (
        table(head, ((f"`{name}`", meaning) for name, meaning in counters.items()))
        for counters in (BROKER_COUNTERS, CONTROLLER_COUNTERS)
    )
    return f"""# Metrics

Counters begin at 0 when their process starts, and grow, unless the table says that they are a present value. A counter
that has not counted yet is absent.

## Brokers

`sparklog brokers describe ID` and `sparklog brokers --json` show them; `Admin.describe_brokers()` returns them.

{brokers}

## The controller

Each count has a line in `driver.log`, or in the output of `sparklog controller`, that names the counter.

{controller}

## Readers

`Consumer.counters` has what a consumer has been sent. Bytes are those of batches' bodies.

{table(head, reader_rows())}
"""


# --- errors ----------------------------------------------------------------------------------------------------------


def public(kind: type) -> list[str]:
    """Return the public names of exceptions (``kind`` is BaseException), in the order of the package."""
    found = {name: getattr(sparklog, name) for name in sparklog.__all__}
    return [name for name, value in found.items() if inspect.isclass(value) and issubclass(value, kind)]


def first_sentence(value: object) -> str:
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("``", "`")
    return text.partition(". ")[0].rstrip(".") + "."


def errors_page() -> str:
    exceptions = []
    for name in public(BaseException):
        error = getattr(sparklog, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        exceptions.append((f"`{name}`", bases, first_sentence(error)))
    codes = [
        (str(int(code)), f"`{code.name}`", *("yes" if flag else "" for flag in trait[:2]), trait.sentence)
        for code, trait in sorted(TRAITS.items())
    ]
    return f"""# Errors

## Exceptions

All of them come from `sparklog`, are a `SparklogError`, and survive pickling. Clients repeat by themselves what may
succeed when it is repeated, before they raise `ClientTimeout`.

{table("exception, is also, meaning", exceptions)}

## Codes

`BrokerError.code` is one of these, as `sparklog.ErrorCode`. Names, and codes below 1000, are Kafka's.

- *Retriable*: the same request may succeed later (`BrokerError.retriable`).
- *Metadata*: the client's picture of the cluster is old, so the client asks for metadata before it tries again.

{table("code, name, retriable, metadata, meaning", codes)}
"""


# --- the Python API --------------------------------------------------------------------------------------------------


API_HEAD = """# Python API

These names come from `sparklog` itself. The exceptions are on [a page of their own](errors.md). The site has signatures
and docstrings here; on a forge, see the files that the tables name."""


def directive(name: str) -> str:
    if inspect.isclass(getattr(sparklog, name)):
        return (
            f"```{{eval-rst}}\n.. autoclass:: sparklog.{name}\n   :members:\n   :inherited-members: tuple, Struct\n```"
        )
    return f"```{{eval-rst}}\n.. autofunction:: sparklog.{name}\n```"


def api_page() -> str:
    parts = [API_HEAD]
    for group, names in _API.items():
        rows = []
        for name in names:
            file = inspect.getsourcefile(getattr(sparklog, name))
            assert file is not None
            where = Path(file).resolve().relative_to(ROOT).as_posix()
            rows.append((f"[{name}](#{name.lower()})", first_sentence(getattr(sparklog, name)), f"`{where}`"))
        parts += [f"## {group}", table("name, what it is, file", rows)]
        for name in names:
            parts += [f"### {name}", directive(name)]
    return "\n\n".join(parts) + "\n"


# --- the operations of requests ---------------------------------------------------------------------------------------


def requests_page() -> str:
    rows = [(f"`{kind.__name__}`", rule.text) for kind, rule in sorted(RULES.items(), key=lambda one: one[0].__name__)]
    operations = [
        (f"`{kind.value}`", ", ".join(f"`{operation.value}`" for operation in sorted(OPERATIONS[kind])))
        for kind in ResourceType
    ]
    return f"""# Operations

With an authorizer a broker serves a request only if ACLs allow what the table says ([security](../security.md#acls)).
Super users, and brokers and controllers that have proved their identity, need no ACL.

## Requests

{table("request, operations", rows)}

## Types of resources

`All` stands for all operations. `Read`, `Write`, `Delete` and `Alter` imply `Describe`, and `AlterConfigs` implies
`DescribeConfigs`.

{table("type, operations", operations)}
"""


PAGE_OF = {
    "settings": settings_page,
    "metrics": metrics_page,
    "errors": errors_page,
    "operations": requests_page,
    "api": api_page,
}


@pytest.mark.parametrize("name", PAGE_OF)
def test_a_reference_page_equals_the_code(name: str) -> None:
    assert (PAGES / f"{name}.md").read_text("utf-8") == PAGE_OF[name](), "run python -m tests.test_reference_pages"


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, make in PAGE_OF.items():
        (PAGES / f"{name}.md").write_text(make(), "utf-8")
