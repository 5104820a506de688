"""The split of long lists into pieces that fit into one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sparklog.protocol.fields import IN_ONE_REQUEST

_T = TypeVar("_T")


def pieces(entries: Sequence[_T], size: int = IN_ONE_REQUEST) -> Iterator[Sequence[_T]]:
    """Yield ``entries`` in order, at most ``size`` at a time; one empty piece if there are none."""
    for first in range(0, max(len(entries), 1), size):
        yield entries[first : first + size]
