"""The expiry time of a certificate in a PEM file.

Python's ``ssl`` reports this time only for the certificate of a peer.
"""

from __future__ import annotations

import calendar
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from sparklog.errors import ConfigError

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
#: The position of the validity in a certificate without its version: after the serial number, the signature's
#: algorithm and the issuer.
_VALIDITY = 3
#: A two-digit year below this number is in the 2000s, and otherwise in the 1900s. Source: RFC 5280, 4.1.2.5.1.
_PIVOT = 50


def expires_at_s(path: str) -> float:
    """Return when the first certificate in a PEM file expires, in seconds since the Unix epoch. Raises ConfigError."""
    try:
        found = _CERTIFICATE.search(Path(path).read_text("ascii"))
        if found is None:
            raise ConfigError(f"{path}: no certificate")
        return not_after_s(ssl.PEM_cert_to_DER_cert(found[0]))
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path}: {error}") from None


def not_after_s(certificate: bytes) -> float:
    """Return when a DER-encoded certificate expires, in seconds since the Unix epoch.

    Raises ValueError or IndexError if the encoding is wrong. Source: RFC 5280, 4.1.
    """
    (outer,) = _elements(certificate, _SEQUENCE)
    signed, *_ = _elements(outer)
    fields = [content for tag, content in _tagged(signed) if tag != _VERSION]
    (_, _), (tag, until) = _tagged(fields[_VALIDITY])
    text = until.decode("ascii")
    if tag == _UTC_TIME:
        text = f"{'20' if int(text[:2]) < _PIVOT else '19'}{text}"
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))


def _elements(content: bytes, expected: int | None = None) -> Iterator[bytes]:
    for tag, element in _tagged(content):
        if expected is not None and tag != expected:
            raise ValueError(f"tag {tag:#x} found, {expected:#x} expected")
        yield element


def _tagged(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each element. Raises ValueError for incomplete elements."""
    at = 0
    while at < len(content):
        tag, length, at = content[at], content[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(content[at : at + count], "big"), at + count
        if at + length > len(content):
            raise ValueError("incomplete certificate")
        yield tag, content[at : at + length]
        at += length
