"""ElectLeaders requests of Kafka clients."""

from __future__ import annotations

from sparklog.broker.kafka.admin.item_errors import FAILURES, item_error
from sparklog.broker.kafka.call import KafkaCall
from sparklog.broker.kafka.error_codes import kafka_code
from sparklog.broker.requests.elections import PREFERRED, UNCLEAN
from sparklog.errors import BrokerError, ErrorCode
from sparklog.kafka.wire.admin import ElectLeadersRequest, ElectLeadersResponse, ReplicaElectionResult
from sparklog.kafka.wire.admin import PartitionResult as ElectionResult
from sparklog.protocol.fields import MAX_ENTRIES
from sparklog.protocol.messages import ElectLeaders, ElectLeadersReply, PartitionResult

_KINDS = {0: PREFERRED, 1: UNCLEAN}


async def elect_leaders(call: KafkaCall, request: ElectLeadersRequest) -> ElectLeadersResponse:
    """Elect leaders, and return the result of each partition."""
    wanted = (
        tuple((topic.topic, partition) for topic in request.topic_partitions for partition in topic.partitions)
        if request.topic_partitions is not None
        else None
    )
    try:
        kind = _KINDS.get(request.election_type)
        if kind is None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"unknown type of election {request.election_type}")
        if wanted is not None and len(wanted) > MAX_ENTRIES:
            detail = f"found {len(wanted)} partitions; expected at most {MAX_ENTRIES}"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)
        reply = await call.native(ElectLeaders(0, kind, request.timeout_ms, wanted))
        assert isinstance(reply, ElectLeadersReply)
        results = reply.results
    except FAILURES as failure:
        return _refused(wanted or (), item_error(failure).code, item_error(failure).message)
    topics: dict[str, list[ElectionResult]] = {}
    for result in results:
        topics.setdefault(result.topic, []).append(_result(result))
    return _response(topics)


def _refused(wanted: tuple[tuple[str, int], ...], code: int, message: str | None) -> ElectLeadersResponse:
    """Return the response to a request that failed as a whole.

    Each partition has the error too, because a client of version 0 reads only partitions' errors.
    """
    topics: dict[str, list[ElectionResult]] = {}
    for topic, partition in wanted:
        failed = ElectionResult(partition_id=partition, error_code=code, error_message=message)
        topics.setdefault(topic, []).append(failed)
    return _response(topics, code)


def _response(topics: dict[str, list[ElectionResult]], code: int = 0) -> ElectLeadersResponse:
    return ElectLeadersResponse(
        error_code=code,
        replica_election_results=[
            ReplicaElectionResult(topic=topic, partition_result=results) for topic, results in topics.items()
        ],
    )


def _result(result: PartitionResult) -> ElectionResult:
    return ElectionResult(
        partition_id=result.partition, error_code=kafka_code(result.code), error_message=result.detail or None
    )
