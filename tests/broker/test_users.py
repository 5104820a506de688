"""Tests of users on real brokers: the requests, their nodes in ZooKeeper, and the command ``sparklog users``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.client.admin.admin import Admin
from sparklog.client.admin.users import UserDescription
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import AlterUserScramCredentials, AlterUserScramCredentialsReply
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from sparklog.protocol.user_messages import ScramCredentialDeletion, ScramCredentialUpsertion
from sparklog.testing.process_cluster import ProcessCluster
from sparklog.zk.cluster_store import ClusterStore
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import Credentials, UserStore
from tests.cli.in_process import Cli, Result, in_process

pytestmark = pytest.mark.integration

CANARY = "canary-password-7c1d"


@pytest.fixture
def admin(cluster: ProcessCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap) as admin:
        yield admin
        for user in admin.list_users():
            admin.delete_user(user.name)


@pytest.fixture
def cli(cluster: ProcessCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SPARKLOG_BOOTSTRAP", cluster.bootstrap)
    return in_process


def stored(cluster: ProcessCluster) -> dict[str, Credentials]:
    async def ask(store: ClusterStore) -> dict[str, Credentials]:
        return await UserStore(store.session, Unreadable()).all_users()

    return cluster.ask_zookeeper(ask)


def test_a_password_is_set_listed_and_deleted(cluster: ProcessCluster, admin: Admin) -> None:
    assert admin.list_users() == []
    admin.set_password("anna", CANARY)
    admin.set_password("otto", CANARY, mechanisms=[SCRAM_SHA_256], iterations=4096)
    assert admin.list_users() == [
        UserDescription("anna", {SCRAM_SHA_256: 16_384, SCRAM_SHA_512: 16_384}),
        UserDescription("otto", {SCRAM_SHA_256: 4096}),
    ]
    before = stored(cluster)
    assert before["anna"][SCRAM_SHA_256].salt != before["otto"][SCRAM_SHA_256].salt
    admin.set_password("anna", CANARY, mechanisms=[SCRAM_SHA_512])
    after = stored(cluster)
    assert after["anna"][SCRAM_SHA_256] == before["anna"][SCRAM_SHA_256]
    assert after["anna"][SCRAM_SHA_512] != before["anna"][SCRAM_SHA_512]
    admin.delete_user("anna", mechanisms=[SCRAM_SHA_256])
    assert admin.list_users(["anna", "nemo"]) == [UserDescription("anna", {SCRAM_SHA_512: 16_384})]
    admin.delete_user("anna")
    assert list(stored(cluster)) == ["otto"]
    with pytest.raises(BrokerError) as error:
        admin.delete_user("anna")
    assert error.value.code is ErrorCode.RESOURCE_NOT_FOUND


@pytest.mark.parametrize(("name", "password"), [("", "p"), ("\x07", "p"), ("anna", ""), ("anna", "\x07")])
def test_an_invalid_name_or_password_is_refused(admin: Admin, name: str, password: str) -> None:
    with pytest.raises(ConfigError):
        admin.set_password(name, password)


def _upsertion(name: str = "anna", mechanism: str = SCRAM_SHA_256, iterations: int = 4096) -> ScramCredentialUpsertion:
    return ScramCredentialUpsertion(name, mechanism, iterations, b"salt" * 4, b"s" * 32, b"k" * 32)


def test_a_broker_checks_what_a_client_sends(cluster: ProcessCluster, admin: Admin) -> None:
    """Only the changes of the last user are valid."""
    request = AlterUserScramCredentials(
        7,
        (ScramCredentialDeletion("nemo", SCRAM_SHA_256), ScramCredentialDeletion("twice", SCRAM_SHA_256)),
        (
            _upsertion("few", iterations=4095),
            _upsertion("mechanism", "PLAIN"),
            _upsertion("size", SCRAM_SHA_512),
            _upsertion("\u2168"),
            _upsertion("twice"),
            _upsertion("valid"),
        ),
    )
    with cluster.connect(0) as connection:
        reply = connection.request(request)[0]
    assert isinstance(reply, AlterUserScramCredentialsReply)
    assert {result.user: ErrorCode(result.code) for result in reply.users} == {
        "nemo": ErrorCode.RESOURCE_NOT_FOUND,
        "twice": ErrorCode.DUPLICATE_RESOURCE,
        "few": ErrorCode.UNACCEPTABLE_CREDENTIAL,
        "mechanism": ErrorCode.UNSUPPORTED_SASL_MECHANISM,
        "size": ErrorCode.UNACCEPTABLE_CREDENTIAL,
        "\u2168": ErrorCode.UNACCEPTABLE_CREDENTIAL,
        "valid": ErrorCode.NONE,
    }
    assert list(stored(cluster)) == ["valid"]


def test_the_command_creates_alters_lists_and_deletes(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{CANARY}\nanother line\n")
    file.chmod(0o600)
    made = cli("users", "create", "anna", "--password-stdin", stdin=f"{CANARY}\n".encode())
    assert made == Result(0, b"created user anna: SCRAM-SHA-256, SCRAM-SHA-512\n", "")
    again = cli("users", "create", "anna", "--password-file", file)
    assert again.code == 1 and "exists already" in again.err
    assert cli("users", "create", "otto", "--mechanism", "scram-sha-256", "--password-file", file).code == 0
    altered = cli("users", "alter", "otto", "--iterations", 8192, "--password-file", file, "--json")
    assert json.loads(altered.out) == {"user": "otto", "mechanisms": [SCRAM_SHA_256]}
    assert json.loads(cli("users", "list", "--json").out) == [
        {"user": "anna", "credentials": {SCRAM_SHA_256: 16_384, SCRAM_SHA_512: 16_384}},
        {"user": "otto", "credentials": {SCRAM_SHA_256: 8192}},
    ]
    assert cli("users", "list").text.splitlines()[-1].split() == ["otto", SCRAM_SHA_256, "8192"]
    assert cli("users", "delete", "otto", "--yes").text == "deleted user otto\n"
    assert cli("users", "alter", "otto", "--password-file", file).code == 1


def test_a_command_without_a_password_is_refused(cli: Cli, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for options in (
        (),
        ("--password-stdin",),
        ("--password-file", empty),
        ("--password-stdin", "--password-file", empty),
    ):
        assert cli("users", "create", "anna", *options).code == 2
    assert cli("users", "create", "anna", "--password-file", tmp_path / "none").code == 1
    assert cli("users", "create", "anna", "--mechanism", "PLAIN", "--password-stdin", stdin=b"p\n").code == 2


def test_a_terminal_gets_a_prompt_without_echo(cluster: ProcessCluster, admin: Admin) -> None:
    own, terminal = os.openpty()
    command = [sys.executable, "-m", "sparklog.cli.main", "users", "create", "anna", "-b", cluster.bootstrap]
    process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, start_new_session=True)
    os.close(terminal)
    shown = b""
    for _ in range(2):
        # The space follows when the terminal has stopped the echo. Earlier input would be discarded.
        while not shown.endswith(b": "):
            shown += os.read(own, 1000)
        os.write(own, f"{CANARY}\n".encode())
        shown += b"\n"
    out, _ = process.communicate(timeout=60)
    os.close(own)
    assert (process.returncode, out) == (0, b"created user anna: SCRAM-SHA-256, SCRAM-SHA-512\n")
    assert CANARY.encode() not in shown
    assert [user.name for user in admin.list_users()] == ["anna"]


def test_the_first_user_is_written_without_brokers(cluster: ProcessCluster, cli: Cli, admin: Admin) -> None:
    options = ("--zookeeper", cluster.zookeeper, "--secret-file", cluster.secret_file, "--password-stdin")
    made = cli("users", "bootstrap", "admin", *options, stdin=f"{CANARY}\n".encode())
    assert (made.code, made.err) == (0, "")
    assert [user.name for user in admin.list_users()] == ["admin"]
    before = stored(cluster)
    again = cli("users", "bootstrap", "admin", *options, stdin=f"{CANARY}\n".encode())
    assert again.code == 2 and "--yes" in again.err
    assert stored(cluster) == before
    assert cli("users", "bootstrap", "admin", *options, "--yes", stdin=f"{CANARY}\n".encode()).code == 0
    assert stored(cluster) != before
