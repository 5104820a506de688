"""A test that clients continue after a broker has closed their idle connections."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from sparklog import Admin, Consumer, Producer
from sparklog.model import TopicPartition
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from tests.broker.topics import PATIENCE_S, create_topic

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def impatient() -> Iterator[ProcessCluster]:
    with ProcessCluster(1, settings={"connections.max.idle.ms": "1000"}) as cluster:
        create_topic(cluster, "t", replicas=1)
        yield cluster


def test_clients_continue_after_their_idle_connections_were_closed(impatient: ProcessCluster) -> None:
    def open_now() -> int:
        counters = impatient.describe(0).counters
        return counters["connections.opened"] - counters.get("connections.closed", 0)

    others = open_now()  # the request for this number may open one more socket
    tp = TopicPartition("t", 0)
    with (
        Producer(impatient.bootstrap) as producer,
        Consumer(impatient.bootstrap, [tp], start="earliest") as consumer,
        Admin(impatient.bootstrap) as admin,
    ):
        for number in range(2):
            producer.write("t", pa.table({"value": [b"%d" % number]}), partition=0).result(60)
            found: list[bytes] = []
            while not found:
                found = [value for batch in consumer.poll(5.0) for value in batch.column("value").to_pylist()]
            assert found == [b"%d" % number]
            assert admin.list_offsets([tp])[tp] == number + 1
            assert open_now() > others + 1
            wait_until(lambda: open_now() <= others + 1, PATIENCE_S, "idle connections to be closed")
