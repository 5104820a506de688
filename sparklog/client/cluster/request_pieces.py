"""A function that splits a long list into pieces, each of which fits into one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sparklog.protocol.fields import IN_ONE_REQUEST

_T = TypeVar("_T")


def pieces(entries: Sequence[_T], size: int = IN_ONE_REQUEST) -> Iterator[Sequence[_T]]:
    """Yield ``entries`` in order, in pieces of at most ``size``. Without entries yield one empty piece."""
    for first in range(0, max(len(entries), 1), size):
        yield entries[first : first + size]
