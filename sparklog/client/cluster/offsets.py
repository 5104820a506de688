"""Requests for the earliest or latest offset, or the offset of a time, with retries.

A new leader may not know its high watermark yet. Then the request is retried too.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, SupportsIndex, cast

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.client.cluster.leader_requests import ask_leaders
from sparklog.client.cluster.metadata import Leader
from sparklog.model import TopicPartition
from sparklog.protocol.messages import (
    EARLIEST,
    LATEST,
    ListedOffset,
    ListOffsets,
    ListOffsetsPartition,
    ListOffsetsReply,
)
from sparklog.record.exact_values import datetime_us

#: A position in a log: its beginning, its end, or a time (a datetime, or microseconds since the epoch).
OffsetQuery = Literal["earliest", "latest"] | dt.datetime | int

_HIGHEST_OFFSET = (1 << 63) - 1


def checked_offset(tp: TopicPartition, offset: object, *, expected: str = "an offset") -> int:
    """Check an offset of any integer type, and return it as an int.

    The error messages name the partition ``tp`` and, with ``expected``, the values that the caller accepts.

    Raises:
        TypeError: ``offset`` is neither an integer nor text.
        ValueError: ``offset`` is text, below 0, or has over 63 bits.
    """
    if isinstance(offset, str):
        raise ValueError(f"{tp}: {offset!r} found; expected {expected}")
    if isinstance(offset, bool) or not hasattr(offset, "__index__"):
        raise TypeError(f"{tp}: {offset!r} ({type(offset).__name__}) found; expected {expected}")
    found = operator.index(cast(SupportsIndex, offset))
    if found < 0:
        raise ValueError(f"{tp}: offset {found}: expected 0 or more")
    if found > _HIGHEST_OFFSET:
        raise ValueError(f"{tp}: offset {found}: expected at most {_HIGHEST_OFFSET}")
    return found


def list_offsets(
    cluster: BlockingCluster,
    queries: Mapping[TopicPartition, OffsetQuery],
    *,
    isolation: int = 0,
    known: Mapping[TopicPartition, int] | None = None,
    timeout_s: float | None = None,
) -> dict[TopicPartition, int]:
    """Return the offset of each query: the earliest or latest offset, or the offset of a time.

    For a time after the last record, return the latest offset.

    ``known`` has offsets that the caller has already seen in the logs. If a leader returns a lower latest offset, the
    other brokers must confirm that it is still the leader.

    Raises:
        BrokerError: UNKNOWN_TOPIC_OR_PARTITION.
        ClientTimeout: a leader did not respond in time.
    """
    known = known or {}
    times = {tp: wire_time(query) for tp, query in queries.items()}
    answers = _ask_all(cluster, times, isolation, known=known, timeout_s=timeout_s)
    past_the_end = [tp for tp, answer in answers.items() if answer.offset < 0]
    if past_the_end:
        times = dict.fromkeys(past_the_end, LATEST)
        answers |= _ask_all(cluster, times, isolation, known=known, timeout_s=timeout_s)
    return {tp: answers[tp].offset for tp in queries}


def listed_offsets(
    cluster: BlockingCluster,
    queries: Mapping[TopicPartition, OffsetQuery],
    *,
    isolation: int = 0,
    known: Mapping[TopicPartition, int] | None = None,
    timeout_s: float | None = None,
) -> dict[TopicPartition, ListedOffset]:
    """Return the leaders' results for the queries, with leader epochs.

    For a time after the last record, the offset is -1.

    For ``known`` and the errors see ``list_offsets``.
    """
    times = {tp: wire_time(query) for tp, query in queries.items()}
    return _ask_all(cluster, times, isolation, known=known or {}, timeout_s=timeout_s)


def wire_time(query: OffsetQuery) -> int:
    """Return the number that represents ``query`` in a ListOffsets request.

    A datetime without a time zone is in UTC.
    """
    if query == "earliest":
        return EARLIEST
    if query == "latest":
        return LATEST
    if isinstance(query, dt.datetime):
        query = datetime_us(query)
    if isinstance(query, bool) or not isinstance(query, int) or query < 0:
        raise ValueError(f"offset query {query!r}: expected 'earliest', 'latest', a datetime or microseconds >= 0")
    return query


def _ask_all(
    cluster: BlockingCluster,
    times: Mapping[TopicPartition, int],
    isolation: int,
    *,
    known: Mapping[TopicPartition, int],
    timeout_s: float | None,
) -> dict[TopicPartition, ListedOffset]:
    def ask(broker_id: int, leaders: Mapping[TopicPartition, Leader]) -> Sequence[ListedOffset]:
        wanted = [ListOffsetsPartition(tp.topic, tp.partition, times[tp], leaders[tp].epoch) for tp in leaders]
        return cluster.ask_broker(broker_id, ListOffsets(0, isolation, tuple(wanted)), ListOffsetsReply).results

    def check(tp: TopicPartition, leader: Leader, result: ListedOffset) -> None:
        if times[tp] == LATEST and result.offset < known.get(tp, 0):
            cluster.confirm(tp, leader)

    return ask_leaders(cluster, "list offsets", times, ask, check=check, timeout_s=timeout_s)
