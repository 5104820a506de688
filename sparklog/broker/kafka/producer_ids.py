"""InitProducerId requests of Kafka clients, for idempotent producers."""

from __future__ import annotations

from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_error
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.transactions import InitProducerIdRequest, InitProducerIdResponse
from sparklog.protocol.messages import InitProducerId, InitProducerIdReply


async def init_producer_id(call: KafkaCall, request: InitProducerIdRequest) -> InitProducerIdResponse:
    """Return a new producer id with epoch 0.

    A producer without transactions that asks again gets another id, as in Kafka. It raises its own epoch itself.
    """
    try:
        if request.transactional_id is not None:
            detail = f"transactional id {request.transactional_id!r}: this broker has no transactions for Kafka clients"
            raise BrokerError(ErrorCode.UNSUPPORTED_VERSION, detail)
        reply = await call.native(InitProducerId(0))
    except BrokerError as error:
        code, _ = kafka_error(error)
        return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)
    assert isinstance(reply, InitProducerIdReply)
    return InitProducerIdResponse(producer_id=reply.producer_id, producer_epoch=reply.producer_epoch)
