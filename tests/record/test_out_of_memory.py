"""Tests of a broker without memory: it reports that the batch is valid, so its producer may send it again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from sparklog.broker.replication import partition
from sparklog.broker.replication.partition import AppendRules, check_batch
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.record import validate
from sparklog.record.codec import encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA

RULES = AppendRules(DEFAULT_SCHEMA, 0, 1 << 20, "timestamp")


class Short:
    """A stand-in for Arrow's reader, or for one of its batches, on a machine without memory."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read_record_batch(self, *_: Any) -> Any:
        raise self._error

    def validate(self, *, full: bool) -> None:
        raise self._error


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 7 failed")])
@pytest.mark.parametrize("where", ["read", "validated", "elsewhere"])
def test_a_lack_of_memory_is_not_reported_as_a_bad_batch(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    row = {"key": [None], "value": [b"v" * 1000], "headers": [None], "timestamp": [1]}
    batch = pa.RecordBatch.from_pydict(row, schema=DEFAULT_SCHEMA)
    encoded = encode_batch(batch, schema_id=0, compression="zstd", event_time="timestamp")
    if where == "read":
        monkeypatch.setattr(pa, "ipc", Short(error))
    elif where == "validated":
        monkeypatch.setattr(validate, "read_record_batch", lambda *_: Short(error))
    else:
        monkeypatch.setattr(partition, "validate_batch", lambda *_, **__: Short(error).read_record_batch())
    with pytest.raises(BrokerError) as caught:
        check_batch(TopicPartition("t", 0), RULES, encoded.header, memoryview(encoded.body), placed=False)
    assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED and caught.value.retriable
    assert "memory" in caught.value.detail
