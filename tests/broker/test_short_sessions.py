"""A fetch session that goes on with one partition, the short way, ends as any."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.errors import BrokerError
from sparklog.protocol.messages import CONSUMER, Fetch, FetchedPartition, FetchPartition
from sparklog.replica.fetch_session import SessionCache

session_steps = st.lists(
    st.fixed_dictionaries(
        {
            "replica": st.sampled_from([CONSUMER, 2, 2, 2, 3]),
            "incarnation": st.sampled_from([1, 1, 1, 2]),
            "session": st.sampled_from([0, 1, 1, 1, 2, 2, 3]),
            "ahead": st.sampled_from([0, 0, 0, 0, 1, "full", "sessionless"]),
            "partitions": st.lists(st.integers(0, 2), min_size=0, max_size=2),
            "epoch": st.sampled_from([1, 1, 1, 2]),
            "forgotten": st.sampled_from([(), (), (), (("t", 0),)]),
            "line": st.sampled_from(["a", "a", "a", "b"]),
            "wake": st.sampled_from([None, 0, 1]),
            "batches": st.integers(0, 1),
        }
    ),
    min_size=3,
    max_size=25,
)


def _served(steps: list[dict[str, Any]], *, short: bool) -> list[object]:
    cache = SessionCache(slots=3, max_partitions=4)
    epochs: dict[int, int] = {}
    seen: list[object] = []
    real = SessionCache._gone_on

    def gone_on(self: SessionCache, fetch: Fetch, now_ms: int, line: object) -> Any:
        return real(self, fetch, now_ms, line) if short else None

    with mock.patch.object(SessionCache, "_gone_on", gone_on):
        for number, step in enumerate(steps):
            seen.append(_one(cache, epochs, step, number))
    return seen


def _one(cache: SessionCache, epochs: dict[int, int], step: dict[str, Any], number: int) -> object:
    session_id, ahead = step["session"], step["ahead"]
    epoch = {"full": 0, "sessionless": -1}.get(ahead)
    if epoch is None:
        epoch = epochs.get(session_id, 0) + ahead
    named = tuple(FetchPartition("t", one, "id", step["epoch"], number, 100) for one in step["partitions"])
    request = Fetch(
        number, step["replica"], step["incarnation"], 5, 1, 99, 0, session_id, epoch, named, step["forgotten"]
    )
    if step["wake"] is not None:
        cache.wake(("t", step["wake"]))
    try:
        context = cache.begin(request, number, line=step["line"])
    except BrokerError as error:
        return str(error)
    due = context.due()
    results = [
        FetchedPartition(key[0], key[1], 0, number, number, 0, number, batch_count=step["batches"]) for key in due
    ]
    reply = context.reply(results, number)
    session = context.session
    if session is None:
        return [list(due.items()), reply]
    epochs[session.session_id] = session.epoch
    state = [getattr(session, name) for name in session.__slots__ if name != "due"]
    return [list(due.items()), reply, state, list(session.due), len(cache), cache._partitions, list(cache._followers)]


@settings(max_examples=200, deadline=None)
@given(steps=session_steps)
def test_a_session_that_goes_on_with_one_partition_is_as_any(steps: list[dict[str, Any]]) -> None:
    assert _served(steps, short=True) == _served(steps, short=False)
