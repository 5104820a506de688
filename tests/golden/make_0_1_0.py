"""Makes the golden files of release 0.1.0: ``python -m tests.golden.make_0_1_0 DIRECTORY``, run in that release's tree.

Later releases must read what 0.1.0 wrote and understand what it sent. The files are:

- ``sparklog.tar.xz``: the release's own sources, so that its brokers and clients run beside later ones;
- ``cluster.tar.xz``: the directories of one broker and of ZooKeeper after an orderly stop, and two Spark checkpoints;
- ``expected/TOPIC.arrow``: what a reader of committed records gets from each topic, with partition and offset;
- ``wire.json``: requests and replies of clients, of a follower and of the controller, as bytes and as field values.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import decimal
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from sparklog import Admin, Consumer, Producer, TopicPartition, __version__, configure
from sparklog.errors import ProtocolError
from sparklog.protocol.frames import PREFIX, PREFIX_BYTES
from sparklog.protocol.messages import decode_reply, decode_request
from sparklog.testing.process_cluster import ProcessCluster, wait_until
from sparklog.testing.proxies import ProxyNetwork

ROOT = Path(__file__).parent.parent.parent
UTC = dt.timezone.utc
START = dt.datetime(2024, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)
#: The number of stored messages of each kind and party, and the longest body that is stored with its message.
KEPT_OF_A_KIND = 2
LONGEST_BODY = 16 * 1024
TYPED = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(12, 4)),
        ("ratio", pa.float64()),
        ("seen", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("lat", pa.float64()), ("lon", pa.float64())])),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("raw", pa.binary()),
    ]
)
SETTINGS = {
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "200",
    "transaction.hanging.after.ms": "600000",
    "default.replication.factor": "1",
}


def typed_rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "name": None if i % 7 == 0 else f"name-{i}",
            "price": decimal.Decimal(i) / 4,
            "ratio": i / 3,
            "seen": START + dt.timedelta(seconds=i),
            "day": START.date() + dt.timedelta(days=i),
            "tags": [f"t{n}" for n in range(i % 4)],
            "place": {"lat": i / 2, "lon": -i / 2},
            "counts": [(f"k{n}", n) for n in range(i % 3)],
            "raw": bytes([i % 256]) * (i % 5),
        }
        for i in range(first, first + count)
    ]


def write_topics(bootstrap: str) -> None:
    """Create and fill one topic of each kind."""
    with Admin(bootstrap) as admin:
        admin.create_topic("default", partitions=2, config={"segment.bytes": 2048})
        admin.create_topic("typed", schema=TYPED, key="id", event_time="seen", partitions=1)
        admin.create_topic(
            "compacted",
            partitions=1,
            config={"cleanup.policy": "compact", "segment.bytes": 1024, "min.cleanable.dirty.ratio": "0.01"},
        )
        admin.create_topic("transactional", partitions=2)
        admin.create_topic("copy", partitions=1)
        with Producer(bootstrap) as producer:
            for i in range(100):
                producer.send(
                    "default",
                    f"value-{i}".encode() if i % 10 else None,
                    key=f"key-{i}",
                    headers={"n": str(i)} if i % 3 == 0 else None,
                    timestamp=START + dt.timedelta(milliseconds=i),
                    partition=i % 2,
                )
                if i % 10 == 9:
                    producer.flush()
        with Producer(bootstrap, compression="zstd") as producer:
            producer.write("typed", pa.Table.from_pylist(typed_rows(0, 20), schema=TYPED)).result()
        admin.add_columns("typed", "note string")
        with Producer(bootstrap, compression="lz4") as producer:
            wider = TYPED.append(pa.field("note", pa.string()))
            rows = [{**row, "note": f"note-{row['id']}"} for row in typed_rows(20, 20)]
            producer.write("typed", pa.Table.from_pylist(rows, schema=wider)).result()
        with Producer(bootstrap) as producer:
            for i in range(60):
                producer.send("compacted", f"v{i}", key=f"k{i % 5}", timestamp=START + dt.timedelta(seconds=i))
                producer.flush()
        write_transactions(bootstrap)
        admin.commit_offsets("readers", {TopicPartition("default", 0): 17, TopicPartition("default", 1): 23})
        wait_until(lambda: compacted_count(bootstrap) < 30, 60, "the compaction of topic compacted")


def write_transactions(bootstrap: str) -> None:
    """Commit, abort, commit. A process that exits without an end leaves the last transaction open."""
    for number, outcome in enumerate(("commit", "abort", "commit")):
        with Producer(bootstrap, transactional_id=f"writer-{number}") as producer:
            producer.begin()
            send_in_transaction(producer, f"{outcome}-{number}")
            producer.commit() if outcome == "commit" else producer.abort()
    subprocess.run([sys.executable, "-m", __spec__.name, "--leave-open", bootstrap], check=True)


def leave_open(bootstrap: str) -> None:
    """Begin a transaction, write, and exit this process immediately."""
    producer = Producer(bootstrap, transactional_id="writer-3")
    producer.begin()
    send_in_transaction(producer, "open-3")
    os._exit(0)


def send_in_transaction(producer: Producer, prefix: str) -> None:
    for i in range(5):
        producer.send("transactional", f"{prefix}-{i}", partition=i % 2, timestamp=START)
    producer.flush()


def compacted_count(bootstrap: str) -> int:
    with Consumer(bootstrap, "compacted") as consumer:
        return int(consumer.to_table().num_rows)


def read(bootstrap: str, topic: str) -> pa.Table:
    with Consumer(bootstrap, topic, log_columns=True) as consumer:
        return consumer.to_table().sort_by([("_partition", "ascending"), ("_offset", "ascending")])


def run_query(spark: SparkSession, checkpoint: Path) -> None:
    """Copy the new records of ``default`` to ``copy``, exactly once."""
    frame = spark.readStream.format("sparklog").options(subscribe="default", startingOffsets="earliest").load()
    writer = (
        frame.select("key", "value", "timestamp")
        .writeStream.format("sparklog")
        .option("topic", "copy")
        .option("checkpointLocation", str(checkpoint))
    )
    assert writer.trigger(availableNow=True).start().awaitTermination(180)


def make_checkpoint(bootstrap: str, base: Path) -> None:
    """Leave a query that has run twice and whose second micro-batch Spark will run again: its commit file is
    deleted."""
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    configure(spark, bootstrap=bootstrap)
    run_query(spark, base / "checkpoint")
    with Producer(bootstrap) as producer:
        for i in range(100, 110):
            producer.send("default", f"value-{i}", key=f"key-{i}", partition=i % 2, timestamp=START)
    run_query(spark, base / "checkpoint")
    spark.stop()
    last = max((base / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)


class RecordingNetwork(ProxyNetwork):
    """Proxies that store the first messages of each kind and party, as frames."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, Any]] = []

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target: tuple[str, int],
        party: str,
        caller: str | None,
    ) -> None:
        back, onward = await asyncio.open_connection(*target)
        if caller is not None:  # ZooKeeper's bytes are not sparklog's
            pumps = [self._pump(reader, onward, caller, party), self._pump(back, writer, party, caller)]
        else:
            name: list[str] = []
            pumps = [self._record(reader, onward, name, request=True), self._record(back, writer, name, request=False)]
        tasks = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, onward):
                end.close()

    async def _record(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, name: list[str], *, request: bool
    ) -> None:
        with contextlib.suppress(EOFError, OSError, ProtocolError):
            while True:
                prefix = await source.readexactly(PREFIX_BYTES)
                length, header_length = PREFIX.unpack(prefix)
                frame = prefix + await source.readexactly(length + 4 - PREFIX_BYTES)
                sink.write(frame)
                await sink.drain()
                header = frame[PREFIX_BYTES : PREFIX_BYTES + header_length]
                message = (decode_request if request else decode_reply)(memoryview(header))
                if not name:
                    name.append(getattr(message, "client_id", ""))
                self._keep(name[0].split("-")[0], message, frame, request)

    def _keep(self, party: str, message: Any, frame: bytes, request: bool) -> None:
        kind = type(message).__name__
        same = [kept for kept in self.kept if (kept["party"], kept["kind"]) == (party, kind)]
        if len(same) < KEPT_OF_A_KIND and len(frame) <= LONGEST_BODY:
            fields = msgspec.to_builtins(message)
            self.kept.append({"party": party, "request": request, "kind": kind, "fields": fields, "frame": frame.hex()})


def record_wire() -> list[dict[str, Any]]:
    """Let clients, two brokers and a controller communicate, and return their messages."""
    network = RecordingNetwork()
    with ProcessCluster(
        2, settings={**SETTINGS, "unix.sockets.enable": "false", "default.replication.factor": "2"}, network=network
    ) as cluster:
        write_topics(cluster.bootstrap)
        with Admin(cluster.bootstrap) as admin:
            admin.create_partitions("copy", 2)
            admin.alter_topic("copy", {"retention.ms": "1000000"})
            admin.delete_records({TopicPartition("default", 0): 3})
            admin.list_offsets({TopicPartition("default", 0): "latest"})
            admin.group_offsets("readers")
            admin.describe_brokers()
            admin.describe_topics()
            admin.list_groups()
            with Consumer(cluster.bootstrap, ["default"], group="members") as consumer:
                wait_until(lambda: consumer.poll(0.2), 60, "records")
                consumer.commit()
            admin.delete_topic("copy")
        return list(network.kept)


def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Omit bytecode and files that no broker and no client needs."""
    left_out = {"__pycache__", "testing", "demo", "delta", "console"}
    return None if left_out & set(entry.name.split("/")) else entry


def tar(target: Path, base: Path, *names: str) -> None:
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in names:
            archive.add(base / name, name, filter=wanted)


def main(out: Path) -> None:
    assert __version__ == "0.1.0", f"these are the files of 0.1.0, this is {__version__}"
    shutil.rmtree(out, ignore_errors=True)
    (out / "expected").mkdir(parents=True)
    tar(out / "sparklog.tar.xz", ROOT, "sparklog")
    (out / "wire.json").write_text(json.dumps(record_wire(), default=str, indent=None, separators=(",", ":")))
    base = Path(tempfile.mkdtemp())
    with ProcessCluster(1, base_dir=base / "data", settings=SETTINGS) as cluster:
        write_topics(cluster.bootstrap)
        make_checkpoint(cluster.bootstrap, base)
        for topic in ("default", "typed", "compacted", "copy"):
            table = read(cluster.bootstrap, topic)
            with pa.ipc.new_file(str(out / "expected" / f"{topic}.arrow"), table.schema) as file:
                file.write_table(table)
    for log in (base / "data").glob("*.log"):
        log.unlink()
    tar(out / "cluster.tar.xz", base, "data", "checkpoint")
    shutil.rmtree(base)


if __name__ == "__main__":
    if sys.argv[1] == "--leave-open":
        leave_open(sys.argv[2])
    main(Path(sys.argv[1]))
