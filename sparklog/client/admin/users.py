"""The administration of users and their passwords.

A password never leaves this process. Brokers get only keys that the client derives from the password.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from sparklog.client.cluster.blocking_cluster import BlockingCluster
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.protocol.messages import (
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    DescribeUserScramCredentials,
    DescribeUserScramCredentialsReply,
)
from sparklog.protocol.sasl import SCRAM_MECHANISMS
from sparklog.protocol.saslprep import saslprep
from sparklog.protocol.scram import DEFAULT_ITERATIONS, MAX_NAME, SALT_BYTES, ScramCredential
from sparklog.protocol.user_messages import ScramCredentialDeletion, ScramCredentialUpsertion


@dataclass(frozen=True, slots=True)
class UserDescription:
    """A user that can log in with a password. ``credentials`` has the number of iterations of each SCRAM mechanism."""

    name: str
    credentials: dict[str, int]


def checked_name(name: str) -> str:
    """Return the name of a new user in its prepared form (SASLprep).

    Raises:
        ConfigError: the name is empty, too long, or has characters that are not allowed.
    """
    try:
        prepared = saslprep(name, stored=True)
    except ConfigError as error:
        raise ConfigError(f"user {name!r}: {error}") from None
    if len(prepared) > MAX_NAME:
        raise ConfigError(f"a user name has at most {MAX_NAME} characters, {len(prepared)} found")
    return prepared


def new_credentials(
    password: str, mechanisms: Iterable[str] = SCRAM_MECHANISMS, iterations: int = DEFAULT_ITERATIONS
) -> dict[str, ScramCredential]:
    """Return credentials for a new password, one for each mechanism, each with a new salt.

    Raises:
        ConfigError: the password has characters that are not allowed, or another argument is out of bounds.
    """
    wanted = list(dict.fromkeys(mechanisms))
    if not wanted:
        raise ConfigError("no mechanism given")
    return {
        mechanism: ScramCredential.derive(mechanism, password, os.urandom(SALT_BYTES), iterations)
        for mechanism in wanted
    }


def list_users(cluster: BlockingCluster, names: Iterable[str] | None) -> list[UserDescription]:
    """Return the users and their mechanisms. See ``Admin.list_users`` for the arguments and errors."""
    request = DescribeUserScramCredentials(0, None if names is None else tuple(names))
    reply = cluster.retrying("users", lambda: cluster.ask_any(request, DescribeUserScramCredentialsReply))
    return [
        UserDescription(found.user, {one.mechanism: one.iterations for one in found.credentials})
        for found in reply.users
        if found.code == ErrorCode.NONE
    ]


def set_password(cluster: BlockingCluster, name: str, credentials: dict[str, ScramCredential]) -> None:
    """Store the credentials of a user's new password. See ``Admin.set_password`` for the errors."""
    upsertions = tuple(
        ScramCredentialUpsertion(name, mechanism, one.iterations, one.salt, one.stored_key, one.server_key)
        for mechanism, one in credentials.items()
    )
    _alter(cluster, AlterUserScramCredentials(0, (), upsertions))


def delete_user(cluster: BlockingCluster, name: str, mechanisms: Iterable[str] | None) -> None:
    """Delete a user. See ``Admin.delete_user`` for the arguments and errors."""
    if mechanisms is None:
        found = list_users(cluster, [name])
        if not found:
            raise BrokerError(ErrorCode.RESOURCE_NOT_FOUND, f"user {name!r} does not exist")
        mechanisms = found[0].credentials
    deletions = tuple(ScramCredentialDeletion(name, mechanism) for mechanism in mechanisms)
    _alter(cluster, AlterUserScramCredentials(0, deletions))


def _alter(cluster: BlockingCluster, request: AlterUserScramCredentials) -> None:
    reply = cluster.retrying("users", lambda: cluster.ask_any(request, AlterUserScramCredentialsReply))
    for result in reply.users:
        if result.code != ErrorCode.NONE:
            raise BrokerError(result.code, result.detail)
