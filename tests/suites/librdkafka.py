"""librdkafka's own tests: the C and C++ program ``test-runner``.

Each number of a test runs as its own process. Tests that need no broker do not run. The runner's tests have scenarios:
those of ``noautocreate`` need a cluster that creates no topics by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.kafka_jars import broker_jars
from tests.kafka_tools import CLASSES
from tests.suites.packages import cached, step
from tests.suites.programs import run_limited
from tests.suites.results import FAILED, Result, read_summary

VERSION = "2.15.1"
#: The npm package of Confluent's client has the whole source of librdkafka, with its tests.
PACKAGE = "@confluentinc/kafka-javascript@1.10.1"
_PARALLEL = 4
_LIMIT_S = 900


def fetch() -> Path:
    """Return the folder of the built runner. Raises as ``cached`` and ``broker_jars``."""
    broker_jars(fetch=True)  # for the scripts that some tests call

    def make(folder: Path) -> None:
        (archive,) = step(["npm", "pack", "--silent", PACKAGE], folder).split()
        step(["tar", "-xzf", archive, "--strip-components=3", "package/deps/librdkafka"], folder)
        (folder / archive).unlink()
        step(["bash", "configure", "--no-download", "--disable-gssapi"], folder)
        step(["make", "-j2", "libs"], folder)
        step(["make", "-j2", "-C", "tests", "test-runner"], folder)

    return cached(f"librdkafka-{VERSION}", make) / "tests"


def run(
    runner: Path, bootstrap: str, output: Path, *, creates_topics: bool, only: Collection[str]
) -> dict[str, Result]:
    """Run the tests of one scenario, or ``only`` some numbers of them; return the results.

    The output of number N is in the file N.txt of ``output``.
    """
    tests = names(runner)
    scenario = "default" if creates_topics else "noautocreate"
    config = output / "test.conf"
    config.write_text(f"bootstrap.servers={bootstrap}\ntest.timeout.multiplier=3\n")
    env = {
        "BROKERS": bootstrap,
        "KAFKA_PATH": str(_scripts(output)),
        "RDKAFKA_TEST_CONF": str(config),
        "TEST_SCENARIO": scenario,
        "TEST_BROKER_ENABLE_AUTO_CREATE": str(creates_topics).lower(),
        "TEST_KAFKA_VERSION": "4.1.1",
        "LD_LIBRARY_PATH": f"{runner.parent / 'src'}:{runner.parent / 'src-cpp'}",
    }

    def run_number(number: str) -> dict[str, Result]:
        file = output / f"{number}.txt"
        ended = run_limited(
            ["./test-runner", "-L", "-p1"], runner, file, env={**env, "TESTS": number}, limit_s=_LIMIT_S
        )
        text = file.read_text(errors="replace")
        found = read_summary(text)
        if not ended:
            found = found or {number: Result(FAILED, f"did not end within {_LIMIT_S} s")}
        elif not found and "SUMMARY" not in text:
            found = {number: Result(FAILED, text[-300:])}
        return {name: result for name, result in found.items() if name == number or name in tests}

    with ThreadPoolExecutor(_PARALLEL) as pool:
        parts = list(pool.map(run_number, sorted(set(only) or {name[:4] for name in tests})))
    return {name: result for part in parts for name, result in part.items()}


def _scripts(output: Path) -> Path:
    """Write scripts with the names of Kafka's, which some tests call; return the folder above ``bin``."""
    folder = output / "scripts"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("kafka-acls", "kafka-configs", "kafka-topics"):
        script = folder / "bin" / f"{name}.sh"
        script.write_text(f'#!/bin/sh\nexec java -cp "{broker_jars(fetch=True)}/*" {CLASSES[name]} "$@"\n')
        script.chmod(0o755)
    return folder


def names(runner: Path) -> set[str]:
    """Return the names of the tests that need a broker."""
    tests = re.findall(r"^ +_TEST\((\d{4}_\w+),\s+([^,)]+)", (runner / "test.c").read_text(), re.MULTILINE)
    return {name for name, flags in tests if not (name.endswith("_mock") or re.search("_(LOCAL|MANUAL)", flags))}
