"""The handling of clients in a forked child process.

A forked child has copies of its parent's clients. The clients' threads do not run in the child, and their sockets are
the parent's connections. So every client of the parent raises ClientForked in the child, and neither process disturbs
the other. To do this, the fork handler changes the class of the clients in the child. So a process that does not fork
spends no time on checks.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from sparklog.client.errors import ClientForked

#: All clients of this process.
_clients: weakref.WeakSet[Any] = weakref.WeakSet()
#: The parent's clients. The child keeps them alive, because their garbage collection could close the parent's sockets.
_inherited: list[Any] = []


class InheritedClient:
    """The class that the parent's clients get in a forked child. Methods other than ``close`` raise ClientForked."""

    kind = "client"

    def __getattribute__(self, name: str) -> Any:
        if name in {"close", "__class__"}:
            return object.__getattribute__(self, name)
        raise ClientForked(type(self).kind)

    def close(self, *_: Any, **__: Any) -> None:
        """Do nothing: the connections are the parent's."""

    def __enter__(self) -> InheritedClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the connections are the parent's."""

    def __iter__(self) -> NoReturn:
        raise ClientForked(type(self).kind)


def watch(client: Any) -> None:
    """Make ``client`` unusable in forked children.

    A child first calls the client's method ``after_fork``, if there is one.
    """
    _clients.add(client)


def _after_fork() -> None:
    for client in list(_clients):
        if hasattr(client, "after_fork"):
            client.after_fork()
        kind = type(client).__name__
        client.__class__ = type(f"Inherited{kind}", (InheritedClient,), {"kind": kind})
        _inherited.append(client)
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
