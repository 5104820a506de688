"""Tests of the file in which planning processes share a delegation token."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sparklog.net import user_directory
from sparklog.net.client_security import ClientSecurity
from sparklog.net.password import Password
from sparklog.security.listeners import SecurityProtocol
from sparklog.spark import token_cache
from sparklog.spark.token_cache import CachedToken, TokenCache

ANNA = ClientSecurity(
    SecurityProtocol.SASL_SSL, mechanism="SCRAM-SHA-512", username="anna", password=Password("a-secret")
)
TOKEN = CachedToken("t1", "token-secret", 1000)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the user in this test."""
    monkeypatch.setattr(token_cache, "user_directory", lambda: user_directory.user_directory(tmp_path))
    return user_directory.user_directory(tmp_path)


def test_a_token_is_shared_until_its_time_is_over(directory: Path) -> None:
    TokenCache("one:9092", ANNA).store(TOKEN)
    assert TokenCache("one:9092", ANNA).load(999) == TOKEN
    assert TokenCache("one:9092", ANNA).load(1000) is None
    [file] = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "anna" not in file.name and TOKEN.secret not in repr(TOKEN)


def test_another_cluster_or_user_has_another_token(directory: Path) -> None:
    TokenCache("one:9092", ANNA).store(TOKEN)
    assert TokenCache("two:9092", ANNA).load(0) is None
    assert TokenCache("one:9092", replace(ANNA, username="bert")).load(0) is None
    bearer = replace(ANNA, mechanism="OAUTHBEARER", password=Password("token-of-anna"))
    TokenCache("one:9092", bearer).store(TOKEN)
    assert TokenCache("one:9092", replace(bearer, password=Password("token-of-bert"))).load(0) is None


def test_a_file_that_others_may_read_or_that_is_damaged_is_not_used(directory: Path) -> None:
    cache = TokenCache("one:9092", ANNA)
    cache.store(TOKEN)
    [file] = directory.iterdir()
    file.chmod(0o644)
    assert cache.load(0) is None
    file.chmod(0o600)
    assert cache.load(0) == TOKEN
    file.write_text("{")
    assert cache.load(0) is None


def test_a_directory_that_others_may_enter_is_not_used(directory: Path) -> None:
    directory.chmod(0o755)
    cache = TokenCache("one:9092", ANNA)
    cache.store(TOKEN)
    assert not list(directory.iterdir())
    assert cache.load(0) is None


def test_each_scope_and_lifetime_has_its_own_token(directory: Path) -> None:
    orders = (("Read", "Topic", "orders", "Literal"),)
    TokenCache("one:9092", ANNA, orders).store(TOKEN)
    assert TokenCache("one:9092", ANNA, orders).load(0) == TOKEN
    assert TokenCache("one:9092", ANNA, (("Read", "Topic", "other", "Literal"),)).load(0) is None
    assert TokenCache("one:9092", ANNA, orders, 5000).load(0) is None
    assert TokenCache("one:9092", ANNA).load(0) is None


def test_a_doubted_token_is_checked_before_its_next_use(directory: Path) -> None:
    cache = TokenCache("one:9092", ANNA)
    assert not cache.is_checked(0)
    cache.store(TOKEN)
    now_ms = int(time.time() * 1000)
    assert cache.is_checked(now_ms) and not cache.is_checked(now_ms + 60_000)
    cache.set_checked(accepted=False)
    assert not cache.is_checked(now_ms)
    cache.set_checked(accepted=True)
    assert cache.is_checked(now_ms)
