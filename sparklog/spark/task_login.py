"""The login of Spark tasks: a delegation token of the planning process instead of its password.

The planning process logs in with the options of the read or write, and requests a token. Tasks get the token in their
plan. They have the same principal, but not the password. The token expires, and it is deleted with its user. Planning
processes of one user share a token (``token_cache``).

A streaming write cannot use a token, because Spark plans it in processes that must not use the network. Its tasks log
in with the options.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import SparklogError
from sparklog.model import host_and_port
from sparklog.spark.options import CLIENT_ID
from sparklog.spark.token_cache import CachedToken, TokenCache

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

#: The maximum wait until all brokers know a new token.
_KNOWN_S = 10.0
_PAUSE_S = 0.05


class TaskLogin:
    """A provider of the settings with which the tasks of one read or write log in.

    Not thread-safe: use it only in the planning process.
    """

    def __init__(self, bootstrap: str, security: ClientSecurity | None) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._of_tasks: ClientSecurity | None = None
        #: The time in milliseconds since the Unix epoch after which tasks get another token.
        self._until_ms = 0

    def security(self) -> ClientSecurity | None:
        """Return the settings for tasks that start now. A token in them is valid for at least half of its lifetime.

        If the options have no SASL login, or already have a token, the result is the settings of the options.

        Raises:
            BrokerError: the login failed.
        """
        from sparklog.net.client_security import client_security

        found = client_security(self._security)
        if not found.protocol.uses_sasl or found.is_token:
            return self._security
        if self._of_tasks is None or time.time() * 1000 >= self._until_ms:
            self._of_tasks = self._cached_token(found) or self._new_token(found)
        return self._of_tasks

    def _cached_token(self, found: ClientSecurity) -> ClientSecurity | None:
        """Return the settings with the token that planning processes of this user share, if a broker accepts it."""
        cached = TokenCache(self._bootstrap, found).load(int(time.time() * 1000))
        if cached is None:
            return None
        of_tasks = _with_token(found, cached.token_id, cached.secret)
        if not _is_accepted(self._bootstrap, of_tasks):
            return None
        self._until_ms = cached.until_ms
        return of_tasks

    def _new_token(self, found: ClientSecurity) -> ClientSecurity:
        from sparklog.client.admin.admin import Admin

        with Admin(self._bootstrap, client_id=CLIENT_ID, security=found) as admin:
            created = admin.create_delegation_token()
            brokers = admin.describe_cluster().brokers
        token, secret = created.token, created.secret.reveal()
        self._until_ms = (token.issue_ms + token.expiry_ms) // 2
        of_tasks = _with_token(found, token.token_id, secret)
        for broker in brokers:
            _await_token(host_and_port(broker.host, broker.port), of_tasks)
        TokenCache(self._bootstrap, found).store(CachedToken(token.token_id, secret, self._until_ms))
        return of_tasks


def _with_token(found: ClientSecurity, token_id: str, secret: str) -> ClientSecurity:
    from sparklog.net.password import Password
    from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256

    mechanism = SCRAM_SHA_256 if found.mechanism == OAUTHBEARER else found.mechanism
    password = Password(secret, transferable=True)
    return replace(found, mechanism=mechanism, username=token_id, password=password, is_token=True)


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
