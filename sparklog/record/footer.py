"""The beginning and the end of a segment's data file, which make it an ordinary Arrow IPC file.

::

    ARROW1 0 0 | schema message | batches ... | end of stream | footer | i32 footer bytes | ARROW1
    '--- arrow_prelude --------'               '--- arrow_footer -----------------------------'

The footer is a flatbuffer, which this module writes without Arrow:

::

    0    u32 32            position of the Footer table
    4    u16 12, u16 16, then the table's positions of version, schema, dictionaries, record batches
    16   zeros
    32   i32 28            distance back to the vtable
    36   u32               -> schema, inside the copy below
    40   u32               -> dictionaries, none
    44   u32               -> record batches
    48   i16 4             metadata version V5, 2 zeros
    52   u32 0             the vector of dictionaries
    56   zeros
    60   u32 count         the vector of record batches: blocks of 24 bytes from 64 on
    ..   the flatbuffer of the Schema message, verbatim

Each replica seals its own segments, and the files of all replicas must be identical. So the same schema bytes and the
same batches must give the same footer with any version of pyarrow. Therefore the schema in the footer is not encoded
again: the footer points into a copy of the topic's schema message. Offsets in flatbuffers are relative, so a copy at a
multiple of 8 stays valid. Source: format/File.fbs of Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sparklog.record.flatbuffer import malformed
from sparklog.record.message import CONTINUATION, METADATA_V5, PREFIX_BYTES, read_metadata_length, schema_table_position

MAGIC = b"ARROW1"
_PRELUDE_MAGIC = MAGIC + bytes(2)
END_OF_STREAM = struct.pack("<Ii", CONTINUATION, 0)

#: One Block of the footer, which describes a batch: its file position, the size of its metadata (with prefix and
#: padding), and the size of its body.
BLOCK_DTYPE = np.dtype([("offset", "<i8"), ("metadata_length", "<i4"), ("padding", "<i4"), ("body_length", "<i8")])

_TABLE = 32
_BLOCKS = 64
_HEAD = struct.Struct("<I6H16xiIIIhxxI4xI")
assert _HEAD.size == _BLOCKS and BLOCK_DTYPE.itemsize == 24


@lru_cache(maxsize=256)
def arrow_prelude(schema_message: bytes) -> bytes:
    """Return the bytes before the first batch of a segment's data file.

    The result is cached: a starting broker needs it for each of its logs, and thousands of them have the same schema.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``schema_message`` is not exactly one message.
    """
    _flatbuffer(schema_message)
    return _PRELUDE_MAGIC + schema_message


def schema_of_prelude(prelude: bytes) -> bytes:
    """Return the schema message in a result of ``arrow_prelude``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``prelude`` is anything else.
    """
    message = prelude[len(_PRELUDE_MAGIC) :]
    if prelude[: len(_PRELUDE_MAGIC)] != _PRELUDE_MAGIC or read_metadata_length(message) != len(message):
        raise malformed(f"{len(prelude)} bytes that are not the front of an Arrow file and its schema alone")
    _flatbuffer(message)
    return message


def arrow_footer(schema_message: bytes, blocks: Sequence[tuple[int, int, int]] | npt.NDArray[np.void]) -> bytes:
    """Return the bytes after the last batch of a sealed segment's data file.

    ``blocks`` has one entry for each batch, in the order of the file: (file position, metadata length, body length).
    ``blocks`` may also be an array of ``BLOCK_DTYPE``, such as a result of ``blocks_of``.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``schema_message`` is not a Schema message.
    """
    flatbuffer = _flatbuffer(schema_message)
    vector = _block_array(blocks)
    copy_at = _BLOCKS + vector.nbytes
    head = _HEAD.pack(
        _TABLE,
        # vtable: its bytes, the table's bytes, then positions of version, schema, dictionaries, record batches
        *(12, 20, 16, 4, 8, 12),
        _TABLE - 4,
        copy_at + schema_table_position(flatbuffer) - (_TABLE + 4),
        52 - (_TABLE + 8),
        60 - (_TABLE + 12),
        METADATA_V5,
        0,
        len(vector),
    )
    footer = head + vector.tobytes() + flatbuffer
    return END_OF_STREAM + footer + struct.pack("<i", len(footer)) + MAGIC


def blocks_of(
    positions: npt.NDArray[np.int64], lengths: npt.NDArray[np.integer], file: bytes | memoryview
) -> npt.NDArray[np.void]:
    """Return the footer's entries (Arrow's blocks) for the batches at ``positions`` of a segment's data ``file``.

    ``lengths`` are the lengths of the bodies, from the batch headers. Positions are multiples of 8. Only the first
    bytes of each batch are read.
    """
    sizes = np.frombuffer(file, dtype="<i4", count=len(file) // 4)
    blocks = np.zeros(len(positions), dtype=BLOCK_DTYPE)
    blocks["offset"] = positions
    blocks["metadata_length"] = sizes[np.asarray(positions) // 4 + 1] + PREFIX_BYTES
    blocks["body_length"] = np.asarray(lengths, dtype=np.int64) - blocks["metadata_length"]
    return blocks


def block_of(position: int, body: bytes | memoryview) -> tuple[int, int, int]:
    """Return the footer's entry (Arrow's block) for the batch at ``position`` of its file.

    ``body`` is the batch's whole message.

    Raises:
        BrokerError: CORRUPT_MESSAGE if ``body`` does not begin with the prefix of a message.
    """
    metadata_length = read_metadata_length(body)
    return position, metadata_length, len(body) - metadata_length


def _flatbuffer(schema_message: bytes) -> bytes:
    metadata_length = read_metadata_length(schema_message)
    flatbuffer = schema_message[PREFIX_BYTES:metadata_length]
    schema_table_position(flatbuffer)
    return flatbuffer


def _block_array(blocks: Sequence[tuple[int, int, int]] | npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    if isinstance(blocks, np.ndarray):
        assert blocks.dtype == BLOCK_DTYPE
        return blocks
    array = np.zeros(len(blocks), dtype=BLOCK_DTYPE)
    columns = np.array(blocks, dtype=np.int64).reshape(-1, 3)
    array["offset"], array["metadata_length"], array["body_length"] = columns.T
    return array
