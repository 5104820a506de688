"""Tests of certificates for several hosts: what tasks ask for, what the driver signs, and what leaves a host."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sparklog.cluster import certificates
from sparklog.cluster.certificates import Subject
from sparklog.cluster.enrolment import CertificateSigner, enrol, has_ended_for_certificates, no_request
from sparklog.cluster.generation import Enrolment, GenerationSpec
from sparklog.errors import ClusterError

SPEC = GenerationSpec(
    cluster_id="some-id",
    zookeeper="127.0.0.1:1",
    driver_epoch=1,
    generation=1,
    brokers=2,
    brokers_per_task=1,
    log_dirs=(),
    data_dir="/data",
    port=9092,
    advertised_host="",
    bind_host="0.0.0.0",
    settings={},
    session_timeout_ms=6000,
)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    certificates.create_ca(tmp_path / "ca")
    return tmp_path / "ca"


def signer(ca: Path, *hosts: str, alias: str = "") -> CertificateSigner:
    return CertificateSigner(ca, "some-id", settings={"a": "b"}, executor_hosts=lambda: hosts, alias=alias)


def on_host(signer: CertificateSigner, directory: Path) -> Enrolment:
    """Return what a task receives from the driver. Each host of these tests has a directory of its own."""
    found = signer.completed(SPEC).enrolment
    assert found is not None
    return structs.replace(found, directory=str(directory))


def test_each_host_makes_its_own_key_and_the_driver_signs(ca: Path, tmp_path: Path) -> None:
    driver = signer(ca, "host-1", "host-2")
    hosts = {name: tmp_path / name for name in ("host-1", "host-2")}
    endings = [enrol(on_host(driver, directory), name) for name, directory in hosts.items()]
    assert has_ended_for_certificates(endings)
    driver.sign([*endings, no_request()])
    assert [enrol(on_host(driver, directory), name) for name, directory in hosts.items()] == ["", ""]
    keys = [(directory / "broker-key.pem").read_text() for directory in hosts.values()]
    assert keys[0] != keys[1]
    crossed = "".join(endings) + repr(driver.completed(SPEC))
    assert "PRIVATE KEY" not in crossed and not any(line in crossed for key in keys for line in key.splitlines()[1:-1])
    for name, directory in hosts.items():
        assert certificates.is_current(directory, Subject("broker", (name,), "broker", "some-id"))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        open_to_others = [path for path in directory.glob("*key.pem") if path.stat().st_mode & 0o077]
        assert not open_to_others and not (directory / "ca-key.pem").exists()


def test_tasks_of_one_host_share_its_key(ca: Path, tmp_path: Path) -> None:
    driver = signer(ca, "host")
    endings = [enrol(on_host(driver, tmp_path / "host"), "host") for _ in range(3)]
    assert all(endings)
    driver.sign(endings)
    assert [enrol(on_host(driver, tmp_path / "host"), "host") for _ in range(3)] == ["", "", ""]


def test_a_certificate_near_its_end_is_requested_again(ca: Path, tmp_path: Path) -> None:
    driver, host = signer(ca, "host"), tmp_path / "host"
    certificates.issue(ca, Subject("broker", ("host",), "broker", "some-id"), into=host, days=20)
    before = (host / "broker-key.pem").read_bytes()
    ending = enrol(on_host(driver, host), "host")
    assert ending and (host / "broker-key.pem").read_bytes() == before, "the brokers use the old key until then"
    driver.sign([ending])
    assert enrol(on_host(driver, host), "host") == ""
    assert (host / "broker-key.pem").read_bytes() != before


@pytest.mark.parametrize(("hosts", "alias"), [(("elsewhere",), ""), ((), ""), (("elsewhere",), "advertised")])
def test_the_driver_signs_no_name_without_an_executor(
    ca: Path, tmp_path: Path, hosts: tuple[str, ...], alias: str
) -> None:
    driver = signer(ca, *hosts, alias=alias)
    with pytest.raises(ClusterError, match=r"requests the name stranger\.invalid"):
        driver.sign([enrol(on_host(driver, tmp_path / "host"), "stranger.invalid")])
    assert on_host(driver, tmp_path / "host").certificates == ()


def test_a_name_with_an_executors_address_is_signed(ca: Path, tmp_path: Path) -> None:
    driver = signer(ca, "127.0.0.1")
    driver.sign([enrol(on_host(driver, tmp_path / "host"), "localhost")])
    assert enrol(on_host(driver, tmp_path / "host"), "localhost") == ""


@pytest.mark.parametrize("hosts", [("driver", "10.9.8.7"), ("127.0.0.1", "10.9.8.7"), ("localhost", "10.9.8.7")])
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::ffff:127.0.0.1", "any.localhost", "127.1"])
def test_no_loopback_name_is_signed_for_several_hosts(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], name: str
) -> None:
    names_with_loopback(monkeypatch, "driver", "any.localhost")
    driver = signer(ca, *hosts)
    with pytest.raises(ClusterError, match="requests the name"):
        driver.sign([enrol(on_host(driver, tmp_path / "host"), name)])


@pytest.mark.parametrize("hosts", [("driver",), ("driver", "driver"), ("127.0.0.1", "127.0.0.2"), ("localhost",)])
def test_loopback_names_are_signed_for_one_host(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...]
) -> None:
    names_with_loopback(monkeypatch, "driver")
    driver = signer(ca, *hosts)
    driver.sign([enrol(on_host(driver, tmp_path / "host"), "localhost")])
    assert enrol(on_host(driver, tmp_path / "host"), "localhost") == ""


def test_the_drivers_own_host_is_signed_among_several(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_with_loopback(monkeypatch, "driver")
    driver = signer(ca, "driver", "10.9.8.7")
    driver.sign([enrol(on_host(driver, tmp_path / "host"), "driver")])
    assert enrol(on_host(driver, tmp_path / "host"), "driver") == ""


def names_with_loopback(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these names resolve to 127.0.0.1, as a line of /etc/hosts does on the driver's host."""
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host in names else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_the_advertised_name_of_all_brokers_is_signed(ca: Path, tmp_path: Path) -> None:
    driver = signer(ca, "host-1", alias="brokers.invalid")
    driver.sign([enrol(on_host(driver, tmp_path / "host"), "brokers.invalid")])
    assert enrol(on_host(driver, tmp_path / "host"), "brokers.invalid") == ""


def test_a_host_that_cannot_keep_a_key_is_named(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ending = enrol(on_host(signer(ca, "host"), tmp_path / "file" / "security"), "host")
    with pytest.raises(ClusterError, match=r"no certificate for host: .*Not a directory"):
        signer(ca, "host").sign([ending, no_request()])
