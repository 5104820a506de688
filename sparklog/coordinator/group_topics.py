"""The topics that groups may read, as their coordinator has been told, and which of them a pattern names. Pure.

Patterns are RE2, which takes time in proportion to the names whatever the pattern is: a client's pattern must not hold
up a broker. Source: KIP-848, SubscribedTopicRegex.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from sparklog.coordinator.assignor import TopicView
from sparklog.model import is_internal
from sparklog.record.arrays import binary_of


def pattern_error(pattern: str) -> str:
    """Why ``pattern`` is none, or the empty string."""
    try:
        _matches(pattern, [""])
    except pa.ArrowInvalid as error:
        return f"pattern {pattern!r}: {error}"
    return ""


def _matches(pattern: str, names: list[str]) -> frozenset[str]:
    """Those that ``pattern`` describes from end to end. Raises ArrowInvalid."""
    found = pc.match_substring_regex(
        binary_of([name.encode() for name in names], pa.string()), pattern=f"^(?:{pattern})$"
    )
    return frozenset(name for name, matched in zip(names, found.to_pylist(), strict=True) if matched)


class Topics:
    """Owned by one group coordinator."""

    def __init__(self) -> None:
        self.views: dict[str, TopicView] = {}
        #: Nothing is assigned before the first word about topics.
        self.told = False
        self._matching: dict[str, frozenset[str]] = {}

    def seen(self, views: Mapping[str, TopicView]) -> frozenset[str]:
        """Take over what is known of topics now; those left out stay, for whoever tells may not have heard of them yet.
        The names of those that are new or different."""
        self.told = True
        changed = frozenset(name for name, view in views.items() if self.views.get(name) != view)
        if changed - self.views.keys():
            self._matching.clear()
        self.views.update((name, views[name]) for name in changed)
        return changed

    def gone(self, topics: Iterable[tuple[str, str]]) -> frozenset[str]:
        """These (name, topic id) were deleted; which of them were known here. An empty id: whatever has the name."""
        found = frozenset(
            name for name, topic_id in topics if name in self.views and topic_id in {"", self.views[name].topic_id}
        )
        for name in found:
            del self.views[name]
        if found:
            self._matching.clear()
        return found

    def matching(self, pattern: str) -> frozenset[str]:
        """Topics whose whole name fits; never internal ones."""
        found = self._matching.get(pattern)
        if found is None:
            found = self._matching[pattern] = self.among(pattern, self.views)
        return found

    @staticmethod
    def among(pattern: str, names: Iterable[str]) -> frozenset[str]:
        """Those of ``names``."""
        return _matches(pattern, [name for name in names if not is_internal(name)])
