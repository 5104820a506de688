"""Tests that a fetch session with one partition on the fast path ends like any other.

They are here, and not beside the tests of ``replica``, because those also run compiled, where no path can be removed.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.protocol.messages import CONSUMER, Fetch, FetchedPartition, FetchPartition
from sparklog.replica.fetch_session import FULL, SESSIONLESS, FetchSession, SessionCache

_PARTITIONS = st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)
#: Values of a request that a session does not continue with.
_ODD: list[dict[str, Any]] = [
    {"line": "elsewhere"},
    {"ahead": 1},
    {"incarnation": 2},
    {"replica": 4},
    {"forgotten": (("t", 0),)},
    {"forgotten": (("t", 1),)},
    {"partitions": []},
    {"partitions": [0, 1]},
    {"leader_epoch": 2},
    {"topic_id": "other"},
    {"session_epoch": FULL},
    {"session_epoch": SESSIONLESS},
    {"session": 9},
]
steps = st.one_of(
    st.fixed_dictionaries(
        {"open": st.just(True), "replica": st.sampled_from([CONSUMER, CONSUMER, 2, 3]), "partitions": _PARTITIONS}
    ),
    *[
        st.fixed_dictionaries(
            {
                "session": st.integers(0, 3),
                "partition": st.integers(0, 1),
                "odd": st.sampled_from([{}] * 20 + _ODD),
                "wake": st.sampled_from([None, 0, 1]),
                "batches": st.integers(0, 1),
            }
        )
    ]
    * 4,
)


class _Cache:
    """Sessions, and one request after the other. Each continues its session as expected, with one of its partitions,
    except for its ``odd`` part."""

    def __init__(self, *, short: bool) -> None:
        self.taken = 0
        self._short = short
        self._cache = SessionCache(slots=3, max_partitions=5, keep_ms=8)
        #: the last response of each session; some sessions are closed by now
        self._known: dict[int, Fetch] = {}
        #: connections by name
        self._lines: dict[str, object] = {}

    def run(self, steps: list[dict[str, Any]]) -> list[object]:
        with mock.patch.object(SessionCache, "_continued", self._gone_on()):
            return [self._step(number, step) for number, step in enumerate(steps)]

    def _gone_on(self, real: Any = SessionCache._continued) -> Any:
        def gone_on(cache: SessionCache, fetch: Fetch, now_ms: int, line: object) -> Any:
            session = real(cache, fetch, now_ms, line) if self._short else None
            self.taken += session is not None
            return session

        return gone_on

    def _step(self, number: int, step: dict[str, Any]) -> object:
        if "open" in step:
            return self._ask(number, step["replica"], session=0, session_epoch=FULL, partitions=step["partitions"])
        if step["wake"] is not None:
            self._cache.wake(("t", step["wake"]))
        if not self._known:
            return None
        session_id = sorted(self._known)[-1 - step["session"] % len(self._known)]
        last, odd = self._known[session_id], dict(step["odd"])
        has = [one.partition for one in last.partitions]
        return self._ask(
            number,
            odd.pop("replica", last.replica_id),
            **{
                "session": session_id,
                "session_epoch": last.session_epoch + 1 + odd.pop("ahead", 0),
                "partitions": [has[step["partition"] % len(has)]],
                "batches": step["batches"],
                **odd,
            },
        )

    def _ask(
        self,
        number: int,
        replica: int,
        *,
        session: int,
        session_epoch: int,
        partitions: list[int],
        incarnation: int = 1,
        leader_epoch: int = 1,
        topic_id: str = "id",
        forgotten: tuple[tuple[str, int], ...] = (),
        line: str = "line",
        batches: int = 0,
    ) -> object:
        named = tuple(FetchPartition("t", one, topic_id, leader_epoch, number, 100) for one in partitions)
        request = Fetch(number, replica, incarnation, 5, 1, 99, 0, session, session_epoch, named, forgotten)
        cache = self._cache
        try:
            context = cache.begin(request, number, connection=self._lines.setdefault(line, object()))
        except BrokerError as error:
            return [str(error), self._state()]
        due = context.due()
        mark = number // 8
        results = [FetchedPartition(key[0], key[1], 0, mark, mark, 0, mark, batch_count=batches) for key in due]
        reply = context.reply(results, number)
        if context.session is not None and (named or session_epoch == FULL):
            self._known[context.session.session_id] = request
        return [list(due.items()), reply, self._state()]

    def _state(self) -> object:
        cache = self._cache
        sessions = [*cache._followers.values(), *cache._consumers.values()]
        names = {line: name for name, line in self._lines.items()}
        seen = [name for name in FetchSession.__slots__ if name not in {"due", "connection"}]
        return [
            [[getattr(one, name) for name in seen] + [list(one.due), names.get(one.connection)] for one in sessions],
            (list(cache._followers), list(cache._consumers), cache._partitions),
            {key: list(found) for key, found in cache.holders.items()},
            {names[line]: list(found) for line, found in cache._by_connection.items()},
        ]


def _open(replica: int, *partitions: int) -> dict[str, Any]:
    return {"open": True, "replica": replica, "partitions": list(partitions)}


def _on(session: int, odd: dict[str, Any] | None = None, *, batches: int = 0, wake: int | None = None) -> Any:
    """Choose a session: 0 is the last one opened."""
    return {"session": session, "partition": 0, "odd": odd or {}, "wake": wake, "batches": batches}


def test_a_session_continued_with_one_partition_equals_any_other() -> None:
    taken = 0

    @settings(max_examples=200, deadline=None)
    @example([_open(CONSUMER, 0), _open(CONSUMER, 1), _open(2, 0), _on(2), _open(3, 0), _on(0)])
    @example([_open(2, 0), _on(0), _on(0, {"line": "elsewhere"}), _on(0), _on(0, batches=1)])
    @example([_open(2, 0), _on(0, {"incarnation": 2}), _on(0, {"leader_epoch": 2}), _on(0)])
    @example([_open(2, 0), _on(0, {"replica": 4}), _on(0, {"topic_id": "other"})])
    @given(st.lists(steps, min_size=6, max_size=30))
    def same(script: list[dict[str, Any]]) -> None:
        nonlocal taken
        short, long = _Cache(short=True), _Cache(short=False)
        assert short.run(script) == long.run(script)
        assert not long.taken
        taken += short.taken

    same()
    assert taken > 150, taken


def test_repeated_requests_for_one_partition_take_the_fast_path() -> None:
    cache = _Cache(short=True)
    cache.run([_open(2, 0, 1), _on(0), _on(0, batches=1), _on(0, wake=1), _open(CONSUMER, 2), _on(0), _on(1)])
    assert cache.taken == 5
