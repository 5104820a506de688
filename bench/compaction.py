"""How fast a log is compacted: ``python -m bench.compaction``.

One log on a real disk, of records with as many keys as asked for, in sealed segments; then one cleaning, as a broker's
cleaner thread carries it out, without a rate limit. Beside it: how fast the same disk copies as many bytes (read, write
and fsync), which is the bound. No broker and no client takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparklog.config import MIB, broker_config, topic_config
from sparklog.model import TopicPartition, TopicSchema
from sparklog.record.codec import encode_batch
from sparklog.record.schema import DEFAULT_EVENT_TIME, DEFAULT_KEY_COLUMNS, DEFAULT_SCHEMA, schema_message
from sparklog.storage.cleaning import CleaningRules
from sparklog.storage.log import Log
from sparklog.storage.log_set import LogDirectory

_BUFFER_BYTES = 128 * MIB


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the log")
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--batch-records", type=int, default=5000)
    parser.add_argument("--directory", type=Path, help="where to; default: a temporary directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        print(json.dumps(measure(Path(name), options)))
    return 0


def measure(path: Path, options: argparse.Namespace) -> dict[str, float]:
    directory = LogDirectory.open(
        path, cluster_id="bench", broker_id=0, config=broker_config({}), in_background=lambda work: work()
    )
    directory.load()
    log = _written(directory, options)
    size = log.size_bytes
    copy_s = _copy_s(path / "copied", [segment.data_path for segment in log.segments])
    began = time.perf_counter()
    records, kept = _cleaned(log)
    took_s = time.perf_counter() - began
    directory.close()
    return {
        "mib": round(size / MIB, 1),
        "records": records,
        "kept": kept,
        "cleaned_mib_s": round(size / MIB / took_s, 1),
        "copied_mib_s": round(size / MIB / copy_s, 1),
    }


def _written(directory: LogDirectory, options: argparse.Namespace) -> Log:
    config = topic_config({"cleanup.policy": "compact", "segment.bytes": str(max(options.mib * MIB // 16, MIB // 4))})
    schemas = (TopicSchema(0, schema_message(DEFAULT_SCHEMA)),)
    log = directory.create(TopicPartition("table", 0), "bench", schemas=schemas, config=config)
    dice = np.random.default_rng(1)
    count = options.batch_records
    while log.size_bytes < options.mib * MIB:
        keys = pa.array([b"key %09d" % key for key in dice.integers(0, options.keys, count).tolist()], pa.binary())
        content = dice.bytes(count * options.value_bytes)
        values = pa.array(
            [content[at : at + options.value_bytes] for at in range(0, len(content), options.value_bytes)], pa.binary()
        )
        now_us = time.time_ns() // 1000
        times = pa.array(np.full(count, now_us), DEFAULT_SCHEMA.field(DEFAULT_EVENT_TIME).type)
        headers = pa.nulls(count, DEFAULT_SCHEMA.field("headers").type)
        rows = pa.RecordBatch.from_arrays([keys, values, headers, times], schema=DEFAULT_SCHEMA)
        header, body = encode_batch(rows, schema_id=0, compression=None, event_time=DEFAULT_EVENT_TIME)
        log.append_as_leader([(header, memoryview(body))], leader_epoch=0, now_us=now_us)
    log.set_high_watermark(log.log_end_offset)
    for job in log.seals_due():
        job.run()
        log.seal_finished(job)
    return log


def _copy_s(target: Path, sources: Sequence[Path]) -> float:
    """Seconds to read the files and to write as much, durably."""
    began = time.perf_counter()
    with target.open("wb") as writer:
        for source in sources:
            writer.write(source.read_bytes())
        writer.flush()
        os.fsync(writer.fileno())
    took_s = time.perf_counter() - began
    target.unlink()
    return took_s


def _cleaned(log: Log) -> tuple[int, int]:
    """Records looked at, and kept."""
    rules = CleaningRules(DEFAULT_KEY_COLUMNS, DEFAULT_EVENT_TIME, log.config, _BUFFER_BYTES, 2**40, seed=1)
    job = log.begin_cleaning(rules, time.time_ns() // 1000, at_once=True)
    assert job is not None
    job.read_keys()
    for group in job.groups():
        found = job.rewrite(group)
        if found is not None and log.replace_segments(job, found):
            job.settle()
    log.cleaning_finished(job, job.finish(time.time_ns() // 1_000_000))
    return job.tally.records, job.tally.kept


if __name__ == "__main__":
    raise SystemExit(main())
