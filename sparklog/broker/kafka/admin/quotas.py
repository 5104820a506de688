"""DescribeClientQuotas and AlterClientQuotas requests of Kafka clients. Source: KIP-546."""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.broker.kafka.admin.item_errors import FAILURES, ItemError, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import (
    AlterClientQuotasEntryData,
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlterClientQuotasResponseEntryData,
    ComponentData,
    DescribeClientQuotasEntryData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    EntityData,
    ValueData,
)
from sparklog.protocol.messages import (
    AlterClientQuotas,
    AlterClientQuotasReply,
    DescribeClientQuotas,
    DescribeClientQuotasReply,
    QuotaAlteration,
    QuotaKey,
)
from sparklog.protocol.quota_messages import MAX_ALTERATIONS
from sparklog.security.quotas import CLIENT_ID, DEFAULT, IP, USER

#: The timeout of sparklog's own requests, because Kafka's requests have none. A Kafka client waits for 30 seconds by
#: default.
_TIMEOUT_MS = 25_000
_EXACT, _DEFAULT_ENTITY, _ANY = 0, 1, 2
_FIELDS = {USER: "user", CLIENT_ID: "client_id", IP: "ip"}


async def describe_client_quotas(call: KafkaCall, request: DescribeClientQuotasRequest) -> DescribeClientQuotasResponse:
    """Return the quotas of the entities that the filter selects."""
    try:
        named, any_of = _filter(request.components)
        reply = await call.native(DescribeClientQuotas(0, QuotaKey(**named), tuple(any_of), request.strict))
    except FAILURES as failure:
        error = item_error(failure)
        return DescribeClientQuotasResponse(error_code=error.code, error_message=error.message, entries=None)
    assert isinstance(reply, DescribeClientQuotasReply)
    return DescribeClientQuotasResponse(
        error_message=None,
        entries=[
            DescribeClientQuotasEntryData(
                entity=_entity(entry.key),
                values=[ValueData(key=key, value=value) for key, value in sorted(entry.quotas.items())],
            )
            for entry in reply.entries
        ],
    )


def _filter(components: Sequence[ComponentData]) -> tuple[dict[str, str], list[str]]:
    """Convert the filter of a request. Raises BrokerError.

    Return the name that an entity must have for each of some fields, and the types for which any name is accepted.
    """
    named: dict[str, str] = {}
    any_of: list[str] = []
    for component in components:
        field = _field(component.entity_type)
        if field in named or component.entity_type in any_of:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{component.entity_type} is named more than once")
        if component.match_type == _ANY:
            any_of.append(component.entity_type)
        elif component.match_type == _DEFAULT_ENTITY:
            named[field] = DEFAULT
        elif component.match_type == _EXACT and component.match is not None:
            named[field] = component.match
        else:
            detail = f"unknown match type {component.match_type} of {component.entity_type}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    return named, any_of


def _field(entity_type: str) -> str:
    """Return the field of a ``QuotaKey`` for a type. Raises BrokerError INVALID_REQUEST for an unknown type."""
    if entity_type not in _FIELDS:
        detail = f"unknown entity type {entity_type[:100]!r}; expected one of {', '.join(_FIELDS)}"
        raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
    return _FIELDS[entity_type]


def _entity(key: QuotaKey) -> list[EntityData]:
    parts = {USER: key.user, CLIENT_ID: key.client_id, IP: key.ip}
    return [
        EntityData(entity_type=kind, entity_name=None if name == DEFAULT else name)
        for kind, name in parts.items()
        if name is not None
    ]


async def alter_client_quotas(call: KafkaCall, request: AlterClientQuotasRequest) -> AlterClientQuotasResponse:
    """Set and remove quotas, and return the result of each entity."""
    errors: dict[int, ItemError] = {}
    valid: list[tuple[int, QuotaAlteration]] = []
    for index, entry in enumerate(request.entries):
        await call.pause()
        try:
            valid.append((index, _alteration(entry)))
        except BrokerError as failure:
            errors[index] = item_error(failure)
    for first in range(0, len(valid) or 1, MAX_ALTERATIONS):
        await _alter(call, valid[first : first + MAX_ALTERATIONS], errors, validate_only=request.validate_only)
    return AlterClientQuotasResponse(
        entries=[
            AlterClientQuotasResponseEntryData(
                error_code=errors[index].code, error_message=errors[index].message, entity=entry.entity
            )
            for index, entry in enumerate(request.entries)
        ]
    )


async def _alter(
    call: KafkaCall,
    alterations: Sequence[tuple[int, QuotaAlteration]],
    errors: dict[int, ItemError],
    *,
    validate_only: bool,
) -> None:
    """Alter the quotas of some entities, and enter their results in ``errors``, by the entity's index."""
    native = AlterClientQuotas(
        0, tuple(alteration for _, alteration in alterations), _TIMEOUT_MS, validate_only=validate_only
    )
    try:
        reply = await call.native(native)
    except FAILURES as failure:
        errors.update((index, item_error(failure)) for index, _ in alterations)
        return
    assert isinstance(reply, AlterClientQuotasReply)
    for (index, _), result in zip(alterations, reply.results, strict=True):
        # Kafka has no other code for a name or a value that a quota cannot have.
        code = ErrorCode.INVALID_REQUEST if result.code == ErrorCode.INVALID_CONFIG else kafka_code(result.code)
        errors[index] = ItemError(code, result.detail or None)


def _alteration(entry: AlterClientQuotasEntryData) -> QuotaAlteration:
    """Return the changes of one entity. Raises BrokerError INVALID_REQUEST."""
    named: dict[str, str] = {}
    for part in entry.entity:
        field = _field(part.entity_type)
        if field in named or part.entity_name == "":
            detail = f"{part.entity_type} has an empty name, or is named more than once"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        named[field] = DEFAULT if part.entity_name is None else part.entity_name
    return QuotaAlteration(QuotaKey(**named), {op.key: None if op.remove else op.value for op in entry.ops})
