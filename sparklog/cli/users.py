"""``sparklog users``: users that log in with a password (SCRAM). Passwords are never arguments of a command."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.cli.options import AsJson, Bootstrap, Timeout, Yes, confirm, open_admin
from sparklog.cli.output import done, note, print_json, print_table
from sparklog.cli.zookeeper_options import ZookeeperConfig, security_in
from sparklog.client.admin.users import checked_name, new_credentials
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.proof import KeyRing
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.scram import DEFAULT_ITERATIONS, ScramCredential
from sparklog.zk.security import ZooKeeperSecurity
from sparklog.zk.session import ZkSession
from sparklog.zk.unreadable import Unreadable
from sparklog.zk.user_store import KEY_BYTES, UserStore

users = typer.Typer(help="Users that log in with a password: create, alter, list, delete.", no_args_is_help=True)

#: The maximum length of a password file. The password is its first line.
_LONGEST_FILE = 4096

User = Annotated[str, typer.Argument(metavar="USER", show_default=False)]
Mechanisms = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this on Python 3.10 as well
    typer.Option("--mechanism", metavar="MECHANISM", help="SCRAM-SHA-256 or SCRAM-SHA-512; repeatable. Default: both."),
]
Iterations = Annotated[int, typer.Option("--iterations", help="Iterations of the password's hash, 4096 or more.")]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password from the first line of stdin.")
]
PasswordFile = Annotated[
    Optional[Path],  # noqa: UP045 - as above
    typer.Option("--password-file", metavar="FILE", help="Read the password from the first line of this file."),
]


@users.command("create")
def create(
    user: User,
    *,
    mechanism: Mechanisms = None,
    iterations: Iterations = DEFAULT_ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Create a user that can log in with a password. The command asks for the password unless an option gives it. Only
    keys derived from the password reach the brokers.

    Example: sparklog users create anna
    """
    name, mechanisms = checked_name(user), _mechanisms(mechanism)
    with open_admin(bootstrap, timeout) as admin:
        if admin.list_users([name]):
            detail = f"user {name!r} exists already; `sparklog users alter` changes its password"
            raise BrokerError(ErrorCode.DUPLICATE_RESOURCE, detail)
        password = _password(name, from_stdin=password_stdin, file=password_file)
        admin.set_password(name, password, mechanisms=mechanisms, iterations=iterations)
    done({"user": name, "mechanisms": mechanisms}, f"created user {name}: {', '.join(mechanisms)}", as_json=as_json)


@users.command("alter")
def alter(
    user: User,
    *,
    mechanism: Mechanisms = None,
    iterations: Iterations = DEFAULT_ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Change the password of a user, for all the user's mechanisms or only for those of --mechanism. The brokers close
    the user's connections, and the user's clients must log in with the new password.

    Example: sparklog users alter anna --password-file /run/secrets/anna
    """
    name = checked_name(user)
    with open_admin(bootstrap, timeout) as admin:
        found = admin.list_users([name])
        if not found:
            raise BrokerError(ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} does not exist")
        mechanisms = _mechanisms(mechanism) if mechanism else list(found[0].credentials)
        password = _password(name, from_stdin=password_stdin, file=password_file)
        admin.set_password(name, password, mechanisms=mechanisms, iterations=iterations)
    text = f"changed the password of user {name}: {', '.join(mechanisms)}"
    done({"user": name, "mechanisms": mechanisms}, text, as_json=as_json)


@users.command("list")
def list_users(bootstrap: Bootstrap = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """List the users that can log in with a password, with their mechanisms and iterations.

    Example: sparklog users list
    """
    with open_admin(bootstrap, timeout) as admin:
        found = admin.list_users()
    if as_json:
        print_json([{"user": user.name, "credentials": user.credentials} for user in found])
        return
    rows = [(user.name, mechanism, iterations) for user in found for mechanism, iterations in user.credentials.items()]
    print_table(("user", "mechanism", "iterations"), rows, numeric=("iterations",))


@users.command("delete")
def delete(
    user: User,
    *,
    mechanism: Mechanisms = None,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Delete a user, or only the user's credentials for --mechanism. The brokers close the user's connections. Asks
    for confirmation unless --yes is given.

    Example: sparklog users delete anna
    """
    confirm(f"Delete user {user}?", f"deleting user {user}", yes=yes)
    with open_admin(bootstrap, timeout) as admin:
        admin.delete_user(user, mechanisms=_mechanisms(mechanism) if mechanism else None)
    done({"deleted": user}, f"deleted user {user}", as_json=as_json)


@users.command("bootstrap")
def bootstrap_user(
    user: User,
    *,
    connect: Annotated[
        str,
        typer.Option("--zookeeper", "-z", envvar="SPARKLOG_ZOOKEEPER", metavar="HOST:PORT,.../CHROOT"),
    ] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(envvar="SPARKLOG_SECRET_FILE", metavar="FILE", help="Cluster secret, if ZooKeeper requires it."),
    ] = None,
    zookeeper_config: ZookeeperConfig = None,
    mechanism: Mechanisms = None,
    iterations: Iterations = DEFAULT_ITERATIONS,
    password_stdin: PasswordStdin = False,
    password_file: PasswordFile = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write the first user straight into ZooKeeper, before the first start or after the loss of all passwords. Name the
    user in super.users. Asks for confirmation before it changes an existing user, unless --yes is given.

    Example: sparklog users bootstrap admin --zookeeper zk1:2181/sparklog --password-file /run/secrets/admin
    """
    if not connect:
        raise ConfigError("no ZooKeeper given: pass --zookeeper host:port or set SPARKLOG_ZOOKEEPER")
    name, mechanisms = checked_name(user), _mechanisms(mechanism)
    keys = read_secret_file(secret_file) if secret_file is not None else None
    security = security_in(zookeeper_config)
    password = _password(name, from_stdin=password_stdin, file=password_file)
    credentials = new_credentials(password, mechanisms, iterations)
    asyncio.run(_bootstrap(connect, name, credentials, keys=keys, security=security, yes=yes))
    text = f"wrote user {name} to ZooKeeper at {connect}: {', '.join(mechanisms)}"
    done({"user": name, "mechanisms": mechanisms}, text, as_json=as_json)


async def _bootstrap(
    connect: str,
    name: str,
    credentials: dict[str, ScramCredential],
    *,
    keys: KeyRing | None,
    security: ZooKeeperSecurity,
    yes: bool,
) -> None:
    session = await ZkSession.open(connect, keys=keys, security=security)
    try:
        if not session.keeps_secrets:
            note("sparklog: any process that reaches ZooKeeper can read the user's keys: pass --zookeeper-config")
        store = UserStore(session, Unreadable())
        if await store.users([name]):
            question = f"User {name} exists. Change its password?"
            await asyncio.to_thread(confirm, question, f"changing user {name}", yes=yes)
        await store.alter(name, credentials, new_key=secrets.token_bytes(KEY_BYTES))
    finally:
        await session.close()


def _mechanisms(chosen: list[str] | None) -> list[str]:
    """Return the chosen mechanisms, or all if none is chosen. Raises ConfigError for an unknown mechanism."""
    found = [name.upper() for name in chosen or SCRAM_MECHANISMS]
    if unknown := [name for name in found if name not in SCRAM_MECHANISMS]:
        raise ConfigError(f"--mechanism {unknown[0]}: expected {' or '.join(SCRAM_MECHANISMS)}")
    return list(dict.fromkeys(found))


def _password(name: str, *, from_stdin: bool, file: Path | None) -> str:
    """Read the password from the file, from stdin, or from a prompt without echo.

    Raises:
        ConfigError: the password is missing, or stdin is not a terminal and no option gives the password.
    """
    if from_stdin and file is not None:
        raise ConfigError("pass either --password-stdin or --password-file")
    if file is not None:
        return _first_line(_read(file), str(file))
    if from_stdin:
        return _first_line(sys.stdin.readline(_LONGEST_FILE), "stdin")
    if not sys.stdin.isatty():
        raise ConfigError("stdin is not a terminal: pass --password-stdin or --password-file")
    found: str = typer.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True)
    return found


def _read(file: Path) -> str:
    with file.open(encoding="utf-8") as opened:
        if os.fstat(opened.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            note(f"sparklog: other users may read {file}: chmod 600")
        try:
            return opened.readline(_LONGEST_FILE)
        except UnicodeDecodeError:
            raise ConfigError(f"{file}: expected UTF-8") from None


def _first_line(text: str, where: str) -> str:
    found = text.removesuffix("\n").removesuffix("\r")
    if not found:
        raise ConfigError(f"{where}: no password found")
    return found
