"""Tests that columns become JSON documents and these documents become the same columns, in bulk and one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import ErrorCode
from sparklog.kafka.records import json_columns
from sparklog.kafka.records.invalid import InvalidRecords
from sparklog.kafka.records.json_columns import columns_from_json, documents_of
from sparklog.record.arrays import binary_of
from sparklog.record.format_values import json_values
from tests.cli.test_round_trips import batches, stored

FLAT = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int8()),
        ("price", pa.float64()),
        ("ratio", pa.float32()),
        ("name", pa.string()),
        ("ok", pa.bool_()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("cost", pa.decimal128(9, 2)),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("x", pa.int32()), ("label", pa.string())])),
    ]
)


def columns(*documents: bytes, schema: pa.Schema = FLAT) -> pa.RecordBatch:
    """Read documents in bulk, as many of them are read."""
    with patch.object(json_columns, "FEW_DOCUMENTS", 0):
        return columns_from_json(binary_of(documents), schema)


def one_by_one(*documents: bytes, schema: pa.Schema = FLAT) -> pa.RecordBatch:
    with patch.object(json_columns, "FEW_DOCUMENTS", 10**9):
        return columns_from_json(binary_of(documents), schema)


def written(batch: pa.RecordBatch, *, few: bool) -> list[bytes]:
    with patch.object(json_columns, "FEW_DOCUMENTS", 10**9 if few else 0):
        documents: list[bytes] = documents_of(batch).to_pylist()
    return documents


@given(batches(), st.booleans())
def test_documents_give_back_the_columns_in_both_ways(batch: pa.RecordBatch, few: bool) -> None:
    documents = written(batch, few=few)
    for read in (columns, one_by_one):
        found = read(*documents, schema=batch.schema)
        assert stored(pa.Table.from_batches([found])) == stored(pa.Table.from_batches([batch]))


@given(batches(), st.booleans())
def test_documents_have_the_documented_form(batch: pa.RecordBatch, few: bool) -> None:
    found = [json.loads(document) for document in written(batch, few=few)]
    values = [json_values(column) for column in batch.columns]
    expected = [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*values, strict=True)]
    assert repr(found) == repr(expected), "the types of numbers are the same too"


PLAIN = b'{"id":1,"price":1.5,"name":"a","ok":true,"at":"2024-01-31T12:00:00Z","day":"2024-01-31","cost":"1.50"}'
NESTED = b'{"id":2,"small":-3,"ratio":0.5,"raw":"b","tags":["x",null,"y"],"place":{"x":7,"label":"z"}}'
PIECES = [
    *(b"{ } [ ] , : null true false NaN Infinity -0 1 1.5 1e400 9007199254740993 16777217 1e3 -1".split(b" ")),
    *(b'"id" "price" "ratio" "name" "cost" "raw" "x" "tags" "place" "1.50" "2024-02-30" "a\\u0000"'.split(b" ")),
    b'"\\ud800"',
    b'"\xff"',
    b'{"base64":"/w=="}',
    b"\n",
    b"\r",
    b" ",
    b"\0",
    b"}{",
]


def mangled(dice: random.Random) -> bytes:
    document = bytearray(dice.choice((PLAIN, NESTED)))
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(document) + 1)
        document[at : at + dice.choice((0, 0, 1, 3))] = dice.choice(PIECES)
    return bytes(document)


def outcome(read: Callable[..., pa.RecordBatch], documents: list[bytes]) -> str:
    try:
        return stored(pa.Table.from_batches([read(*documents)]))
    except InvalidRecords as error:
        assert error.code is ErrorCode.INVALID_RECORD and error.record_errors
        return str(error.record_errors)


@given(st.integers(0, 2**32))
def test_both_ways_agree_on_mangled_documents(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(10):
        documents = [mangled(dice) if dice.random() < 0.7 else PLAIN for _ in range(dice.choice((1, 2, 3)))]
        assert outcome(columns, documents) == outcome(one_by_one, documents), documents


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"null", "null found, expected a JSON object"),
        (b"5", "5 found, expected a JSON object"),
        (b"", "Expecting value"),
        (b'{"id":1', "Expecting"),
        (b'{"id":1}{"id":2}', "Extra data"),
        (b'{"ide":1}', r"unknown fields \['ide'\]"),
        (b'{"id":1,"id":2}', "two values for 'id'"),
        (b'{"id":1.5}', r"field id: 1\.5|field id: Decimal\('1\.5'\)"),
        (b'{"small":128}', "field small: 128"),
        (b'{"price":9007199254740993}', "field price"),
        (b'{"ratio":1e39}', "field ratio"),
        (b'{"name":5}', "field name: 5"),
        (b'{"name":"\xff"}', "not UTF-8"),
        (b'{"name":"\\ud800"}', "field name"),
        (b'{"at":"yesterday"}', "field at: 'yesterday'"),
        (b'{"place":{"y":1}}', "field place"),
        (b'{"tags":[1]}', r"field tags\[0\]|field tags"),
        (b'{"cost":"1.555"}', "field cost"),
        (b'{"id":' + b"[" * 100_000, "nested too deeply|Expecting"),
    ],
)
def test_a_document_that_does_not_fit_is_named(document: bytes, message: str) -> None:
    with pytest.raises(InvalidRecords, match=message) as refused:
        columns(PLAIN, PLAIN, document, PLAIN)
    assert refused.value.code is ErrorCode.INVALID_RECORD
    assert [error.batch_index for error in refused.value.record_errors] == [2]


def test_the_errors_of_several_records_are_named() -> None:
    with pytest.raises(InvalidRecords) as refused:
        columns(b'{"id":"x","price":"y"}', PLAIN, b'{"price":1}')
    assert [(error.batch_index, error.message[:11]) for error in refused.value.record_errors] == [
        (0, "field id: '"),
        (0, "field price"),
    ]


def test_a_null_in_a_required_column_is_named() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    with pytest.raises(InvalidRecords, match="record 1: field id cannot be null"):
        columns(b'{"id":1}', b'{"name":"x"}', schema=schema)


def test_documents_that_join_each_other_are_refused() -> None:
    """The rows of both together are two, as many as the records."""
    with pytest.raises(InvalidRecords):
        columns(b'{"place":{"x":1}', b'{"x":1}}{"id":1}')
    with pytest.raises(InvalidRecords):
        columns(b'{"name":"}', b'{"}{"id":1}')


@pytest.mark.parametrize("document", [b'{"id": 5 }', b' {"id":5}', b'{"id":5}\n', b'{"id":5.0}', b'{\n "id": 5\n}'])
def test_other_layouts_of_a_document_are_read(document: bytes) -> None:
    assert columns(PLAIN, document).column("id").to_pylist() == [1, 5]
