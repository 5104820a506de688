"""Tests of the audit log's lines and of their limits."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sparklog.errors import ErrorCode
from sparklog.protocol.messages import (
    Ack,
    AclEntry,
    AlterTopic,
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    CreateAcls,
    CreateDelegationToken,
    CreateDelegationTokenReply,
    CreateTopic,
    CreateTopicReply,
    DelegationTokenExpiryReply,
    DeleteAcls,
    DeleteAclsReply,
    DeletedRecords,
    DeleteRecords,
    DeleteRecordsPartition,
    DeleteRecordsReply,
    DeleteTopic,
    ElectLeaders,
    ElectLeadersReply,
    ErrorReply,
    ExpireDelegationToken,
    Metadata,
    PartitionResult,
    RenewDelegationToken,
    Reply,
    Request,
)
from sparklog.protocol.token_messages import TokenDescription
from sparklog.protocol.user_messages import AlteredUser, ScramCredentialDeletion, ScramCredentialUpsertion
from sparklog.security.audit import (
    FAILED_LOGINS,
    MAX_TEXT,
    OF_PRINCIPAL,
    AuditEvent,
    AuditKind,
    AuditLimits,
    audit_line,
)
from sparklog.security.changes import change_of


def denial(principal: str = "User:anna", resource: str = "Topic:orders", **fields: str) -> AuditEvent:
    return AuditEvent(
        event=AuditKind.DENIAL,
        principal=principal,
        address="10.0.0.7",
        allowed=False,
        request="Produce",
        resource=resource,
        rule="no ACL allows it",
        **fields,  # type: ignore[arg-type]
    )


def failed_login(principal: str, address: str = "10.0.0.7") -> AuditEvent:
    return AuditEvent(event=AuditKind.LOGIN, principal=principal, address=address, allowed=False)


def test_a_line_has_the_facts_of_its_event() -> None:
    line = json.loads(audit_line(denial(operation="Write"), wall_ms=1_700_000_000_123))
    assert line == {
        "time": "2023-11-14T22:13:20.123Z",
        "event": "denial",
        "principal": "User:anna",
        "address": "10.0.0.7",
        "decision": "denied",
        "request": "Produce",
        "operation": "Write",
        "resource": "Topic:orders",
        "rule": "no ACL allows it",
    }


@given(st.text(st.characters(), max_size=2 * MAX_TEXT))
def test_any_name_makes_one_short_printable_line(name: str) -> None:
    line = audit_line(denial(principal=name, resource=name), wall_ms=0)
    assert line.isprintable()
    assert len(line) < 12 * 2 * MAX_TEXT + 300
    found = json.loads(line)["principal"]
    assert found == name or (len(name) > MAX_TEXT and found == name[: MAX_TEXT - 3] + "...")


def test_a_repeated_denial_is_written_once_with_a_later_count() -> None:
    limits = AuditLimits(period_s=60)
    assert limits.admit(denial(), 0) == (denial(),)
    for at in range(1, 51):
        assert limits.admit(denial(), at) == ()
    assert limits.admit(denial(resource="Topic:other"), 51)
    assert limits.suppresses
    summary, again = limits.admit(denial(), 60)
    assert (summary.suppressed, again.suppressed) == (50, 0)
    assert not limits.suppresses


def test_failed_logins_of_one_address_are_limited_together() -> None:
    limits = AuditLimits()
    written = [event for number in range(1000) for event in limits.admit(failed_login(f"User:{number}"), 0)]
    assert len(written) == FAILED_LOGINS
    assert len(limits.admit(failed_login("User:anna", "10.0.0.8"), 1)) == 1
    (summary,) = limits.end_all()
    assert (summary.address, summary.suppressed) == ("10.0.0.7", 990)


def test_one_principal_cannot_flood_the_file_with_many_resources() -> None:
    limits = AuditLimits()
    written = [event for number in range(1000) for event in limits.admit(denial(resource=f"Topic:{number}"), 0)]
    assert len(written) == OF_PRINCIPAL
    assert limits.admit(denial(principal="User:ben"), 0)


def test_the_number_of_counted_kinds_is_bounded() -> None:
    limits = AuditLimits(kinds=10)
    written = [event for number in range(1000) for event in limits.admit(denial(f"User:{number}"), 0)]
    assert len(written) == 11
    assert sum(event.suppressed for event in limits.end_all()) == 989
    assert limits.admit(denial(), 1) == (denial(),)


def test_changes_are_never_suppressed() -> None:
    limits = AuditLimits()
    change = AuditEvent(event=AuditKind.CHANGE, principal="User:admin", address="local", allowed=True)
    assert all(limits.admit(change, 0) == (change,) for _ in range(1000))


def described(request: Request, reply: Reply) -> tuple[str, str] | None:
    return change_of(request, reply)


def test_successful_administrative_requests_are_described() -> None:
    assert described(CreateTopic(1, "orders", 3, 2, 1000), CreateTopicReply(1, "id")) == (
        "Topic:orders",
        "created, topic id id",
    )
    assert described(AlterTopic(1, "orders", {"retention.ms": "1"}, ("flush.ms",), 1000), Ack(1)) == (
        "Topic:orders",
        "retention.ms=1, unset flush.ms",
    )
    request = DeleteRecords(1, (DeleteRecordsPartition("a", 0, 5), DeleteRecordsPartition("a", 1, 5)))
    reply = DeleteRecordsReply(1, (DeletedRecords(0, 5), DeletedRecords(3, -1, "unknown")))
    assert described(request, reply) == ("Topic:a", "deleted records of a-0 below 5")
    elected = ElectLeadersReply(1, tuple(PartitionResult("a", number, 0) for number in range(12)))
    asked = ElectLeaders(1, "preferred", 1000, tuple(("a", number) for number in range(12)))
    assert described(asked, elected) == (
        "Cluster",
        "preferred elections of a-0, a-1, a-2, a-3, a-4, a-5, a-6, a-7, a-8, a-9 and 2 more",
    )


def test_changes_of_acls_are_described() -> None:
    entry = AclEntry("Topic", "orders", "Literal", "User:anna", "*", "Write", "Allow")
    acl = "an ACL allows User:anna Write on Topic 'orders' from any host"
    assert described(CreateAcls(1, (entry,)), Ack(1)) == ("Cluster", f"added: {acl}")
    assert described(DeleteAcls(1, ()), DeleteAclsReply(1, (entry,))) == ("Cluster", f"removed: {acl}")
    assert described(DeleteAcls(1, ()), DeleteAclsReply(1, ())) is None


def test_failures_and_other_requests_are_no_changes() -> None:
    assert described(DeleteTopic(1, "orders", 1000), ErrorReply(1, 3, "unknown")) is None
    assert described(Metadata(1), Ack(1)) is None
    request = DeleteRecords(1, (DeleteRecordsPartition("a", 0, 5),))
    assert described(request, DeleteRecordsReply(1, (DeletedRecords(3, -1, "unknown"),))) is None


def test_suppressed_events_keep_only_the_text_of_their_line() -> None:
    limits, long = AuditLimits(), "t" * 1_000_000
    for _ in range(2):
        limits.admit(denial(resource=f"Topic:{long}"), 0.0)
    [summary] = limits.end_all()
    assert len(summary.resource) == MAX_TEXT and summary.suppressed == 1


def test_changes_of_users_and_tokens_are_described_without_secrets() -> None:
    upsertion = ScramCredentialUpsertion("anna", "SCRAM-SHA-256", 4096, b"canary", b"canary", b"canary")
    refused = ScramCredentialDeletion("otto", "SCRAM-SHA-256")
    reply = AlterUserScramCredentialsReply(1, (AlteredUser("otto", ErrorCode.RESOURCE_NOT_FOUND), AlteredUser("anna")))
    assert described(AlterUserScramCredentials(1, (refused,), (upsertion,)), reply) == (
        "User:anna",
        "credentials: set SCRAM-SHA-256 of anna",
    )
    token = TokenDescription("t1", "User:anna", (), 1, 2, 3)
    assert described(CreateDelegationToken(1), CreateDelegationTokenReply(1, token, "canary")) == (
        "DelegationToken:t1",
        "created for User:anna",
    )
    ends = DelegationTokenExpiryReply(1, 7)
    assert described(RenewDelegationToken(1, "t1"), ends) == ("DelegationToken:t1", "renewed until 7")
    assert described(ExpireDelegationToken(1, "t1"), ends) == ("DelegationToken:t1", "ends at 7")
    assert "canary" not in repr(upsertion) + repr(CreateDelegationTokenReply(1, token, "canary"))
