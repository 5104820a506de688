"""The login of Spark tasks: a delegation token of the planning process instead of its password.

The planning process logs in with the options of the read or write, and requests a token. Tasks get the token in their
plan. They have the same principal, but neither the password nor a reference to it. The token expires, and it is deleted
with its user.

A streaming write cannot use a token, because Spark plans it in processes that must not use the network. Its tasks log
in with the options.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import host_and_port
from sparklog.spark.options import CLIENT_ID

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity

#: The maximum wait until all brokers know a new token.
_KNOWN_S = 10.0
_PAUSE_S = 0.05


class TaskLogin:
    """The login of the tasks of one read or write. Owner: the planning process."""

    def __init__(self, bootstrap: str, security: ClientSecurity | None) -> None:
        self._bootstrap = bootstrap
        self._security = security
        self._of_tasks: ClientSecurity | None = None
        #: The time in seconds since the Unix epoch after which tasks get another token.
        self._until_s = 0.0

    def security(self) -> ClientSecurity | None:
        """Return the settings for tasks that start now. A token in them is valid for at least half of its lifetime.

        If the options have no SASL login, return the settings in the options.

        Raises:
            BrokerError: the login failed.
        """
        from sparklog.net.client_security import client_security

        found = client_security(self._security)
        if not found.protocol.uses_sasl or found.is_token:
            return self._security
        if self._of_tasks is None or time.time() >= self._until_s:
            self._of_tasks = self._new_token(found)
        return self._of_tasks

    def _new_token(self, found: ClientSecurity) -> ClientSecurity:
        from sparklog.client.admin.admin import Admin
        from sparklog.protocol.sasl import OAUTHBEARER, SCRAM_SHA_256

        with Admin(self._bootstrap, client_id=CLIENT_ID, security=found) as admin:
            created = admin.create_delegation_token()
            brokers = admin.describe_cluster().brokers
        token = created.token
        self._until_s = (token.issue_ms + token.expiry_ms) / 2 / 1000
        mechanism = SCRAM_SHA_256 if found.mechanism == OAUTHBEARER else found.mechanism
        of_tasks = replace(found, mechanism=mechanism, username=token.token_id, password=created.secret, is_token=True)
        for broker in brokers:
            _await_token(host_and_port(broker.host, broker.port), of_tasks)
        return of_tasks


def _await_token(address: str, security: ClientSecurity) -> None:
    """Wait until this broker accepts the token. Ignore a broker that does not respond."""
    deadline_s = time.monotonic() + _KNOWN_S
    while True:
        try:
            with BlockingCluster(address, client_id=CLIENT_ID, timeout_s=_KNOWN_S, security=security) as link:
                link.refresh()
            return
        except BrokerError as error:
            if error.code != ErrorCode.SASL_AUTHENTICATION_FAILED or time.monotonic() >= deadline_s:
                return
        time.sleep(_PAUSE_S)
