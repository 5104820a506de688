"""Tests of the quota for the time of requests that are handled in slices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparklog.broker.requests.slices import Slices, Steps
from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.model import Principal
from sparklog.net.connection_slots import ConnectionStanding
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Metadata, Request
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.quotas import REQUEST_PERCENTAGE, QuotaEntity, QuotaTable

#: The time that each slice takes at least.
SLICE_S = 0.02
#: A percentage with which a slice costs a wait of minutes.
PERCENT = 0.01


class Connection(ServerConnection):
    """A connection that keeps the throttle time of its replies instead of sending them."""

    def __init__(self) -> None:
        self.closed = False
        self.throttle_ms = None
        self.principal = Principal("User", "anna")
        self.waits_ms: list[int] = []
        self.pauses = 0
        self.replied = asyncio.Event()

    client_id = "app"
    identity = None
    standing = ConnectionStanding.CLIENT

    def pause_requests(self) -> None:
        self.pauses += 1

    def resume_requests(self) -> None:
        self.pauses -= 1

    def reply(self, *_: object) -> None:
        self.waits_ms.append(self.throttle_ms() if self.throttle_ms is not None else 0)
        self.replied.set()


def busy() -> None:
    until_s = time.monotonic() + SLICE_S
    while time.monotonic() < until_s:
        pass


@pytest.mark.parametrize("slices_before", [0, 1, 2])
def test_a_reply_has_the_time_of_its_last_slice(slices_before: int) -> None:
    connection = Connection()
    charged: list[float] = []
    failures: list[Exception] = []

    def steps() -> Steps:
        for _ in range(slices_before):
            busy()
            yield None
        busy()
        connection.reply()

    async def run() -> None:
        slices, limits = Slices(), ConnectionLimits(per_address=0, per_user=0, window_s=1)
        quotas = QuotaManager(Counter(), limits, window_s=1, queued_max_bytes=1 << 20)

        def handle(of: Any, request: Request, body: memoryview) -> None:
            slices.run(of, steps(), failures.append)

        fetching = SimpleNamespace(consumer_sent=None, time_used=None)
        handlers = quotas.limited({Metadata: handle}, cast(Any, fetching), slices)
        quotas.apply(QuotaTable({QuotaEntity(client_id="app"): {REQUEST_PERCENTAGE: PERCENT}}))
        charge_time = quotas._charge_time

        def noted(of: ServerConnection, client: Any, took_s: float) -> None:
            charged.append(took_s)
            charge_time(of, client, took_s)

        quotas._charge_time = noted  # type: ignore[method-assign,assignment]
        handlers[Metadata](connection, Metadata(0), memoryview(b""))
        await connection.replied.wait()
        await asyncio.sleep(0)  # the slice that has replied ends

    began_s = time.monotonic()
    asyncio.run(run())
    took_s = time.monotonic() - began_s
    worked_s = (slices_before + 1) * SLICE_S
    # The bucket saves the time of one second of the quota, which is almost nothing.
    assert connection.waits_ms[0] / 1000 > (worked_s - 0.001) / (PERCENT / 100) - took_s
    assert not failures
    assert worked_s <= sum(charged) <= took_s, "no time counts twice"
