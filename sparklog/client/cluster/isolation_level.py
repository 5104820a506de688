"""The isolation levels of readers: by name in the API, by number on the wire."""

from __future__ import annotations

from typing import Literal

from sparklog.errors import ConfigError

#: ``read_committed``: records of committed transactions and without a transaction, up to the first open transaction.
#: ``read_uncommitted``: all replicated records, whatever the outcome of their transaction.
Isolation = Literal["read_committed", "read_uncommitted"]

#: The names by their number on the wire; see ``messages.Fetch``.
_NAMES = ("read_uncommitted", "read_committed")


def wire_isolation(isolation: Isolation | int) -> int:
    """Return the number on the wire; a valid number is returned unchanged. Raises ConfigError for other values."""
    if isolation in _NAMES:
        return _NAMES.index(isolation)
    if isinstance(isolation, int) and isolation in {0, 1}:
        return int(isolation)
    raise ConfigError(f"isolation={isolation!r}: expected 'read_committed' or 'read_uncommitted'")
