"""Tests of a broker's audit log: its file, its thread, and the count of suppressed lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sparklog.broker.security.audit_log import Audit, AuditFile, open_audit_log
from sparklog.protocol.messages import Ack, DeleteTopic
from sparklog.security.principals import Principal


class Connection(NamedTuple):
    principal: Principal = Principal("User", "anna")
    peer_host: str = "10.0.0.7"
    listener: str = "CLIENT"


@pytest.fixture
def audit_file(tmp_path: Path) -> Iterator[Path]:
    """Open the audit log of this process, and restore the logger afterwards."""
    logger = logging.getLogger("sparklog.audit")
    before, level, propagates = list(logger.handlers), logger.level, logger.propagate
    path = tmp_path / "audit.log"
    open_audit_log(path)
    yield path
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = propagates


def written(path: Path) -> list[dict[str, object]]:
    for handler in logging.getLogger("sparklog.audit").handlers:
        if isinstance(handler, AuditFile):
            handler.close()  # waits for the thread
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_reach_a_file_that_only_its_owner_can_read(audit_file: Path) -> None:
    counters: Counter[str] = Counter()

    async def run() -> None:
        audit = Audit(counters)
        audit.login(Principal("User", "anna"), "10.0.0.7", "SCRAM-SHA-256", True, listener="CLIENT")
        audit.login("User:eve", "10.0.0.8", "SCRAM-SHA-256", False, "wrong user or password")
        for _ in range(5):
            audit.denied(Connection(), "Produce", "Write", "Topic:orders", "no ACL allows it")
        audit.replied(Connection(), DeleteTopic(1, "orders", 1000), Ack(1))
        audit.close()

    asyncio.run(run())
    lines = written(audit_file)
    assert [(line["event"], line["decision"], line.get("suppressed")) for line in lines] == [
        ("login", "allowed", None),
        ("login", "denied", None),
        ("denial", "denied", None),
        ("change", "allowed", None),
        ("denial", "denied", 4),
    ]
    assert lines[3]["resource"] == "Topic:orders" and lines[3]["request"] == "DeleteTopic"
    assert audit_file.stat().st_mode & 0o777 == 0o600
    assert counters == {"logins": 1, "logins.failed": 1, "requests.denied": 5, "audit.suppressed": 4}


def test_lines_do_not_wait_for_a_disk_that_cannot_keep_up(tmp_path: Path) -> None:
    handler = AuditFile(tmp_path / "missing" / "audit.log")
    record = logging.makeLogRecord({"msg": "{}"})
    for _ in range(1000):
        handler.emit(record)
    handler.close()
    assert not (tmp_path / "missing").exists()


def test_dropped_lines_are_counted_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.broker.security.audit_log._MOST_WAITING", 1)
    handler = AuditFile(tmp_path / "audit.log")
    record = logging.makeLogRecord({"msg": "{}"})
    while not handler.dropped:
        handler.emit(record)
    while handler.dropped and not handler.lines_noted:
        handler.emit(record)
    handler.close()
    assert '{"event": "dropped"' in (tmp_path / "audit.log").read_text()
