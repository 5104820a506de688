"""Tests of the settings and files that secure ZooKeeper sessions: what is refused, and that no secret is printed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from kazoo.protocol.serialization import Auth

from sparklog.cluster.options import ClusterOptions
from sparklog.config import broker_config
from sparklog.errors import ConfigError
from sparklog.zk import paths
from sparklog.zk.security import Masked, ZooKeeperSecurity, security_of

TLS = {"zookeeper.ssl.client.enable": "true", "zookeeper.ssl.truststore.location": "/pem/ca.pem"}
CANARY = "canary-4711"


def digest_file(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "digest"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_settings_describe_the_security_of_sessions() -> None:
    found = security_of(
        {
            **TLS,
            "zookeeper.ssl.keystore.location": "/pem/broker.pem",
            "zookeeper.ssl.key.location": "/pem/broker-key.pem",
            "zookeeper.digest.file": "/etc/digest",
            "zookeeper.set.acl": "true",
            "num.partitions": "7",
        }
    )
    assert found == ZooKeeperSecurity(
        tls=True,
        ca="/pem/ca.pem",
        certificate="/pem/broker.pem",
        key="/pem/broker-key.pem",
        digest_file="/etc/digest",
        set_acl=True,
    )
    assert security_of({}) == ZooKeeperSecurity()
    assert not security_of({**TLS, "zookeeper.ssl.endpoint.identification.algorithm": "none"}).check_hostname


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zookeeper.ssl.client.enable": "true"}, r"truststore\.location is missing"),
        ({"zookeeper.ssl.truststore.location": "/ca.pem"}, r"ssl\.client\.enable must be true"),
        ({**TLS, "zookeeper.ssl.key.location": "/key.pem"}, r"keystore\.location is missing"),
        ({"zookeeper.digest.file": "digest"}, "absolute path"),
        ({"zookeeper.ssl.truststore": "/ca.pem"}, "unknown setting"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        security_of(settings)


def test_acls_need_an_identity_at_the_operators_zookeeper(tmp_path: Path) -> None:
    wanted = {"zookeeper.set.acl": "true"}
    ClusterOptions(data_dir=tmp_path, settings=wanted).checked()
    with pytest.raises(ConfigError, match=r"set zookeeper\.digest\.file"):
        ClusterOptions(data_dir=tmp_path, settings=wanted, zookeeper="zk:2181").checked()


def test_a_digest_file_may_hold_several_credentials(tmp_path: Path) -> None:
    path = digest_file(tmp_path, "# newest first\nsparklog:new:1\n\nsparklog:old\n")
    assert list(ZooKeeperSecurity(digest_file=path).credentials()) == ["sparklog:new:1", "sparklog:old"]


@pytest.mark.parametrize("text", [f"sparklog {CANARY}", f":{CANARY}", "sparklog:", "", "# nothing", "\xff" * 70_000])
def test_a_malformed_digest_file_is_refused_without_its_text(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="digest file") as error:
        ZooKeeperSecurity(digest_file=digest_file(tmp_path, text)).credentials()
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_digest_file_that_others_may_open_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        ZooKeeperSecurity(digest_file=digest_file(tmp_path, "sparklog:secret", mode)).credentials()


def test_a_missing_digest_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ZooKeeperSecurity(digest_file=str(tmp_path / "none")).credentials()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_digest_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = digest_file(tmp_path, "sparklog:secret")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="owner 12345"):
        ZooKeeperSecurity(digest_file=path).credentials()


def test_credentials_are_never_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    security = ZooKeeperSecurity(digest_file=digest_file(tmp_path, f"sparklog:{CANARY}"))
    (credential,) = security.credentials()
    request = Auth(0, "digest", credential)  # kazoo logs this request
    with caplog.at_level(1):
        logging.getLogger("kazoo").log(5, "Sending request: %s %r %s", request, credential, credential)
    shown = f"{security!r} {credential} {credential!r} {credential:>40} {request} {caplog.text}"
    assert CANARY not in shown
    assert shown.count("***") == 7
    assert CANARY.encode() in request.serialize()
    assert CANARY not in repr(broker_config({"zookeeper.digest.file": security.digest_file}))


def test_a_masked_text_is_equal_to_its_content() -> None:
    assert Masked("a:b") == "a:b"
    assert len({Masked("a:b"), "a:b"}) == 1


@pytest.mark.parametrize(
    "path", ["/config/users", "/config/users/anna", "/config/tokens/7", "/acls/topic/t", "/acls_changes"]
)
def test_credentials_and_access_rules_are_secret(path: str) -> None:
    assert paths.is_secret(path)


@pytest.mark.parametrize("path", ["/", "/config", "/config/users2", "/aclsx", "/brokers/topics/acls"])
def test_other_nodes_are_readable(path: str) -> None:
    assert not paths.is_secret(path)
