"""A broker's copy of the metadata of the topics that it hosts: the file ``topics`` in the root of a log directory.

ZooKeeper has the same metadata. The file is used if the data of ZooKeeper is lost, and for topics whose logs are set
aside. ``partition.json`` does not suffice, because it has only what is needed to read a log. The file is replaced
atomically, and its new content is durable on return. The file may be some seconds older than the broker's metadata.
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
    """Return the stored copies of topics' metadata, by topic id. The result is empty if the file is missing or damaged.

    Raises:
        NewerFormatError: a newer release wrote the file.
    """
    path = log_dir / TOPICS_FILE
    try:
        found = decode_state(read_file(disk, path), _Notes, path=path)
    except FileNotFoundError:
        return {}
    except NewerFormatError:
        raise
    except StorageError as failure:
        logger.warning("%s; the broker writes the notes on its topics again", failure)
        return {}
    return {note.topic_id: note for note in found.topics}


def write_topic_notes(disk: Disk, log_dir: Path, notes: dict[str, TopicNote]) -> None:
    """Store copies of topics' metadata durably, by topic id. Raises OSError."""
    replace_file(disk, log_dir / TOPICS_FILE, encode_state(_Notes(tuple(notes.values()))))
