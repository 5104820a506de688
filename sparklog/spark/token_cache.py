"""The delegation tokens that the planning processes of this user share on this host.

Each query has its own planning process. If each process asked for a token, a program with many short queries would soon
have as many tokens as a user may have. So the processes share one token for each cluster, login and scope. The token is
in a file that only this user can read. It is replaced when half of its period (the time until it expires) is over.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparklog.errors import ClusterError
from sparklog.net.user_directory import user_directory
from sparklog.protocol.sasl import OAUTHBEARER

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity
    from sparklog.spark.task_scope import Scope

#: The time for which a token that a broker has accepted need not be checked again.
_CHECKED_S = 10.0


class CachedToken(msgspec.Struct, frozen=True):
    """A delegation token with its secret. Tasks that start before ``until_ms`` (ms since 1970) may get it.

    A renewal by a task extends the token's life by ``period_ms``. If ``period_ms`` is 0, tasks cannot renew the token.
    """

    token_id: str
    secret: str
    until_ms: int
    period_ms: int = 0

    def __repr__(self) -> str:
        return f"CachedToken({self.token_id})"


class TokenCache:
    """A file that stores the token for one cluster, login, scope and lifetime."""

    def __init__(
        self, bootstrap: str, security: ClientSecurity, scope: Scope = (), lifetime_ms: int | None = None
    ) -> None:
        # With OAUTHBEARER only the token distinguishes users. It is random, so its hash reveals nothing.
        user = security.password.reveal() if security.mechanism == OAUTHBEARER else security.username
        login = (bootstrap, security.protocol.value, security.ca, security.mechanism, user)
        key = msgspec.json.encode((login, scope, lifetime_ms))
        self._name = f"{hashlib.sha256(key).hexdigest()[:32]}.token"

    def load(self, now_ms: int) -> CachedToken | None:
        """Return the token in the file, or None if the file has no token that tasks can still get."""
        try:
            path = self._path()
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    return None
                token = msgspec.json.decode(file.read(4096), type=CachedToken)
        except (OSError, ClusterError, msgspec.MsgspecError):
            return None
        return token if now_ms < token.until_ms else None

    def store(self, token: CachedToken) -> None:
        """Write the token to the file. If that fails, the next planning process asks for its own token."""
        try:
            path = self._path()
            new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(token))
            new.replace(path)
        except (OSError, ClusterError):
            return

    def is_checked(self, now_ms: int) -> bool:
        """Return whether a broker has accepted the token within the last ten seconds."""
        try:
            return abs(now_ms / 1000 - self._path().stat().st_mtime) < _CHECKED_S
        except (OSError, ClusterError):
            return False

    def set_checked(self, *, accepted: bool) -> None:
        """Record that a broker has accepted the token, or that it must be checked before its next use."""
        with suppress(OSError, ClusterError):
            os.utime(self._path(), None if accepted else (0, 0))

    def _path(self) -> Path:
        return user_directory() / self._name
