"""The tests of franz-go's client (``pkg/kgo``) that need a broker.

The Go module proxy serves the module with its tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.suites.packages import cached, step
from tests.suites.programs import run_limited
from tests.suites.results import Result, read_go

MODULE = "github.com/twmb/franz-go"
VERSION = "v1.22.3"
#: Fewer than the suite's own number, 500,000: its chains of groups write each record four times.
_RECORDS = 20_000
_LIMIT_S = 2400
#: What a test calls that connects to the brokers.
_CONNECTS = re.compile(r"\b(tmpTopic\w*|tmpGroup|newTestClient|getSeedBrokers|testChainETL)\(")


def fetch() -> Path:
    """Return the folder of the compiled tests. Raises as ``cached``."""

    def make(folder: Path) -> None:
        found = json.loads(step(["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"], folder))
        step(["cp", "-r", "--no-preserve=mode", f"{found['Dir']}/.", "."], folder)
        step(["go", "test", "-c", "-o", "kgo.test", "./pkg/kgo"], folder)
        step(["go", "build", "-o", "test2json", "cmd/test2json"], folder)

    return cached(f"franz-go-{VERSION}", make)


def run(
    folder: Path, bootstrap: str, output: Path, *, creates_topics: bool, only: Collection[str]
) -> dict[str, Result]:
    """Run the tests that need a broker, or ``only`` some; return the results."""
    file = output / "kgo.txt"
    names = sorted(only or set(_tests(folder / "pkg" / "kgo")))
    binary = [str(folder / "kgo.test"), "-test.v=test2json", f"-test.run=^({'|'.join(names)})$"]
    run_limited(
        [str(folder / "test2json"), "-t", *binary, f"-test.timeout={_LIMIT_S}s"],
        folder / "pkg" / "kgo",
        file,
        env={"KGO_SEEDS": bootstrap, "KGO_TEST_RECORDS": str(_RECORDS), "KGO_LOG_LEVEL": "none", "GOMEMLIMIT": "2GiB"},
        limit_s=_LIMIT_S + 60,
    )
    return read_go(file.read_text(errors="replace"))


def _tests(folder: Path) -> Iterator[str]:
    """Yield the names of the test functions that connect to brokers."""
    for file in folder.glob("*_test.go"):
        for function in re.split(r"^(?=func )", file.read_text(), flags=re.MULTILINE):
            name = re.match(r"func (Test\w+)\(", function)
            if name is not None and _CONNECTS.search(function):
                yield name[1]
