"""Tests of the checks of a topic's settings that depend on the topic."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparklog.broker.requests.alter_topic import check_config
from sparklog.config import broker_config
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicRecord, TopicSchema
from sparklog.record.schema import DEFAULT_SCHEMA, schema_message


def _record(schema: pa.Schema, *, key_columns: tuple[str, ...] = ()) -> TopicRecord:
    return TopicRecord(
        name="t",
        topic_id="0" * 32,
        assignment=((1,),),
        schemas=(TopicSchema(0, schema_message(schema)),),
        key_columns=key_columns,
    )


def test_values_as_json_need_a_schema_of_the_topic() -> None:
    settings = broker_config({})
    json = {"kafka.value.format": "json"}
    check_config(settings, _record(pa.schema([pa.field("n", pa.int64())])), json)
    with pytest.raises(BrokerError, match="a schema of its own") as caught:
        check_config(settings, _record(DEFAULT_SCHEMA), json)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_a_default_of_json_concerns_no_topic_without_a_schema() -> None:
    check_config(broker_config({"kafka.value.format": "json"}), _record(DEFAULT_SCHEMA), {})


def test_compaction_needs_key_columns() -> None:
    schema = pa.schema([pa.field("n", pa.int64())])
    compact = {"cleanup.policy": "compact"}
    check_config(broker_config({}), _record(schema, key_columns=("n",)), compact)
    with pytest.raises(BrokerError, match="needs key columns"):
        check_config(broker_config({}), _record(schema), compact)
