"""Tests that a follower at the log's end gets the same responses on the fast path and on the general one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog.broker.replication.partition import Partition
from sparklog.broker.requests import open_fetch
from sparklog.broker.requests.open_fetch import OpenFetch
from sparklog.model import TopicPartition
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, FetchPartition
from sparklog.replica.fetch_session import FULL, SessionCache
from tests.broker.support import LocalReplicas
from tests.broker.test_fetches import INCARNATION, Line, led, produce

_FOLLOWERS = (0, 2)
_PARTITIONS = 2
_WAIT_MS = 30_000
#: A linger that no stalled machine reaches; see ``_Stage.linger``.
_LINGER_S = 5.0

asks = st.fixed_dictionaries(
    {
        "follower": st.sampled_from([0, 0, 0, 2]),
        #: the follower's distance from the log's end, by partition
        "lag": st.sampled_from([{0: 0}] * 6 + [{0: 1}, {0: 2}, {1: 0}, {1: 1}, {0: 0, 1: 0}, {0: 1, 1: 0}, {}]),
        # none, or less than the linger: never so short that it expires
        "wait_ms": st.sampled_from([_WAIT_MS] * 8 + [0, 2_000]),
        "min_bytes": st.sampled_from([1] * 6 + [700, 1 << 20]),
    }
)
steps = st.one_of(
    st.tuples(st.just("produce"), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("ask"), asks),
    st.tuples(st.just("ask"), asks),
    st.tuples(st.just("turn"), st.none()),
    st.tuples(st.just("linger"), st.none()),
    st.tuples(st.just("start"), st.sampled_from([0, 0, 1])),
)


class _Stage:
    """Two followers of two partitions, each with a session that has received everything."""

    def __init__(self, broker: LocalReplicas) -> None:
        self.broker = broker
        self.partitions = [broker.partitions.require(TopicPartition("t", one)) for one in range(_PARTITIONS)]
        self.lines = {follower: Line() for follower in _FOLLOWERS}
        self.sessions = dict.fromkeys(_FOLLOWERS, 0)
        self.asked = dict.fromkeys(_FOLLOWERS, 0)
        for follower, line in self.lines.items():
            self.ask(follower, dict.fromkeys(range(_PARTITIONS), 0), wait_ms=_WAIT_MS, min_bytes=1)
            self.sessions[follower] = line.answers[0][0].session_id

    def ask(self, follower: int, behind: dict[int, int], *, wait_ms: int, min_bytes: int) -> None:
        epoch = self.asked[follower]  # which is also the request's number
        assert epoch or self.sessions[follower] == FULL
        self.asked[follower] += 1
        named = []
        for number, records in behind.items():
            log = self.partitions[number].log
            offset = max(log.log_end_offset - records, log.log_start_offset)
            named.append(FetchPartition("t", number, "id", 1, offset, 1 << 20, 1 if offset else -1))
        request = Fetch(
            epoch,
            follower,
            INCARNATION,
            wait_ms,
            min_bytes,
            1 << 20,
            0,
            self.sessions[follower],
            epoch,
            tuple(named),
        )
        self.broker.fetches.handle(cast(ServerConnection, self.lines[follower]), request, memoryview(b""))

    def linger(self) -> None:
        """Advance the time so far that lingering fetches complete, and no others."""
        for fetch in list(self.broker.fetches._waiting.values()):
            if fetch.due_s <= time.monotonic() + _LINGER_S:
                fetch.complete()

    async def step(self, kind: str, what: Any) -> None:
        if kind == "produce":
            produce(self.partitions[what])
        elif kind == "ask":
            self.ask(what["follower"], what["lag"], wait_ms=what["wait_ms"], min_bytes=what["min_bytes"])
        elif kind == "turn":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        elif kind == "linger":
            self.linger()
        elif kind == "start":
            partition = self.partitions[what]
            partition.advance_log_start(partition.replica.high_watermark)
            self.broker.fetches.log_start_moved(partition)

    def state(self) -> object:
        sessions = self.broker.fetches._sessions._followers.values()
        return [
            [sorted((number, reply) for number, (reply, _) in line.answers.items()) for line in self.lines.values()],
            [(dict(one.reported), list(one.due), one.epoch) for one in sessions],
            [(one.log.log_start_offset, one.log.log_end_offset, one.replica.high_watermark) for one in self.partitions],
            dict(self.broker.context.counters),
        ]


def _answers(script: list[tuple[str, Any]], taken: Counter[str], *, short: bool) -> list[object]:
    found: list[object] = []

    async def scenario(broker: LocalReplicas, partition: Partition) -> None:
        stage = _Stage(broker)
        for kind, what in script:
            await stage.step(kind, what)
            found.append(stage.state())

    with tempfile.TemporaryDirectory() as path, ExitStack() as patched:
        patched.enter_context(mock.patch.object(open_fetch, "_MARK_LINGER_S", _LINGER_S))
        for owner, name, no in _WAYS:
            way = _counted(getattr(owner, name), name, no, taken) if short else lambda *_, no=no: no
            patched.enter_context(mock.patch.object(owner, name, way))
        led(Path(path), scenario, replicas=(0, 1, 2), count=_PARTITIONS)
    return found


#: The fast paths, and their answer when they do not apply.
_WAYS: list[tuple[type, str, Any]] = [
    (OpenFetch, "park_at_end", False),
    (OpenFetch, "_reply_single_partition", False),
    (SessionCache, "_continued", None),
]


def _counted(real: Any, name: str, no: Any, taken: Counter[str]) -> Any:
    def way(*asked: Any) -> Any:
        answer = real(*asked)
        taken[name] += answer != no
        return answer

    return way


def _ask(
    behind: dict[int, int] | None = None, *, follower: int = 0, wait_ms: int = _WAIT_MS, min_bytes: int = 1
) -> tuple[str, Any]:
    behind = {0: 0} if behind is None else behind
    return ("ask", {"follower": follower, "lag": behind, "wait_ms": wait_ms, "min_bytes": min_bytes})


_TURN, _LINGER = ("turn", None), ("linger", None)
#: A record that is fetched and committed. No fetch waits afterwards.
_COMMITTED = [
    ("produce", 0), _ask({0: 1}), _ask({0: 1}, follower=2), _ask(), _ask(follower=2), _LINGER
]  # fmt: skip


def test_the_fast_paths_equal_the_general_one() -> None:
    taken: Counter[str] = Counter()

    @settings(max_examples=40, deadline=None)
    @example([*_COMMITTED, *[_ask(), ("produce", 0), _TURN] * 4, _ask(), _LINGER])
    # The new high watermark comes with records.
    @example(
        [*_COMMITTED, _ask(), ("produce", 0), _TURN, _ask(), _ask(follower=2), ("produce", 0), _TURN, _ask(), _LINGER]
    )
    # The other partition is due: it changed while no fetch waited, or while one did.
    @example([*_COMMITTED, ("produce", 1), _ask(), _TURN, _LINGER, _ask(), _TURN])
    @example([*_COMMITTED, _ask(), ("produce", 1), ("produce", 0), _TURN, _ask(), _TURN, _LINGER])
    # The records are smaller than the requested bytes.
    @example([*_COMMITTED, _ask(min_bytes=1 << 20), ("produce", 0), _TURN, _LINGER])
    # Only the log start has changed, while no fetch waited or one did.
    @example([*_COMMITTED, ("start", 0), _TURN, _ask(), _LINGER])
    @example([*_COMMITTED, _ask(), ("start", 0), _TURN, _LINGER])
    @given(st.lists(steps, min_size=4, max_size=20))
    def same(script: list[tuple[str, Any]]) -> None:
        assert _answers(script, taken, short=True) == _answers(script, Counter(), short=False)

    same()
    assert all(taken[name] >= 4 for _, name, _ in _WAYS), taken
