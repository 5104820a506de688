"""The suites by name, and a run of one of them on a new cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.suites import franz_go, librdkafka, python_clients
from tests.suites.results import Result
from tests.suites.sides import running


class Runner(Protocol):
    """The function that runs the fetched tests in a folder on a cluster."""

    def __call__(
        self, folder: Path, bootstrap: str, output: Path, /, *, creates_topics: bool, only: Collection[str]
    ) -> dict[str, Result]: ...


class Suite(NamedTuple):
    """The tests of another project."""

    #: Fetches and builds the tests, and returns their folder.
    fetch: Callable[[], Path]
    run: Runner
    #: The clusters on which it runs, one after the other: whether each creates unknown topics.
    clusters: tuple[bool, ...]


SUITES = {
    "librdkafka": Suite(librdkafka.fetch, librdkafka.run, (True, False)),
    "kafka-python": Suite(python_clients.fetch_kafka_python, python_clients.run_kafka_python, (True,)),
    "franz-go": Suite(franz_go.fetch, franz_go.run, (False,)),
}


def run_suite(name: str, system: str, output: Path, *, only: Collection[str] = ()) -> dict[str, Result]:
    """Run a suite on new clusters of ``system``; return the results. The output of the tests is in ``output``.

    Raises:
        ClusterError: the tests cannot be fetched or built, or a cluster did not start.
    """
    suite = SUITES[name]
    folder = suite.fetch()
    results: dict[str, Result] = {}
    for creates_topics in suite.clusters:
        place = output / ("creates-topics" if creates_topics else "creates-no-topics")
        place.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="cluster-", dir=place))
        with running(system, directory, creates_topics=creates_topics) as bootstrap:
            results.update(suite.run(folder, bootstrap, place, creates_topics=creates_topics, only=only))
    return results
