"""A process that validates broken batches, so that a crash is visible.

Run as ``python -m tests.record.fuzz_batches <seed> <rounds>``. Every round changes the bytes of a good batch, adds a
matching CRC, and validates it. The result must be a BrokerError, or every reader must accept the batch. Schema messages
are treated likewise. The process prints the counts as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import struct
import sys
from collections.abc import Iterator

import pyarrow as pa

from sparklog.errors import BrokerError
from sparklog.record.codec import EncodedBatch, decode_batch
from sparklog.record.message import read_metadata_length
from sparklog.record.schema import DEFAULT_SCHEMA, parse_schema, schema_message
from tests.record.batches import NESTED_SCHEMA, default_batch, encoded, nested_batch, resealed, validate

NUMBERS = (
    0,
    1,
    2,
    4,
    7,
    8,
    9,
    10,
    11,
    63,
    64,
    255,
    256,
    65535,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
)


def mutated(body: bytes, dice: random.Random) -> bytes:
    """Return ``body`` with one to four changes, mostly in the metadata."""
    changed = bytearray(body)
    metadata = read_metadata_length(body)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        end = metadata if dice.random() < 0.35 else len(changed)
        at = dice.randrange(max(min(end, len(changed)), 1))
        kind = dice.choices(range(8), (4, 4, 4, 4, 4, 4, 4, 1))[0]
        if kind == 0:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            changed[at] = dice.randrange(256)
        elif kind in {2, 3}:
            _put(changed, at & ~7, dice, "<q")
        elif kind == 4:
            _put(changed, at & ~3, dice, "<i")
        elif kind == 5:
            _put(changed, at & ~1, dice, "<h")
        elif kind == 6:
            other = dice.randrange(len(changed))
            count = dice.choice((4, 8, 16, 24))
            changed[at : at + count] = changed[other : other + count]
        else:
            _resize(changed, dice)
        if len(changed) < 16:
            break
    return bytes(changed)


def _put(changed: bytearray, at: int, dice: random.Random, form: str) -> None:
    bits = 8 * struct.calcsize(form)
    number = dice.choice(NUMBERS) if dice.random() < 0.8 else dice.getrandbits(bits)
    number = (dice.choice((1, -1)) * number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    if at + bits // 8 <= len(changed):
        struct.pack_into(form, changed, at, number)


def _resize(changed: bytearray, dice: random.Random) -> None:
    if dice.random() < 0.5:
        del changed[dice.randrange(len(changed)) :]
    else:
        changed.extend(dice.randbytes(dice.choice((1, 8, 64))))


def read_everything(batch: EncodedBatch, schema: pa.Schema) -> None:
    """Read every value as readers do. A batch that was accepted must not crash any of this."""
    records = decode_batch(batch.header, memoryview(batch.body), schema)
    taken = records.take(pa.array(range(records.num_rows - 1, -1, -1), pa.int64()))
    taken.validate(full=True)
    assert records.serialize().size
    for column in records.columns:
        with contextlib.suppress(OverflowError, ValueError):  # a time outside Python's years is data and no damage
            column.to_pylist()


def judge(bad: EncodedBatch, schema: pa.Schema) -> str:
    """Return the error's name, or "accepted" if every reader accepts the batch."""
    try:
        validate(bad, schema)
    except BrokerError as error:
        return error.code.name
    read_everything(bad, schema)
    return "accepted"


def judge_schema(message: bytes) -> str:
    """Return the error's name, or "schema" if the schema can be written again."""
    try:
        schema = parse_schema(message)
    except BrokerError as error:
        return f"schema {error.code.name}"
    assert parse_schema(schema_message(schema)).equals(schema)
    return "schema"


def every_flip(batch: EncodedBatch) -> Iterator[bytes]:
    """Yield the bytes with every single bit flipped, and truncated to every length."""
    body = batch.body.to_pybytes()
    for bit in range(8 * len(body)):
        changed = bytearray(body)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
    for length in range(len(body)):
        yield body[:length]


def main(seed: int, rounds: int) -> None:
    dice = random.Random(seed)
    tally: collections.Counter[str] = collections.Counter()
    for compression in (None, "zstd"):
        batch = encoded(default_batch(4), compression)
        tally.update(judge(resealed(batch, body), DEFAULT_SCHEMA) for body in every_flip(batch))
    good = [
        (encoded(batch, compression), schema)
        for batch, schema in ((default_batch(), DEFAULT_SCHEMA), (nested_batch(), NESTED_SCHEMA))
        for compression in (None, "lz4", "zstd")
    ]
    for _ in range(rounds):
        batch, schema = dice.choice(good)
        tally[judge(resealed(batch, mutated(batch.body.to_pybytes(), dice)), schema)] += 1
    messages = [schema_message(DEFAULT_SCHEMA), schema_message(NESTED_SCHEMA)]
    tally.update(judge_schema(mutated(dice.choice(messages), dice)) for _ in range(rounds // 4))
    print(json.dumps(tally))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
