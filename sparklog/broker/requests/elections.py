"""ElectLeaders requests: the broker passes them to the controller through nodes in ZooKeeper.

The controller deletes a node after its elections. The broker then reads the results from ZooKeeper, because its own
metadata may be older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.zk_registration import ZkRegistration
from sparklog.broker.metadata_cache import MetadataCache
from sparklog.broker.requests.delayed_replies import limit_s, reply_later, wait_for_metadata
from sparklog.broker.requests.slices import Slices
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import NO_LEADER, LeaderAndIsr, TopicPartition, VersionedState
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import ElectLeaders, ElectLeadersReply, PartitionDecision, PartitionResult, Reply
from sparklog.zk.codecs import ElectionRequest

PREFERRED, UNCLEAN = "preferred", "unclean"

#: The maximum wait for the controller's update about the elections. After this update, this broker's Metadata responses
#: have the new leaders.
_ECHO_TIMEOUT_MS = 1000
#: The number of attempts at an election, and the pause after the first attempt. The pause doubles each time.
_ATTEMPTS, _FIRST_PAUSE_S = 6, 0.03
#: The maximum number of partitions in one node. Even with long topic names the node then stays below 1 MB. At 1 MB
#: ZooKeeper would close the connection, and all other requests of this broker would fail too.
_IN_ONE_NODE = 3000


class ElectionRequests:
    """The handler of ElectLeaders requests, which passes them to the controller."""

    def __init__(self, context: BrokerContext, slices: Slices, registry: ZkRegistration) -> None:
        self._context = context
        self._slices = slices
        self._registry = registry

    def handle(self, connection: ServerConnection, request: ElectLeaders, body: memoryview) -> None:
        if request.kind not in {PREFERRED, UNCLEAN}:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"election {request.kind!r} found, expected {PREFERRED!r} or {UNCLEAN!r}"
            )
        reply_later(self._context, connection, request, self._elect_leaders(request))

    async def _elect_leaders(self, request: ElectLeaders) -> Reply:
        asked = _partitions(self._context.cache, request)
        await asyncio.sleep(0)
        results, wanting = await self._slices.result(self._classify(request, asked))
        if wanting:
            results |= await self._hold_elections(request, wanting)
        await asyncio.sleep(0)
        answered = [results[tp] for tp in asked]
        if request.partitions is None:
            satisfied = {ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED}
            answered = [result for result in answered if result.code not in satisfied]
        return ElectLeadersReply(request.cid, tuple(answered))

    def _classify(
        self, request: ElectLeaders, asked: Sequence[TopicPartition]
    ) -> Generator[None, None, tuple[dict[TopicPartition, PartitionResult], list[PartitionDecision]]]:
        """Return the results of partitions that need no election, and the list of partitions that need one."""
        results: dict[TopicPartition, PartitionResult] = {}
        wanting: list[PartitionDecision] = []
        for tp in asked:
            if self._slices.over():
                yield
            known = self._context.cache.partition(tp)
            if known is None:
                results[tp] = _result(
                    tp, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"this broker does not know partition {tp}"
                )
            elif _has_leader_wanted(self._context.cache, request.kind, known, known.state):
                results[tp] = _result(tp, ErrorCode.ELECTION_NOT_NEEDED, f"{tp} is led by broker {known.state.leader}")
            else:
                wanting.append(known)
        return results, wanting

    async def _hold_elections(
        self, request: ElectLeaders, wanting: Sequence[PartitionDecision]
    ) -> dict[TopicPartition, PartitionResult]:
        """Let the controller elect leaders, and retry for partitions whose wanted leader could be elected but was not.

        The retries are needed because a leader writes its ISR itself, and the controller learns of the new ISR a moment
        later.
        """
        results: dict[TopicPartition, PartitionResult] = {}
        pause_s = _FIRST_PAUSE_S
        for _ in range(_ATTEMPTS):
            await self._carried_out(request, wanting)
            found = await self._states(wanting)
            results |= {
                tp: _outcome(self._context.cache, request.kind, known, state) for tp, (known, state) in found.items()
            }
            wanting = [
                known
                for known, state in found.values()
                if state and _possible(self._context.cache, request.kind, known, state)
            ]
            if not wanting:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return results

    async def _carried_out(self, request: ElectLeaders, wanting: Sequence[PartitionDecision]) -> None:
        """Write the request nodes, then wait until the controller has deleted all of them.

        All nodes are written before the wait. An unclean election may wait for the end of a broker's session, and
        elections of other partitions must not wait for that too.

        Raises:
            BrokerError: REQUEST_TIMED_OUT, with the number of partitions whose nodes still exist.
        """
        registry = self._registry
        end = asyncio.get_running_loop().time() + limit_s(request.timeout_ms)
        asked: dict[asyncio.Task[None], tuple[str, int]] = {}
        try:
            for first in range(0, len(wanting), _IN_ONE_NODE):
                named = tuple((known.topic, known.partition) for known in wanting[first : first + _IN_ONE_NODE])
                topic_ids = {known.topic: known.topic_id for known in wanting[first : first + _IN_ONE_NODE]}
                path = await registry.request_election(ElectionRequest(request.kind, named, topic_ids))
                asked[asyncio.create_task(registry.request_done(path))] = (path, len(named))
            done, left = await asyncio.wait(asked, timeout=max(0.0, end - asyncio.get_running_loop().time()))
            for task in done:
                task.result()
            if left:
                count = sum(asked[task][1] for task in left)
                detail = f"no controller has completed the election of {count} of {len(wanting)} leaders in time"
                raise BrokerError(ErrorCode.REQUEST_TIMED_OUT, detail)
        except Exception:
            for task, (path, _) in asked.items():
                if not task.done():
                    registry.withdraw_request(path)
            raise
        finally:
            for task in asked:
                task.cancel()

    async def _states(
        self, wanting: Sequence[PartitionDecision]
    ) -> dict[TopicPartition, tuple[PartitionDecision, VersionedState | None]]:
        """Read the states of these partitions from ZooKeeper.

        Wait for a while until this broker's metadata is as new as these states.
        """
        tps = [TopicPartition(known.topic, known.partition) for known in wanting]
        found = dict(zip(tps, await self._registry.read_states(tps), strict=True))
        await wait_for_metadata(
            self._context,
            lambda: all(_arrived(self._context.cache, tp, state) for tp, state in found.items()),
            _ECHO_TIMEOUT_MS,
        )
        return {
            tp: (self._context.cache.partition(tp) or known, found[tp]) for tp, known in zip(tps, wanting, strict=True)
        }


def _partitions(cache: MetadataCache, request: ElectLeaders) -> list[TopicPartition]:
    if request.partitions is not None:
        return [TopicPartition(*named) for named in dict.fromkeys(request.partitions)]
    topics = ((name, cache.topic(name)) for name in sorted(cache.topics()))
    return [TopicPartition(name, number) for name, topic in topics if topic for number in sorted(topic.partitions)]


def _has_leader_wanted(cache: MetadataCache, kind: str, known: PartitionDecision, state: LeaderAndIsr) -> bool:
    if kind == PREFERRED:
        return bool(known.replicas) and state.leader == known.replicas[0]
    return state.leader in cache.incarnations


def _arrived(cache: MetadataCache, tp: TopicPartition, found: VersionedState | None) -> bool:
    known = cache.partition(tp)
    return found is None or known is None or known.version >= found.version


def _possible(cache: MetadataCache, kind: str, known: PartitionDecision, found: VersionedState) -> bool:
    """Return whether the partition does not have the wanted leader although that leader could be elected."""
    if _has_leader_wanted(cache, kind, known, found.state):
        return False
    live = cache.incarnations
    if kind == UNCLEAN:
        return any(replica in live for replica in known.replicas)
    return known.replicas[0] in live and known.replicas[0] in found.state.isr


def _outcome(
    cache: MetadataCache, kind: str, known: PartitionDecision, found: VersionedState | None
) -> PartitionResult:
    tp = TopicPartition(known.topic, known.partition)
    if found is None:
        return _result(tp, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{tp} no longer exists")
    state = found.state
    if _has_leader_wanted(cache, kind, known, state):
        return _result(tp, ErrorCode.NONE)
    live = cache.incarnations
    if kind == UNCLEAN:
        alive = [replica for replica in known.replicas if replica in live]
        reason = f"{tp}: no replica of {list(known.replicas)} is alive; live are {sorted(live)}"
        if alive:
            reason = f"{tp}: {alive} are alive; brokers of the ISR {list(state.isr)} may still return"
        return _result(tp, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, reason)
    preferred = known.replicas[0]
    lack = "alive" if preferred not in live else "in sync" if preferred not in state.isr else "chosen"
    leader = f"broker {state.leader} leads" if state.leader != NO_LEADER else "no broker leads"
    reason = f"{tp}: broker {preferred} is not {lack}, in sync are {list(state.isr)}; {leader}"
    return _result(tp, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, reason)


def _result(tp: TopicPartition, code: ErrorCode, detail: str = "") -> PartitionResult:
    return PartitionResult(tp.topic, tp.partition, code, detail)
