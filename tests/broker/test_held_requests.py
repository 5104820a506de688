"""Tests of requests that wait because of a quota and then fail, without a network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sized
from typing import Any, cast

from sparklog.broker.security.quota_manager import QuotaManager
from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.connection_slots import ConnectionStanding
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Fetch, Produce
from sparklog.security.connection_limits import ConnectionLimits
from sparklog.security.principals import ANONYMOUS
from sparklog.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, QuotaEntity, QuotaTable

#: The size of each request, far above the quotas.
SIZE = 1000


class Connection:
    """A client's connection as the quota manager sees it. It counts its pauses."""

    identity = None
    standing = ConnectionStanding.CLIENT
    principal = ANONYMOUS
    client_id = "app"
    peer = "peer"

    def __init__(self) -> None:
        self.closed = False
        self.pauses = 0

    def pause_requests(self) -> None:
        self.pauses += 1

    def resume_requests(self) -> None:
        self.pauses -= 1

    def close(self) -> None:
        self.closed = True


def after_the_wait(first_failed: Callable[[Exception], None]) -> tuple[Connection, list[str]]:
    """Let two requests of a Kafka connection wait, and fail when the wait ends. Return the connection and the answers.

    ``first_failed`` is called with the error of the first request.
    """
    answers: list[str] = []

    async def run() -> Connection:
        limits = ConnectionLimits(per_address=0, per_user=0, window_s=1)
        quotas = QuotaManager(Counter(), limits, window_s=1, queued_max_bytes=1 << 20)
        rates = {PRODUCER_BYTE_RATE: 1.0, CONSUMER_BYTE_RATE: 1.0, REQUEST_PERCENTAGE: 1e9}
        quotas.apply(QuotaTable({QuotaEntity(client_id="app"): rates}))

        def begin(of: Connection, kind: type, handle: Any, failed: Callable[[Exception], None]) -> None:
            request = Fetch(0, -1, -1, 0, 0, 1, 0, 0, 0, ()) if kind is Fetch else object()
            quotas.begin(cast(ServerConnection, of), kind, request, SIZE, handle, failed=failed)

        def nothing(connection: ServerConnection, request: object, size: Sized) -> None:
            """Succeed at once."""

        def refuse(connection: ServerConnection, request: object, size: Sized) -> None:
            raise BrokerError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "refused")

        debtor, waiting = Connection(), Connection()
        begin(debtor, Produce, nothing, lambda error: None)
        quotas._consumer_sent(cast(ServerConnection, debtor), SIZE)
        begin(waiting, Produce, refuse, first_failed)
        begin(waiting, Fetch, refuse, lambda error: answers.append(f"second: {error}"))
        assert (waiting.pauses, answers) == (1, []), "both wait"
        quotas.apply(QuotaTable())
        return waiting

    return asyncio.run(run()), answers


def test_held_requests_that_fail_are_answered_by_their_protocol() -> None:
    first: list[Exception] = []
    connection, answers = after_the_wait(first.append)
    assert [str(error) for error in first] and len(answers) == 1
    assert (connection.pauses, connection.closed) == (0, False)


def test_a_failed_answer_does_not_keep_others_from_theirs() -> None:
    def fail(error: Exception) -> None:
        raise AttributeError("no such field")

    connection, answers = after_the_wait(fail)
    assert len(answers) == 1
    assert connection.pauses == 0, "the connection continues"
    assert connection.closed, "its client waits for an answer that cannot come"
