"""Tests of principals from certificates: Kafka's mapping rules, and subjects as Kafka writes them."""

from __future__ import annotations

import pytest

from sparklog.errors import ConfigError
from sparklog.security.mapping_rules import MappingRules, subject_of

SUBJECT = "CN=kafka-server1, OU=Eng, O=Example, C=US".replace(", ", ",")


@pytest.mark.parametrize(
    ("rules", "subject", "principal"),
    [
        ("DEFAULT", SUBJECT, f"User:{SUBJECT}"),
        ("", SUBJECT, f"User:{SUBJECT}"),
        ("RULE:^CN=(.*?),.*$/$1/", SUBJECT, "User:kafka-server1"),
        ("RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/U", SUBJECT, "User:KAFKA-SERVER1@ENG"),
        ("RULE:^.*O=(.*?),.*$/$1/L", SUBJECT, "User:example"),
        ("RULE:^UID=(.*?),.*$/$1/, RULE:^CN=(.*?),.*$/$1/L, DEFAULT", SUBJECT, "User:kafka-server1"),
        ("RULE:^UID=(.*?),.*$/$1/,DEFAULT", SUBJECT, f"User:{SUBJECT}"),
        (r"RULE:^CN=([^,]*),.*$/team\/$1/", SUBJECT, "User:team/kafka-server1"),
        (r"RULE:CN=a\/(b),.*/$1/", "CN=a/b,O=x", "User:b"),
        ("RULE:^CN=(.*?)$/$1/", SUBJECT + "\n", None),
        ("RULE:CN=(.*?),/$1/", SUBJECT, None),
        ("RULE:^CN=(a?)(.*?),.*$/$1/", SUBJECT, None),
    ],
)
def test_the_first_rule_that_matches_the_whole_subject_decides(rules: str, subject: str, principal: str | None) -> None:
    found = MappingRules(rules).principal(subject)
    assert (str(found) if found is not None else None) == principal


@pytest.mark.parametrize(
    "rules",
    ["RULE:^CN=(.*)", "RULE:^CN=(.*)/$1", "CN=(.*)/$1/", "RULE:(/x/", "RULE:CN=(.*)/$2/", "DEFAULT DEFAULT", "default"],
)
def test_a_malformed_rule_is_refused(rules: str) -> None:
    with pytest.raises(ConfigError, match=r"ssl\.principal\.mapping\.rules"):
        MappingRules(rules)


def test_a_very_long_subject_matches_no_rule() -> None:
    assert MappingRules("RULE:^(CN=a+)+$/x/").principal("CN=" + "a" * 5000 + "b") is None


def test_a_subject_is_written_as_kafka_writes_it() -> None:
    certificate = {
        "subject": (
            (("countryName", "US"),),
            (("organizationName", "A, B; C"),),
            (("organizationalUnitName", "#1 "), ("userId", "7")),
            (("commonName", 'q"uote'),),
        )
    }
    assert subject_of(certificate) == r"CN=q\"uote,OU=\#1\ +UID=7,O=A\, B\; C,C=US"
    assert subject_of({}) == ""
