"""Tests of the modules that planning and tasks import.

Every planning step is a new Python process, and so are some tasks. Most of their duration is imports.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Slow imports that only tasks use.
_OF_TASKS = {
    "asyncio",
    "uvloop",
    "pyarrow.compute",
    "sparklog.client.producer.producer",
    "sparklog.client.consumer.partition_reader",
}


@pytest.mark.parametrize("step", ["reader", "stream", "writer", "topic_resolution"])
def test_planning_imports_no_modules_that_only_tasks_use(step: str) -> None:
    code = (
        f"import sys; import sparklog.spark.source, sparklog.spark.{step};"
        f"assert not {_OF_TASKS} & set(sys.modules), {_OF_TASKS} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


#: One batch of a topic without a schema, as a task assembles it, and the validation that Spark's worker does.
_ASSEMBLE = """
import sys
import pyarrow as pa
from sparklog.model import TopicPartition
from sparklog.record.header import HEADER_BYTES, unpack_header
from sparklog.record.codec import decode_batch, encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA
from sparklog.spark.columns import offset_run, plan_columns
from sparklog.spark.schema import DEFAULT_COLUMNS, TopicShape

values = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer((0).to_bytes(4, "little") * 2), pa.py_buffer(b"")])
batch = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) if f.name != "value" else values for f in DEFAULT_SCHEMA],
                                   schema=DEFAULT_SCHEMA)
header, body = encode_batch(batch, schema_id=0, compression=None, event_time=None)
plan = plan_columns(DEFAULT_COLUMNS, TopicShape(DEFAULT_SCHEMA))
found = plan.assemble(header, decode_batch(header, body, DEFAULT_SCHEMA), partition=TopicPartition("t", 0),
                      offsets=offset_run(0, 1))
found.validate(full=True)
assert found.num_rows == 1 and "pandas" not in sys.modules, [name for name in sys.modules if "pandas" in name]
"""


def test_a_read_loads_no_pandas() -> None:
    subprocess.run([sys.executable, "-c", _ASSEMBLE], check=True, timeout=60)
