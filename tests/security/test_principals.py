"""Tests of principals and of the setting that lists the super users."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.security.principals import Principal, parse_principal, parse_super_users


def test_a_principal_is_read_from_its_own_text() -> None:
    anna = Principal("User", "anna")
    assert parse_principal(str(anna)) == anna
    assert parse_principal("User:CN=a:b") == Principal("User", "CN=a:b"), "only the first colon separates"


@pytest.mark.parametrize("text", ["", "anna", "User:", ":anna"])
def test_a_text_without_type_or_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="User:anna"):
        parse_principal(text)


def test_super_users_are_separated_by_semicolons() -> None:
    assert parse_super_users("User:admin; User:CN=x,OU=y;") == {
        Principal("User", "admin"),
        Principal("User", "CN=x,OU=y"),
    }
    assert parse_super_users("") == frozenset()
