"""Tests of an embedded ZooKeeper with TLS: only clients with a certificate of its authority are served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from sparklog.cluster.certificates import Subject, create_ca, issue
from sparklog.cluster.embedded_zookeeper import EmbeddedZookeeper
from sparklog.cluster.zookeeper_supervisor import ZookeeperSupervisor
from sparklog.errors import ClusterError, ConfigError
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import ZkSession
from tests.waiting import wait_until


class Served(NamedTuple):
    """A running server, the security of a client that it accepts, and the directory of its authority."""

    server: EmbeddedZookeeper
    security: ZooKeeperSecurity
    directory: Path


def client_of(directory: Path, name: str, *hosts: str) -> ZooKeeperSecurity:
    files = issue(directory, Subject(name, hosts))
    return ZooKeeperSecurity(
        tls=True, ca=str(directory / "ca.pem"), certificate=str(files.certificate), key=str(files.key)
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server whose certificate is for 127.0.0.1 only."""
    directory = tmp_path_factory.mktemp("tls")
    create_ca(directory)
    own = client_of(directory, "zookeeper", "127.0.0.1")
    server = EmbeddedZookeeper.start(directory / "zookeeper", security=own)
    yield Served(server, client_of(directory, "broker"), directory)
    server.stop()


@pytest.fixture
def other_ca(tmp_path: Path) -> Path:
    create_ca(tmp_path / "other")
    return tmp_path / "other"


def test_requests_in_flight_together_get_their_responses(served: Served) -> None:
    """Several responses may arrive in one TLS record, and one response in several."""

    async def scenario() -> None:
        session = await ZkSession.open(served.server.connect, security=served.security)
        try:
            sizes = [number % 7 * 10_000 + number for number in range(100)]
            await asyncio.gather(*(session.create(f"/{size}", b"x" * size) for size in sizes))
            for _ in range(3):
                found = await asyncio.gather(*(session.get(f"/{size}") for size in sizes))
                assert [len(node.data) for node in found] == sizes
        finally:
            await session.close()

    asyncio.run(scenario())


def refusal(served: Served, security: ZooKeeperSecurity | None, *, host: str = "127.0.0.1") -> str:
    """Try to open a session, and return the error that it gets."""

    async def scenario() -> str:
        connect = served.server.connect.replace("127.0.0.1", host)
        with pytest.raises(ClusterError) as error:
            await ZkSession.open(connect, security=security, connect_timeout_ms=700)
        return str(error.value)

    return asyncio.run(scenario())


def test_a_client_without_a_certificate_is_refused(served: Served) -> None:
    assert "TLS failed" in refusal(served, replace(served.security, certificate="", key=""))


def test_a_client_of_another_authority_is_refused(served: Served, other_ca: Path) -> None:
    foreign = client_of(other_ca, "broker")
    assert "TLS failed" in refusal(served, replace(foreign, ca=served.security.ca))


def test_a_server_of_another_authority_is_refused(served: Served, other_ca: Path) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(served, replace(served.security, ca=str(other_ca / "ca.pem")))


def test_a_server_of_another_name_is_refused(served: Served) -> None:
    assert "'localhost'" in refusal(served, served.security, host="localhost")

    async def unchecked() -> None:
        connect = served.server.connect.replace("127.0.0.1", "localhost")
        session = await ZkSession.open(connect, security=replace(served.security, check_hostname=False))
        await session.close()

    asyncio.run(unchecked())


def test_a_client_without_tls_is_refused(served: Served) -> None:
    refusal(served, None)
    lines = (served.directory / "zookeeper" / "zoo.cfg").read_text().splitlines()
    assert not any(line.startswith("clientPort") for line in lines)
    host, _, port = served.server.connect.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"srvr")
        connection.shutdown(socket.SHUT_WR)
        assert b"Mode" not in connection.recv(4096)


def test_connections_without_tls_do_not_fill_the_log(served: Served) -> None:
    host, _, port = served.server.connect.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"not TLS " * 4000)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(4096)
    log = served.directory / "zookeeper" / "server.log"
    wait_until(lambda: b"not TLS ".hex() in log.read_text())
    assert max(map(len, log.read_text().splitlines())) <= 4100
    assert (log.parent / "server.out").read_text() == ""


def test_only_the_named_authority_is_trusted(served: Served) -> None:
    (authority,) = served.security.context().get_ca_certs()
    assert authority["subject"] == ((("commonName", "sparklog development CA"),),)


def test_a_key_that_others_may_read_is_refused(served: Served) -> None:
    files = issue(served.directory, Subject("careless"))
    files.key.chmod(0o644)
    careless = replace(served.security, certificate=str(files.certificate), key=str(files.key))
    with pytest.raises(ConfigError, match="chmod 600"):
        asyncio.run(ZkSession.open(served.server.connect, security=careless))


def test_the_servers_copy_of_the_key_is_private(served: Served) -> None:
    assert (served.directory / "zookeeper" / "keystore.pem").stat().st_mode & 0o777 == 0o600


def test_a_driver_without_the_settings_learns_that_tls_runs(served: Served) -> None:
    with pytest.raises(ClusterError, match="serves only with TLS"):
        EmbeddedZookeeper.start(served.directory / "zookeeper")
    assert EmbeddedZookeeper.start(served.directory / "zookeeper", security=served.security).adopted


def test_a_killed_server_is_replaced_by_one_with_tls(tmp_path: Path) -> None:
    create_ca(tmp_path)
    own = client_of(tmp_path, "zookeeper", "127.0.0.1")
    first = EmbeddedZookeeper.start(tmp_path / "zookeeper", security=own)
    keeper = ZookeeperSupervisor(first)
    try:
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: keeper.server is not first)
        assert keeper.server.connect == first.connect
        asyncio.run(_open_and_close(first.connect, own))
    finally:
        keeper.stop()


async def _open_and_close(connect: str, security: ZooKeeperSecurity) -> None:
    session = await ZkSession.open(connect, security=security)
    await session.close()


def test_an_embedded_server_with_tls_needs_a_certificate(tmp_path: Path, other_ca: Path) -> None:
    with pytest.raises(ConfigError, match=r"keystore\.location"):
        EmbeddedZookeeper.start(
            tmp_path / "zookeeper", security=ZooKeeperSecurity(tls=True, ca=str(other_ca / "ca.pem"))
        )


def test_a_server_with_a_certificate_for_another_host_does_not_start(tmp_path: Path, other_ca: Path) -> None:
    elsewhere = client_of(other_ca, "elsewhere", "zk.example.com")
    with pytest.raises(ClusterError, match=r"certificate was refused.*127\.0\.0\.1"):
        EmbeddedZookeeper.start(tmp_path / "zookeeper", security=elsewhere)
