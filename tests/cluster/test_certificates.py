"""Tests of the certificates for development, with Python's TLS as the judge."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from sparklog.cluster import certificates
from sparklog.cluster.certificates import CertificateFiles, Subject
from sparklog.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    certificates.create_ca(tmp_path / "certs")
    return tmp_path / "certs"


def handshake(directory: Path, server: CertificateFiles, client: CertificateFiles, name: str) -> tuple[str, str]:
    """Connect a client to a server over TLS, each with its certificate; return the error of each side, or ""."""
    sides = socket.socketpair()
    errors = {True: "", False: ""}

    def run(of_server: bool) -> None:
        context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH if of_server else ssl.Purpose.SERVER_AUTH, cafile=directory / "ca.pem"
        )
        context.load_cert_chain(*(server if of_server else client))
        context.verify_mode = ssl.CERT_REQUIRED
        with sides[of_server] as side:
            side.settimeout(10)
            try:
                with context.wrap_socket(
                    side, server_side=of_server, server_hostname=None if of_server else name
                ) as wrapped:
                    wrapped.sendall(b"x")
                    wrapped.recv(1)
            except OSError as error:
                errors[of_server] = str(error)

    thread = threading.Thread(target=run, args=(True,))
    thread.start()
    run(False)
    thread.join()
    return errors[True], errors[False]


@pytest.mark.parametrize("host", ["broker1.example.com", "127.0.0.1", "::1"])
def test_a_broker_and_a_client_accept_each_other(directory: Path, host: str) -> None:
    broker = certificates.issue(directory, Subject("broker-1", (host,), "broker", "some-id"))
    anna = certificates.issue(directory, Subject("anna"))
    assert handshake(directory, broker, anna, host) == ("", "")


def test_a_certificate_for_another_host_is_refused(directory: Path) -> None:
    broker = certificates.issue(directory, Subject("broker-1", ("broker1.example.com",)))
    _, of_client = handshake(directory, broker, broker, "broker2.example.com")
    assert "Hostname mismatch" in of_client


def test_a_certificate_of_another_ca_is_refused(directory: Path, tmp_path: Path) -> None:
    certificates.create_ca(tmp_path / "others")
    stranger = certificates.issue(tmp_path / "others", Subject("anna"))
    broker = certificates.issue(directory, Subject("broker-1", ("localhost",)))
    of_server, _ = handshake(directory, broker, stranger, "localhost")
    assert "certificate verify failed" in of_server


def test_the_role_is_a_uri_of_the_cluster(directory: Path) -> None:
    files = certificates.issue(directory, Subject("broker-1", role="broker", cluster_id="some-id"))
    names = x509.load_pem_x509_certificate(files.certificate.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == ["sparklog:some-id/broker"]


def test_only_the_owner_reads_the_keys(directory: Path) -> None:
    files = certificates.issue(directory, Subject("anna"), into=directory / "new")
    for key in (files.key, directory / "ca-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == stat.S_IMODE((directory / "new").stat().st_mode) == 0o700


def test_a_second_ca_does_not_replace_the_first(directory: Path) -> None:
    before = (directory / "ca-key.pem").read_bytes()
    with pytest.raises(ConfigError, match="has a CA already"):
        certificates.create_ca(directory)
    assert (directory / "ca-key.pem").read_bytes() == before


def test_a_certificate_is_replaced_by_a_newer_one(directory: Path) -> None:
    first = certificates.issue(directory, Subject("anna"))
    before = first.certificate.read_bytes(), first.key.read_bytes()
    again = certificates.issue(directory, Subject("anna"))
    assert again == first
    assert first.certificate.read_bytes() != before[0]
    assert first.key.read_bytes() != before[1]
    assert sorted(path.name for path in directory.iterdir()) == ["anna-key.pem", "anna.pem", "ca-key.pem", "ca.pem"]


@pytest.mark.parametrize(
    ("subject", "error"),
    [
        (Subject("../evil"), "name"),
        (Subject("ca"), "name"),
        (Subject("ca-key"), "name"),
        (Subject("anna", ("bücher.example",)), "host"),
        (Subject("anna", role="king", cluster_id="x"), "role"),
        (Subject("anna", role="broker"), "cluster id"),
        (Subject("anna", cluster_id="x"), "cluster id"),
    ],
    ids=str,
)
def test_a_subject_that_is_not_allowed_is_refused(directory: Path, subject: Subject, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        certificates.issue(directory, subject)


def test_an_unreadable_ca_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="certs ca"):
        certificates.issue(tmp_path, Subject("anna"))
    for name in ("ca.pem", "ca-key.pem"):
        (tmp_path / name).write_text("no PEM")
    with pytest.raises(ConfigError, match="not a PEM file"):
        certificates.issue(tmp_path, Subject("anna"))


def test_a_host_asks_for_a_certificate_and_keeps_its_key(directory: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    subject = Subject("broker", ("host-1.example", "10.0.0.1"), "broker", "some-id")
    request = certificates.request(host, subject)
    assert certificates.request(host, subject) != "" and certificates.requested_hosts(request) == subject.hosts
    signed = certificates.sign(directory, request, subject)
    assert certificates.accept(host, "broker", signed)
    certificates.trust(host, certificates.ca_certificate(directory))
    assert certificates.is_current(host, subject)
    assert not (host / "broker-next-key.pem").exists() and not (host / "ca-key.pem").exists()
    assert stat.S_IMODE((host / "broker-key.pem").stat().st_mode) == 0o600
    broker, anna = certificates.files_of(host, "broker"), certificates.issue(directory, Subject("anna"))
    assert handshake(directory, broker, anna, "host-1.example") == ("", "")


def test_a_certificate_for_another_hosts_key_is_not_accepted(directory: Path, tmp_path: Path) -> None:
    subject = Subject("broker", ("host",), "broker", "some-id")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    signed = certificates.sign(directory, certificates.request(tmp_path / "one", subject), subject)
    assert not certificates.accept(tmp_path / "two", "broker", signed), "this host has no key yet"
    certificates.request(tmp_path / "two", subject)
    assert not certificates.accept(tmp_path / "two", "broker", signed)
    assert not (tmp_path / "two" / "broker.pem").exists()


def test_a_certificate_beside_another_key_is_not_current(directory: Path) -> None:
    subject = Subject("broker", ("host",), "broker", "some-id")
    files = certificates.issue(directory, subject)
    assert certificates.is_current(directory, subject)
    files.key.write_bytes(certificates.issue(directory, Subject("other")).key.read_bytes())
    assert not certificates.is_current(directory, subject)


def test_a_damaged_or_unusual_request_is_refused(directory: Path, tmp_path: Path) -> None:
    subject = Subject("broker", ("host",), "broker", "some-id")
    request = certificates.request(tmp_path, subject)
    lines = request.splitlines()
    changed = lines[-3][:-2] + ("A" if lines[-3][-2] != "A" else "B") + lines[-3][-1]
    refused = {
        "damaged|not signed with its own key": "\n".join([*lines[:-3], changed, *lines[-2:]]),
        "at most": request + "x" * 10_000,
        "damaged": "no request",
        "another kind of key": _request_of(rsa.generate_private_key(65537, 2048), x509.DNSName("host")),
        "not a host": _request_of(
            ec.generate_private_key(ec.SECP256R1()), x509.UniformResourceIdentifier("sparklog:some-id/controller")
        ),
        "names no host": _request_of(ec.generate_private_key(ec.SECP256R1())),
    }
    for error, text in refused.items():
        with pytest.raises(ConfigError, match=error):
            certificates.requested_hosts(text)
    with pytest.raises(ConfigError, match="is for"):
        certificates.sign(directory, request, subject._replace(hosts=("other",)))


def _request_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *names: x509.GeneralName) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
