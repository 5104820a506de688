"""Tests of topics' schemas: which ones are allowed, how they are sent, and how they may grow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import BrokerError, ErrorCode
from sparklog.record.layout import MAX_DEPTH, MAX_NODES, layout_of
from sparklog.record.message import read_batch_message
from sparklog.record.schema import (
    DEFAULT_EVENT_TIME,
    DEFAULT_KEY_COLUMNS,
    DEFAULT_SCHEMA,
    MAX_SCHEMA_BYTES,
    check_case,
    check_event_time,
    check_extension,
    check_key_columns,
    parse_schema,
    plain_schema,
    schema_message,
)
from tests.record.batches import NESTED_SCHEMA, default_batch, encoded, nested_batch

LEAVES = st.sampled_from(
    [
        pa.bool_(),
        pa.int8(),
        pa.uint64(),
        pa.float16(),
        pa.float64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.binary(16),
        pa.date32(),
        pa.date64(),
        pa.time32("ms"),
        pa.time64("ns"),
        pa.timestamp("ns"),
        pa.timestamp("us", "Europe/Berlin"),
        pa.duration("ms"),
        pa.decimal128(38, 9),
        pa.decimal256(50, 2),
    ]
)
NAMES = st.text("abcdefgh_ä", min_size=1, max_size=6)
KINDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda kind, nullable: pa.list_(pa.field("item", kind, nullable)), inner, st.booleans()),
        st.builds(pa.large_list, inner),
        st.builds(pa.list_, inner, st.integers(1, 5)),
        st.builds(pa.map_, LEAVES, inner),
        st.lists(st.tuples(NAMES, inner), min_size=1, max_size=3, unique_by=lambda pair: pair[0]).map(pa.struct),
    ),
    max_leaves=5,
)
SCHEMAS = st.lists(
    st.builds(pa.field, NAMES, KINDS, st.booleans()), min_size=1, max_size=6, unique_by=lambda field: field.name
).map(pa.schema)


def refused(schema: pa.Schema) -> str:
    with pytest.raises(BrokerError) as caught:
        schema_message(schema)
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH
    return caught.value.detail


@given(SCHEMAS)
def test_a_schema_survives_encoding(schema: pa.Schema) -> None:
    message = schema_message(schema)
    assert len(message) % 8 == 0
    assert parse_schema(message).equals(schema)
    assert parse_schema(message) is parse_schema(bytes(bytearray(message)))


@given(SCHEMAS)
def test_the_layout_is_that_of_arrows_messages(schema: pa.Schema) -> None:
    empty = pa.RecordBatch.from_arrays([pa.nulls(3, field.type) for field in schema], names=schema.names)
    message = read_batch_message(memoryview(empty.serialize()))
    layout = layout_of(schema)
    assert len(message.nodes) == len(layout.nodes)
    assert len(message.buffers) == layout.buffers
    assert message.rows == 3 and message.variadic_counts == 0


def test_the_default_schema_has_kafkas_columns() -> None:
    assert DEFAULT_SCHEMA.names == ["key", "value", "headers", "timestamp"]
    check_event_time(DEFAULT_SCHEMA, DEFAULT_EVENT_TIME)
    check_key_columns(DEFAULT_SCHEMA, DEFAULT_KEY_COLUMNS)
    assert layout_of(DEFAULT_SCHEMA).required == ()
    assert layout_of(NESTED_SCHEMA).required == (0, 12)


def test_metadata_are_not_part_of_a_schema() -> None:
    noisy = pa.schema([pa.field("a", pa.int64(), metadata={"comment": "x"})], metadata={"pandas": "{}"})
    assert schema_message(noisy) == schema_message(pa.schema([("a", pa.int64())]))
    foreign = parse_schema(noisy.serialize().to_pybytes())
    assert foreign.metadata is None and foreign.field("a").metadata is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (pa.dictionary(pa.int8(), pa.string()), "use string"),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), "use string"),
        (pa.null(), "not stored"),
        (pa.string_view(), "not stored"),
        (pa.binary_view(), "not stored"),
        (pa.list_view(pa.int8()), "not stored"),
        (pa.month_day_nano_interval(), "not stored"),
        (pa.run_end_encoded(pa.int16(), pa.string()), "not stored"),
        (pa.sparse_union([pa.field("a", pa.int8())]), "not stored"),
        (pa.dense_union([pa.field("a", pa.int8())]), "not stored"),
        (pa.struct([]), "at least one field"),
        (pa.binary(0), "fixed size 0"),
        (pa.list_(pa.int8(), 0), "fixed size 0"),
        (pa.list_(pa.int8(), 1 << 30), "fixed size 1073741824"),
        (pa.uuid(), "extension types"),
        (pa.map_(pa.string(), pa.null()), "not stored"),
    ],
    ids=str,
)
def test_unsupported_column_types_are_refused(kind: pa.DataType, reason: str) -> None:
    detail = refused(pa.schema([("good", pa.int64()), ("bad", kind)]))
    assert detail.startswith("column 'bad'") and reason in detail and "good" not in detail


def test_other_invalid_schemas_are_refused() -> None:
    assert "at least one column" in refused(pa.schema([]))
    assert "'a' occurs 2 times" in refused(pa.schema([("a", pa.int8()), ("a", pa.int8())]))
    assert "without a name" in refused(pa.schema([("", pa.int8())]))
    deep = pa.int8()
    for _ in range(MAX_DEPTH):
        deep = pa.list_(deep)
    assert f"deeper than {MAX_DEPTH}" in refused(pa.schema([("deep", deep)]))
    many = pa.schema([(str(index), pa.int8()) for index in range(MAX_NODES + 1)])
    assert f"at most {MAX_NODES} expected" in refused(many)
    assert f"at most {MAX_SCHEMA_BYTES} expected" in refused(pa.schema([("x" * MAX_SCHEMA_BYTES, pa.int8())]))


def test_an_unknown_extension_type_is_refused() -> None:
    field = pa.field("a", pa.int64(), metadata={"ARROW:extension:name": "of.someone", "ARROW:extension:metadata": ""})
    with pytest.raises(BrokerError, match="extension types"):
        parse_schema(pa.schema([field]).serialize().to_pybytes())


def test_names_that_are_not_text_are_refused() -> None:
    good = schema_message(pa.schema([("nested", pa.struct([("abcdefgh", pa.int8())]))]))
    with pytest.raises(BrokerError, match="not a schema") as caught:
        parse_schema(good.replace(b"abcdefgh", b"abc\xf2\x28fgh"[:8]))
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_bytes_that_are_not_a_schema_are_refused() -> None:
    good = schema_message(DEFAULT_SCHEMA)
    for wrong in (b"", good[:-8], good + bytes(8), good + good, bytes(64), encoded().body.to_pybytes()):
        with pytest.raises(BrokerError) as caught:
            parse_schema(wrong)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
    with pytest.raises(BrokerError, match="at most"):
        parse_schema(bytes(MAX_SCHEMA_BYTES + 8))


@given(st.randoms(use_true_random=False))
def test_damaged_schemas_give_errors_or_schemas(dice: random.Random) -> None:
    damaged = bytearray(schema_message(NESTED_SCHEMA))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(8, len(damaged))
        damaged[at] = dice.choice((0, 1, 4, 8, 127, 255, dice.randrange(256)))
    try:
        schema = parse_schema(bytes(damaged))
    except BrokerError as error:
        assert error.code in {ErrorCode.CORRUPT_MESSAGE, ErrorCode.SCHEMA_MISMATCH}
    else:
        assert parse_schema(schema_message(schema)).equals(schema)


# -- growth ----------------------------------------------------------------------------------------------------------

OLD = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.string())])


def test_nullable_columns_may_be_added_at_the_end() -> None:
    check_extension(OLD, OLD)
    check_extension(OLD, OLD.append(pa.field("c", pa.list_(pa.int8()))).append(pa.field("d", pa.date32())))


@pytest.mark.parametrize(
    ("new", "difference"),
    [
        (pa.schema([OLD.field(0)]), "column 'b' is missing"),
        (pa.schema([OLD.field(1), OLD.field(0)]), "column 0 is 'b', expected 'a'"),
        (pa.schema([OLD.field(0), pa.field("b", pa.large_string())]), "column 'b' is large_string, expected string"),
        (pa.schema([pa.field("a", pa.int64()), OLD.field(1)]), "column 'a' is int64, expected int64 not null"),
        (OLD.append(pa.field("c", pa.int8(), nullable=False)), "added column 'c' is int8 not null"),
        (OLD.append(pa.field("c", pa.null())), "column 'c' (null): this type is not stored"),
    ],
)
def test_everything_else_is_refused_with_the_difference(new: pa.Schema, difference: str) -> None:
    with pytest.raises(BrokerError) as caught:
        check_extension(OLD, new)
    assert caught.value.code is ErrorCode.SCHEMA_MISMATCH
    assert difference in caught.value.detail


def test_event_time_and_key_columns_are_checked() -> None:
    check_event_time(NESTED_SCHEMA, None)
    check_event_time(NESTED_SCHEMA, "at")
    check_event_time(NESTED_SCHEMA, "day")
    check_key_columns(NESTED_SCHEMA, ("id", "name"))
    check_key_columns(NESTED_SCHEMA, ())
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: check_event_time(NESTED_SCHEMA, "id"), "'id': expected a timestamp or a date, found int64"),
        (lambda: check_event_time(NESTED_SCHEMA, "nowhere"), "'nowhere' is not among"),
        (lambda: check_key_columns(NESTED_SCHEMA, ("tags",)), "'tags' is list"),
        (lambda: check_key_columns(NESTED_SCHEMA, ("nowhere",)), "'nowhere' is not among"),
        (lambda: check_key_columns(NESTED_SCHEMA, ("id", "id")), "twice"),
    ]
    for check, reason in refused:
        with pytest.raises(BrokerError, match=reason) as caught:
            check()
        assert caught.value.code is ErrorCode.SCHEMA_MISMATCH


def test_data_frame_types_get_their_plain_equivalents() -> None:
    polars_like = pa.schema(
        [
            pa.field("text", pa.string_view()),
            pa.field("bytes", pa.binary_view()),
            pa.field("category", pa.dictionary(pa.uint32(), pa.large_string())),
            pa.field("lists", pa.large_list(pa.field("item", pa.string_view()))),
            pa.field("views", pa.list_view(pa.string_view())),
            pa.field("inside", pa.struct([pa.field("a", pa.string_view(), nullable=False)])),
            pa.field("map", pa.map_(pa.string_view(), pa.dictionary(pa.int8(), pa.int64()))),
            pa.field("id", pa.uuid(), metadata={"k": "v"}),
            pa.field("two", pa.list_(pa.string_view(), 2)),
        ]
    )
    plain = plain_schema(polars_like)
    assert plain.types == [
        pa.string(),
        pa.binary(),
        pa.large_string(),
        pa.large_list(pa.string()),
        pa.list_(pa.string()),
        pa.struct([pa.field("a", pa.string(), nullable=False)]),
        pa.map_(pa.string(), pa.int64()),
        pa.binary(16),
        pa.list_(pa.string(), 2),
    ]
    assert schema_message(plain)
    assert plain_schema(NESTED_SCHEMA).equals(NESTED_SCHEMA)
    assert nested_batch(1).schema.equals(NESTED_SCHEMA) and default_batch(1).schema.equals(DEFAULT_SCHEMA)


@pytest.mark.parametrize(("existing", "added"), [([], ["Name", "name"]), (["Name"], ["NAME"])], ids=str)
def test_columns_that_differ_only_in_case_are_refused(existing: list[str], added: list[str]) -> None:
    with pytest.raises(BrokerError, match="differ in case only"):
        check_case(existing, added)


def test_columns_may_join_others_that_differ_only_in_case() -> None:
    check_case(["Name", "name"], ["other", "Name"])
