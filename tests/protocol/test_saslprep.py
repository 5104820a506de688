"""Tests of the preparation of names and passwords."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.protocol.saslprep import saslprep


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("I\u00adX", "IX"),
        ("user", "user"),
        ("USER", "USER"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        ("a\u00a0b", "a b"),
        ("\u0627\u0628", "\u0627\u0628"),
    ],
)
def test_the_examples_of_rfc_4013_are_prepared(text: str, prepared: str) -> None:
    assert saslprep(text) == saslprep(text, stored=True) == prepared
    assert saslprep(prepared) == prepared


@pytest.mark.parametrize(
    "text", ["", "\u00ad", "\u0007", "\u0627\u0031", "a\u0627", "\ud800", "\ufffd", "\u2028", "\x7f"]
)
def test_characters_that_rfc_4013_prohibits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        saslprep(text)
    assert not text.strip() or text not in str(error.value)


def test_an_unassigned_character_is_refused_only_in_a_stored_text() -> None:
    assert saslprep("\U0001f600") == "\U0001f600"
    with pytest.raises(ConfigError, match=r"Unicode 3\.2"):
        saslprep("\U0001f600", stored=True)
