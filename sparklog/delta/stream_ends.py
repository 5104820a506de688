"""The offset ranges of a micro-batch of ``format("sparklog")``, read from Spark's checkpoint.

The rows do not show these ranges: transaction markers, aborted transactions and compaction leave offsets without rows,
and a batch may have no rows. Before a batch runs, Spark writes the file ``offsets/<batch>`` in the checkpoint. Its last
line is the source's offset at the end of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sparklog.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchEnds:
    """The start and end offsets of a micro-batch of one topic, by partition.

    ``ends`` has the end offsets. ``begun`` has the start offsets: the ends of the previous micro-batch, unless the
    source stored another start.
    """

    topic_id: str
    ends: Mapping[int, int]
    begun: Mapping[int, int] = field(default_factory=dict)


class _StreamedTopic(msgspec.Struct):
    id: str
    offsets: dict[int, int]


class _Offset(msgspec.Struct):
    version: int
    topics: dict[str, _StreamedTopic]
    begun: dict[str, _StreamedTopic] = msgspec.field(name="from", default_factory=dict)


def read_batch_ends(checkpoint: Path, batch: int, *, topic: str) -> BatchEnds:
    """Return the start and end offsets of a micro-batch, from the checkpoint of a query that reads one topic.

    Raises:
        ConfigError: the micro-batch's file in the checkpoint has no offset of this source for ``topic``.
    """
    found = _read(checkpoint / "offsets" / str(batch), topic)
    before = _read(checkpoint / "offsets" / str(batch - 1), topic).ends if batch > 0 else {}
    return BatchEnds(found.topic_id, found.ends, {**before, **found.begun})


def _read(path: Path, topic: str) -> BatchEnds:
    last = path.read_text("utf-8").splitlines()[-1]
    try:
        offset = msgspec.json.decode(last, type=_Offset)
        found = offset.topics[topic]
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(f"{path}: no offset of topic {topic}: {error}: {last[:500]}") from None
    begun = offset.begun.get(topic)
    return BatchEnds(found.id, found.offsets, begun.offsets if begun is not None else {})
