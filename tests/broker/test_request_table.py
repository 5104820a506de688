"""Test that a broker handles every request that has a rule."""

from __future__ import annotations

from sparklog.security.request_rules import RULES
from tests.broker.staged import Stage
from tests.security.test_request_rules import HANDSHAKE


def test_every_request_with_a_rule_has_a_handler() -> None:
    assert RULES.keys() - HANDSHAKE == Stage().handlers.keys()
