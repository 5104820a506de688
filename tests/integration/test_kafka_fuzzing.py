"""Random requests of every Kafka API, whole and damaged, against real brokers: no handler fails, and no broker ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.client.consumer.consumer import Consumer
from sparklog.client.producer.producer import Producer
from sparklog.kafka.wire import ApiKey, RequestHeader, decode_response, decode_response_header, request_frame
from sparklog.kafka.wire.fields import REQUESTS, Array, Field, Primitive, fields_of
from sparklog.kafka.wire.metadata import ApiVersionsRequest
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.testing.settled_admin import SettledAdmin

pytestmark = pytest.mark.integration

WORKERS = 12
#: The longest wait for one response. Some requests wait for records or for members.
PATIENCE_S = 0.5
NAMES = (
    "events",
    "missing",
    "g",
    "m-1",
    "consumer",
    "range",
    "127.0.0.1",
    "User:a",
    "retention.ms",
    "",
    "__consumer_offsets",
    "é",
)
NUMBERS = (0, 1, 2, 3, -1, -2, 5, 100)
#: Fields whose greatest values would only make the cluster slow or large.
SMALL = re.compile(r"num_partitions|count|replication_factor|iterations|timeout|max_wait|period|lifetime|time_period")


class RandomRequests:
    """A source of random requests whose values are often those of things that exist."""

    def __init__(self, seed: int, topic_ids: list[bytes]) -> None:
        self.dice = random.Random(seed)
        self._topic_ids = [*topic_ids, bytes(16), b"\x07" * 16]

    def request(self, api_key: int, version: int) -> Any:
        return self._struct(REQUESTS[ApiKey(api_key)].declared, version)

    def _struct(self, declared: type, version: int) -> Any:
        fields = (field for field in fields_of(declared) if version in field.versions)
        return declared(**{field.name: self._value(field, version) for field in fields})

    def _value(self, field: Field, version: int) -> Any:
        if version in field.nullable and self.dice.random() < 0.2:
            return None
        return self._of_type(field.type, version, field.name)

    def _of_type(self, kind: Primitive | Array | type, version: int, name: str) -> Any:
        match kind:
            case Primitive():
                return self._primitive(kind, name)
            case Array():
                return [self._of_type(kind.element, version, name) for _ in range(self.dice.choice((0, 1, 1, 1, 2)))]
            case declared:
                return self._struct(declared, version)

    def _primitive(self, kind: Primitive, name: str) -> Any:
        dice = self.dice
        if kind.name.startswith("int"):
            bits = int(kind.name[3:])
            extremes = () if SMALL.search(name) else (2 ** (bits - 1) - 1, -(2 ** (bits - 1)))
            return dice.choice((*NUMBERS, *extremes))
        match kind.name:
            case "bool":
                return dice.random() < 0.5
            case "float64":
                return dice.choice((0.0, 1.0, -1.0, 1e308))
            case "uuid":
                return dice.choice(self._topic_ids)
            case "string":
                return dice.choice(NAMES)
            case _:
                return dice.randbytes(dice.choice((0, 1, 61, 200)))

    def damaged(self, frame: bytes) -> bytes:
        """Return the frame with some changed bytes after its length, or with another length."""
        changed = bytearray(frame)
        for _ in range(self.dice.choice((1, 1, 2, 8))):
            changed[self.dice.randrange(4, len(changed))] = self.dice.choice(
                (0, 1, 0x7F, 0x80, 0xFF, self.dice.randrange(256))
            )
        if self.dice.random() < 0.1:
            del changed[self.dice.randrange(4, len(changed)) :]
            changed[:4] = (len(changed) - 4).to_bytes(4, "big")
        return bytes(changed)


class Fuzzer:
    """Some clients that send random requests to brokers, and check each response that arrives."""

    def __init__(self, bootstrap: str, requests: RandomRequests) -> None:
        self._addresses = [address.rpartition(":") for address in bootstrap.split(",")]
        self._requests = requests
        self.versions: list[tuple[int, int, int]] = []
        self.answered: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        await self._learn_versions()
        await asyncio.gather(*(self._worker(count // WORKERS) for _ in range(WORKERS)))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._requests.dice.choice(self._addresses)
        return await asyncio.open_connection(host, int(port))

    async def _learn_versions(self) -> None:
        reader, writer = await self._connect()
        header = RequestHeader(ApiKey.API_VERSIONS, 4, 1, "fuzzer")
        response = await self._ask(reader, writer, header, frame_of(header, ApiVersionsRequest()), patience_s=60)
        writer.close()
        for found in response.api_keys:
            first = 3 if found.api_key == ApiKey.PRODUCE else found.min_version
            self.versions.append((found.api_key, first, found.max_version))

    async def _worker(self, count: int) -> None:
        reader, writer = await self._connect()
        for number in range(count):
            api_key, first, last = self._requests.dice.choice(self.versions)
            header = RequestHeader(api_key, self._requests.dice.randint(first, last), number, "fuzzer")
            frame = frame_of(header, self._requests.request(api_key, header.api_version))
            is_damaged = self._requests.dice.random() < 0.3
            try:
                await self._ask(reader, writer, header, self._requests.damaged(frame) if is_damaged else frame)
                self.answered[ApiKey(api_key).name] += not is_damaged
            except (OSError, EOFError, asyncio.TimeoutError):
                writer.close()
                reader, writer = await self._connect()
        writer.close()

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        header: RequestHeader,
        frame: bytes,
        patience_s: float = PATIENCE_S,
    ) -> Any:
        writer.write(frame)
        length = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), patience_s), "big")
        found = memoryview(await asyncio.wait_for(reader.readexactly(length), patience_s))
        if frame[4:8] != frame_of(header, REQUESTS[ApiKey(header.api_key)].declared())[4:8]:
            return None  # The damage has made it a request of another API.
        _, message = decode_response_header(header.api_key, header.api_version, found)
        return decode_response(header.api_key, header.api_version, message)


def frame_of(header: RequestHeader, request: Any) -> bytes:
    return b"".join(map(bytes, request_frame(header, request)))


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(2, kafka=True) as running:
        with SettledAdmin(running.bootstrap) as admin:
            admin.create_topic("events", partitions=2, replication_factor=2)
        yield running


def errors(cluster: ProcessCluster) -> str:
    """Return the errors in the logs of all brokers, with their tracebacks."""
    texts = (slot.log_file.read_text(errors="replace") for slot in cluster.slots.values())
    lines = (line for text in texts for line in re.split(r"\n(?=\d\d:)", text))
    return "\n".join(line for line in lines if " ERROR " in line[:40])


def fuzz(cluster: ProcessCluster, seed: int, count: int) -> Counter[str]:
    with SettledAdmin(cluster.bootstrap) as admin:
        (topic,) = admin.describe_topics(["events"])
        fuzzer = Fuzzer(cluster.kafka_bootstrap, RandomRequests(seed, [bytes.fromhex(topic.topic_id)]))
        asyncio.run(fuzzer.run(count))
        described = admin.describe_brokers()
        assert [broker.error for broker in described] == ["", ""]
        failed = [broker.counters.get("requests.failed", 0) for broker in described]
        assert failed == [0, 0], f"seed {seed}: handlers failed\n{errors(cluster)[-8000:]}"
        with contextlib.suppress(Exception):
            admin.delete_topic("after")
        admin.create_topic("after", partitions=1, replication_factor=2)
    with Producer(cluster.bootstrap) as producer:
        producer.send("after", value=b"still here")
    with Consumer(cluster.bootstrap, "after", start="earliest") as consumer:
        assert next(batch for batch in iter(lambda: consumer.poll(30.0), None) if batch)
    return fuzzer.answered


def test_random_requests_harm_no_broker(cluster: ProcessCluster) -> None:
    answered = fuzz(cluster, seed=1, count=2400)
    assert len(answered) > 30, "most APIs answer"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_random_requests_harm_no_broker(cluster: ProcessCluster, seed: int) -> None:
    fuzz(cluster, seed, count=40_000)
