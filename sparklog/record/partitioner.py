"""The partitions of keys: Kafka's murmur2, computed for whole columns.

A key gets the same partition as from Kafka's default partitioner, so producers of sparklog and of Kafka can write to
one topic. Each step of the computation processes four bytes of all keys, without a Python loop over records.
``keys.py`` defines the bytes of keys in typed columns.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

#: The result for a null key. The producer then chooses the partition.
NO_PARTITION = -1

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
#: If fewer keys than this have bytes left, a step with numpy takes longer than a Python loop over these keys.
_FEW = 16

_Keys: TypeAlias = "pa.Array | pa.ChunkedArray"


def partitions_for_keys(keys: _Keys, n: int) -> npt.NDArray[np.int32]:
    """Return the partition of each key, from 0 to ``n`` - 1, or NO_PARTITION for a null key.

    ``keys`` may have any binary or string type.
    """
    assert n > 0
    positive = murmur2_column(keys) & np.uint32(0x7FFFFFFF)
    partitions: npt.NDArray[np.int32] = (positive % np.uint32(n)).astype(np.int32)
    if keys.null_count:
        partitions[np.asarray(keys.is_null(), dtype=np.bool_)] = NO_PARTITION
    return partitions


def partition_for_key(key: bytes, n: int) -> int:
    """Return the partition of one key, from 0 to ``n`` - 1. For a few keys this is faster than numpy."""
    assert n > 0
    return (murmur2(key) & 0x7FFFFFFF) % n


def murmur2(key: bytes) -> int:
    """Return the murmur2 hash of one key as a signed 32-bit number. Source: Kafka's ``Utils.murmur2``."""
    count = len(key) // 4
    state = _SEED ^ len(key)
    for word in struct.unpack_from(f"<{count}I", key):
        mixed = word * _M & _MASK
        mixed = (mixed ^ mixed >> 24) * _M & _MASK
        state = state * _M & _MASK ^ mixed
    if tail := key[4 * count :]:
        state = (state ^ int.from_bytes(tail, "little")) * _M & _MASK
    state = (state ^ state >> 13) * _M & _MASK
    state ^= state >> 15
    return state - (1 << 32) if state >> 31 else state


def murmur2_column(keys: _Keys) -> npt.NDArray[np.uint32]:
    """Return the unsigned hash of each key.

    A null has the hash of the empty key.

    Source: org.apache.kafka.common.utils.Utils.murmur2 (seed 0x9747b28c).
    """
    if isinstance(keys, pa.ChunkedArray):
        return np.concatenate([murmur2_column(chunk) for chunk in keys.chunks] or [np.zeros(0, np.uint32)])
    content, starts, lengths = key_spans(keys)
    with np.errstate(over="ignore"):
        return _hash(content, starts, lengths)


def _hash(
    content: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    order = _longest_first(lengths)
    if order is not None:
        starts, lengths = starts[order], lengths[order]
    state: npt.NDArray[np.uint32] = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    words = _words(content)
    steps = int(lengths[0]) // 4 if len(lengths) else 0
    # The keys are sorted by length, so those that have a word for a step are at the beginning of the arrays.
    active_at = np.searchsorted(-lengths, np.arange(-4, -4 * steps - 1, -4), side="right").tolist()
    for step, active in enumerate(active_at):
        if active < _FEW:
            _finish_few(state[:active], words, starts[:active] + 4 * step, lengths[:active] // 4 - step)
            break
        state[:active] = state[:active] * np.uint32(_M) ^ _mixed(words[starts[:active] + 4 * step])
    _add_tails(state, content, starts, lengths)
    state ^= state >> np.uint32(13)
    state *= np.uint32(_M)
    state ^= state >> np.uint32(15)
    if order is None:
        return state
    hashes: npt.NDArray[np.uint32] = np.empty_like(state)
    hashes[order] = state
    return hashes


def _longest_first(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | None:
    """Return the order by descending length, or None if all keys have the same length."""
    if len(lengths) == 0:
        return None
    longest = lengths.max()
    if longest == lengths.min():
        return None
    shorter_by = longest - lengths
    # numpy uses radix sort for 16-bit numbers, which is many times faster.
    return np.argsort(shorter_by.astype(np.uint16) if longest < 1 << 16 else shorter_by, kind="stable")


def _finish_few(
    state: npt.NDArray[np.uint32],
    words: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> None:
    for index in range(len(state)):
        start, count = int(starts[index]), int(counts[index])
        value = int(state[index])
        for word in _mixed(words[start : start + 4 * count : 4].copy()).tolist():
            value = value * _M & _MASK ^ word
        state[index] = value


def _mixed(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    words = words * np.uint32(_M)
    words ^= words >> np.uint32(24)
    words *= np.uint32(_M)
    return words


def _add_tails(
    state: npt.NDArray[np.uint32],
    content: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> None:
    left = lengths % 4
    ends = starts + lengths - left
    for place in (2, 1, 0):
        rows = np.flatnonzero(left > place)
        state[rows] ^= content[ends[rows] + place].astype(np.uint32) << np.uint32(8 * place)
    rows = np.flatnonzero(left)
    state[rows] *= np.uint32(_M)


def _words(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the little-endian word that begins at each byte. Keys may begin at any position."""
    count = max(len(content) - 3, 0)
    words: npt.NDArray[np.uint32] = np.ndarray(
        shape=(count,), dtype="<u4", buffer=content.data if count else bytes(0), strides=(1,)
    )
    return words


def key_spans(keys: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all bytes of the column, and the start and length of each key. A null has length 0."""
    kind = keys.type
    if types.is_dictionary(kind):
        keys = keys.dictionary.cast(pa.large_binary()).take(keys.indices)
        kind = keys.type
    if types.is_string_view(kind) or types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        keys = keys.cast(pa.large_binary())
        kind = keys.type
    if types.is_binary(kind) or types.is_string(kind):
        width = "<i4"
    elif types.is_large_binary(kind) or types.is_large_string(kind):
        width = "<i8"
    else:
        raise TypeError(f"keys are {kind}, expected binary or string")
    _, offset_buffer, content_buffer = keys.buffers()
    if len(keys) == 0:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64)
    offsets = np.frombuffer(offset_buffer, dtype=width)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    content = np.frombuffer(content_buffer, dtype=np.uint8) if content_buffer else np.zeros(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if keys.null_count:
        lengths = np.where(pc.is_null(keys).to_numpy(zero_copy_only=False), 0, lengths)
    return content, starts, lengths
