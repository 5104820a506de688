"""The class of ``format("sparklog")``, which Spark instantiates in a new process for each planning step.

The object keeps only its options, so every step queries the cluster again. No task runs this module. Each step imports
only the modules that it needs, because importing the rest takes longer than querying the cluster. The reader
deliberately has no ``pushFilters``: pyspark 4.2.0 shares one read function among all scans of a DataFrame, so rows that
one scan filters out would be missing from the other scans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
from sparklog.spark.gc_freeze import freeze_planner
from sparklog.spark.options import check_stored, without_security


class SparklogSource(DataSource):
    """The data source that reads and writes topics, as batches and streams.

    ``sparklog.configure`` creates subclasses with other ``defaults``.
    """

    #: The options, by canonical name, that apply if a query does not set them.
    defaults: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        #: Whether this process plans a read, and pickles this object only for the tasks.
        self._is_planned = False
        freeze_planner()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the next planning process, or for tasks, which get no options for TLS and login."""
        if not self._is_planned:
            return self.__dict__
        return {**self.__dict__, "options": without_security(self.options)}

    @classmethod
    def name(cls) -> str:
        return "sparklog"

    def schema(self) -> StructType:
        """Return the columns of the topics. Spark does not call this for a write, or if the user gives a schema."""
        from sparklog.spark.read_options import parse_schema_options
        from sparklog.spark.topics import SourceTopic

        options = parse_schema_options(self.options, self.defaults)
        if is_creation(self.options):
            check_stored(options.security)
        with SourceTopic(options.bootstrap, options.security) as view:
            selected = view.select(options.selection)
        columns = selected.columns(
            include_headers=options.include_headers, include_cast_errors=options.include_cast_errors
        )
        return table_columns(columns, self.options) if is_creation(self.options) else columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader of the columns in ``schema``: all columns, or those that the user selected."""
        from sparklog.spark.read_options import parse_read_options
        from sparklog.spark.reader import BatchReader, plan_read
        from sparklog.spark.topics import SourceTopic

        options = parse_read_options(read_options_of(self.options, schema), self.defaults)
        self._is_planned = True
        with SourceTopic(options.bootstrap, options.security) as view:
            return BatchReader(plan_read(view, options, schema=schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - pyspark's name
        """Return a reader for a stream.

        Spark calls this method for each run of a query and again for its tasks, so the method does not query the
        cluster.
        """
        from sparklog.spark.read_options import parse_read_options
        from sparklog.spark.stream import StreamReader

        options = parse_read_options(read_options_of(self.options, schema), self.defaults, streaming=True)
        self._is_planned = True
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a batch writer for rows of ``schema``, which is checked against the topic before any task starts."""
        from sparklog.spark.task_login import TaskLogin
        from sparklog.spark.task_scope import write_scope
        from sparklog.spark.write_options import parse_write_options
        from sparklog.spark.write_plan import plan_write
        from sparklog.spark.writer import BatchWriter

        if overwrite:
            raise ConfigError(
                'topics only support .mode("append"); to overwrite a topic, delete it and create it again'
            )
        options = parse_write_options(write_options_of(self.options, schema), self.defaults)
        plan = plan_write(options, schema=schema, now=True)
        # The plan, which tasks get, has a token instead of the password.
        login = TaskLogin(options.bootstrap, options.security, lifetime_ms=options.token_lifetime_ms)
        return BatchWriter(plan.with_login(login.of(write_scope(plan, streaming=False))))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return a writer of one micro-batch.

        Spark calls this method three times per batch, so the method does not query the cluster. ``overwrite`` is set in
        output mode complete, in which each batch appends the whole result, as with the Kafka sink.
        """
        from sparklog.spark.write_options import parse_write_options
        from sparklog.spark.write_plan import plan_write
        from sparklog.spark.writer import StreamWriter

        options = parse_write_options(write_options_of(self.options, schema), self.defaults, streaming=True)
        return StreamWriter(plan_write(options, schema=schema, now=False))
