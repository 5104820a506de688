"""A follower that waits at the log's end is answered the short way with what it would be answered the long way."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog.broker.open_fetch import OpenFetch
from sparklog.broker.partition import Partition
from sparklog.broker.state import BrokerState
from sparklog.model import NO_EPOCH
from sparklog.replica.fetch_session import SessionCache
from sparklog.replica.replica import Replica
from tests.broker.test_fetches import Line, ask, led, opened, produce

steps = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 3)),
        # how far behind the log's end the follower says it is, and for how long it would wait
        st.tuples(st.just("ask"), st.sampled_from([0, 0, 0, 1, 2])),
        st.tuples(st.just("ask at once"), st.sampled_from([0, 1])),
        st.tuples(st.just("turn"), st.just(0)),
        st.tuples(st.just("linger"), st.just(0)),
        st.tuples(st.just("start"), st.just(0)),
    ),
    min_size=2,
    max_size=14,
)


def _answers(script: list[tuple[str, int]], *, short: bool) -> list[object]:
    found: list[object] = []

    async def scenario(broker: BrokerState, partition: Partition) -> None:
        line = Line()
        session = opened(broker, line)
        cid = 1
        for kind, number in script:
            if kind == "produce":
                produce(partition, number)
            elif kind.startswith("ask"):
                cid += 1
                offset = max(partition.log.log_end_offset - number, partition.log.log_start_offset)
                wait_ms = 0 if kind == "ask at once" else 30_000
                ask(broker, line, cid, session=session, epoch=cid - 1, offset=offset, wait_ms=wait_ms)
            elif kind == "turn":
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif kind == "linger":
                await asyncio.sleep(0.03)
            elif kind == "start":
                partition.advance_log_start(partition.replica.high_watermark)
                broker.fetches.log_start_moved(partition)
            found.append(sorted((number, reply) for number, (reply, _) in line.answers.items()))
            sessions = broker.fetches._sessions._followers.values()
            found.append([(dict(one.told), list(one.due), one.epoch) for one in sessions])
        found.append((partition.log.log_end_offset, partition.replica.high_watermark, dict(broker.counters)))

    with tempfile.TemporaryDirectory() as path, _way(short=short):
        led(Path(path), scenario)
    return found


def _way(*, short: bool) -> Any:
    if short:
        return mock.patch.object(Replica, "append_epoch", Replica.append_epoch)
    ways = mock.patch.multiple(
        OpenFetch, _waits_at_end=lambda self, partition: False, _answers_alone=lambda self: False
    )
    return _Both(
        ways,
        mock.patch.object(SessionCache, "_gone_on", lambda *_: None),
        mock.patch.object(Replica, "append_epoch", lambda *_: NO_EPOCH),
    )


class _Both:
    def __init__(self, *patches: Any) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.__enter__()

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.__exit__(*error)


@settings(max_examples=30, deadline=None)
@example(script=[("produce", 1), ("ask", 0), ("produce", 1), ("turn", 0), ("ask", 0), ("linger", 0)])
@given(script=steps)
def test_the_short_ways_answer_what_the_long_ones_do(script: list[tuple[str, int]]) -> None:
    assert _answers(script, short=True) == _answers(script, short=False)
