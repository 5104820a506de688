"""``format("sparklog")``: the class Spark makes, in processes of its own, once for each planning step.

It keeps nothing but its options; every step asks the cluster again. Nothing here runs in a task. Each step imports what
it needs, for a process that does little else takes longer to import the rest than to ask the cluster.
There is no ``pushFilters``, on purpose: pyspark 4.2.0 shares one read function among all scans of a DataFrame, so
rows that one use of it filters out would be missing from every other use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from sparklog.errors import ConfigError
from sparklog.spark.catalog import is_creation, read_options_of, table_columns, write_options_of
from sparklog.spark.gc_freeze import rest_beside_tasks


class SparklogSource(DataSource):
    """Reads and writes of topics, as batches and streams. ``sparklog.configure`` makes subclasses with other
    ``defaults``."""

    #: Options by canonical name, for where a query gives none.
    defaults: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        rest_beside_tasks()

    @classmethod
    def name(cls) -> str:
        return "sparklog"

    def schema(self) -> StructType:
        """The columns of the topics read; not asked for when the user gave a schema, or for a write."""
        from sparklog.spark.read_options import parse_schema_options
        from sparklog.spark.topics import TopicView

        options = parse_schema_options(self.options, self.defaults)
        with TopicView(options.bootstrap) as view:
            selected = view.select(options.selection)
        columns = selected.columns(
            include_headers=options.include_headers, include_cast_errors=options.include_cast_errors
        )
        return table_columns(columns, self.options) if is_creation(self.options) else columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns in ``schema``: all of them, or the user's choice."""
        from sparklog.spark.read_options import parse_read_options
        from sparklog.spark.reader import BatchReader, plan_read
        from sparklog.spark.topics import TopicView

        options = parse_read_options(read_options_of(self.options, schema), self.defaults)
        with TopicView(options.bootstrap) as view:
            return BatchReader(plan_read(view, options, schema=schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - pyspark's name
        """As ``reader``, for a stream; made for each planning run and again for tasks, so it asks nobody here."""
        from sparklog.spark.read_options import parse_read_options
        from sparklog.spark.stream import StreamReader

        options = parse_read_options(read_options_of(self.options, schema), self.defaults, streaming=True)
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer that appends rows of ``schema``, which is checked against the topic here, before any task."""
        from sparklog.spark.write_options import parse_write_options
        from sparklog.spark.write_plan import plan_write
        from sparklog.spark.writer import BatchWriter

        if overwrite:
            raise ConfigError(
                'a log only grows: write with .mode("append"); to start anew, delete the topic and create it again'
            )
        options = parse_write_options(write_options_of(self.options, schema), self.defaults)
        return BatchWriter(plan_write(options, schema=schema, now=True))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A writer of one micro-batch, made three times for each, so it asks nobody here. ``overwrite`` is what Spark
        says for output mode complete: the whole result is appended each time, as the Kafka sink does."""
        from sparklog.spark.write_options import parse_write_options
        from sparklog.spark.write_plan import plan_write
        from sparklog.spark.writer import StreamWriter

        options = parse_write_options(write_options_of(self.options, schema), self.defaults, streaming=True)
        return StreamWriter(plan_write(options, schema=schema, now=False))
