"""What a broker was told of the topics that it hosts: ``topics`` in the root of a log directory.

ZooKeeper holds this; the file is for its loss, and for topics whose logs are set aside. ``partition.json`` has no more
than a log needs to be read. Replaced atomically, durable on return, and some seconds behind what the broker was told.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from sparklog.errors import StorageError
from sparklog.model import TopicNote
from sparklog.storage.disk import Disk, read_file, replace_file
from sparklog.storage.formats import NewerFormatError, decode_state, encode_state

TOPICS_FILE = "topics"

logger = logging.getLogger(__name__)


class _Notes(msgspec.Struct, frozen=True):
    topics: tuple[TopicNote, ...]
    version: int = 1


def read_topic_notes(disk: Disk, log_dir: Path) -> dict[str, TopicNote]:
    """Return the notes by topic id; none from a missing or damaged file.

    Raises:
        NewerFormatError: it was written by a newer release.
    """
    path = log_dir / TOPICS_FILE
    try:
        found = decode_state(read_file(disk, path), _Notes, path=path)
    except FileNotFoundError:
        return {}
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; topics are noted again", failure)
        return {}
    return {note.topic_id: note for note in found.topics}


def write_topic_notes(disk: Disk, log_dir: Path, notes: dict[str, TopicNote]) -> None:
    """Raises OSError."""
    replace_file(disk, log_dir / TOPICS_FILE, encode_state(_Notes(tuple(notes.values()))))
