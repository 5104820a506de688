"""The messages of logins, ACLs, SCRAM users and delegation tokens."""

from __future__ import annotations

from sparklog.kafka.wire.api_keys import ApiKey
from sparklog.kafka.wire.fields import array, binary, int8, int16, int32, int64, message, string, struct


@message(ApiKey.SASL_HANDSHAKE, "0-1")
class SaslHandshakeRequest:
    """A request to log in by a SASL mechanism."""

    mechanism: str = string("0+")


@message(ApiKey.SASL_HANDSHAKE, "0-1")
class SaslHandshakeResponse:
    error_code: int = int16("0+")
    mechanisms: list[str] = array(string, "0+")


@message(ApiKey.SASL_AUTHENTICATE, "0-2", flexible="2+")
class SaslAuthenticateRequest:
    """A request with one of the client's SASL messages of a login."""

    auth_bytes: bytes = binary("0+")


@message(ApiKey.SASL_AUTHENTICATE, "0-2", flexible="2+")
class SaslAuthenticateResponse:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    auth_bytes: bytes = binary("0+")
    session_lifetime_ms: int = int64("1+")


@message(ApiKey.DESCRIBE_ACLS, "1-3", flexible="2+")
class DescribeAclsRequest:
    """A request for the ACLs that match a filter."""

    resource_type_filter: int = int8("0+")
    resource_name_filter: str | None = string("0+", nullable="0+")
    pattern_type_filter: int = int8("1+", default=3)
    principal_filter: str | None = string("0+", nullable="0+")
    host_filter: str | None = string("0+", nullable="0+")
    operation: int = int8("0+")
    permission_type: int = int8("0+")


@struct
class AclDescription:
    principal: str = string("0+")
    host: str = string("0+")
    operation: int = int8("0+")
    permission_type: int = int8("0+")


@struct
class DescribeAclsResource:
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    pattern_type: int = int8("1+", default=3)
    acls: list[AclDescription] = array(AclDescription, "0+")


@message(ApiKey.DESCRIBE_ACLS, "1-3", flexible="2+")
class DescribeAclsResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    resources: list[DescribeAclsResource] = array(DescribeAclsResource, "0+")


@struct
class AclCreation:
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    resource_pattern_type: int = int8("1+", default=3)
    principal: str = string("0+")
    host: str = string("0+")
    operation: int = int8("0+")
    permission_type: int = int8("0+")


@message(ApiKey.CREATE_ACLS, "1-3", flexible="2+")
class CreateAclsRequest:
    """A request to create ACLs."""

    creations: list[AclCreation] = array(AclCreation, "0+")


@struct
class AclCreationResult:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")


@message(ApiKey.CREATE_ACLS, "1-3", flexible="2+")
class CreateAclsResponse:
    throttle_time_ms: int = int32("0+")
    results: list[AclCreationResult] = array(AclCreationResult, "0+")


@struct
class DeleteAclsFilter:
    resource_type_filter: int = int8("0+")
    resource_name_filter: str | None = string("0+", nullable="0+")
    pattern_type_filter: int = int8("1+", default=3)
    principal_filter: str | None = string("0+", nullable="0+")
    host_filter: str | None = string("0+", nullable="0+")
    operation: int = int8("0+")
    permission_type: int = int8("0+")


@message(ApiKey.DELETE_ACLS, "1-3", flexible="2+")
class DeleteAclsRequest:
    """A request to delete the ACLs that match filters."""

    filters: list[DeleteAclsFilter] = array(DeleteAclsFilter, "0+")


@struct
class DeleteAclsMatchingAcl:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    resource_type: int = int8("0+")
    resource_name: str = string("0+")
    pattern_type: int = int8("1+", default=3)
    principal: str = string("0+")
    host: str = string("0+")
    operation: int = int8("0+")
    permission_type: int = int8("0+")


@struct
class DeleteAclsFilterResult:
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    matching_acls: list[DeleteAclsMatchingAcl] = array(DeleteAclsMatchingAcl, "0+")


@message(ApiKey.DELETE_ACLS, "1-3", flexible="2+")
class DeleteAclsResponse:
    throttle_time_ms: int = int32("0+")
    filter_results: list[DeleteAclsFilterResult] = array(DeleteAclsFilterResult, "0+")


@struct
class UserName:
    name: str = string("0+")


@message(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, "0", flexible="0+")
class DescribeUserScramCredentialsRequest:
    """A request for the mechanisms and iterations of SCRAM users."""

    users: list[UserName] | None = array(UserName, "0+", nullable="0+")


@struct
class CredentialInfo:
    mechanism: int = int8("0+")
    iterations: int = int32("0+")


@struct
class DescribeUserScramCredentialsResult:
    user: str = string("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    credential_infos: list[CredentialInfo] = array(CredentialInfo, "0+")


@message(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, "0", flexible="0+")
class DescribeUserScramCredentialsResponse:
    throttle_time_ms: int = int32("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")
    results: list[DescribeUserScramCredentialsResult] = array(DescribeUserScramCredentialsResult, "0+")


@struct
class ScramCredentialDeletion:
    name: str = string("0+")
    mechanism: int = int8("0+")


@struct
class ScramCredentialUpsertion:
    name: str = string("0+")
    mechanism: int = int8("0+")
    iterations: int = int32("0+")
    salt: bytes = binary("0+")
    salted_password: bytes = binary("0+")


@message(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, "0", flexible="0+")
class AlterUserScramCredentialsRequest:
    """A request to set or delete the passwords of SCRAM users."""

    deletions: list[ScramCredentialDeletion] = array(ScramCredentialDeletion, "0+")
    upsertions: list[ScramCredentialUpsertion] = array(ScramCredentialUpsertion, "0+")


@struct
class AlterUserScramCredentialsResult:
    user: str = string("0+")
    error_code: int = int16("0+")
    error_message: str | None = string("0+", nullable="0+")


@message(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, "0", flexible="0+")
class AlterUserScramCredentialsResponse:
    throttle_time_ms: int = int32("0+")
    results: list[AlterUserScramCredentialsResult] = array(AlterUserScramCredentialsResult, "0+")


@struct
class CreatableRenewers:
    principal_type: str = string("0+")
    principal_name: str = string("0+")


@message(ApiKey.CREATE_DELEGATION_TOKEN, "1-3", flexible="2+")
class CreateDelegationTokenRequest:
    """A request for a new delegation token."""

    owner_principal_type: str | None = string("3+", nullable="3+")
    owner_principal_name: str | None = string("3+", nullable="3+")
    renewers: list[CreatableRenewers] = array(CreatableRenewers, "0+")
    max_lifetime_ms: int = int64("0+")


@message(ApiKey.CREATE_DELEGATION_TOKEN, "1-3", flexible="2+")
class CreateDelegationTokenResponse:
    error_code: int = int16("0+")
    principal_type: str = string("0+")
    principal_name: str = string("0+")
    token_requester_principal_type: str = string("3+")
    token_requester_principal_name: str = string("3+")
    issue_timestamp_ms: int = int64("0+")
    expiry_timestamp_ms: int = int64("0+")
    max_timestamp_ms: int = int64("0+")
    token_id: str = string("0+")
    hmac: bytes = binary("0+")
    throttle_time_ms: int = int32("0+")


@message(ApiKey.RENEW_DELEGATION_TOKEN, "1-2", flexible="2+")
class RenewDelegationTokenRequest:
    """A request to extend a delegation token's time."""

    hmac: bytes = binary("0+")
    renew_period_ms: int = int64("0+")


@message(ApiKey.RENEW_DELEGATION_TOKEN, "1-2", flexible="2+")
class RenewDelegationTokenResponse:
    error_code: int = int16("0+")
    expiry_timestamp_ms: int = int64("0+")
    throttle_time_ms: int = int32("0+")


@message(ApiKey.EXPIRE_DELEGATION_TOKEN, "1-2", flexible="2+")
class ExpireDelegationTokenRequest:
    """A request to end a delegation token now or later."""

    hmac: bytes = binary("0+")
    expiry_time_period_ms: int = int64("0+")


@message(ApiKey.EXPIRE_DELEGATION_TOKEN, "1-2", flexible="2+")
class ExpireDelegationTokenResponse:
    error_code: int = int16("0+")
    expiry_timestamp_ms: int = int64("0+")
    throttle_time_ms: int = int32("0+")


@struct
class DescribeDelegationTokenOwner:
    principal_type: str = string("0+")
    principal_name: str = string("0+")


@message(ApiKey.DESCRIBE_DELEGATION_TOKEN, "1-3", flexible="2+")
class DescribeDelegationTokenRequest:
    """A request for delegation tokens by owner."""

    owners: list[DescribeDelegationTokenOwner] | None = array(DescribeDelegationTokenOwner, "0+", nullable="0+")


@struct
class DescribedDelegationTokenRenewer:
    principal_type: str = string("0+")
    principal_name: str = string("0+")


@struct
class DescribedDelegationToken:
    principal_type: str = string("0+")
    principal_name: str = string("0+")
    token_requester_principal_type: str = string("3+")
    token_requester_principal_name: str = string("3+")
    issue_timestamp: int = int64("0+")
    expiry_timestamp: int = int64("0+")
    max_timestamp: int = int64("0+")
    token_id: str = string("0+")
    hmac: bytes = binary("0+")
    renewers: list[DescribedDelegationTokenRenewer] = array(DescribedDelegationTokenRenewer, "0+")


@message(ApiKey.DESCRIBE_DELEGATION_TOKEN, "1-3", flexible="2+")
class DescribeDelegationTokenResponse:
    error_code: int = int16("0+")
    tokens: list[DescribedDelegationToken] = array(DescribedDelegationToken, "0+")
    throttle_time_ms: int = int32("0+")
