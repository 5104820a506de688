"""Tests of Kafka connections to a real server: the order of responses, limits, failures, and the end of connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import patch

import pytest

from sparklog.broker.kafka import dispatcher
from sparklog.broker.kafka.call import Handler, KafkaCall, NativeHandlers
from sparklog.broker.kafka.dispatcher import has_many_entries
from sparklog.broker.kafka.error_codes import KafkaCode, KafkaError
from sparklog.broker.kafka.kafka_protocol import KafkaProtocol
from sparklog.broker.requests.slices import Slices
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire import (
    ApiKey,
    RequestHeader,
    decode_request,
    decode_response,
    decode_response_header,
    request_frame,
)
from sparklog.kafka.wire.data import ProduceRequest, ProduceResponse
from sparklog.kafka.wire.groups import HeartbeatRequest
from sparklog.kafka.wire.metadata import (
    ApiVersionsRequest,
    Coordinator,
    DescribeClusterRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from sparklog.kafka.wire.security import SaslAuthenticateRequest, SaslHandshakeRequest
from sparklog.model import KAFKA_LISTENER
from sparklog.net.authentication import ListenerSecurity
from sparklog.net.server import Server, serve
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import Ack, DeleteTopic, DescribeBroker, ErrorReply, HelloReply, Reply
from tests.net.two_step_login import MECHANISM, TwoStepLogins

MAX_IN_FLIGHT = 4


class Client:
    """A Kafka client that sends requests and decodes the responses in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._sent: list[RequestHeader] = []
        self._correlation_id = 0

    def send(self, key: ApiKey, version: int, request: Any) -> int:
        self._correlation_id += 1
        header = RequestHeader(key, version, self._correlation_id, "test")
        self._sent.append(header)
        self.writer.write(b"".join(map(bytes, request_frame(header, request))))
        return self._correlation_id

    async def response(self) -> Any:
        """Return the next response, which must be that to the oldest request without one."""
        length = int.from_bytes(await asyncio.wait_for(self.reader.readexactly(4), 60), "big")
        frame = memoryview(await asyncio.wait_for(self.reader.readexactly(length), 60))
        header = self._sent.pop(0)
        found, message = decode_response_header(header.api_key, header.api_version, frame)
        assert found == header.correlation_id
        return decode_response(header.api_key, header.api_version, message)

    async def ask(self, key: ApiKey, version: int, request: Any) -> Any:
        self.send(key, version, request)
        return await self.response()

    def produce(self, acks: int = 1) -> int:
        return self.send(ApiKey.PRODUCE, 9, ProduceRequest(acks=acks, timeout_ms=1000, topic_data=[]))

    def metadata(self) -> int:
        return self.send(ApiKey.METADATA, 12, MetadataRequest(topics=None))

    async def closed(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), 60) == b""
        return True


class Broker:
    """A server with a Kafka listener, whose handlers the test completes. ``started`` has their calls."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.started: list[tuple[str, asyncio.Future[Any]]] = []
        self.cancelled: list[str] = []
        self.lost: list[ServerConnection] = []
        self.calls: list[KafkaCall] = []
        self.server: Server
        self.port = 0
        #: The time that connections wait because of a quota, and the seconds of the steps that have been charged.
        self.wait_ms = 0
        self.limits_time = False
        self.steps_s: list[float] = []

    def throttle_ms(self, connection: ServerConnection) -> int:
        return self.wait_ms

    def timed(self, connection: ServerConnection, step: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        try:
            return step()
        finally:
            self.steps_s.append(time.monotonic() - began_s)

    def handlers(self) -> dict[int, Handler]:
        return {
            ApiKey.PRODUCE: self._produce,
            ApiKey.METADATA: self._metadata,
            ApiKey.DESCRIBE_CLUSTER: self._describe_cluster,
            ApiKey.HEARTBEAT: self._heartbeat,
        }

    def _produce(self, call: KafkaCall, request: ProduceRequest) -> asyncio.Future[Any]:
        return self._hold("produce")

    async def _metadata(self, call: KafkaCall, request: MetadataRequest) -> MetadataResponse:
        self.calls.append(call)
        try:
            return await self._hold("metadata")  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append("metadata")
            raise

    async def _describe_cluster(self, call: KafkaCall, request: DescribeClusterRequest) -> Any:
        raise BrokerError(ErrorCode.TOPIC_RESTORING, "later")

    def _heartbeat(self, call: KafkaCall, request: HeartbeatRequest) -> Any:
        raise KafkaError(KafkaCode.INVALID_TIMESTAMP)

    def _hold(self, name: str) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.started.append((name, future))
        return future

    async def until(self, count: int) -> list[asyncio.Future[Any]]:
        """Wait until this number of handlers have started. Return what they wait for."""
        await until(lambda: len(self.started) >= count)
        return [future for _, future in self.started]


async def until(true: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not true():
        assert asyncio.get_running_loop().time() < end, "the expected event did not happen"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    natives: dict[type, Any] | None = None, security: ListenerSecurity | None = None, **limits: Any
) -> AsyncIterator[tuple[Broker, Callable[[], Awaitable[Client]]]]:
    broker = Broker()
    server = broker.server = await serve(
        lambda connection: None,  # type: ignore[arg-type, return-value]
        host="127.0.0.1",
        port=0,
        describe=lambda cid, version: HelloReply(cid, version, 1, 1, "c", 1 << 20),
        max_frame_bytes=1 << 20,
        max_in_flight=MAX_IN_FLIGHT,
        **({"queued_max_bytes": 1 << 20} | limits),
    )
    handlers = natives or {}
    protocol = KafkaProtocol(
        broker.handlers(),
        NativeHandlers(handlers, handlers),
        max_frame_bytes=1 << 20,
        counters=broker.counters,
        on_lost=broker.lost.append,
        quotas=broker,
        slices=Slices(),
    )
    security = security or ListenerSecurity(KAFKA_LISTENER + "PLAINTEXT")
    broker.port = await server.listen("127.0.0.1", 0, security, protocol)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writers.append(writer)
        return Client(reader, writer)

    try:
        yield broker, connect
    finally:
        for writer in writers:
            writer.close()
        await until(lambda: server.connections == 0)
        await server.close()


def test_pipelined_produces_are_in_progress_together_and_answered_in_order() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            for _ in range(3):
                client.produce()
            first, second, third = await broker.until(3)
            third.set_result(ProduceResponse(throttle_time_ms=3))
            second.set_result(ProduceResponse(throttle_time_ms=2))
            await asyncio.sleep(0)
            first.set_result(ProduceResponse(throttle_time_ms=1))
            assert [(await client.response()).throttle_time_ms for _ in range(3)] == [1, 2, 3]

    asyncio.run(test())


def test_every_response_has_the_time_that_a_quota_demands() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            (held,) = await broker.until(1)
            broker.wait_ms = 250
            held.set_result(MetadataResponse())
            assert (await client.response()).throttle_time_ms == 250
            failed = await client.ask(ApiKey.DESCRIBE_CLUSTER, 1, DescribeClusterRequest())
            assert failed.error_code and failed.throttle_time_ms == 250
            client.produce()
            *_, held = await broker.until(2)
            held.set_result(ProduceResponse(throttle_time_ms=7))
            assert (await client.response()).throttle_time_ms == 7, "the handler knows the time better"
            broker.wait_ms = 0
            client.metadata()
            *_, held = await broker.until(3)
            held.set_result(MetadataResponse())
            assert (await client.response()).throttle_time_ms == 0

    asyncio.run(test())


def test_every_step_of_a_request_is_charged() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            (held,) = await broker.until(1)
            held.set_result(MetadataResponse())
            await client.response()
            assert not broker.steps_s, "without a quota nothing is measured"
            broker.limits_time = True
            client.metadata()
            *_, held = await broker.until(2)
            held.set_result(MetadataResponse())
            await client.response()
            assert len(broker.steps_s) == 3, "the call, the step to the wait, and the step after it"
            failed = await client.ask(ApiKey.DESCRIBE_CLUSTER, 1, DescribeClusterRequest())
            assert failed.error_code and len(broker.steps_s) == 5
            client.metadata()
            await broker.until(3)
        await until(lambda: broker.cancelled == ["metadata"])

    asyncio.run(test())


def test_other_requests_are_handled_one_after_the_other() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.produce()
            client.metadata()
            client.metadata()
            client.produce()
            for started, name in enumerate(("produce", "metadata", "metadata", "produce")):
                *_, last = await broker.until(started + 1)
                assert [name for name, _ in broker.started][started:] == [name]
                last.set_result(ProduceResponse() if name == "produce" else MetadataResponse())
                await client.response()

    asyncio.run(test())


def test_a_request_without_a_response_does_not_hold_up_the_next() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.produce(acks=0)
            client._sent.clear()
            client.produce()
            first, second = await broker.until(2)
            second.set_result(ProduceResponse(throttle_time_ms=7))
            first.set_result(None)
            assert (await client.response()).throttle_time_ms == 7

    asyncio.run(test())


def test_api_versions_waits_for_its_turn() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            client.send(ApiKey.API_VERSIONS, 4, ApiVersionsRequest())
            (metadata,) = await broker.until(1)
            metadata.set_result(MetadataResponse(cluster_id="x"))
            assert (await client.response()).cluster_id == "x"
            listed = {found.api_key: found for found in (await client.response()).api_keys}
            assert set(listed) == {*broker.handlers(), 17, 18, 36}
            assert listed[ApiKey.PRODUCE].min_version == 0

    asyncio.run(test())


def test_errors_become_the_response_of_the_api() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            described = await client.ask(ApiKey.DESCRIBE_CLUSTER, 1, DescribeClusterRequest())
            assert (described.error_code, described.error_message) == (ErrorCode.NOT_ENOUGH_REPLICAS, "later")
            beat = await client.ask(ApiKey.HEARTBEAT, 4, HeartbeatRequest())
            assert beat.error_code == KafkaCode.INVALID_TIMESTAMP
            # The response of Metadata 12 has no error for the whole request.
            client.metadata()
            (metadata,) = await broker.until(1)
            metadata.set_exception(ValueError("a fault"))
            assert await client.closed()
            assert broker.counters["requests.failed"] == 1

    asyncio.run(test())


def test_a_large_response_is_encoded_in_a_thread() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            client.metadata()
            (large,) = await broker.until(1)
            broker.calls[0].encodes_in_thread = True
            partitions = [MetadataResponsePartition(partition_index=number) for number in range(20_000)]
            large.set_result(MetadataResponse(topics=[MetadataResponseTopic(name="t", partitions=partitions)]))
            assert len((await client.response()).topics[0].partitions) == 20_000
            _, broken = await broker.until(2)
            broker.calls[1].encodes_in_thread = True
            broken.set_result(MetadataResponse(topics=None))  # type: ignore[arg-type]
            assert await client.closed()

    asyncio.run(test())


def test_a_thread_encodes_a_response_with_many_entries() -> None:
    partitions = [MetadataResponsePartition(partition_index=number) for number in range(100)]
    topics = [MetadataResponseTopic(name=f"t-{number}", partitions=partitions) for number in range(49)]
    assert not has_many_entries(MetadataResponse())
    assert not has_many_entries(MetadataResponse(topics=topics))
    assert has_many_entries(MetadataResponse(topics=[*topics, *topics[:2]]))
    assert has_many_entries(FindCoordinatorResponse(coordinators=[Coordinator()] * 5001))


def test_a_call_lets_other_work_run() -> None:
    async def test() -> None:
        call = KafkaCall(cast(ServerConnection, None), NativeHandlers({}, {}), Slices(), version=0, client_id="")
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other())
        ends_s = time.monotonic() + 0.2
        while time.monotonic() < ends_s:
            await call.pause()
        task.cancel()
        assert 2 <= others <= 40

    asyncio.run(test())


def test_requests_after_a_malformed_one_are_not_started() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            (metadata,) = await broker.until(1)
            header = RequestHeader(ApiKey.PRODUCE, 9, 1, "test")
            request = ProduceRequest(acks=1, timeout_ms=1000, topic_data=[])
            frame = bytearray(b"".join(map(bytes, request_frame(header, request))))
            frame[-2:] = b"\xff\xff"
            client.writer.write(bytes(frame))
            client.produce()
            await asyncio.sleep(0.05)
            metadata.set_result(MetadataResponse())
            await client.response()
            assert await client.closed()
            assert len(broker.started) == 1

    asyncio.run(test())


def test_the_end_of_a_connection_cancels_its_requests() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            client.metadata()
            client.produce()
            await broker.until(1)
            client.writer.close()
            await until(lambda: len(broker.lost) == 1)
            await until(lambda: broker.cancelled == ["metadata"])
            assert len(broker.started) == 1, "a request that waited is not started"
            assert broker.server.queued_bytes == 0

    asyncio.run(test())


def test_requests_without_a_response_are_limited() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            for _ in range(MAX_IN_FLIGHT + 3):
                client.produce()
            await broker.until(MAX_IN_FLIGHT)
            await asyncio.sleep(0.1)
            assert len(broker.started) == MAX_IN_FLIGHT
            for done in range(MAX_IN_FLIGHT + 3):
                (await broker.until(done + 1))[done].set_result(ProduceResponse())
                await client.response()

    asyncio.run(test())


def test_a_large_request_is_decoded_in_a_thread() -> None:
    async def test() -> None:
        names = [MetadataRequestTopic(name=f"a-topic-with-this-name-{number:06}") for number in range(20_000)]
        loop_thread, threads = threading.get_ident(), []

        def decode(*request: Any) -> Any:
            threads.append(threading.get_ident() == loop_thread)
            return decode_request(*request)

        with patch.object(dispatcher, "decode_request", decode):
            async with running() as (broker, connect):
                client = await connect()
                client.send(ApiKey.METADATA, 12, MetadataRequest(topics=names))
                client.metadata()
                (large,) = await broker.until(1)
                large.set_result(MetadataResponse(throttle_time_ms=1))
                _, small = await broker.until(2)
                small.set_result(MetadataResponse(throttle_time_ms=2))
                assert [(await client.response()).throttle_time_ms for _ in range(2)] == [1, 2]
        assert threads == [False, True]

    asyncio.run(test())


def test_a_large_malformed_request_closes_the_connection() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            client = await connect()
            header = RequestHeader(ApiKey.METADATA, 12, 1, "test")
            names = [MetadataRequestTopic(name="a" * 200)] * 1000
            frame = bytearray(b"".join(map(bytes, request_frame(header, MetadataRequest(topics=names)))))
            frame[-6:] = b"\xff" * 6
            client.writer.write(bytes(frame))
            client.metadata()
            assert await client.closed()
            assert not broker.started

    asyncio.run(test())


def test_malformed_requests_close_only_their_connection() -> None:
    async def test() -> None:
        async with running() as (broker, connect):
            good, bad = await connect(), await connect()
            good.metadata()
            (metadata,) = await broker.until(1)
            header = RequestHeader(ApiKey.METADATA, 12, 1, "test")
            frame = bytearray(b"".join(map(bytes, request_frame(header, MetadataRequest(topics=None)))))
            frame[-6:] = b"\xff" * 6
            bad.writer.write(bytes(frame))
            assert await bad.closed()
            metadata.set_result(MetadataResponse())
            await good.response()

    asyncio.run(test())


def test_half_a_frame_is_limited_as_any_connection() -> None:
    async def test() -> None:
        async with running(hello_s=0.2) as (broker, connect):
            half, whole = await connect(), await connect()
            half.writer.write(b"\x00\x00\x00\x20\x00")
            whole.metadata()
            (metadata,) = await broker.until(1)
            assert await half.closed()
            metadata.set_result(MetadataResponse())
            await whole.response()

    asyncio.run(test())


def test_a_failed_login_is_reported_and_answered_later() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with running(security=ListenerSecurity("kafka:SASL", logins)) as (broker, connect):

            async def log_in(client: Client, password: bytes) -> Any:
                await client.ask(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=MECHANISM))
                await client.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=b"anna"))
                return await client.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=password))

            bad, good = await connect(), await connect()
            assert (await log_in(bad, b"wrong")).error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert await bad.closed()
            assert (await log_in(good, b"a-secret")).error_code == 0
            good.metadata()
            await broker.until(1)
            assert str(broker.calls[0].connection.principal) == "User:anna"
            assert logins.events == [
                f"SASL_AUTHENTICATION_FAILED by {MECHANISM} from 127.0.0.1",
                f"User:anna by {MECHANISM} from 127.0.0.1",
            ]
            broker.started[0][1].set_result(MetadataResponse())
            await good.response()

    asyncio.run(test())


def test_many_failures_hide_whether_a_password_is_right() -> None:
    async def test() -> None:
        logins = TwoStepLogins()
        async with running(security=ListenerSecurity("kafka:SASL", logins)) as (broker, connect):
            delays = broker.server._limits.login_delays
            while delays.failed("127.0.0.1", time.monotonic()) < 60:
                pass
            responses = []
            for password in (b"a-secret", b"wrong"):
                client = await connect()
                await client.ask(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=MECHANISM))
                await client.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=b"anna"))
                request = SaslAuthenticateRequest(auth_bytes=password)
                responses.append(await client.ask(ApiKey.SASL_AUTHENTICATE, 2, request))
                assert await client.closed()
            assert responses[0] == responses[1]
            assert responses[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED

    asyncio.run(test())


def test_native_handlers_run_in_the_name_of_the_connection() -> None:
    seen: list[tuple[str, str, str]] = []

    def describe(connection: ServerConnection, request: DescribeBroker, body: memoryview) -> None:
        seen.append((connection.peer_host, connection.listener, connection.client_id))
        connection.reply(Ack(request.cid))

    def delete(connection: ServerConnection, request: DeleteTopic, body: memoryview) -> None:
        connection.reply(ErrorReply(request.cid, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic"))

    async def test() -> None:
        async with running({DescribeBroker: describe, DeleteTopic: delete}) as (broker, connect):
            client = await connect()
            client.metadata()
            (metadata,) = await broker.until(1)
            call = broker.calls[0]
            reply: Reply = await call.native(DescribeBroker(0))
            assert reply == Ack(0)
            with pytest.raises(BrokerError, match="no such topic"):
                await call.native(DeleteTopic(0, "t", 1000))
            metadata.set_result(MetadataResponse())
            await client.response()
            assert seen == [("127.0.0.1", "kafka:PLAINTEXT", "test")]

    asyncio.run(test())
