"""Test that a broker handles every request that the table of senders classifies."""

from __future__ import annotations

from sparklog.protocol.senders import SENDERS
from tests.broker.staged import Stage

#: Requests that a connection handles itself.
HANDSHAKE = {"Hello", "Prove", "SaslAuthenticate"}


def test_every_classified_request_has_a_handler() -> None:
    assert {kind for kind in SENDERS if kind.__name__ not in HANDSHAKE} == Stage().handlers.keys()
