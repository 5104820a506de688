"""A broker's cache of all users' credentials, which follows ZooKeeper.

A change takes effect without a restart: the broker watches the index of the users and reads those that have changed.
While ZooKeeper is unreachable, the broker uses the credentials that it has read last.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import USER, Principal
from sparklog.protocol.scram import ScramCredential
from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import PAUSE_S, Node, ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import KEY_BYTES, Credentials, UserIndex, UserStore, decode_index

_log = logging.getLogger(__name__)


class Users:
    """The credentials of all users. Owner: the broker's event loop, from ``open`` to ``close``.

    The connections of a user end when it has lost a credential or got another one in its place.
    """

    def __init__(self) -> None:
        #: Called with the principal of each user whose connections must end.
        self.revoked_listeners: list[Callable[[Principal], object]] = []
        self._session: ZkSession | None = None
        self._store: UserStore | None = None
        self._users: dict[str, Credentials] = {}
        # As long as there is no user, no broker has another key.
        self._unknown_users_key = os.urandom(KEY_BYTES)
        #: The version of the index whose users are in ``_users``, and the session that has read it.
        self._version = -1
        self._generation = -1
        self._index: Node | None = None
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()
        #: Set, and replaced by a new one, when a version is applied.
        self._applied = asyncio.Event()
        self._stop_watch: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, session: ZkSession) -> None:
        """Begin to follow the users. ``session`` must stay open until ``close``."""
        self._session = session
        self._store = UserStore(session, Unreadable())
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="follow users")
        self._stop_watch = self._store.watch(self._on_index)

    def close(self) -> None:
        """End the watch."""
        if self._stop_watch is not None and self._task is not None:
            self._stop_watch()
            self._task.cancel()

    @property
    def store(self) -> UserStore:
        """Return the users in ZooKeeper. Raises BrokerError BROKER_NOT_AVAILABLE before ``open``."""
        if self._store is None:
            raise BrokerError(ErrorCode.BROKER_NOT_AVAILABLE, "the broker is still starting")
        return self._store

    @property
    def is_loaded(self) -> bool:
        """Return whether the users have been read once."""
        return self._loaded.is_set()

    async def loaded(self) -> None:
        """Wait until the users have been read once."""
        await self._loaded.wait()

    @property
    def unknown_users_key(self) -> bytes:
        """Return the secret from which the credentials of unknown users are made, the same on all brokers."""
        return self._unknown_users_key

    @property
    def count(self) -> int:
        """Return the number of users with credentials."""
        return len(self._users)

    def has(self, name: str) -> bool:
        return name in self._users

    def credential(self, mechanism: str, name: str) -> ScramCredential | None:
        """Return a user's credential, or None if there is no such user or it has none for this mechanism."""
        found = self._users.get(name)
        return None if found is None else found.get(mechanism)

    async def applied(self, version: int, *, timeout_s: float) -> None:
        """Wait until this version of the index is applied, for at most ``timeout_s``."""

        async def reached() -> None:
            while self._version < version:
                await self._applied.wait()

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reached(), timeout_s)

    def _on_index(self, node: Node | None) -> None:
        self._index = node
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._apply(self._index)
            except ZkUnreachable:
                continue  # After a reconnection the watch reports the index again.
            except (ZkError, ZkFormatError) as error:
                _log.error("the users cannot be read from ZooKeeper, so changes of users have no effect: %s", error)
                await asyncio.sleep(PAUSE_S)
                self._changed.set()

    async def _apply(self, node: Node | None) -> None:
        """Read the users that have changed since the last version of the index, or all of them."""
        assert self._session is not None
        index, version = decode_index(node), node.version if node is not None else -1
        generation = self._session.generation
        missed = version - self._version
        follows = self._loaded.is_set() and generation == self._generation and self._version >= 0
        if follows and 0 <= missed <= len(index.changed):
            names = set(index.changed[len(index.changed) - missed :])
            await self._replace(names)
        else:
            found = await self.store.all_users()
            self._use({name: found.get(name) for name in found.keys() | self._users.keys()})
        self._note(index)
        self._version, self._generation = version, generation
        self._applied.set()
        self._applied = asyncio.Event()
        if not self._loaded.is_set():
            _log.info("read %d users", len(self._users))
            self._loaded.set()

    async def _replace(self, names: set[str]) -> None:
        found = await self.store.users(names)
        self._use({name: found.get(name) for name in names})

    def _note(self, index: UserIndex) -> None:
        if index.unknown_users_key:
            self._unknown_users_key = index.unknown_users_key

    def _use(self, changes: dict[str, Credentials | None]) -> None:
        """Apply these changes, and report the users that have lost a credential."""
        for name, credentials in changes.items():
            before, after = self._users.get(name, {}), credentials or {}
            if after:
                self._users[name] = after
            else:
                self._users.pop(name, None)
            if any(after.get(mechanism) != credential for mechanism, credential in before.items()):
                _log.info("a credential of user %r was changed or deleted: ending its connections", name)
                for listener in self.revoked_listeners:
                    listener(Principal(USER, name))
