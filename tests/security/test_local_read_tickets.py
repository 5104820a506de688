"""Properties of tickets for local reads: only the process that signed a ticket accepts it, for its time and topics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from sparklog.errors import BrokerError, ErrorCode
from sparklog.protocol.fields import MAX_TICKET_BYTES
from sparklog.security.local_read_tickets import KEY_BYTES, LocalReadTicket, sign, verify

KEY = bytes(range(KEY_BYTES))
TEXTS = st.text(max_size=40)
TIMES = st.integers(min_value=0, max_value=2**62)
TICKETS = st.builds(
    LocalReadTicket,
    principal=st.tuples(TEXTS, TEXTS),
    host=TEXTS,
    token_id=TEXTS,
    topic_ids=st.lists(TEXTS, max_size=16).map(tuple),
    incarnation=st.integers(min_value=0, max_value=2**31),
    issued_ms=TIMES,
    expires_ms=st.integers(min_value=1, max_value=60_000),
).map(lambda ticket: replace(ticket, expires_ms=ticket.issued_ms + ticket.expires_ms))
ANY = LocalReadTicket(("User", "anna"), "127.0.0.1", "", ("an-id",), 3, 1000, 61_000)


def refused(key: bytes, signed: bytes, *, incarnation: int, now_ms: int) -> bool:
    try:
        verify(key, signed, incarnation=incarnation, now_ms=now_ms)
    except BrokerError as error:
        assert error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED and len(error.detail) < 200
        return True
    return False


@given(TICKETS, st.floats(min_value=0, max_value=1, exclude_max=True))
def test_a_signed_ticket_returns_unchanged_while_it_is_valid(ticket: LocalReadTicket, part: float) -> None:
    now_ms = min(ticket.issued_ms + int((ticket.expires_ms - ticket.issued_ms) * part), ticket.expires_ms - 1)
    assert verify(KEY, sign(KEY, ticket), incarnation=ticket.incarnation, now_ms=now_ms) == ticket


@given(TICKETS, TIMES)
def test_an_expired_ticket_is_refused(ticket: LocalReadTicket, later_ms: int) -> None:
    assert refused(KEY, sign(KEY, ticket), incarnation=ticket.incarnation, now_ms=ticket.expires_ms + later_ms)


@given(TICKETS, st.integers(min_value=0, max_value=2**31))
def test_a_ticket_of_another_incarnation_is_refused(ticket: LocalReadTicket, other: int) -> None:
    if other != ticket.incarnation:
        assert refused(KEY, sign(KEY, ticket), incarnation=other, now_ms=ticket.issued_ms)


@given(TICKETS, st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_a_ticket_of_another_process_is_refused(ticket: LocalReadTicket, other: bytes) -> None:
    if other != KEY:
        assert refused(KEY, sign(other, ticket), incarnation=ticket.incarnation, now_ms=ticket.issued_ms)


@given(TICKETS, st.data())
def test_each_changed_byte_is_detected(ticket: LocalReadTicket, data: st.DataObject) -> None:
    signed = bytearray(sign(KEY, ticket))
    at = data.draw(st.integers(min_value=0, max_value=len(signed) - 1))
    signed[at] ^= data.draw(st.integers(min_value=1, max_value=255))
    assert refused(KEY, bytes(signed), incarnation=ticket.incarnation, now_ms=ticket.issued_ms)
    del signed[at:]
    assert refused(KEY, bytes(signed), incarnation=ticket.incarnation, now_ms=ticket.issued_ms)


@given(TICKETS, TICKETS)
def test_the_signature_of_another_ticket_is_refused(ticket: LocalReadTicket, other: LocalReadTicket) -> None:
    """No field can be changed: neither the principal, nor the topics, nor the expiry."""
    for name, value in asdict(other).items():
        wanted = replace(ticket, **{name: value})
        if wanted != ticket:
            forged = sign(KEY, ticket)[:32] + sign(KEY, wanted)[32:]
            assert refused(KEY, forged, incarnation=wanted.incarnation, now_ms=wanted.issued_ms)


@given(st.binary(max_size=500))
def test_bytes_that_are_no_ticket_are_refused(data: bytes) -> None:
    assert refused(KEY, data, incarnation=3, now_ms=2000)


def test_a_ticket_with_too_many_names_is_not_signed() -> None:
    with pytest.raises(BrokerError, match="expected at most"):
        sign(KEY, replace(ANY, topic_ids=("x" * 1000,) * 17))
    assert len(sign(KEY, ANY)) < MAX_TICKET_BYTES
