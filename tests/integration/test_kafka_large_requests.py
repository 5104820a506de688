"""Tests that no request of a Kafka client keeps the broker's only thread for long, however many entries it has.

They measure the processor time that the loop's thread uses in its longest turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.codec import API_VERSIONS, MAX_ELEMENTS, MAX_PRODUCE_ELEMENTS
from sparklog.kafka.wire.data import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from sparklog.kafka.wire.fields import REQUESTS, Array, Field, Primitive, fields_of
from sparklog.kafka.wire.metadata import ApiVersionsRequest
from sparklog.protocol.messages import Metadata
from sparklog.record.codec import encode_batch
from sparklog.record.schema import DEFAULT_SCHEMA
from tests.broker.metered import MeteredCluster
from tests.broker.support import produce
from tests.broker.topics import create_topic
from tests.integration.kafka_calls import KafkaCalls
from tests.integration.test_kafka_data_limits import fetch_request
from tests.tiers import marked_after

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.alone]

LIMIT_S = 0.1
MIB = 1024 * 1024
#: The APIs of the second tier: each has a handler of another kind.
FIRST = [
    ApiKey.PRODUCE,
    ApiKey.FETCH,
    ApiKey.METADATA,
    ApiKey.OFFSET_FETCH,
    ApiKey.DELETE_ACLS,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS,
]
#: Logins have a lower limit, and ApiVersions has no lists.
APIS = FIRST + sorted(
    API_VERSIONS.keys() - {*FIRST, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.API_VERSIONS}
)
Path = tuple[Field, ...]
#: The elements that one tagged field counts as.
_TAG = 4
#: Fields whose default would prevent a response, or create many topics.
_VALUES = {"acks": -1, "validate_only": True}


@pytest.fixture(scope="module")
def metered() -> Iterator[MeteredCluster]:
    cluster = MeteredCluster(kafka=True)
    with cluster:
        create_topic(cluster, "zeros", replicas=1, config={"max.message.bytes": str(256 * MIB)})
        yield cluster


def longest_turn_s(cluster: MeteredCluster, key: ApiKey, version: int, request: Any) -> float:
    """Send one request, and return the longest turn of the loop until its response."""
    address = cluster.slots[0].kafka_address
    with KafkaCalls(address, timeout_s=300) as calls, KafkaCalls(address) as others:
        others.ask(ApiKey.API_VERSIONS, 3, ApiVersionsRequest())
        turn = cluster.longest_turn(0)
        turn.write(0, 0)
        with contextlib.suppress(ConnectionError):  # The broker closes the connection if a request exceeds a limit.
            calls.ask(key, version, request)
        others.ask(ApiKey.API_VERSIONS, 3, ApiVersionsRequest())
        return turn.read()[1] / 1e9


def lists(declared: type, version: int) -> Iterator[Path]:
    """Return the way to each list of a message: the fields from the message on."""
    for field in fields_of(declared):
        if version not in field.versions:
            continue
        inner = field.type.element if isinstance(field.type, Array) else field.type
        if isinstance(field.type, Array):
            yield (field,)
        if not isinstance(inner, Primitive):
            for path in lists(inner, version):
                yield field, *path


def filled(declared: type, version: int, path: Path, sizes: list[int], numbers: Iterator[int]) -> Any:
    """Return a message with ``sizes`` elements in the lists of ``path``. All names and numbers differ."""
    values: dict[str, Any] = {}
    for field in fields_of(declared):
        if version in field.tagged or version not in field.versions:
            continue
        if isinstance(field.type, Primitive) and field.type.name in {"string", "uuid"}:
            number = next(numbers)
            values[field.name] = f"name-{number:07}" if field.type.name == "string" else number.to_bytes(16, "big")
        elif field.name in _VALUES:
            values[field.name] = _VALUES[field.name]
    if path:
        field, *rest = path
        inner: Any = field.type.element if isinstance(field.type, Array) else field.type
        if not isinstance(field.type, Array):
            values[field.name] = filled(inner, version, tuple(rest), sizes, numbers)
        elif isinstance(inner, Primitive):
            values[field.name] = [_value(inner, next(numbers)) for _ in range(sizes[0])]
        else:
            values[field.name] = [filled(inner, version, tuple(rest), sizes[1:], numbers) for _ in range(sizes[0])]
    return declared(**values)


def _value(kind: Primitive, number: int) -> Any:
    match kind.name:
        case "string":
            return f"name-{number:07}"
        case "uuid":
            return number.to_bytes(16, "big")
        case "int8" | "int16":
            return number % 100
        case _:
            return number


def largest(key: ApiKey) -> Iterator[tuple[str, int, Any]]:
    """Return requests whose elements are all in one list, or in lists of one element each."""
    declared, version = REQUESTS[key].declared, API_VERSIONS[key][1]
    most = MAX_PRODUCE_ELEMENTS if key is ApiKey.PRODUCE else MAX_ELEMENTS
    for path in lists(declared, version):
        depth = sum(isinstance(field.type, Array) for field in path)
        name = ".".join(field.name for field in path)
        deep, wide = [1] * (depth - 1) + [most - depth - _TAG], [most // depth - _TAG] + [1] * (depth - 1)
        yield name, version, filled(declared, version, path, deep, count())
        if depth > 1:
            yield f"wide {name}", version, filled(declared, version, path, wide, count())


@pytest.mark.parametrize("key", marked_after(len(FIRST), APIS, pytest.mark.long), ids=lambda key: key.name)
def test_no_request_of_many_entries_takes_long_turns(metered: MeteredCluster, key: ApiKey) -> None:
    found = {}
    for name, version, request in largest(key):
        found[name] = min(longest_turn_s(metered, key, version, request) for _ in range(2))
    assert not {name: turn_s for name, turn_s in found.items() if turn_s >= LIMIT_S}, found


# --- batches that decompress to many bytes ---


@pytest.fixture(scope="module")
def zeros(metered: MeteredCluster) -> None:
    """Write a batch of some kilobytes that decompresses to 200 MiB."""
    rows = {"key": [None] * 200, "value": [bytes(MIB)] * 200, "headers": [None] * 200, "timestamp": [*range(1, 201)]}
    records = pa.RecordBatch.from_pydict(rows, schema=DEFAULT_SCHEMA)
    batch = encode_batch(records, schema_id=0, compression="zstd", event_time="timestamp")
    with metered.connect(0) as connection:
        connection.request(Metadata(0, ()))
        assert produce(connection, "zeros", (batch.header, batch.body)).base_offset == 0


@pytest.mark.usefixtures("zeros")
def test_a_batch_of_zeros_is_fetched_in_short_turns(metered: MeteredCluster) -> None:
    assert longest_turn_s(metered, ApiKey.FETCH, 12, fetch_request("zeros")) < LIMIT_S


@pytest.mark.usefixtures("zeros")
def test_a_batch_of_zeros_is_searched_in_short_turns(metered: MeteredCluster) -> None:
    wanted = [ListOffsetsPartition(partition_index=0, timestamp=0)]
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name="zeros", partitions=wanted)])
    assert longest_turn_s(metered, ApiKey.LIST_OFFSETS, 7, request) < LIMIT_S
