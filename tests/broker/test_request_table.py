"""Test that a broker handles every request that the table of senders classifies."""

from __future__ import annotations

from sparklog.protocol.senders import SENDERS
from tests.broker.staged import Stage
from tests.security.test_request_rules import HANDSHAKE


def test_every_classified_request_has_a_handler() -> None:
    assert SENDERS.keys() - HANDSHAKE == Stage().handlers.keys()
