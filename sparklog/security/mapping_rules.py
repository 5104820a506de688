"""The rules that map the subject of a client's certificate to a principal: Kafka's ``ssl.principal.mapping.rules``.

This module is pure.

Commas separate the rules. The first rule that matches the whole subject decides. A rule is one of these:

- ``DEFAULT`` uses the whole subject as the name.
- ``RULE:pattern/replacement/`` replaces the subject. ``$1`` in the replacement is the first group of the pattern.
  ``L`` or ``U`` after the last slash changes the name to lower or upper case. A slash within the pattern or the
  replacement is written as a backslash and a slash.

Patterns are Python's regular expressions, which equal Java's in common cases. Source: KIP-371.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sparklog.errors import ConfigError
from sparklog.model import USER, Principal

_RULE = re.compile(
    r"\s*(?:(?P<default>DEFAULT)|RULE:(?P<pattern>(?:\\.|[^\\/])*)/(?P<to>(?:\\.|[^\\/])*)/(?P<case>[LU]?))\s*(?:,|\Z)"
)
_GROUP = re.compile(r"\$([0-9])|\\(.)")
_CASES: dict[str, Callable[[str], str]] = {"": str, "L": str.lower, "U": str.upper}
#: The maximum length of a subject to which rules are applied. The time of a pattern may grow fast with the length.
_MAX_SUBJECT = 1024
#: The short names of attributes in a subject, by OpenSSL's long names. Source: RFC 2253; X500Principal.getName().
_ATTRIBUTES = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}
_SPECIAL = re.compile(r'[,+"\\<>;]')


class _Rule(NamedTuple):
    """One rule. ``pattern`` is None for DEFAULT."""

    pattern: re.Pattern[str] | None
    replacement: str
    case: str

    def apply(self, subject: str) -> str | None:
        if self.pattern is None:
            return subject
        found = self.pattern.fullmatch(subject)
        if found is None:
            return None
        return _CASES[self.case](_GROUP.sub(lambda part: _replaced(part, found), self.replacement))


def _replaced(part: re.Match[str], found: re.Match[str]) -> str:
    return (found[int(part[1])] or "") if part[1] is not None else part[2]


class MappingRules:
    """The rules of one listener that map certificates to principals, in their order."""

    def __init__(self, text: str = "DEFAULT") -> None:
        """Parse the setting. Raises ConfigError."""
        self._rules = _parse(text or "DEFAULT")

    def principal(self, subject: str) -> Principal | None:
        """Return the principal for a certificate with this subject, or None if no rule matches."""
        if len(subject) > _MAX_SUBJECT:
            return None
        for rule in self._rules:
            name = rule.apply(subject)
            if name:
                return Principal(USER, name)
        return None


def _parse(text: str) -> list[_Rule]:
    rules: list[_Rule] = []
    at = 0
    while at < len(text):
        found = _RULE.match(text, at)
        if found is None:
            raise ConfigError(
                f"ssl.principal.mapping.rules {text[at:]!r}: expected DEFAULT or RULE:pattern/replacement/"
            )
        rules.append(_rule(found))
        at = found.end()
    return rules


def _rule(found: re.Match[str]) -> _Rule:
    if found["default"]:
        return _Rule(None, "", "")
    try:
        pattern = re.compile(found["pattern"].replace("\\/", "/"))
    except re.error as error:
        raise ConfigError(f"ssl.principal.mapping.rules: pattern {found['pattern']!r}: {error}") from None
    most = max((int(number) for number, _ in _GROUP.findall(found["to"]) if number), default=0)
    if most > pattern.groups:
        detail = f"the replacement has ${most}, the pattern {found['pattern']!r} has {pattern.groups} groups"
        raise ConfigError(f"ssl.principal.mapping.rules: {detail}")
    return _Rule(pattern, found["to"], found["case"])


def subject_of(certificate: dict[str, Any]) -> str:
    """Return the subject of a certificate, such as ``CN=anna,O=Example``.

    ``certificate`` is a result of ``SSLObject.getpeercert``. The last attribute of its subject comes first, as in
    Kafka.
    """
    names = certificate.get("subject", ())
    return ",".join(
        "+".join(f"{_ATTRIBUTES.get(key, key)}={_escaped(value)}" for key, value in name) for name in reversed(names)
    )


def _escaped(value: str) -> str:
    escaped = _SPECIAL.sub(r"\\\g<0>", value)
    if escaped.startswith((" ", "#")):
        escaped = "\\" + escaped
    if escaped.endswith(" ") and not escaped.endswith("\\ "):
        escaped = escaped[:-1] + "\\ "
    return escaped
