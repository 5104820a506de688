"""A follower that waits at the log's end is answered the short way with what it would be answered the long way."""

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
from sparklog.net.server import ServerConnection
from sparklog.protocol.messages import Fetch, FetchPartition
from sparklog.replica.fetch_session import FULL, SessionCache
from tests.broker.support import LocalReplicas
from tests.broker.test_fetches import INCARNATION, Line, led, produce

_FOLLOWERS = (0, 2)
_PARTITIONS = 2
_WAIT_MS = 30_000
#: A linger that no stalled machine reaches by itself; see ``_Stage.linger``.
_LINGER_S = 5.0

asks = st.fixed_dictionaries(
    {
        "follower": st.sampled_from([0, 0, 0, 2]),
        #: how far behind the log's end it says it is, by partition that it names
        "behind": st.sampled_from([{0: 0}] * 6 + [{0: 1}, {0: 2}, {1: 0}, {1: 1}, {0: 0, 1: 0}, {0: 1, 1: 0}, {}]),
        # none at all, or less than the linger: never so short that it ends by itself
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
    """Two followers of two partitions, each with a session that was told all there is."""

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
        epoch = self.asked[follower]  # which is the request's number as well
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
        """As if so much time had passed that whoever lingers is answered, and nobody else."""
        for fetch in list(self.broker.fetches._waiting.values()):
            if fetch.due_s <= time.monotonic() + _LINGER_S:
                fetch.complete()

    async def step(self, kind: str, what: Any) -> None:
        if kind == "produce":
            produce(self.partitions[what])
        elif kind == "ask":
            self.ask(what["follower"], what["behind"], wait_ms=what["wait_ms"], min_bytes=what["min_bytes"])
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


#: The short ways, and what each says where it is not to be gone.
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
    return ("ask", {"follower": follower, "behind": behind, "wait_ms": wait_ms, "min_bytes": min_bytes})


_TURN, _LINGER = ("turn", None), ("linger", None)
#: A record, fetched and told to be committed. Nobody waits after that.
_COMMITTED = [
    ("produce", 0), _ask({0: 1}), _ask({0: 1}, follower=2), _ask(), _ask(follower=2), _LINGER
]  # fmt: skip


def test_the_fast_paths_answer_as_the_general_ones_do() -> None:
    taken: Counter[str] = Counter()

    @settings(max_examples=40, deadline=None)
    @example([*_COMMITTED, *[_ask(), ("produce", 0), _TURN] * 4, _ask(), _LINGER])
    # The news of what is committed comes with records.
    @example(
        [*_COMMITTED, _ask(), ("produce", 0), _TURN, _ask(), _ask(follower=2), ("produce", 0), _TURN, _ask(), _LINGER]
    )
    # The other partition is due: it came while nobody waited, or while somebody did.
    @example([*_COMMITTED, ("produce", 1), _ask(), _TURN, _LINGER, _ask(), _TURN])
    @example([*_COMMITTED, _ask(), ("produce", 1), ("produce", 0), _TURN, _ask(), _TURN, _LINGER])
    # Records are fewer bytes than are asked for.
    @example([*_COMMITTED, _ask(min_bytes=1 << 20), ("produce", 0), _TURN, _LINGER])
    # The log's start has moved and nothing else, while nobody waited or somebody did.
    @example([*_COMMITTED, ("start", 0), _TURN, _ask(), _LINGER])
    @example([*_COMMITTED, _ask(), ("start", 0), _TURN, _LINGER])
    @given(st.lists(steps, min_size=4, max_size=20))
    def same(script: list[tuple[str, Any]]) -> None:
        assert _answers(script, taken, short=True) == _answers(script, Counter(), short=False)

    same()
    assert all(taken[name] >= 4 for _, name, _ in _WAYS), taken
