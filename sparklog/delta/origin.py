"""The origin of a topic's records: the topic itself, and the table from which it was restored."""

from __future__ import annotations

from typing import NamedTuple


class ArchiveOrigin(NamedTuple):
    """The identity of a topic and of the archive from which it was restored. It shows which tables belong to the topic.

    ``restored_from`` is the value of the topic's setting ``restored.from``: ``<topic id>/<table id>@<version>``, or
    empty if the topic was not restored.
    """

    topic_id: str
    restored_from: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the topic's id and, if it was restored, the id of the topic from whose archive it was restored."""
        return tuple(filter(None, (self.topic_id, self.restored_from.partition("/")[0])))

    def is_in(self, topic_id: str, *, table_id: str, progress_version: int) -> bool:
        """Return whether the rows of a table belong to this topic.

        ``topic_id`` is the topic id in the table's last archive commit. ``progress_version`` is the table version of
        that commit.

        The rows belong to this topic if ``topic_id`` is its id. They also belong to this topic if it was restored from
        this table, and the table got no archive commit after the restored version. After such a commit the table and
        this topic have different records at the same offsets.
        """
        if topic_id == self.topic_id:
            return True
        source, _, version = self.restored_from.rpartition("@")
        return source == f"{topic_id}/{table_id}" and int(version) >= progress_version
