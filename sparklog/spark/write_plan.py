"""The plan of a write: the columns, which the driver has checked, and the routes of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from sparklog.errors import ConfigError
from sparklog.spark.route import TopicRoute, find_topic_column
from sparklog.spark.sink import SinkRun, batch_run
from sparklog.spark.write_options import WriteOptions

if TYPE_CHECKING:
    from sparklog.spark.token_renewal import LoginOfTasks, TokenRenewal


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The part of a write that every task needs: its options, columns and routes. It is small and is pickled.

    If a topic has no route yet, the task plans the route when the first row for the topic appears.
    """

    options: WriteOptions
    columns: StructType
    routes: Mapping[str, TopicRoute]
    topic_column: str | None
    #: The time from which tasks renew the token in the options; None if tasks need not renew it.
    renewal: TokenRenewal | None = None

    def run(self, run_id: str) -> SinkRun:
        """Return the ``SinkRun`` of a batch write.

        If an option names the topic, ``plan_write`` must have looked up the topic (``now=True``).
        """
        topic = self.options.topic
        return batch_run(run_id, self.options.named, topic_id=self.routes[topic].topic_id if topic is not None else "")

    def with_login(self, login: LoginOfTasks) -> WritePlan:
        """Return the plan with this login instead of that of the options."""
        return replace(self, options=replace(self.options, security=login.security), renewal=login.renewal)


def plan_write(options: WriteOptions, *, schema: StructType, now: bool) -> WritePlan:
    """Check the columns of a DataFrame, and return the plan of the write.

    With ``now``, if an option names the topic, also check the columns against the topic.

    Raises:
        ConfigError: neither an option nor a column names the topic, or two columns have the same name.
        BrokerError: SCHEMA_MISMATCH with the columns that do not match, or UNKNOWN_TOPIC_OR_PARTITION.
    """
    names = schema.fieldNames()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"duplicate columns: {', '.join(twice)}")
    if options.topic is None:
        return WritePlan(options, schema, {}, find_topic_column(schema))
    if not now:
        return WritePlan(options, schema, {}, None)
    from sparklog.spark.topic_resolution import look_up_route

    return WritePlan(options, schema, {options.topic: look_up_route(options.topic, schema, options)}, None)
