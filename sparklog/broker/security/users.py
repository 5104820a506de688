"""A broker's cache of all users' SCRAM credentials. ZooKeeper stores them.

A change takes effect without a restart, because the broker watches ZooKeeper.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

from sparklog.broker.security.index_follower import IndexFollower
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.scram import CredentialForm, ScramCredential
from sparklog.zk.session import Node, ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import KEY_BYTES, Credentials, UserStore, decode_index

_log = logging.getLogger(__name__)

#: The maximum number of forms that dummy credentials of unknown users have. Each login computes an HMAC for each form.
_MOST_FORMS = 16


class Users:
    """A cache of the SCRAM credentials of all users, which it reads from ZooKeeper.

    When a credential of a user is deleted or replaced, the broker closes the user's connections. Not thread-safe: use
    it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(self) -> None:
        #: Called with the principal of each user whose connections must end.
        self.revoked_listeners: list[Callable[[Principal], object]] = []
        self.follower = IndexFollower("users", lambda node: decode_index(node).changed, self._apply)
        self._store: UserStore | None = None
        self._users: dict[str, Credentials] = {}
        #: The number of credentials of each form, by mechanism, and the same for only the most frequent forms.
        self._forms: dict[str, Counter[CredentialForm]] = {}
        self._frequent: dict[str, dict[CredentialForm, int]] = {}
        # As long as there is no user, no broker has another key.
        self._unknown_users_key = os.urandom(KEY_BYTES)

    def open(self, session: ZkSession) -> None:
        """Start to watch the users in ZooKeeper. ``session`` must stay open until ``close``."""
        self._store = UserStore(session, Unreadable())
        self.follower.open(session, self._store.watch)

    def close(self) -> None:
        """End the watch of the users."""
        self.follower.close()

    @property
    def store(self) -> UserStore:
        """Return the store of users in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    @property
    def unknown_users_key(self) -> bytes:
        """Return the secret from which dummy credentials of unknown users are derived.

        All brokers have the same secret.
        """
        return self._unknown_users_key

    @property
    def count(self) -> int:
        """Return the number of users with credentials."""
        return len(self._users)

    def has(self, name: str) -> bool:
        return name in self._users

    def credential(self, mechanism: str, name: str) -> ScramCredential | None:
        """Return a user's credential for the mechanism; None if the user or the credential does not exist."""
        found = self._users.get(name)
        return None if found is None else found.get(mechanism)

    def forms(self, mechanism: str) -> dict[CredentialForm, int]:
        """Return the most frequent forms of the mechanism's credentials, with the number of credentials of each.

        A form is a number of iterations and a length of salt. The dummy credentials of unknown users have these forms
        too.
        """
        return self._frequent.get(mechanism, {})

    async def _apply(self, node: Node | None, names: set[str] | None) -> None:
        """Read the users with these names, or all users if ``names`` is None."""
        if names is None:
            found = await self.store.all_users()
            names = found.keys() | self._users.keys()
            _log.info("read %d users", len(found))
        else:
            found = await self.store.users(names)
        self._use({name: found.get(name) for name in names})
        self._unknown_users_key = decode_index(node).unknown_users_key or self._unknown_users_key

    def _use(self, changes: dict[str, Credentials | None]) -> None:
        """Apply these changes, and report the users that have lost a credential."""
        for name, credentials in changes.items():
            before, after = self._users.get(name, {}), credentials or {}
            self._count(before, -1)
            self._count(after, 1)
            if after:
                self._users[name] = after
            else:
                self._users.pop(name, None)
            if any(after.get(mechanism) != credential for mechanism, credential in before.items()):
                _log.info("a credential of user %r was changed or deleted: ending its connections", name)
                for listener in self.revoked_listeners:
                    listener(Principal(USER, name))
        # Brokers that know the same users choose the same forms.
        self._frequent = {
            mechanism: dict(sorted(forms.items(), key=lambda one: (one[1], one[0]), reverse=True)[:_MOST_FORMS])
            for mechanism, forms in self._forms.items()
        }

    def _count(self, credentials: Credentials, change: int) -> None:
        for mechanism, credential in credentials.items():
            forms = self._forms.setdefault(mechanism, Counter())
            form = CredentialForm(credential.iterations, len(credential.salt))
            forms[form] += change
            if not forms[form]:
                del forms[form]
