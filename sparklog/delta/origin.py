"""Whose records a topic has at their offsets: its own, and those of the table that it was restored from. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Origin(NamedTuple):
    """Of one topic. ``restored_from``: its setting of that name, ``<topic id>/<table id>@<version>``, or empty."""

    topic_id: str
    restored_from: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """The topic's, and that of the one it was restored from."""
        return tuple(filter(None, (self.topic_id, self.restored_from.partition("/")[0])))

    def is_in(self, topic_id: str, *, table_id: str, seam_version: int) -> bool:
        """Whether a table's rows are this topic's. ``topic_id`` and ``seam_version``: what its last archive commit
        says, and its version. A table of the same earlier topic that the restore was not made from, or that went on
        behind its version, holds other records where the restored topic has gone on."""
        if topic_id == self.topic_id:
            return True
        source, _, version = self.restored_from.rpartition("@")
        return source == f"{topic_id}/{table_id}" and int(version) >= seam_version
