"""Tests of the messages of OAUTHBEARER: those of the RFC, refusals, and hostile bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.oauthbearer import MAX_TOKEN, OAuthBearerClient, OAuthBearerServer, ValidToken
from sparklog.protocol.sasl import ServerStep

#: Source: RFC 7628, section 4.1, without the address.
TOKEN = "vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg=="
ANNA = ValidToken(Principal(USER, "anna"), 7000)


def validate(token: str) -> ValidToken:
    if token != TOKEN:
        raise BrokerError(ErrorCode.SASL_AUTHENTICATION_FAILED, "the token is not valid: expired")
    return ANNA


def refused(call: Any, *arguments: Any) -> BrokerError:
    with pytest.raises(BrokerError) as error:
        call(*arguments)
    assert error.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED
    return error.value


def test_a_valid_token_logs_in() -> None:
    client, server = OAuthBearerClient(TOKEN), OAuthBearerServer(validate)
    assert client.first() == f"n,,\x01auth=Bearer {TOKEN}\x01\x01".encode()
    step = server.step(client.first())
    assert step == ServerStep(b"", ANNA.principal, 7000)
    assert not client.complete
    assert client.step(step.data) == b"" and client.complete
    for ended in (client, server):
        with pytest.raises(BrokerError) as error:
            ended.step(b"")
        assert error.value.code is ErrorCode.ILLEGAL_SASL_STATE


def test_a_refused_token_fails_after_the_clients_acknowledgement() -> None:
    client, server = OAuthBearerClient("another"), OAuthBearerServer(validate)
    step = server.step(client.first())
    assert step == ServerStep(b'{"status":"invalid_token"}')
    assert client.step(step.data) == b"\x01" and not client.complete
    assert "expired" in str(refused(server.step, b"\x01"))
    assert "invalid_token" in str(refused(client.step, b""))
    assert not client.complete


@pytest.mark.parametrize("second", [b"", b"\x01", f"n,,\x01auth=Bearer {TOKEN}\x01\x01".encode()])
def test_nothing_follows_a_refusal_but_the_failure(second: bytes) -> None:
    server = OAuthBearerServer(validate)
    server.step(OAuthBearerClient("another").first())
    refused(server.step, second)


@pytest.mark.parametrize("header", ["n,,", "y,,", "n,a=anna,"])
@pytest.mark.parametrize(
    "pairs", ["auth=bearer {}", "auth=Bearer  {}", "host=example.com\x01port=9092\x01auth=Bearer {}"]
)
def test_other_spellings_are_understood(header: str, pairs: str) -> None:
    message = f"{header}\x01{pairs.format(TOKEN)}\x01\x01"
    assert OAuthBearerServer(validate).step(message.encode()).principal == ANNA.principal


def test_another_authorization_id_is_refused() -> None:
    server = OAuthBearerServer(validate)
    assert server.step(f"n,a=otto,\x01auth=Bearer {TOKEN}\x01\x01".encode()).principal is None
    refused(server.step, b"\x01")


@pytest.mark.parametrize(
    "message",
    [
        "",
        "n,,",
        "n,,\x01\x01",
        f"\x01auth=Bearer {TOKEN}\x01\x01",
        f"p=tls-unique,,\x01auth=Bearer {TOKEN}\x01\x01",
        f"n,b=anna,\x01auth=Bearer {TOKEN}\x01\x01",
        f"n,,n=x\x01auth=Bearer {TOKEN}\x01\x01",
        f"n,,\x01auth=Bearer {TOKEN}\x01",
        f"n,,\x01auth=Bearer {TOKEN}",
        f"n,,\x01auth=Bearer {TOKEN}\x01\x01x",
        f"n,,\x01auth=Basic {TOKEN}\x01\x01",
        f"n,,\x01auth={TOKEN}\x01\x01",
        "n,,\x01auth=Bearer \x01\x01",
        "n,,\x01auth=Bearer a b\x01\x01",
        f"n,,\x01auth=Bearer {TOKEN}\x01auth=Bearer {TOKEN}\x01\x01",
        f"n,,\x01au-th=x\x01auth=Bearer {TOKEN}\x01\x01",
        f"n,,\x01{'k=v' + chr(1)}auth\x01\x01",
        "n,,\x01" + "".join(f"k{'x' * n}=v\x01" for n in range(40)) + "\x01",
        f"n,,\x01auth=Bearer {'x' * 40_000}\x01\x01",
    ],
)
def test_a_malformed_message_is_refused_at_once(message: str) -> None:
    refused(OAuthBearerServer(validate).step, message.encode())


@given(st.binary(max_size=100) | st.binary(max_size=50).map(lambda data: b"n,,\x01auth=Bearer " + data + b"\x01\x01"))
def test_any_bytes_are_refused(data: bytes) -> None:
    server = OAuthBearerServer(validate)
    try:
        step = server.step(data)
    except BrokerError as error:
        assert error.code is ErrorCode.SASL_AUTHENTICATION_FAILED
    else:
        assert step.principal is None
        refused(server.step, b"\x01")


@given(st.binary(min_size=1, max_size=100))
def test_a_client_accepts_no_reply_but_the_empty_one(data: bytes) -> None:
    client = OAuthBearerClient(TOKEN)
    assert client.step(data) == b"\x01"
    refused(client.step, b"")
    assert not client.complete


@pytest.mark.parametrize("token", ["", "a b", "a\x01b", "ä", "x" * (MAX_TOKEN + 1)])
def test_a_token_that_cannot_be_sent_is_not_quoted(token: str) -> None:
    with pytest.raises(ConfigError) as error:
        OAuthBearerClient(token)
    assert not token or token not in str(error.value)


def test_a_client_does_not_show_its_token() -> None:
    assert TOKEN not in repr(OAuthBearerClient(TOKEN))
