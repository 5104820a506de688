"""Hashes of 128 bits for the keys of a whole column.

The cleaner compares these hashes, so that it need not store the keys.

This is multilinear hashing: a key is a sequence of 32-bit words (padded with zeros) and its length. A hash has four
parts of 32 bits. Each part is the upper half of a sum of products with random 64-bit numbers, modulo 2^64. For any two
different keys, one part is equal with a probability of at most 2^-32, and all four are equal with 2^-128. The random
numbers are made from a ``seed``. Each cleaning has another seed, so that no user can prepare keys that collide. Among a
billion keys, a collision happens in one of 10^20 cleanings. That is far less likely than an error that the checksums of
the batches do not detect. A null has the hash of the empty key, so the caller must check the column for nulls.

Source: Lemire and Kaser, "Strongly universal string hashing is fast". This module is pure. Loops run over key lengths,
not over keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparklog.record.partitioner import key_spans

#: The bytes of keys that are copied together at a time. The positions of these bytes take eight times as much memory.
_GATHER_BYTES = 1 << 20
_HASHES = 4
#: Up to this number of words in a key, a loop over words is faster than a matrix product.
_FEW_WORDS = 16
_HALF = np.uint64(32)
_UPPER = np.uint64(0xFFFFFFFF00000000)
#: The mask of a key's last word, by the number of the word's bytes that belong to the key.
_KEPT = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], "<u4")


class KeyHashes(NamedTuple):
    """The 128-bit hashes of several keys: ``high`` has the upper 64 bits of each, and ``low`` the lower 64 bits."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]


class KeyHash:
    """A hash function for keys, with a seed.

    Compare only hashes from functions with the same seed.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        #: The constants for the sum and for the length.
        self._constant = self._draw(1)[0]
        self._of_length = self._draw(1)[0]
        #: The random numbers, one row for each word of a key. There are enough rows for the longest key so far.
        self._of_words = self._draw(16)

    def _draw(self, rows: int) -> npt.NDArray[np.uint64]:
        return self._random.integers(0, 2**64, (rows, _HASHES), np.uint64)

    def of(self, keys: pa.Array) -> KeyHashes:
        """Return the hash of each key of a binary column (``keys.encode_keys``)."""
        content, starts, lengths = key_spans(keys)
        sums = np.empty((_HASHES, len(starts)), np.uint64)
        words = (lengths + 3) // 4
        counts = _distinct(words)
        with np.errstate(over="ignore"):
            for count in counts:
                self._grow(count)
                step = max(1, _GATHER_BYTES // (4 * count)) if count else len(starts)
                for some in _pieces(words, count, step, alone=len(counts) == 1):
                    sums[:, some] = self._sums(content, starts[some], lengths[some], count)
            measures = lengths.astype(np.uint64)
            for one, constant, of_length in zip(sums, self._constant, self._of_length, strict=True):
                one += measures * of_length + constant
        high = sums[0] & _UPPER | sums[1] >> _HALF
        low = sums[2] & _UPPER | sums[3] >> _HALF
        return KeyHashes(high, low)

    def _grow(self, count: int) -> None:
        if count > len(self._of_words):
            self._of_words = np.concatenate([self._of_words, self._draw(max(count, 2 * len(self._of_words)))])

    def _sums(
        self,
        content: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        count: int,
    ) -> npt.NDArray[np.uint64]:
        """Return the sums of products for keys that all have ``count`` words."""
        if not count:
            return np.zeros((_HASHES, len(starts)), np.uint64)
        width = 4 * count
        length = int(lengths[0])
        if _is_run(starts, lengths):  # adjacent keys of one length, or a single key
            gathered = np.zeros((len(starts), width), np.uint8)
            first = int(starts[0])
            gathered[:, :length] = content[first : first + length * len(starts)].reshape(-1, length)
        else:
            gathered = _windows(content, int(starts.max()) + width, width)[starts]
        words = gathered.view("<u4")
        words[:, -1] &= _KEPT[lengths - (width - 4)]  # clears the bytes of the next key
        if count > _FEW_WORDS:
            product: npt.NDArray[np.uint64] = (words.astype(np.uint64) @ self._of_words[:count]).T
            return product
        sums = np.zeros((_HASHES, len(starts)), np.uint64)
        for word, factors in zip(words.T, self._of_words, strict=False):
            own = word.astype(np.uint64)
            for one, factor in zip(sums, factors, strict=True):
                one += own * factor
        return sums


def _windows(content: npt.NDArray[np.uint8], end: int, width: int) -> npt.NDArray[np.uint8]:
    """Return, for each position, the ``width`` bytes from there on. After the content there are zeros."""
    if end > len(content):
        content = np.concatenate([content, np.zeros(end - len(content), np.uint8)])
    return np.lib.stride_tricks.sliding_window_view(content, width)


def _pieces(
    words: npt.NDArray[np.int64], count: int, step: int, *, alone: bool
) -> Iterator[slice | npt.NDArray[np.intp]]:
    """Yield the rows of the keys with ``count`` words, ``step`` at a time. ``alone`` means that all keys have these."""
    if alone:
        yield from (slice(first, first + step) for first in range(0, len(words), step))
    else:
        rows = np.flatnonzero(words == count)
        yield from (rows[first : first + step] for first in range(0, len(rows), step))


def _is_run(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
    return bool((lengths == lengths[0]).all() and (np.diff(starts) == lengths[0]).all())


def _distinct(counts: npt.NDArray[np.int64]) -> list[int]:
    """Return the distinct values. Small values are counted, which is many times faster than sorting them."""
    if not len(counts):
        return []
    greatest = int(counts.max())
    found = np.flatnonzero(np.bincount(counts)) if greatest < len(counts) else np.unique(counts)
    return [int(count) for count in found]
