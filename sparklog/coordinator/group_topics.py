"""The topics that groups may read, as far as their coordinator knows, and the topics that a pattern matches.

The module is pure. Patterns are RE2, which takes time in proportion to the names for any pattern: a client's pattern
must not block a broker. Source: KIP-848, SubscribedTopicRegex.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from sparklog.coordinator.assignor import TopicView
from sparklog.model import is_internal
from sparklog.record.arrays import binary_of


def pattern_error(pattern: str) -> str:
    """Return why ``pattern`` is invalid, or an empty string."""
    try:
        _matches(pattern, [""])
    except pa.ArrowInvalid as error:
        return f"pattern {pattern!r}: {error}"
    return ""


def _matches(pattern: str, names: list[str]) -> frozenset[str]:
    """Return the names that ``pattern`` matches from end to end. Raises ArrowInvalid."""
    found = pc.match_substring_regex(
        binary_of([name.encode() for name in names], pa.string()), pattern=f"^(?:{pattern})$"
    )
    return frozenset(name for name, matched in zip(names, found.to_pylist(), strict=True) if matched)


class Topics:
    """The known topics of one group coordinator."""

    def __init__(self) -> None:
        self.views: dict[str, TopicView] = {}
        #: Whether topics were reported. Nothing is assigned before the first report.
        self.is_known = False
        self._matching: dict[str, frozenset[str]] = {}

    def seen(self, views: Mapping[str, TopicView]) -> frozenset[str]:
        """Update the known topics; return the names of new or different topics.

        A topic that is not named stays, because the reporting broker may not know it yet.
        """
        self.is_known = True
        changed = frozenset(name for name, view in views.items() if self.views.get(name) != view)
        if changed - self.views.keys():
            self._matching.clear()
        self.views.update((name, views[name]) for name in changed)
        return changed

    def gone(self, topics: Iterable[tuple[str, str]]) -> frozenset[str]:
        """Remove deleted topics (name, topic id); return those that were known.

        An empty id means any topic with the name.
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
        """Return the topics whose whole name matches; never internal ones."""
        found = self._matching.get(pattern)
        if found is None:
            found = self._matching[pattern] = self.among(pattern, self.views)
        return found

    @staticmethod
    def among(pattern: str, names: Iterable[str]) -> frozenset[str]:
        """Return those of ``names`` that match; never internal ones."""
        return _matches(pattern, [name for name in names if not is_internal(name)])
