"""DescribeUserScramCredentials and AlterUserScramCredentials requests of Kafka clients. Source: KIP-554.

A Kafka client sends the salted password of a user, from which this broker derives the keys that it stores. sparklog's
own clients send the keys.
"""

from __future__ import annotations

from collections import Counter

from sparklog.broker.kafka.admin.item_errors import FAILURES, ItemError, item_error, refused
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.kafka.wire import security as wire
from sparklog.kafka.wire.security import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    AlterUserScramCredentialsResult,
    CredentialInfo,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    DescribeUserScramCredentialsResult,
)
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import (
    AlterUserScramCredentials,
    AlterUserScramCredentialsReply,
    DescribeUserScramCredentials,
    DescribeUserScramCredentialsReply,
)
from sparklog.protocol.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from sparklog.protocol.scram import MAX_NAME, ScramCredential
from sparklog.protocol.user_messages import DescribedUser, ScramCredentialDeletion, ScramCredentialUpsertion

_MECHANISMS = {1: SCRAM_SHA_256, 2: SCRAM_SHA_512}
_CODES = {mechanism: code for code, mechanism in _MECHANISMS.items()}


async def describe_users(
    call: KafkaCall, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    """Return the mechanisms and iterations of the users that the request names, or of all users."""
    names = [user.name for user in request.users or ()]
    twice = {name for name, count in Counter(names).items() if count > 1}
    try:
        if len(names) > MAX_ENTRIES:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"found {len(names)} users; expected at most {MAX_ENTRIES}")
        wanted = None if not names else tuple(dict.fromkeys(names))
        reply = await call.native(DescribeUserScramCredentials(0, wanted))
    except FAILURES as failure:
        error = item_error(failure)
        return DescribeUserScramCredentialsResponse(error_code=error.code, error_message=error.message)
    assert isinstance(reply, DescribeUserScramCredentialsReply)
    return DescribeUserScramCredentialsResponse(
        error_message=None, results=[_described(user, is_twice=user.user in twice) for user in reply.users]
    )


def _described(user: DescribedUser, *, is_twice: bool) -> DescribeUserScramCredentialsResult:
    if is_twice:
        detail = f"user {user.user!r} is named more than once"
        return DescribeUserScramCredentialsResult(
            user=user.user, error_code=ErrorCode.DUPLICATE_RESOURCE, error_message=detail
        )
    return DescribeUserScramCredentialsResult(
        user=user.user,
        error_code=kafka_code(user.code),
        error_message=user.detail or None,
        credential_infos=[
            CredentialInfo(mechanism=_CODES[info.mechanism], iterations=info.iterations)
            for info in user.credentials
            if info.mechanism in _CODES
        ],
    )


async def alter_users(call: KafkaCall, request: AlterUserScramCredentialsRequest) -> AlterUserScramCredentialsResponse:
    """Set and delete credentials of users, and return the result of each user.

    Raises:
        BrokerError: the request has more than ``MAX_ENTRIES`` changes.
    """
    count = len(request.deletions) + len(request.upsertions)
    if count > MAX_ENTRIES:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"found {count} changes; expected at most {MAX_ENTRIES}")
    names = dict.fromkeys([one.name for one in request.deletions] + [one.name for one in request.upsertions])
    errors: dict[str, ItemError] = {}
    deletions, upsertions = [], []
    for deletion in request.deletions:
        await call.pause()
        deletions.append(_deletion(deletion, errors))
    for upsertion in request.upsertions:
        await call.pause()
        upsertions.append(_upsertion(upsertion, errors))
    native = AlterUserScramCredentials(
        0,
        tuple(one for one in deletions if one is not None and one.user not in errors),
        tuple(one for one in upsertions if one is not None and one.user not in errors),
    )
    try:
        reply = await call.native(native)
        assert isinstance(reply, AlterUserScramCredentialsReply)
        for user in reply.users:
            errors[user.user] = ItemError(kafka_code(user.code), user.detail or None)
    except FAILURES as failure:
        for name in names:
            errors.setdefault(name, item_error(failure))
    return AlterUserScramCredentialsResponse(
        results=[
            AlterUserScramCredentialsResult(user=name, error_code=errors[name].code, error_message=errors[name].message)
            for name in names
        ]
    )


def _deletion(wanted: wire.ScramCredentialDeletion, errors: dict[str, ItemError]) -> ScramCredentialDeletion | None:
    """Convert a deletion to that of sparklog's protocol. If it is invalid, enter its error and return None."""
    mechanism = _mechanism(wanted.name, wanted.mechanism, errors)
    return None if mechanism is None else ScramCredentialDeletion(wanted.name, mechanism)


def _upsertion(wanted: wire.ScramCredentialUpsertion, errors: dict[str, ItemError]) -> ScramCredentialUpsertion | None:
    """Convert a new credential to that of sparklog's protocol. If it is invalid, enter its error and return None."""
    name, mechanism = wanted.name, _mechanism(wanted.name, wanted.mechanism, errors)
    if mechanism is None:
        return None
    try:
        if not 1 <= len(name) <= MAX_NAME:
            raise ConfigError(f"a user name of {len(name)} characters found, 1 to {MAX_NAME} expected")
        new = ScramCredential.of_salted_password(mechanism, wanted.salted_password, wanted.salt, wanted.iterations)
    except ConfigError as error:
        errors[name] = refused(ErrorCode.UNACCEPTABLE_CREDENTIAL, str(error))
        return None
    return ScramCredentialUpsertion(name, mechanism, new.iterations, new.salt, new.stored_key, new.server_key)


def _mechanism(name: str, code: int, errors: dict[str, ItemError]) -> str | None:
    if code not in _MECHANISMS:
        detail = f"user {name!r}: unknown SCRAM mechanism {code}"
        errors[name] = refused(ErrorCode.UNSUPPORTED_SASL_MECHANISM, detail)
    return _MECHANISMS.get(code)
