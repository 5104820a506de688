"""The trace of one partition's replicas, with one line for each event, in the words of the replication protocol.

``traced`` creates a replica core that reports each step and is otherwise unchanged, so that the run is the same as
without a trace. ``about`` omits lines about other partitions, and keeps lines about brokers, connections and the
controller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from sparklog.errors import ErrorCode
from sparklog.replica import effects as fx
from sparklog.replica import events as ev
from sparklog.replica.replica import Replica

Told = Callable[[Replica, str], None]
_PARTITION = re.compile(r"\b[tuv]-\d+\b")


def traced(replica_type: type[Replica], tell: Told) -> type[Replica]:
    """Return a subclass of ``replica_type`` that calls ``tell`` with a line for each step that changes something."""

    class Traced(replica_type):  # type: ignore[valid-type, misc]
        __slots__ = ()

        def step(self, event: ev.Event, now_ms: int) -> list[fx.Effect]:
            effects: list[fx.Effect] = super().step(event, now_ms)
            line = describe(event, effects)
            if line:
                tell(self, line)
            return effects

    return Traced


def about(partition: str, lines: Iterable[str]) -> list[str]:
    """Return the lines that name this partition, and the lines that name no partition."""
    return [line for line in lines if partition in (names := _PARTITION.findall(line)) or not names]


def describe(event: ev.Event, effects: list[fx.Effect]) -> str:
    """Describe one step of a replica core as a line. Return "" if the step changed nothing and sent nothing new."""
    told = [words for words in map(_effect, effects) if words]
    fact = _event(event)
    if not fact:
        return "; ".join(told)
    return f"{fact}: {'; '.join(told)}" if told else fact


def _event(event: ev.Event) -> str:
    match event:
        case ev.LeaderAppended(_, base_offset, end_offset):
            return f"appended [{base_offset}, {end_offset}) as leader"
        case ev.FollowerFetched(replica_id, incarnation, leader_epoch, offset, last_epoch):
            whose = f"b{replica_id} (incarnation {incarnation})"
            return f"{whose} fetches from {offset} in epoch {leader_epoch}, its log ends in epoch {last_epoch}"
        case ev.LeaderResponded() if event.batch_count:
            return f"told of records up to {event.end_offset}, high watermark {event.high_watermark}"
        case ev.LeaderResponded() if event.diverging is not None:
            return f"receives the divergence point: epoch {event.diverging[0]}, end {event.diverging[1]}"
        case ev.LeaderResponded() if event.code != ErrorCode.NONE:
            return f"refused with {ErrorCode(event.code).name}"
        case ev.FollowerAppended(end_offset):
            return f"holds records up to {end_offset}"
        case ev.Truncated(end_offset):
            return f"log cut, ends at {end_offset}"
        case ev.TruncationFailed():
            return "log not cut"
        case ev.Decided(state, version):
            return f"told version {version}: leader {state.leader} in epoch {state.leader_epoch}, ISR {state.isr}"
        case ev.IsrWritten(isr, version):
            return f"ISR {isr} is written, version {version}"
        case ev.IsrRefused(state, version):
            return f"ISR refused, version {version} has leader {state.leader}, ISR {state.isr}"
        case ev.IsrWriteFailed():
            return "does not know whether its ISR was written"
        case ev.FollowerConnectionLost(replica_id):
            return f"loses the connection of b{replica_id}"
        case ev.LogFailed(detail):
            return f"log failed: {detail}"
        case ev.Stopped():
            return "stopped"
        case _:
            return ""


def _effect(effect: fx.Effect) -> str:
    match effect:
        case fx.HighWatermarkMoved(high_watermark):
            return f"high watermark {high_watermark}"
        case fx.TruncateLog(offset):
            return f"truncates to {offset}"
        case fx.RefuseTruncation(_, _, offset, high_watermark):
            return f"refuses to cut to {offset}, below its high watermark {high_watermark}"
        case fx.TruncationAccepted():
            return "withdraws its refusal"
        case fx.RestartLog(offset):
            return f"empties its log and starts at {offset}"
        case fx.WriteIsr():
            return f"proposes ISR {effect.isr} at version {effect.expected_version}"
        case fx.RefuseFetch(code):
            return f"refuses with {code.name}"
        case fx.AnswerDiverging(epoch, end_offset):
            return f"reports the divergence point: epoch {epoch}, end {end_offset}"
        case fx.RespondToProduce(_, code, base_offset) if code == ErrorCode.NONE:
            return f"acknowledges {base_offset}"
        case fx.StartFetching(leader, leader_epoch):
            return f"fetches from b{leader} in epoch {leader_epoch}"
        case fx.RoleChanged(role, leader_epoch):
            return f"is {role} in epoch {leader_epoch}"
        case fx.ReportBadDecision(detail):
            return f"refuses the decision: {detail}"
        case _:
            return ""
