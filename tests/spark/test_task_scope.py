"""Tests of the scopes of tasks' tokens: what the tasks of a read or a write may do, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql.types import StructType

from sparklog.protocol.token_messages import ScopeEntry
from sparklog.security.delegation_tokens import checked_scope
from sparklog.spark.route import TopicRoute
from sparklog.spark.sink import batch_run
from sparklog.spark.task_scope import Scope, read_scope, write_scope
from sparklog.spark.write_options import NamedWrite, NewTopic, WriteOptions
from sparklog.spark.write_plan import WritePlan

OPTIONS = WriteOptions("b:1", "orders", None)
WRITE = ("Write", "Topic", "orders", "Literal")


def plan(**more: object) -> WritePlan:
    options = replace(OPTIONS, **more)  # type: ignore[arg-type]
    routes = {} if options.topic is None else {options.topic: TopicRoute("orders", (), None, "id-of-orders")}
    return WritePlan(options, StructType(), routes, None if options.topic else "topic")


def valid(scope: Scope) -> Scope:
    """Check that brokers accept the scope."""
    checked_scope(ScopeEntry(*entry) for entry in scope)
    return scope


def test_the_scope_of_a_read_has_its_topics() -> None:
    assert valid(read_scope(["b", "a", "b"])) == (("Read", "Topic", "a", "Literal"), ("Read", "Topic", "b", "Literal"))
    assert read_scope(f"t{number}" for number in range(1001)) == (("Read", "Topic", "*", "Literal"),)


def test_the_scope_of_a_write_has_its_topic_and_transactions() -> None:
    assert valid(write_scope(plan(), streaming=False)) == (WRITE, ("Write", "TransactionalId", "write:", "Prefixed"))
    assert valid(write_scope(plan(), streaming=True)) == (WRITE, ("Write", "TransactionalId", "query:", "Prefixed"))
    assert write_scope(plan(exactly_once=False), streaming=False) == (WRITE,)


def test_a_write_changes_topics_only_if_its_options_say_so() -> None:
    scope = valid(write_scope(plan(exactly_once=False, merge_schema=True, new_topic=NewTopic(1, 1)), streaming=True))
    assert scope == (("Alter", "Topic", "orders", "Literal"), ("Create", "Topic", "orders", "Literal"), WRITE)


def test_a_named_write_has_its_own_transactions_only() -> None:
    named = NamedWrite("job", 3)
    scope = valid(write_scope(plan(named=named), streaming=False))
    key = batch_run("run", named, topic_id="id-of-orders").key
    assert set(scope) == {WRITE, *(("Write", "TransactionalId", name, "Literal") for name in (key, "app::job"))}


def test_rows_that_name_topics_write_to_all_topics() -> None:
    every = ("Write", "Topic", "*", "Literal")
    assert write_scope(plan(topic=None, exactly_once=False), streaming=False) == (every,)
    named = write_scope(plan(topic=None, named=NamedWrite("job", 3)), streaming=False)
    assert named == (every, ("Write", "TransactionalId", "app:", "Prefixed"))
