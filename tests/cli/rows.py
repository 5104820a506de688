"""Rows that commands write and read, and the final content of a topic."""

from __future__ import annotations

import pyarrow as pa

from sparklog.client.consumer.consumer import Consumer
from tests.client.fake_cluster import FakeCluster

TYPED = pa.schema([("carrier", pa.string()), ("delay", pa.float64())])
ROWS = pa.table({"carrier": ["UA", "AA", None], "delay": [1.5, None, -2.0]}, schema=TYPED)


def table_of(fake: FakeCluster, topic: str) -> pa.Table:
    with Consumer(fake.bootstrap, topic) as consumer:
        return consumer.to_table()
