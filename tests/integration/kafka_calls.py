"""A client that sends single requests of Kafka's protocol, for tests of the versions that no real client uses."""

from __future__ import annotations

import secrets
import socket
from types import TracebackType
from typing import Any

from sparklog.kafka.wire import (
    ApiKey,
    RequestHeader,
    decode_response,
    decode_response_header,
    request_frame,
)
from sparklog.kafka.wire.metadata import FindCoordinatorRequest
from sparklog.kafka.wire.security import SaslAuthenticateRequest, SaslHandshakeRequest
from sparklog.protocol.sasl import SCRAM_SHA_256
from sparklog.protocol.scram import ScramClient

#: The settings of one broker with an authorizer, and with logins on its Kafka listener.
SECURED_BROKER = {
    "super.users": "User:admin",
    "internal.topic.replication.factor": "1",
    "kafka.listeners": "USERS://127.0.0.1:0",
    "listener.security.protocol.map": "USERS:SASL_PLAINTEXT",
}


class KafkaCalls:
    """A blocking connection to the Kafka listener of one broker. ``timeout_s`` limits the wait for each response."""

    def __init__(self, address: str, *, client_id: str = "test", timeout_s: float = 30.0) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._client_id = client_id
        #: The correlation id of the last request.
        self.sent = 0

    def __enter__(self) -> KafkaCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, api_key: ApiKey, version: int, request: Any) -> None:
        self.sent += 1
        header = RequestHeader(api_key, version, self.sent, self._client_id)
        self._socket.sendall(b"".join(request_frame(header, request)))

    def receive(self, api_key: ApiKey, version: int) -> Any:
        frame = memoryview(self._exactly(int.from_bytes(self._exactly(4), "big")))
        correlation_id, message = decode_response_header(api_key, version, frame)
        assert correlation_id == self.sent
        return decode_response(api_key, version, message)

    def ask(self, api_key: ApiKey, version: int, request: Any) -> Any:
        self.send(api_key, version, request)
        return self.receive(api_key, version)

    def log_in(self, username: str, password: str, *, token: bool = False) -> int:
        """Log in by SCRAM-SHA-256, and return the error code. ``token`` means that a delegation token logs in."""
        client = ScramClient(SCRAM_SHA_256, username, password, secrets.token_urlsafe(), token=token)
        self.ask(ApiKey.SASL_HANDSHAKE, 1, SaslHandshakeRequest(mechanism=SCRAM_SHA_256))
        message = client.first()
        while True:
            reply = self.ask(ApiKey.SASL_AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=message))
            if reply.error_code:
                return int(reply.error_code)
            message = client.step(reply.auth_bytes)
            if client.complete:
                return 0

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            more = self._socket.recv(count - len(found))
            if not more:
                raise ConnectionError("the broker has closed the connection")
            found += more
        return bytes(found)


def coordinator_of(address: str, group: str) -> str:
    """Return the Kafka address of the group's coordinator. Retry until there is one."""
    with KafkaCalls(address) as calls:
        for _ in range(100):
            request = FindCoordinatorRequest(key_type=0, coordinator_keys=[group])
            (found,) = calls.ask(ApiKey.FIND_COORDINATOR, 4, request).coordinators
            if not found.error_code:
                return f"{found.host}:{found.port}"
    raise AssertionError(f"group {group} has no coordinator: error {found.error_code}")
