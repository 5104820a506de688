"""The login of Spark tasks: a delegation token of the planning process instead of its password.

The planning process logs in with the options of the read or write, and requests a token. Tasks get the token in their
plan. They have the same principal, but may do only what the scope of the token allows, and do not have the password.
The token expires unless the tasks renew it (``token_renewal``), and it is deleted with its user. Planning processes of
one user share a token (``token_cache``).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import SparklogError
from sparklog.model import host_and_port
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.task_scope import Scope
from sparklog.spark.token_cache import CachedToken, TokenCache
from sparklog.spark.token_renewal import LoginOfTasks, TokenRenewal

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

#: The maximum wait until all brokers know a new token.
_KNOWN_S = 10.0
_PAUSE_S = 0.05


class TaskLogin:
    """A provider of the settings with which the tasks of one read or write log in.

    ``lifetime_ms`` is the time after which a token expires unless tasks renew it; None means the brokers' default. With
    ``checks_rarely``, a shared token that a broker has accepted within the last ten seconds is not checked again. Not
    thread-safe: use it only in the planning process.
    """

    def __init__(
        self,
        bootstrap: str,
        security: ClientSecurity | None,
        *,
        lifetime_ms: int | None = None,
        checks_rarely: bool = False,
    ) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._lifetime_ms = lifetime_ms
        self._checks_rarely = checks_rarely
        #: The token of each scope.
        self._tokens: dict[Scope, CachedToken] = {}

    def of(self, scope: Scope) -> LoginOfTasks:
        """Return the login of tasks that start now, with a token that permits only the operations in ``scope``.

        The token remains valid for at least half of its period, the time from a renewal to the expiry. If the options
        have no SASL login, or already have a token, the result has the settings of the options.

        Raises:
            BrokerError: the login failed.
        """
        from sparklog.net.client_security import client_security

        found = client_security(self._security)
        if not found.protocol.uses_sasl or found.is_token:
            return LoginOfTasks(self._security)
        token = self._tokens.get(scope)
        if token is None or time.time() * 1000 >= token.until_ms:
            token = self._tokens[scope] = self._cached_token(found, scope) or self._new_token(found, scope)
        renewal = TokenRenewal(token.until_ms, token.period_ms) if token.period_ms else None
        return LoginOfTasks(_with_token(found, token), renewal)

    def doubt(self, scope: Scope) -> None:
        """Ensure that the shared token is checked before its next use, because tasks with this token have failed."""
        from sparklog.net.client_security import client_security

        found = client_security(self._security)
        if found.protocol.uses_sasl and not found.is_token:
            self._cache(found, scope).set_checked(accepted=False)

    def _cache(self, found: ClientSecurity, scope: Scope) -> TokenCache:
        return TokenCache(self._bootstrap, found, scope, self._lifetime_ms)

    def _cached_token(self, found: ClientSecurity, scope: Scope) -> CachedToken | None:
        """Return the token that planning processes of this user share, if a broker accepts it."""
        cache, now_ms = self._cache(found, scope), int(time.time() * 1000)
        cached = cache.load(now_ms)
        if cached is None or (self._checks_rarely and cache.is_checked(now_ms)):
            return cached
        if not _is_accepted(self._bootstrap, _with_token(found, cached)):
            return None
        cache.set_checked(accepted=True)
        return cached

    def _new_token(self, found: ClientSecurity, scope: Scope) -> CachedToken:
        from sparklog.client.admin.admin import Admin

        with Admin(self._bootstrap, client_id=CLIENT_ID, security=found) as admin:
            created = admin.create_delegation_token(scope=scope, period_ms=self._lifetime_ms)
            brokers = admin.describe_cluster().brokers
        made = created.token
        token = CachedToken(
            made.token_id, created.secret.reveal(), (made.issue_ms + made.expiry_ms) // 2, made.period_ms
        )
        for broker in brokers:
            _await_token(host_and_port(broker.host, broker.port), _with_token(found, token))
        self._cache(found, scope).store(token)
        return token


def _with_token(found: ClientSecurity, token: CachedToken) -> ClientSecurity:
    from sparklog.net.password import Password
    from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256

    mechanism = SCRAM_SHA_256 if found.mechanism == OAUTHBEARER else found.mechanism
    password = Password(token.secret, transferable=True)
    return replace(found, mechanism=mechanism, username=token.token_id, password=password, is_token=True)


def _is_accepted(bootstrap: str, security: ClientSecurity) -> bool:
    """Return whether a broker accepts the token. It may have been deleted with its user."""
    try:
        with BlockingCluster(bootstrap, client_id=CLIENT_ID, timeout_s=_KNOWN_S, security=security) as link:
            link.refresh()
    except SparklogError:
        return False
    return True


def _await_token(address: str, security: ClientSecurity) -> None:
    """Wait until this broker accepts the token. Ignore a broker that does not respond."""
    deadline_s = time.monotonic() + _KNOWN_S
    while not _is_accepted(address, security) and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)
