"""Origin of a topic's records: the topic itself, and the table that it was restored from. Pure."""

from __future__ import annotations

from typing import NamedTuple


class ArchiveOrigin(NamedTuple):
    """Origin of one topic's records. ``restored_from``: the setting of that name, ``<topic id>/<table id>@<version>``,
    or empty."""

    topic_id: str
    restored_from: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the topic's id, and that of the topic it was restored from."""
        return tuple(filter(None, (self.topic_id, self.restored_from.partition("/")[0])))

    def is_in(self, topic_id: str, *, table_id: str, seam_version: int) -> bool:
        """Return whether a table's rows belong to this topic. ``topic_id`` and ``seam_version``: the id in its last
        archive commit, and that commit's version. A table of the same earlier topic from which the topic was not
        restored, or that continued after the restored version, has other records at the restored topic's later
        offsets."""
        if topic_id == self.topic_id:
            return True
        source, _, version = self.restored_from.rpartition("@")
        return source == f"{topic_id}/{table_id}" and int(version) >= seam_version
