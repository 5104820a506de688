"""Run another project's test suite on sparklog or Kafka, and print the table.

``python -m tests.suites NAME [--on kafka] [--only TEST ...] [--output FOLDER]``. The exit code is 1 if a result is not
the expected one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.suites.results import differences, read_expected, table
from tests.suites.run import SUITES, run_suite
from tests.suites.sides import SYSTEMS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--on", choices=SYSTEMS, default="sparklog")
    parser.add_argument("--only", nargs="*", default=(), help="names or numbers of tests")
    parser.add_argument("--output", type=Path, default=None, help="folder for the output of each test")
    arguments = parser.parse_args()
    output = arguments.output or Path(tempfile.mkdtemp(prefix="sparklog-suite-"))
    results = run_suite(arguments.suite, arguments.on, output, only=arguments.only)
    expected = read_expected(arguments.suite)
    print(table(results, expected))
    wrong = list(differences(results, expected, arguments.on))
    for test, words in wrong:
        print(f"{test}: {words}")
    print(f"{len(wrong)} of {len(results)} results are not expected; the output is in {output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
