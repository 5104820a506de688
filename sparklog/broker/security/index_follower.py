"""A task that watches an index in ZooKeeper, and reads the nodes that have changed.

An index is a ZooKeeper node that lists the latest changes in a group of other nodes, such as the nodes of all users.
Every write of a node in the group also writes the name of this node to the index. The version of the index grows by one
with each change. If more nodes have changed than the index names, the task reads all nodes again. While ZooKeeper is
unreachable, the broker uses the content that it read last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from sparklog.zk.codecs import ZkFormatError
from sparklog.zk.errors import ZkError, ZkUnreachable
from sparklog.zk.session import PAUSE_S, Node, ZkSession

_log = logging.getLogger(__name__)

Name = TypeVar("Name")


class IndexFollower(Generic[Name]):
    """A follower of one index in ZooKeeper, which reads the nodes that have changed.

    ``changed_of`` returns the names that an index contains, the newest change last. ``apply`` reads the nodes with
    these names, or all nodes if it gets None instead. A name is a text, or another value that identifies a node. Not
    thread-safe: use it on the broker's event loop, from ``open`` to ``close``.
    """

    def __init__(
        self,
        what: str,
        changed_of: Callable[[Node | None], tuple[Name, ...]],
        apply: Callable[[Node | None, set[Name] | None], Awaitable[None]],
    ) -> None:
        self._what = what
        self._changed_of = changed_of
        self._apply = apply
        self._session: ZkSession | None = None
        #: The version of the index that the broker uses, and the number of the ZooKeeper session that read it.
        self._version = -1
        self._generation = -1
        self._index: Node | None = None
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()
        #: An event that is set when a version is applied. A new event then replaces it.
        self._applied = asyncio.Event()
        self._stop_watch: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, session: ZkSession, watch: Callable[[Callable[[Node | None], None]], Callable[[], None]]) -> None:
        """Start to watch the index. ``session`` must stay open until ``close``.

        ``watch`` subscribes a callback to all new states of the index. It returns a function that ends the
        subscription.
        """
        self._session = session
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"follow {self._what}")
        self._stop_watch = watch(self._on_index)

    def close(self) -> None:
        """End the watch of the index."""
        if self._stop_watch is not None and self._task is not None:
            self._stop_watch()
            self._task.cancel()

    @property
    def is_loaded(self) -> bool:
        """Return whether the task has read all nodes at least once."""
        return self._loaded.is_set()

    def note_loaded(self) -> None:
        """Set ``is_loaded`` without reading the nodes from ZooKeeper."""
        self._loaded.set()

    async def loaded(self) -> None:
        """Wait until the task has read all nodes at least once."""
        await self._loaded.wait()

    async def applied(self, version: int, *, timeout_s: float) -> bool:
        """Wait until the broker uses this version of the index, for at most ``timeout_s``. Return whether it does."""

        async def reached() -> None:
            while self._version < version:
                await self._applied.wait()

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reached(), timeout_s)
        return self._version >= version

    def _on_index(self, node: Node | None) -> None:
        self._index = node
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._advance(self._index)
            except ZkUnreachable:
                continue  # After a reconnection the watch reports the index again.
            except (ZkError, ZkFormatError) as error:
                _log.error("%s cannot be read from ZooKeeper, so their changes have no effect: %s", self._what, error)
                await asyncio.sleep(PAUSE_S)
                self._changed.set()

    async def _advance(self, node: Node | None) -> None:
        """Read the nodes that have changed up to this version of the index."""
        assert self._session is not None
        names, version = self._changed_of(node), node.version if node is not None else -1
        generation = self._session.generation
        missed = version - self._version
        follows = self._loaded.is_set() and generation == self._generation and self._version >= 0
        if follows and 0 <= missed <= len(names):
            await self._apply(node, set(names[len(names) - missed :]))
        else:
            await self._apply(node, None)
        self._version, self._generation = version, generation
        self._applied.set()
        self._applied = asyncio.Event()
        self._loaded.set()
