"""Tests that run the examples of docs/spark.md in their order, on the cluster that the first lines start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sparklog.client.admin.admin import Admin
from sparklog.cluster.local import LocalCluster
from tests.ports import FirstPort

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(600)]

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "spark.md"
#: Lines that the examples print, in their order. Other lines may come between them.
PRINTED = [
    "|     ann|       8.0|",  # a batch
    "| orders|    3|",  # two topics
    "|returns|    1|",
    "|     bob|      1|",  # sparklog.read: one partition, from offset 1
    "|     ann|      2|",
    "|     bob|       1|",  # a view without one price
    "|ann     |8.0  |",  # a window
    "{TopicPartition(topic='orders', partition=0): 3, TopicPartition(topic='orders', partition=1): 0}",
    "0 1",  # a join of two topics: ann's returned orders
    "|     sue|  9.0|",  # a table
]


def test_every_example_runs(
    plain_spark: SparkSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The page names no port. Other tests may search for free ports from the default one upwards.
    defaults = LocalCluster.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "port", FirstPort.SPARK_PAGE)
    text = PAGE.read_text()
    examples = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(examples) == text.count("```") // 2, "the page has a code block that is not a Python example"
    shell: dict[str, Any] = {"__name__": "__main__"}
    before = plain_spark.catalog.listTables()
    try:
        for example in examples:
            line = text.count("\n", 0, example.start(1))
            exec(compile("\n" * line + example[1], str(PAGE), "exec"), shell)
        spark, cluster = shell["spark"], shell["cluster"]
        assert spark is plain_spark
        printed = iter(capsys.readouterr().out.splitlines())
        for wanted in PRINTED:
            assert any(wanted in found for found in printed), f"{wanted!r} is not printed after the lines before it"
        copies = ("large-orders", "copies-a", "copies-b")
        # The rows exist once, though the named write ran twice; then again with a new column.
        assert rows(spark, "orders-2024") == [
            ("ann", 7.0, "by phone"), ("ann", 7.0, None), ("eve", 6.0, "by phone"), ("eve", 6.0, None)
        ]  # fmt: skip
        assert [rows(spark, topic) for topic in copies] == [[("ann", 5.0), ("ann", 7.0), ("eve", 6.0)]] * 3
        with Admin(cluster.bootstrap) as admin:
            assert set(admin.list_topics()) == {"orders", "returns", "orders-2024", *copies}
    finally:
        if "cluster" in shell:
            shell["cluster"].stop()
        for query in plain_spark.streams.active:
            query.stop()
        for table in plain_spark.catalog.listTables():
            if table not in before:
                plain_spark.sql(f"DROP {'VIEW' if table.isTemporary else 'TABLE'} IF EXISTS {table.name}")


def rows(spark: SparkSession, topic: str) -> list[tuple[Any, ...]]:
    frame = spark.read.format("sparklog").option("subscribe", topic).load()
    found = frame.drop("_topic", "_partition", "_offset", "_timestamp").collect()
    return sorted((tuple(row) for row in found), key=str)
