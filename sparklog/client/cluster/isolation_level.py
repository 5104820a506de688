"""What readers see of transactions: by name in the API, by number on the wire."""

from __future__ import annotations

from typing import Literal

from sparklog.errors import ConfigError

#: ``read_committed``: records of committed transactions and of none, up to the first transaction that is open.
#: ``read_uncommitted``: all that is replicated, whatever becomes of its transaction.
Isolation = Literal["read_committed", "read_uncommitted"]

#: By the wire's number: see ``messages.Fetch``.
_NAMES = ("read_uncommitted", "read_committed")


def wire_isolation(isolation: Isolation | int) -> int:
    """The wire's number; numbers are taken as they are. Raises ConfigError for anything else."""
    if isolation in _NAMES:
        return _NAMES.index(isolation)
    if isinstance(isolation, int) and isolation in {0, 1}:
        return int(isolation)
    raise ConfigError(f"isolation={isolation!r}: expected 'read_committed' or 'read_uncommitted'")
