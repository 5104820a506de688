"""The checker of a history: it reports each violation of the log's guarantees, such as a lost record.

This module is pure. The guarantees of a topic depend on its rules (see ``history.Rules``). In every topic, no client
may read an uncommitted record, and no record may change. A transaction is committed as a whole or not at all. A
consumer may skip only offsets that the log hides from readers of committed records. The members of a group together
read each record, and a member begins at the last committed offset or after it. The checker compares the final logs of
the replicas with each other. Then it compares all reads and writes with the final logs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from sparklog.model import assert_never
from sparklog.testing.history import (
    Assigned,
    Began,
    Committed,
    ConsumerFailed,
    Entry,
    FinalLog,
    Finished,
    NotHealed,
    OperationEnded,
    Polled,
    Positioned,
    RecordedFault,
    Run,
    Sent,
    TopicUsed,
)

HistoryPartition: TypeAlias = tuple[str, int]
#: The name of a record: its producer and its number.
RecordName: TypeAlias = tuple[str, int]
#: The maximum number of violations of one kind that are printed. More of them add no information.
_MOST_PRINTED = 20


class Violation(NamedTuple):
    """A violation of one of the log's guarantees, as the checker reports it.

    ``kind`` is one of: lost, duplicate, reordered, unknown, uncommitted, aborted, torn, changed, skipped, repeated,
    replicas, consumer, not healed, unfinished.
    """

    kind: str
    text: str


class _Gap(NamedTuple):
    """Offsets ``[start, end)`` that a consumer has not received. ``text`` is the violation if it should have."""

    start: int
    end: int
    text: str


class CheckReport(NamedTuple):
    violations: tuple[Violation, ...]
    counts: dict[str, int]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: the counts, then at most ``_MOST_PRINTED`` violations of each kind."""
        yield ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        printed: Counter[str] = Counter()
        for kind, text in self.violations:
            printed[kind] += 1
            if printed[kind] <= _MOST_PRINTED:
                yield f"VIOLATION {kind}: {text}"
        for kind, count in printed.items():
            if count > _MOST_PRINTED:
                yield f"... and {count - _MOST_PRINTED} more of kind {kind}"


def check(entries: Iterable[Entry]) -> CheckReport:
    """Check a history; return a report of all violations."""
    checker = _Checker()
    for entry in entries:
        checker.take(entry)
    checker.conclude()
    return CheckReport(tuple(checker.violations), dict(checker.counts))


class _Checker:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self._topics: dict[str, TopicUsed] = {}
        self._sent: dict[RecordName, Sent] = {}
        self._ended: dict[RecordName, OperationEnded] = {}
        #: The write of every record: the ``Sent`` entry of the record's batch.
        self._destination: dict[RecordName, Sent] = {}
        self._positions: dict[tuple[str, str, int], int] = {}
        #: The gaps between the records that consumers have read. The final log decides whether they are allowed.
        self._gaps: dict[HistoryPartition, list[_Gap]] = defaultdict(list)
        #: The records of each transaction.
        self._transactions: dict[str, list[RecordName]] = defaultdict(list)
        #: The end of the offsets that a group has read, by group, topic and partition.
        self._group_ends: dict[tuple[str, str, int], int] = {}
        #: The highest committed offset that a group's coordinator has acknowledged.
        self._committed: dict[tuple[str, str, int], int] = {}
        #: The lowest offset at which a member may begin, of members that have not begun.
        self._begins: dict[tuple[str, str, int], int] = {}
        #: The offsets that readers of committed records must skip.
        self._hidden: dict[HistoryPartition, set[int]] = defaultdict(set)
        #: The record at each offset, and the reader that read it first.
        self._seen: dict[HistoryPartition, dict[int, tuple[RecordName, str]]] = defaultdict(dict)
        self._logs: dict[HistoryPartition, list[FinalLog]] = defaultdict(list)
        self._finished = False

    def take(self, entry: Entry) -> None:
        match entry:
            case Began():
                pass
            case TopicUsed():
                self._topics[entry.topic] = entry
            case Sent():
                self._take_sent(entry)
            case OperationEnded():
                self._ended[entry.producer, entry.first] = entry
                self.counts[f"batches {entry.outcome}"] += 1
            case Positioned():
                self._positions[entry.consumer, entry.topic, entry.partition] = entry.offset
            case Polled():
                self._take_poll(entry)
            case Assigned():
                committed = self._committed.get((entry.group, entry.topic, entry.partition), 0)
                self._begins[entry.consumer, entry.topic, entry.partition] = committed
                self.counts["assignments"] += 1
            case Committed():
                place = (entry.group, entry.topic, entry.partition)
                self._committed[place] = max(self._committed.get(place, 0), entry.offset)
                self.counts["offsets committed"] += 1
            case ConsumerFailed():
                self.counts["consumer failures"] += 1
                if entry.forbidden:
                    self._wrong("consumer", f"{entry.consumer} at {entry.at} s: {entry.error}")
            case RecordedFault():
                self.counts["faults"] += 1
            case FinalLog():
                self._logs[entry.topic, entry.partition].append(entry)
            case NotHealed():
                self._wrong("not healed", entry.text)
            case Finished():
                self._finished = True
            case _:
                assert_never(entry)

    def _wrong(self, kind: str, text: str) -> None:
        self.violations.append(Violation(kind, text))

    def _take_sent(self, sent: Sent) -> None:
        self.counts["records sent"] += sent.count
        self._sent[sent.producer, sent.first] = sent
        for number in range(sent.first, sent.first + sent.count):
            self._destination[sent.producer, number] = sent
            if sent.transaction:
                self._transactions[sent.transaction].append((sent.producer, number))

    # --- reads ---

    def _take_poll(self, poll: Polled) -> None:
        self.counts["polls"] += 1
        self.counts["records read"] += poll.end - poll.start
        who = f"{poll.consumer} at {poll.at} s, {poll.topic}-{poll.partition}"
        self._check_start(poll, who)
        at = poll.start
        place = (poll.topic, poll.partition)
        seen = self._seen[place]
        for run in poll.runs:
            if run.offset < at:
                self._wrong("repeated", f"{who}: offset {run.offset} came after {at - 1} within one poll")
            elif run.offset > at:
                text = f"{who}: offset {run.offset} came after {at - 1} within one poll"
                self._gaps[place].append(_Gap(at, run.offset, text))
            at = run.offset + run.count
            for offset, name in _records(run):
                known = seen.setdefault(offset, (name, who))
                if known[0] != name:
                    self._wrong("changed", f"{who}: {_say(name)} at offset {offset}; {known[1]} saw {_say(known[0])}")
        if at != poll.end:
            self._gaps[place].append(_Gap(at, poll.end, f"{who}: records up to {at}, the position went to {poll.end}"))

    def _check_start(self, poll: Polled, who: str) -> None:
        """Check that the poll begins at the consumer's position, and that its group has read all records below."""
        place = (poll.topic, poll.partition)
        key = (poll.consumer, *place)
        begins = self._begins.pop(key, None)
        expected = self._positions.get(key, 0) if begins is None else begins
        if poll.start < expected:
            self._wrong("repeated", f"{who}: read from {poll.start} on again, the position was {expected}")
        elif poll.start > expected and begins is None:
            text = f"{who}: read from {poll.start} on, the position was {expected}"
            self._gaps[place].append(_Gap(expected, poll.start, text))
        self._positions[key] = poll.end
        if poll.group:
            group = (poll.group, poll.topic, poll.partition)
            end = self._group_ends.get(group, 0)
            if poll.start > end:
                text = f"{who}: read from {poll.start} on, group {poll.group} had read up to {end}"
                self._gaps[place].append(_Gap(end, poll.start, text))
            self._group_ends[group] = max(end, poll.end)

    # --- the end ---

    def conclude(self) -> None:
        if not self._finished:
            self._wrong("unfinished", "the history has no end: the run was cut short")
        truth = {place: self._compare_replicas(place, logs) for place, logs in self._logs.items()}
        self._check_gaps()
        self._check_reads(truth)
        for place, log in truth.items():
            self._check_content(place, log)
        self._check_acknowledged(truth)
        self._check_transactions(truth)

    def _compare_replicas(self, place: HistoryPartition, logs: list[FinalLog]) -> dict[int, RecordName]:
        """Compare the logs of the replicas; return the record names by offset, up to the highest high watermark."""
        topic, partition = place
        first = max(logs, key=lambda log: log.high_watermark)
        digests = {batch.base_offset: batch for batch in first.batches}
        for other in logs:
            where = f"{topic}-{partition}: brokers {first.broker} and {other.broker}"
            if (other.log_start, other.high_watermark) != (first.log_start, first.high_watermark):
                ends = [(log.log_start, log.high_watermark) for log in (first, other)]
                self._wrong("replicas", f"{where} have offsets {ends}")
            for batch in other.batches:
                if digests.get(batch.base_offset) != batch:
                    found = digests.get(batch.base_offset)
                    self._wrong("replicas", f"{where} differ at offset {batch.base_offset}: {found} and {batch}")
                    break
            if len(other.batches) != len(first.batches):
                counts = [len(log.batches) for log in (first, other)]
                self._wrong("replicas", f"{where} have {counts} batches")
        self.counts["replicas compared"] += len(logs)
        for start, end in first.hidden:
            self._hidden[place].update(range(start, end))
        return {offset: name for run in first.runs for offset, name in _records(run)}

    def _check_gaps(self) -> None:
        for place, gaps in self._gaps.items():
            hidden = self._hidden[place]
            for gap in gaps:
                if gap.start > gap.end or any(offset not in hidden for offset in range(gap.start, gap.end)):
                    self._wrong("skipped", gap.text)

    def _check_reads(self, truth: dict[HistoryPartition, dict[int, RecordName]]) -> None:
        for (topic, partition), seen in self._seen.items():
            log = truth.get((topic, partition))
            for offset, (name, who) in seen.items():
                self._check_written(topic, partition, offset, name, who)
                ended = self._outcome_of(name)
                hidden = offset in self._hidden[topic, partition]
                if hidden or (ended is not None and ended.outcome == "aborted"):
                    self._wrong("aborted", f"{who}: {_say(name)} at offset {offset}, which was aborted")
                if log is not None and offset not in log:
                    self._wrong("uncommitted", f"{who}: {_say(name)} at offset {offset}, which no log has in the end")
                elif log is not None and log[offset] != name:
                    self._wrong("changed", f"{who}: {_say(name)} at offset {offset}, now {_say(log[offset])}")
            if log is None and self._must_last(topic):
                self._wrong("lost", f"{topic}-{partition} was read and has no log in the end")

    def _check_written(self, topic: str, partition: int, offset: int, name: RecordName, who: str) -> None:
        sent = self._destination.get(name)
        if sent is None:
            self._wrong("unknown", f"{who}: {_say(name)} at offset {offset}, which no producer sent")
        elif (sent.topic, sent.partition) != (topic, partition):
            place = f"{sent.topic}-{sent.partition}"
            self._wrong("unknown", f"{who}: {_say(name)} at offset {offset}, which was sent to {place}")
        else:
            ended = self._ended.get((sent.producer, sent.first))
            if ended is not None and ended.outcome == "refused":
                self._wrong("unknown", f"{who}: {_say(name)} at offset {offset}, which was refused: {ended.error}")

    def _check_content(self, place: HistoryPartition, log: dict[int, RecordName]) -> None:
        """Check that all records of a final log were sent.

        On a strict topic, check that each is there once, in its producer's order.
        """
        topic, partition = place
        strict = self._rules(topic) == "strict"
        first_at: dict[RecordName, int] = {}
        last_of: dict[str, tuple[int, int]] = {}
        for offset, name in sorted(log.items()):
            self._check_written(topic, partition, offset, name, f"the final log of {topic}-{partition}")
            ended = self._outcome_of(name)
            if ended is not None and ended.outcome == "aborted" and offset not in self._hidden[place]:
                self._wrong("aborted", f"{topic}-{partition}: {_say(name)} at {offset} was aborted, and is committed")
            if not strict:
                continue
            if name in first_at:
                self._wrong("duplicate", f"{topic}-{partition}: {_say(name)} at {first_at[name]} and {offset}")
                continue
            first_at[name] = offset
            number, at = last_of.get(name[0], (-1, -1))
            if name[1] < number:
                late = f"{_say(name)} at {offset} after {_say((name[0], number))} at {at}"
                self._wrong("reordered", f"{topic}-{partition}: {late}")
            last_of[name[0]] = (name[1], offset)

    def _check_acknowledged(self, truth: dict[HistoryPartition, dict[int, RecordName]]) -> None:
        where = self._committed_records(truth)
        for key, ended in self._ended.items():
            sent = self._sent.get(key)
            if sent is None:
                self._wrong("unknown", f"{_say(key)} ended at {ended.at} s and was never sent")
                continue
            if ended.outcome != "acknowledged":
                continue
            found = where.get((sent.topic, sent.partition), {})
            names = [(sent.producer, number) for number in range(sent.first, sent.first + sent.count)]
            missing = [name for name in names if name not in found]
            if not self._must_last(sent.topic):
                remade = self._rules(sent.topic) == "remade"
                reason = "records deleted with their topic" if remade else "records lost where acks allow it"
                self.counts[reason] += len(missing)
                continue
            place = f"{sent.topic}-{sent.partition}"
            if missing:
                self._wrong(
                    "lost", f"{place}: {_say(missing[0])} ({len(missing)} records) acknowledged at {ended.at} s"
                )
            elif ended.base_offset >= 0 and found[names[0]] != ended.base_offset:
                told = f"acknowledged at offset {ended.base_offset}, is at {found[names[0]]}"
                self._wrong("changed", f"{place}: {_say(names[0])} {told}")

    def _check_transactions(self, truth: dict[HistoryPartition, dict[int, RecordName]]) -> None:
        """Check that the final logs have all committed records of a transaction, or none."""
        found = {name for names in self._committed_records(truth).values() for name in names}
        self.counts["transactions"] += len(self._transactions)
        for transaction, names in self._transactions.items():
            committed = sum(name in found for name in names)
            if committed not in {0, len(names)}:
                self._wrong("torn", f"{committed} of {len(names)} records of transaction {transaction} are committed")

    def _committed_records(
        self, truth: dict[HistoryPartition, dict[int, RecordName]]
    ) -> dict[HistoryPartition, dict[RecordName, int]]:
        """Return the offset of each record in the final logs that readers of committed records may see."""
        return {
            place: {name: offset for offset, name in log.items() if offset not in self._hidden[place]}
            for place, log in truth.items()
        }

    def _outcome_of(self, name: RecordName) -> OperationEnded | None:
        sent = self._destination.get(name)
        return None if sent is None else self._ended.get((sent.producer, sent.first))

    def _rules(self, topic: str) -> str:
        used = self._topics.get(topic)
        return "strict" if used is None else used.rules

    def _must_last(self, topic: str) -> bool:
        return self._rules(topic) == "strict"


def _records(run: Run) -> Iterator[tuple[int, RecordName]]:
    for step in range(run.count):
        yield run.offset + step, (run.producer, run.first + step)


def _say(name: RecordName) -> str:
    return f"{name[0]}:{name[1]}"
