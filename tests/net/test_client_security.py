"""Tests of the security settings of clients: Kafka's names, references, and that no output shows a secret."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.errors import ConfigError
from sparklog.net.client_security import CLIENT_CONFIG, ClientSecurity, client_security
from sparklog.net.password import Password, parse_properties
from sparklog.security.listeners import SecurityProtocol

SECRET = "canary-7f3a"
SCRAM = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256"}
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule required"


def test_the_names_of_librdkafka_are_parsed() -> None:
    found = ClientSecurity.parse(
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "anna",
            "sasl.password": SECRET,
            "ssl.ca.location": "/ca.pem",
            "ssl.certificate.location": "/cert.pem",
            "ssl.key.location": "/key.pem",
            "ssl.key.password": "key-" + SECRET,
            "bootstrap.servers": "ignored:9092",
        }
    )
    assert found.protocol is SecurityProtocol.SASL_SSL and found.verify_hostname and not found.is_token
    assert (found.ca, found.certificate, found.key) == ("/ca.pem", "/cert.pem", "/key.pem")
    assert (found.mechanism, found.username) == ("SCRAM-SHA-512", "anna")
    assert (found.password.reveal(), found.key_password.reveal()) == (SECRET, "key-" + SECRET)


@pytest.mark.parametrize(
    ("config", "username", "password", "is_token"),
    [
        (f'{MODULE} username="anna" password="{SECRET}";', "anna", SECRET, False),
        (f"{MODULE} username='anna' password='{SECRET}' ;", "anna", SECRET, False),
        (f"{MODULE} username=anna password={SECRET};", "anna", SECRET, False),
        (f'{MODULE}\n  username="a b;c"\n  password="q\\"{SECRET}";\n', "a b;c", f'q"{SECRET}', False),
        (f'{MODULE} username="id" password="{SECRET}" tokenauth="true";', "id", SECRET, True),
    ],
)
def test_the_login_module_of_java_is_parsed(config: str, username: str, password: str, is_token: bool) -> None:
    found = ClientSecurity.parse({**SCRAM, "sasl.jaas.config": config, "ssl.truststore.type": "PEM"})
    assert (found.username, found.password.reveal(), found.is_token) == (username, password, is_token)


def test_the_names_of_java_are_parsed() -> None:
    found = ClientSecurity.parse(
        {
            "security.protocol": "SSL",
            "ssl.truststore.location": "/ca.pem",
            "ssl.keystore.location": "/both.pem",
            "ssl.endpoint.identification.algorithm": "",
        }
    )
    assert (found.ca, found.certificate, found.key, found.verify_hostname) == ("/ca.pem", "/both.pem", "", False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"security.protocol": "TLS"}, "PLAINTEXT, SSL"),
        ({**SCRAM, "sasl.pasword": SECRET}, "sasl.pasword: unknown setting"),
        ({**SCRAM, "sasl.password": SECRET}, "sasl.username is missing"),
        ({**SCRAM, "sasl.username": "anna"}, "sasl.password is missing"),
        ({**SCRAM, "sasl.mechanism": "PLAIN", "sasl.username": "anna", "sasl.password": SECRET}, "SCRAM-SHA-512"),
        ({**SCRAM, "sasl.jaas.config": f"ScramLoginModule username={SECRET}"}, "login module"),
        ({**SCRAM, "sasl.jaas.config": f'{MODULE} username="anna" "{SECRET}";'}, "options as name"),
        ({**SCRAM, "sasl.jaas.config": f'a.PlainLoginModule required password="{SECRET}";'}, "PlainLoginModule is not"),
        ({"security.protocol": "SSL", "ssl.truststore.location": "/ca.jks"}, "only PEM"),
        ({"security.protocol": "SSL", "ssl.truststore.type": "JKS"}, "only PEM"),
        ({"security.protocol": "SSL", "ssl.keystore.key": SECRET}, "in PEM files"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/a", "ssl.truststore.location": "/b"}, "values differ"),
        ({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "maybe"}, "expected https"),
        ({**SCRAM, "sasl.tokenauth": SECRET, "sasl.username": "a", "sasl.password": "b"}, "true or false"),
        ({"security.protocol": "${env:SPARKLOG_TEST_UNSET}"}, "SPARKLOG_TEST_UNSET"),
        ({"security.protocol": "${vault:x}"}, "unknown kind"),
    ],
)
def test_a_wrong_setting_is_refused_without_its_secret(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ClientSecurity.parse(settings)
    assert SECRET not in str(caught.value)


def test_references_are_read_at_each_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, both = tmp_path / "password", tmp_path / "secrets"
    file.write_text(f"{SECRET}\n", "utf-8")
    both.write_text("# users\nanna = a-secret\nbert = b-secret\n", "utf-8")
    monkeypatch.setenv("SPARKLOG_TEST_USER", "anna")
    settings = {**SCRAM, "sasl.username": "${env:SPARKLOG_TEST_USER}", "sasl.password": f"${{file:{file}}}"}
    found = ClientSecurity.parse(settings)
    assert (found.username, found.password.reveal()) == ("anna", SECRET)
    file.write_text("rotated", "utf-8")
    assert found.password.reveal() == "rotated"
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        found.password.reveal()
    assert Password(f"${{file:{both}:bert}}").reveal() == "b-secret"
    jaas = f'{MODULE} username="anna" password="${{file:{both}:anna}}";'
    assert ClientSecurity.parse({**SCRAM, "sasl.jaas.config": jaas}).password.reveal() == "a-secret"


def test_no_output_shows_a_password() -> None:
    found = ClientSecurity.parse({**SCRAM, "sasl.username": "anna", "sasl.password": SECRET})
    password = found.password
    shown = (repr(found), str(found), repr(password), str(password), f"{password}", f"{password:>20}", f"{found!r}")
    assert not [text for text in shown if SECRET in text]
    assert "anna" in repr(found)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(found)
    assert SECRET not in str(caught.value)
    assert copy.deepcopy(found) == found
    assert repr(Password("${file:/run/secrets/x}")) == "Password(${file:/run/secrets/x})"


def test_references_and_tokens_can_be_pickled() -> None:
    reference = ClientSecurity.parse({**SCRAM, "sasl.username": "anna", "sasl.password": "${env:PASSWORD}"})
    token = ClientSecurity.parse({**SCRAM, "sasl.username": "id", "sasl.password": SECRET, "sasl.tokenauth": "true"})
    for one in (reference, token, ClientSecurity()):
        assert pickle.loads(pickle.dumps(one)) == one


def test_a_client_takes_a_mapping_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.conf"
    file.write_text(
        f'# a client\nsecurity.protocol=SASL_PLAINTEXT\nsasl.jaas.config={MODULE} \\\n  username="anna" \\\n'
        f'  password="{SECRET}";\nclient.id = x\n',
        "utf-8",
    )
    file.chmod(0o600)
    monkeypatch.delenv(CLIENT_CONFIG, raising=False)
    assert client_security(None) == ClientSecurity()
    by_path = client_security(file)
    assert by_path == client_security(str(file)) and by_path.username == "anna"
    monkeypatch.setenv(CLIENT_CONFIG, str(file))
    assert client_security(None) == by_path == client_security(by_path)
    assert client_security({}) == ClientSecurity()
    with Admin("localhost:1") as admin:
        assert admin._cluster.security == by_path
    with pytest.raises(ConfigError, match="missing"):
        Admin("localhost:1", security=tmp_path / "missing")


def test_a_readable_file_with_a_password_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "client.conf"
    file.write_text(f"security.protocol=SASL_PLAINTEXT\nsasl.username=anna\nsasl.password={SECRET}\n", "utf-8")
    for mode, warnings in ((0o600, 0), (0o644, 1)):
        caplog.clear()
        file.chmod(mode)
        client_security(file)
        assert len(caplog.records) == warnings
    assert SECRET not in caplog.text and "chmod 600" in caplog.text


def test_a_malformed_line_is_named_by_its_number() -> None:
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse_properties(f"a = b\n{SECRET}\n", "client.conf")
    assert SECRET not in str(caught.value)
