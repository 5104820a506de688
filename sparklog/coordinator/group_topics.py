"""The topics that a group coordinator knows, and the topics that a subscription pattern matches.

The module is pure. Patterns are RE2: for any pattern the matching time is linear in the length of the names, so a
client's pattern cannot block the broker. Source: KIP-848, SubscribedTopicRegex.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from sparklog.coordinator.assignor import TopicView
from sparklog.model import is_internal
from sparklog.record.arrays import binary_of


def pattern_error(pattern: str) -> str:
    """Return why ``pattern`` is not a valid regular expression, or an empty string."""
    try:
        matching_names(pattern, [""])
    except pa.ArrowInvalid as error:
        return f"pattern {pattern!r}: {error}"
    return ""


def matching_names(pattern: str, names: list[str]) -> frozenset[str]:
    """Return the names that ``pattern`` (RE2) matches as a whole. Raises ArrowInvalid for an invalid pattern."""
    found = pc.match_substring_regex(
        binary_of([name.encode() for name in names], pa.string()), pattern=f"^(?:{pattern})$"
    )
    return frozenset(name for name, matched in zip(names, found.to_pylist(), strict=True) if matched)


class Topics:
    """The table of the topics that one group coordinator knows."""

    def __init__(self) -> None:
        self.views: dict[str, TopicView] = {}
        #: Whether the broker has reported topics. No partitions are assigned before the first report.
        self.is_known = False
        self._matching: dict[str, frozenset[str]] = {}

    def seen(self, views: Mapping[str, TopicView]) -> frozenset[str]:
        """Add or update topics. Return the names of new and changed topics.

        Known topics that are not in ``views`` stay, because the broker may not know them yet.
        """
        self.is_known = True
        changed = frozenset(name for name, view in views.items() if self.views.get(name) != view)
        if changed - self.views.keys():
            self._matching.clear()
        self.views.update((name, views[name]) for name in changed)
        return changed

    def gone(self, topics: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Remove deleted topics (name, topic id). Return the names of the removed topics.

        An empty topic id means every topic with the name.
        """
        found = frozenset(
            name for name, topic_id in topics if name in self.views and topic_id in {"", self.views[name].topic_id}
        )
        for name in found:
            del self.views[name]
        if found:
            self._matching.clear()
        return found

    def matching(self, pattern: str) -> frozenset[str]:
        """Return the known topics whose whole name matches ``pattern``, without internal topics."""
        found = self._matching.get(pattern)
        if found is None:
            found = self._matching[pattern] = self.among(pattern, self.views)
        return found

    @staticmethod
    def among(pattern: str, names: Iterable[str]) -> frozenset[str]:
        """Return the ``names`` that match ``pattern``, without internal topics."""
        return matching_names(pattern, [name for name in names if not is_internal(name)])
