"""The options that several commands share, and their parsers: bootstrap servers, times, byte counts, confirmations."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Optional

import typer

from sparklog.client.admin.admin import Admin
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.escaping import escaped
from sparklog.net.client_security import Security

_BOOTSTRAP_VARIABLES = ["SPARKLOG_BOOTSTRAP", "SPARKLOG_BOOTSTRAP_SERVERS"]


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return topic names for shell completion; empty if no broker responds quickly."""
    found = context.params.get("bootstrap") or _from_environment()
    if not found:
        return []
    topic, colon, _ = incomplete.partition(":")
    try:
        with Admin(found, timeout_s=1.0, first_contact_s=0.5) as admin:
            names = [] if colon else admin.list_topics()
            return [name for name in names if name.startswith(topic) and name.isprintable()]
    except SparklogError:
        return []


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return group names for shell completion; empty if no broker responds quickly."""
    found = context.params.get("bootstrap") or _from_environment()
    if not found:
        return []
    try:
        with Admin(found, timeout_s=1.0, first_contact_s=0.5) as admin:
            # A user cannot type an unprintable name, and the shell would show it without escapes.
            return [name for name in admin.list_groups() if name.startswith(incomplete) and name.isprintable()]
    except SparklogError:
        return []


def _from_environment() -> str:
    import os

    return next((os.environ[name] for name in _BOOTSTRAP_VARIABLES if os.environ.get(name)), "")


Bootstrap = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=_BOOTSTRAP_VARIABLES,
        metavar="HOST:PORT,...",
        help="Addresses of one or more brokers.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time-out of the command.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]
Throttle = Annotated[
    Optional[str],  # noqa: UP045 - as above
    typer.Option("--throttle", metavar="BYTES", help="Limit of copied bytes per second and broker, such as 50MB."),
]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=topic_names)]
Topics = Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False, autocompletion=topic_names)]

#: The time after which a command fails if no broker has ever responded, for example at a wrong address.
FIRST_CONTACT_S = 2.5

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": factor**power
    for power, letter in enumerate("kmgt", 1)
    for rest, factor in (("", 1000), ("b", 1000), ("ib", 1024))
}
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
#: The formats that ``point_in_time`` accepts, for error messages.
TIMES = "a time such as 2026-01-31T12:00 (UTC unless it has a time zone), or an age such as -90s, -15m, -1h, -7d"


def byte_count(text: str | None, *, what: str) -> int:
    """Return the number of bytes that a text such as ``"50MB"`` or ``"64 KiB"`` means; 0 for None.

    Raises ConfigError for any other text.
    """
    if text is None:
        return 0
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) *([a-z]*)(?:/s)?", text.strip().lower())
    if match is None or match[2] not in _UNITS or (count := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise ConfigError(f"{what} {text!r}: expected a number of bytes, such as 1000000, 500kB, 50MB, 1GiB")
    return count


def span_ms(text: str, *, what: str) -> int:
    """Return the milliseconds that a text such as ``"90s"`` or ``"7d"`` means. Raises ConfigError for other texts."""
    span = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    if span is None:
        raise ConfigError(f"{what} {text!r}: expected a time such as 90s, 15m, 12h, 7d")
    return int(span[1]) * _SPAN_S[span[2]] * 1000


def servers(bootstrap: str | None) -> str:
    """Return the bootstrap servers. Raises ConfigError if the option is not given."""
    if not bootstrap:
        raise ConfigError("no brokers given: pass --bootstrap host:port or set SPARKLOG_BOOTSTRAP")
    return bootstrap


@contextlib.contextmanager
def open_admin(bootstrap: str | None, timeout_s: float, *, security: Security = None) -> Iterator[Admin]:
    """Open an admin client for one command, for a ``with`` block.

    An error about an unknown topic suggests a topic with a similar name. ``security`` replaces ``--client-config``.
    """
    with Admin(servers(bootstrap), timeout_s=timeout_s, first_contact_s=FIRST_CONTACT_S, security=security) as admin:
        try:
            yield admin
        except BrokerError as error:
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or not (near := _nearest(admin, str(error))):
                raise
            raise BrokerError(error.code, f"{error.detail or 'no such topic'}; did you mean {near!r}?") from error


def _nearest(admin: Admin, message: str) -> str:
    """Return the topic whose name is most similar to a word of ``message``.

    Return "" if no name is similar, or if one of the words is the name of a topic.
    """
    words = re.findall(r"[A-Za-z0-9._-]+", message)
    try:
        there = admin.list_topics()
    except (BrokerError, ClientTimeout):
        return ""
    if set(words) & set(there):
        return ""  # the topic exists, so the error is about its partition
    near = [match for word in words for match in difflib.get_close_matches(word, there, n=1, cutoff=0.7)]
    return near[0] if near else ""


def confirm(question: str, what: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal. Without a terminal, require ``--yes``. With ``yes``, do nothing.

    Raises:
        typer.Abort: the answer is no.
        ConfigError: stdin is not a terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}: stdin is not a terminal; pass --yes")
    typer.confirm(escaped(question), abort=True, err=True)


def pairs(items: list[str], *, what: str) -> dict[str, str]:
    """Return ``["a=1", "b=2"]`` as a mapping. Raises ConfigError for an item without ``=``."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"{what} {item!r}: expected name=value")
        found[name.strip()] = value.strip()
    return found


def point_in_time(text: str) -> dt.datetime | None:
    """Return the time that ``text`` means: ISO 8601, or an age such as ``-1h``. Return None for any other text.

    A time without a time zone is UTC.
    """
    if span := re.fullmatch(r"-([0-9]+)([smhd])", text):
        return dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=int(span[1]) * _SPAN_S[span[2]])
    try:
        found = dt.datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else ""))
        return found if found.tzinfo is not None else found.replace(tzinfo=dt.timezone.utc)
    except ValueError:
        return None
