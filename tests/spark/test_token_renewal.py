"""Tests of when a task renews its token. Real renewals are in ``test_task_logins``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sparklog.errors import BrokerError, ErrorCode
from sparklog.net.client_security import ClientSecurity
from sparklog.net.password import Password
from sparklog.security.listeners import SecurityProtocol
from sparklog.spark import token_renewal
from sparklog.spark.token_renewal import TokenRenewal, renewing
from tests.waiting import wait_until

HOUR_MS = 3_600_000


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return a list in which a test puts what renewals return: the seconds until the next one. They take from it."""
    waits: list[float | None] = []
    monkeypatch.setattr(token_renewal._Renewer, "_renew", lambda renewer: waits.pop(0))
    monkeypatch.setattr(token_renewal, "_next_s_of", {})
    return waits


def security(token_id: str = "t1") -> ClientSecurity:
    password = Password("secret", transferable=True)
    return ClientSecurity(
        SecurityProtocol.SASL_SSL, mechanism="SCRAM-SHA-256", username=token_id, password=password, is_token=True
    )


def now_ms() -> int:
    return int(time.time() * 1000)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "renew the delegation token"]


def ended(condition: Callable[[], bool] = lambda: True) -> None:
    wait_until(lambda: condition() and not threads(), "the end of the renewals")


def test_a_due_token_is_renewed_even_if_the_task_ends_at_once(renewals: list[float | None]) -> None:
    renewals.append(1000.0)
    with renewing("b:1", security(), TokenRenewal(now_ms() - 1, HOUR_MS)):
        pass
    ended(lambda: not renewals)


def test_a_later_task_of_the_process_does_not_renew_it_again(renewals: list[float | None]) -> None:
    renewals.append(1000.0)
    for _ in range(3):
        with renewing("b:1", security(), TokenRenewal(now_ms() - 1, HOUR_MS)):
            wait_until(lambda: not renewals, "the first renewal")
        ended()
    renewals.append(1000.0)
    with renewing("b:1", security("another"), TokenRenewal(now_ms() - 1, HOUR_MS)):
        pass
    ended(lambda: not renewals)


def test_a_token_is_not_renewed_before_its_time(renewals: list[float | None]) -> None:
    with renewing("b:1", security(), TokenRenewal(now_ms() + HOUR_MS // 2, HOUR_MS)):
        assert len(threads()) == 1
    ended()


def test_a_clock_that_is_wrong_does_not_delay_the_renewal_for_long(renewals: list[float | None]) -> None:
    renewals += [0.01, 0.01, None]
    with renewing("b:1", security(), TokenRenewal(now_ms() + 100 * HOUR_MS, 20)):
        ended(lambda: not renewals)


def test_without_a_token_nothing_is_renewed(renewals: list[float | None]) -> None:
    for given in (None, security()):
        with renewing("b:1", given, None):
            assert not threads()


@pytest.mark.parametrize(
    ("code", "text"),
    [(ErrorCode.SASL_AUTHENTICATION_FAILED, "has expired or was ended"), (ErrorCode.OFFSET_OUT_OF_RANGE, "RANGE: no$")],
)
def test_only_the_error_of_a_login_gets_the_reason(renewals: list[float | None], code: ErrorCode, text: str) -> None:
    renewal = TokenRenewal(now_ms() + HOUR_MS, HOUR_MS)
    with pytest.raises(BrokerError, match=text) as caught, renewing("b:1", security(), renewal):
        raise BrokerError(code, "no")
    assert caught.value.code is code
    ended()
