"""A certificate authority (CA) for development, and the keys and certificates that it signs.

A directory holds ``ca.pem`` and ``ca-key.pem`` of the CA. Each issued certificate is a pair of files, ``NAME.pem`` and
``NAME-key.pem``. Keys are elliptic curve keys (P-256) without a password, in files of mode 0600. Production clusters
use the operator's own CA, and their brokers need only PEM files. Only this module needs the optional library
``cryptography``.

Source: RFC 5280 (extensions).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sparklog.errors import ConfigError
from sparklog.security.peer_certificates import role_uri

#: The roles that a certificate may have. Brokers and controllers of a cluster accept each other by this role.
ROLES = ("broker", "controller")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
#: Certificates are valid from this long before their creation, because the clocks of hosts differ.
_CLOCK_SKEW = dt.timedelta(minutes=5)


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
    _write(files, key, builder, key)
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
    names = _alternative_names(subject)
    builder = (
        _builder(_common_name(subject.name), ca_certificate.subject, days)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(of_ca=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    files = files_of(into or directory, subject.name)
    files.certificate.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(files, key, builder, ca_key)
    return files


def is_current(directory: Path, subject: Subject, *, days: int = 30) -> bool:
    """Return whether ``directory`` has a certificate for ``subject`` that is valid for at least ``days`` from now.

    The CA in ``directory`` must have issued it.

    Raises:
        ConfigError: there is no CA, or a part of the subject is not allowed.
    """
    _check(subject)
    ca_certificate, _ = _load_ca(directory)
    files = files_of(directory, subject.name)
    try:
        found = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found.verify_directly_issued_by(ca_certificate)
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature):
        return False
    until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
    return files.key.exists() and list(names) == _alternative_names(subject) and found.not_valid_after_utc > until


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


def _load_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:

    files = files_of(directory, "ca")
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        key = load_pem_private_key(files.key.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; 'sparklog certs ca' creates a CA") from None
    except (ValueError, TypeError):  # TypeError means that the key has a password.
        raise ConfigError(f"{directory}: ca.pem or ca-key.pem is not a PEM file of a certificate or key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{files.key}: expected an elliptic curve key, as 'sparklog certs ca' creates it")
    return certificate, key


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


def _write(
    files: CertificateFiles,
    key: ec.EllipticCurvePrivateKey,
    builder: x509.CertificateBuilder,
    signer: ec.EllipticCurvePrivateKey,
) -> None:

    signed = builder.sign(signer, hashes.SHA256())
    _replace(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _replace(files.certificate, signed.public_bytes(Encoding.PEM), 0o644)


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
