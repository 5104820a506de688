"""Kafka's own programs, for tests of real parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.kafka_jars import broker_jars
from sparklog.errors import ClusterError

if TYPE_CHECKING:
    from tests.kafka_tools import KafkaTools


@pytest.fixture(scope="session")
def jars() -> Path:
    """Return the folder of Kafka's jars. Skip the test if they cannot be fetched."""
    try:
        return broker_jars(fetch=True)
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tools(jars: Path) -> Iterator[KafkaTools]:
    """Start a JVM with Kafka's command-line tools."""
    from tests.kafka_tools import KafkaTools  # this imports pyspark, which takes long

    with KafkaTools(jars) as running:
        yield running
