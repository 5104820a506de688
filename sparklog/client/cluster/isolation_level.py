"""The isolation levels of consumers. The API uses their names, and requests use their numbers."""

from __future__ import annotations

from typing import Literal

from sparklog.errors import ConfigError

#: ``read_committed``: records of committed transactions, and records without a transaction, up to the first open
#: transaction. ``read_uncommitted``: all records below the high watermark, even of open and aborted transactions.
Isolation = Literal["read_committed", "read_uncommitted"]

#: The names, by their number in requests; see ``messages.Fetch``.
_NAMES = ("read_uncommitted", "read_committed")


def wire_isolation(isolation: Isolation | int) -> int:
    """Return the number of an isolation level. A number is returned unchanged. Raises ConfigError for other values."""
    if isolation in _NAMES:
        return _NAMES.index(isolation)
    if isinstance(isolation, int) and isolation in {0, 1}:
        return int(isolation)
    raise ConfigError(f"isolation={isolation!r}: expected 'read_committed' or 'read_uncommitted'")
