"""The delegation tokens that the planning processes of this user share on this host.

Each query has a planning process of its own. If each asked for a token, a program with many short queries would soon
have as many tokens as a user may have. So they keep one token for each cluster and login in a file that only this user
can read, until half of its lifetime is over.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparklog.errors import ClusterError
from sparklog.net.user_directory import user_directory
from sparklog.protocol.sasl import OAUTHBEARER

if TYPE_CHECKING:
    from sparklog.net.client_security import ClientSecurity


class CachedToken(msgspec.Struct, frozen=True):
    """A delegation token with its secret. Tasks that start before ``until_ms`` (since 1970) may get it."""

    token_id: str
    secret: str
    until_ms: int

    def __repr__(self) -> str:
        return f"CachedToken({self.token_id})"


class TokenCache:
    """A file that stores the token for one cluster and login."""

    def __init__(self, bootstrap: str, security: ClientSecurity) -> None:
        # With OAUTHBEARER only the token distinguishes users. It is random, so its hash reveals nothing.
        user = security.password.reveal() if security.mechanism == OAUTHBEARER else security.username
        login = (bootstrap, security.protocol.value, security.ca, security.mechanism, user)
        self._name = f"{hashlib.sha256(chr(0).join(login).encode()).hexdigest()[:32]}.token"

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
        """Write the token to the file. If that fails, the next planning process asks for a token of its own."""
        try:
            path = self._path()
            new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(token))
            new.replace(path)
        except (OSError, ClusterError):
            return

    def _path(self) -> Path:
        return user_directory() / self._name
