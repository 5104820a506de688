"""The scope of a delegation token: the operations that the Spark tasks of one read or write may do with the token.

This module is pure. The planning of a read does not load the modules of writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparklog.protocol.token_messages import MAX_SCOPE

if TYPE_CHECKING:
    from sparklog.spark.write_plan import WritePlan

#: The entries of a scope, as ``Admin.create_delegation_token`` accepts them. Sorted, so that equal scopes are equal.
Scope = tuple["tuple[str, str, str, str]", ...]
_EVERY_TOPIC = "*"
_LITERAL, _PREFIXED = "Literal", "Prefixed"


def read_scope(topics: Iterable[str]) -> Scope:
    """Return the scope of a token for tasks that read these topics: the token permits only reads of the topics.

    If there are more than ``MAX_SCOPE`` topics, the token permits reads of all topics.
    """
    names = sorted(set(topics))
    return _on_topics("Read", names if len(names) <= MAX_SCOPE else [_EVERY_TOPIC])


def write_scope(plan: WritePlan, *, streaming: bool) -> Scope:
    """Return the scope of a token for the tasks and the commit of a write: the operations that the token permits.

    If rows name the topics, the scope includes all topics. The scope of an exactly-once write also has transactional
    ids. If the write is named (txnAppId, txnVersion) and an option names its topic, these are its own ids. The ids of
    other writes are not known in advance, so the scope has the prefix that all such ids have.
    """
    options = plan.options
    topics = [_EVERY_TOPIC if options.topic is None else options.topic]
    scope = [*_on_topics("Write", topics)]
    if options.new_topic is not None:
        scope += _on_topics("Create", topics)
    if options.merge_schema:
        scope += _on_topics("Alter", topics)
    if options.exactly_once:
        scope += [("Write", "TransactionalId", name, kind) for name, kind in _transactional_ids(plan, streaming)]
    return tuple(sorted(scope))


def _on_topics(operation: str, topics: Iterable[str]) -> Scope:
    return tuple((operation, "Topic", topic, _LITERAL) for topic in topics)


def _transactional_ids(plan: WritePlan, streaming: bool) -> list[tuple[str, str]]:
    """Return the transactional ids of a write, or a prefix of them, each with the type of the pattern."""
    from sparklog.spark.sink import BATCH_PREFIX, NAMED_PREFIX, STREAM_PREFIX, named_key

    options = plan.options
    if streaming:
        return [(STREAM_PREFIX, _PREFIXED)]
    if options.named is None:
        return [(BATCH_PREFIX, _PREFIXED)]
    if options.topic is None:
        return [(NAMED_PREFIX, _PREFIXED)]  # The ids have the ids of the topics.
    topic_id = plan.routes[options.topic].topic_id
    return [(named_key(options.named.app_id, found), _LITERAL) for found in (topic_id, "")]
