"""A certificate authority (CA) for development, and the keys and certificates that it signs.

A directory holds ``ca.pem`` and ``ca-key.pem`` of the CA. Each issued certificate is a pair of files, ``NAME.pem`` and
``NAME-key.pem``. Keys are elliptic curve keys (P-256) without a password, in files of mode 0600. Production clusters
use the operator's own CA, and their brokers need only PEM files. Only this module needs the optional library
``cryptography``.

A host without the CA's key makes its own key and asks for a certificate. ``request`` makes the key and a signing
request. ``sign`` signs the request where the CA is. ``accept`` writes the certificate beside the key.

Source: RFC 5280 (extensions), RFC 2986 (signing requests).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sparklog.errors import ConfigError
from sparklog.security.peer_certificates import role_uri

#: The roles that a certificate may have. Brokers and controllers of a cluster accept each other by this role.
ROLES = ("broker", "controller")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
#: Certificates are valid from this long before their creation, because the clocks of hosts differ.
_CLOCK_SKEW = dt.timedelta(minutes=5)
#: The maximum length of a signing request in characters, and the maximum number of hosts in it.
_LONGEST_REQUEST = 8192
_MOST_HOSTS = 8


class CertificateFiles(NamedTuple):
    """The paths of a certificate and of its private key."""

    certificate: Path
    key: Path


class Subject(NamedTuple):
    """The identity of a certificate's owner.

    ``hosts`` are the names and addresses at which clients reach the owner. ``role`` is one of ``ROLES`` or empty, and
    ``cluster_id`` is the cluster in which the owner has this role.
    """

    name: str
    hosts: tuple[str, ...] = ()
    role: str = ""
    cluster_id: str = ""


def files_of(directory: Path, name: str) -> CertificateFiles:
    """Return the paths of the certificate called ``name``, whether or not they exist."""
    return CertificateFiles(directory / f"{name}.pem", directory / f"{name}-key.pem")


def create_ca(directory: Path, *, name: str = "sparklog development CA", days: int = 3650) -> CertificateFiles:
    """Create a CA in ``directory``, which is created with mode 0700 if it does not exist.

    Raises:
        ConfigError: the directory already has a CA.
    """
    files = files_of(directory, "ca")
    if files.key.exists() or files.certificate.exists():
        raise ConfigError(f"{directory} has a CA already")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(name)
    builder = (
        _builder(subject, subject, days)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(of_ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _replace(files.key, _key_pem(key), 0o600)
    _replace(files.certificate, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), 0o644)
    return files


def issue(directory: Path, subject: Subject, *, into: Path | None = None, days: int = 365) -> CertificateFiles:
    """Issue a certificate with a new key, signed by the CA in ``directory``. Write both files to ``into``.

    If ``into`` is None, write them to ``directory``. If the files exist, each is replaced atomically, the key first.
    Brokers load the new pair when both files have changed.

    Raises:
        ConfigError: there is no CA, or a part of the subject is not allowed.
    """
    _check(subject)
    ca_certificate, ca_key = _load_ca(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    signed = _signed(subject, key.public_key(), ca_certificate, ca_key, days=days)
    files = files_of(into or directory, subject.name)
    files.certificate.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _replace(files.key, _key_pem(key), 0o600)
    _replace(files.certificate, signed.public_bytes(Encoding.PEM), 0o644)
    return files


def request(directory: Path, subject: Subject) -> str:
    """Return a signing request (PEM) for ``subject``. Its key is in ``directory``, in a file of mode 0600.

    The first call makes the key. ``accept`` puts the key into use when it has the certificate. The role and the cluster
    are not part of the request: the signer decides them.

    Raises:
        ConfigError: a part of the subject is not allowed, or the file of the key is damaged.
    """
    _check(subject)
    path = _next_key(directory, subject.name)
    if not path.exists():
        _replace(path, _key_pem(ec.generate_private_key(ec.SECP256R1())), 0o600)
    builder = x509.CertificateSigningRequestBuilder().subject_name(_common_name(subject.name))
    names: list[x509.GeneralName] = [_host(host) for host in subject.hosts]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(_load_key(path), hashes.SHA256()).public_bytes(Encoding.PEM).decode("ascii")


def requested_hosts(text: str) -> tuple[str, ...]:
    """Return the host names and addresses in the signing request ``text`` (PEM).

    Raises:
        ConfigError: the request is damaged or too long, does not name 1 to 8 hosts, does not have a P-256 key, or is
            not signed with its own key.
    """
    return _hosts_of(_parse_request(text))


def sign(directory: Path, text: str, subject: Subject, *, days: int = 365) -> str:
    """Sign the request ``text`` (PEM) with the CA in ``directory``. Return the certificate for ``subject`` (PEM).

    The caller has checked ``requested_hosts``.

    Raises:
        ConfigError: there is no CA, the request is damaged, or the request is not for the hosts of ``subject``.
    """
    _check(subject)
    found = _parse_request(text)
    if _hosts_of(found) != subject.hosts:
        raise ConfigError(f"the signing request is for {_hosts_of(found)}, and not for {subject.hosts}")
    ca_certificate, ca_key = _load_ca(directory)
    signed = _signed(subject, _curve_key(found), ca_certificate, ca_key, days=days)
    return signed.public_bytes(Encoding.PEM).decode("ascii")


def accept(directory: Path, name: str, certificate: str) -> bool:
    """Put ``certificate`` (PEM) and the key of the last ``request`` into use.

    Return False if the certificate is for another key.

    Raises:
        ConfigError: the certificate or the file of the key is damaged.
    """
    path = _next_key(directory, name)
    if not path.exists():
        return False
    try:
        found = x509.load_pem_x509_certificate(certificate.encode())
    except ValueError:
        raise ConfigError(f"the certificate for {name} is not a PEM certificate") from None
    if _public_pem(found.public_key()) != _public_pem(_load_key(path).public_key()):
        return False
    files = files_of(directory, name)
    path.replace(files.key)
    _replace(files.certificate, certificate.encode(), 0o644)
    return True


def ca_certificate(directory: Path) -> str:
    """Return the certificate of the CA in ``directory`` (PEM). Raises ConfigError if it cannot be read."""
    return _load_ca_certificate(directory).public_bytes(Encoding.PEM).decode("ascii")


def trust(directory: Path, text: str) -> None:
    """Store ``text`` (PEM) as the certificate of the CA in ``directory``. This does not need the CA's key."""
    path = files_of(directory, "ca").certificate
    if not path.exists() or path.read_text("ascii", errors="replace") != text:
        _replace(path, text.encode(), 0o644)


def is_current(directory: Path, subject: Subject, *, days: int = 30) -> bool:
    """Return whether ``directory`` has a certificate for ``subject`` that is valid for at least ``days`` from now.

    The CA in ``directory`` must have issued the certificate, and the private key of the certificate must be in
    ``directory`` as well. The key of the CA is not needed.

    Raises:
        ConfigError: there is no CA, or a part of the subject is not allowed.
    """
    _check(subject)
    issuer = _load_ca_certificate(directory)
    files = files_of(directory, subject.name)
    try:
        found = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found.verify_directly_issued_by(issuer)
        has_key = _public_pem(found.public_key()) == _public_pem(_load_key(files.key).public_key())
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature, ConfigError):
        return False
    until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
    return has_key and list(names) == _alternative_names(subject) and found.not_valid_after_utc > until


def _check(subject: Subject) -> None:
    if not _NAME.fullmatch(subject.name) or subject.name in {"ca", "ca-key"}:
        raise ConfigError(f"name {subject.name!r}: expected up to 64 letters, digits and ._@-, and not 'ca'")
    if subject.role and subject.role not in ROLES:
        raise ConfigError(f"role {subject.role!r}: expected one of {', '.join(ROLES)}")
    if bool(subject.role) is not bool(subject.cluster_id):
        raise ConfigError("a role needs a cluster id, and a cluster id needs a role")


def _alternative_names(subject: Subject) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [_host(host) for host in subject.hosts]
    if subject.role:
        names.append(x509.UniformResourceIdentifier(role_uri(subject.cluster_id, subject.role)))
    return names


def _next_key(directory: Path, name: str) -> Path:
    """Return the path of the key for which a certificate was requested, and which is not in use yet."""
    return directory / f"{name}-next-key.pem"


def _load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    return _load_ca_certificate(directory), _load_key(files_of(directory, "ca").key)


def _load_ca_certificate(directory: Path) -> x509.Certificate:
    path = files_of(directory, "ca").certificate
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError:
        raise ConfigError(f"{path} is not a PEM file of a certificate") from None


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError):  # TypeError means that the key has a password.
        raise ConfigError(f"{path} is not a PEM file of a key without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path}: expected an elliptic curve key, as 'sparklog certs ca' creates it")
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "; 'sparklog certs ca' creates a CA" if path.name in {"ca.pem", "ca-key.pem"} else ""
        raise ConfigError(f"{path}: {error.strerror}{hint}") from None


def _parse_request(text: str) -> x509.CertificateSigningRequest:
    if len(text) > _LONGEST_REQUEST:
        raise ConfigError(f"a signing request has {len(text)} characters: expected at most {_LONGEST_REQUEST}")
    try:
        found = x509.load_pem_x509_csr(text.encode())
        is_valid = found.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError("a signing request is damaged") from None
    if not is_valid:
        raise ConfigError("a signing request is not signed with its own key")
    _curve_key(found)
    return found


def _curve_key(found: x509.CertificateSigningRequest) -> ec.EllipticCurvePublicKey:
    key = found.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError("a signing request has another kind of key than P-256")
    return key


def _hosts_of(found: x509.CertificateSigningRequest) -> tuple[str, ...]:
    try:
        names = list(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound):
        raise ConfigError("a signing request names no host") from None
    if not 1 <= len(names) <= _MOST_HOSTS:
        raise ConfigError(f"a signing request names {len(names)} hosts: expected 1 to {_MOST_HOSTS}")
    if other := [name for name in names if not isinstance(name, x509.DNSName | x509.IPAddress)]:
        raise ConfigError(f"a signing request names {other[0].value!r}, which is not a host")
    return tuple(str(name.value) for name in names)


def _public_pem(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError("a certificate has another kind of key than an elliptic curve key")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, days: int) -> x509.CertificateBuilder:

    if not 1 <= days <= 36_500:
        raise ConfigError(f"days={days}: expected 1 to 36500")
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _signed(
    subject: Subject,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
) -> x509.Certificate:
    builder = (
        _builder(_common_name(subject.name), issuer.subject, days)
        .public_key(public_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(of_ca=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
    if names := _alternative_names(subject):
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _key_usage(*, of_ca: bool) -> x509.KeyUsage:

    return x509.KeyUsage(
        digital_signature=not of_ca,
        key_cert_sign=of_ca,
        crl_sign=of_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"host {host!r}: expected an address, or a name in ASCII letters") from None


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write the file under another name and rename it, so that a reader never sees an incomplete file."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
