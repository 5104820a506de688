"""Tests of the checker: it accepts a good history, and finds each fault that is put into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from sparklog.errors import ConfigError
from sparklog.testing.checker import check
from sparklog.testing.history import (
    Assigned,
    Committed,
    ConsumerFailed,
    Entry,
    FinalLog,
    Finished,
    HistoryWriter,
    NotHealed,
    ObservedBatch,
    OperationEnded,
    Polled,
    Positioned,
    RecordedFault,
    Run,
    Sent,
    TopicUsed,
    read_history,
    record_name,
    record_value,
    runs_of,
)

History = list[Entry]
Outcome = Literal["acknowledged", "refused", "unknown", "aborted"]


def sent(first: int, count: int = 2, *, topic: str = "t", partition: int = 0) -> Sent:
    return Sent(producer="p", topic=topic, partition=partition, first=first, count=count)


def polled(start: int, *runs: Run, end: int = -1, consumer: str = "c", topic: str = "t") -> Polled:
    last = max((run.offset + run.count for run in runs), default=start)
    return Polled(
        consumer=consumer, topic=topic, partition=0, start=start, end=last if end < 0 else end, runs=tuple(runs)
    )


def final(broker: int, *runs: Run, topic: str = "t") -> FinalLog:
    batches = tuple(ObservedBatch(run.offset, run.count, 0, f"{run.producer}{run.first}") for run in runs)
    end = runs[-1].offset + runs[-1].count
    return FinalLog(
        broker=broker,
        topic=topic,
        partition=0,
        log_start=0,
        high_watermark=end,
        log_end=end,
        batches=batches,
        runs=runs,
    )


def good() -> History:
    """Return a good history: four batches of two (acknowledged, unknown and in the log, unknown and lost, refused),
    one consumer, a fault."""
    log = (Run(0, "p", 0, 2), Run(2, "p", 2, 2))
    return [
        TopicUsed(topic="t", rules="strict", acks=-1),
        sent(0),
        OperationEnded(producer="p", first=0, outcome="acknowledged", base_offset=0),
        Positioned(consumer="c", topic="t", partition=0, offset=0),
        polled(0, log[0]),
        sent(2),
        RecordedFault(text="SIGKILL of broker 1, the leader of t-0"),
        OperationEnded(producer="p", first=2, outcome="unknown", error="time is up"),
        polled(2, log[1]),
        Positioned(consumer="c", topic="t", partition=0, offset=1),
        polled(1, Run(1, "p", 1, 1), log[1]),
        sent(4),
        OperationEnded(producer="p", first=4, outcome="unknown"),
        sent(6),
        OperationEnded(producer="p", first=6, outcome="refused", error="no such column"),
        final(0, *log),
        final(1, *log),
        Finished(),
    ]


def in_transaction(name: str, first: int, outcome: Outcome, *, count: int = 2) -> History:
    return [
        Sent(producer="p", topic="t", partition=0, first=first, count=count, transaction=name),
        OperationEnded(producer="p", first=first, outcome=outcome),
    ]


def transactions() -> History:
    """Return a good history of three transactions: committed, aborted, and committed with an unknown outcome.

    A marker follows each. A consumer skips what the log hides, and two members of a group read in turn.
    """
    runs = (Run(0, "p", 0, 2), Run(3, "p", 2, 2), Run(6, "p", 4, 2))
    log = msgspec.structs.replace(final(0, *runs), hidden=((2, 3), (3, 6), (8, 9)))
    return [
        TopicUsed(topic="t", rules="strict", acks=-1),
        *in_transaction("a", 0, "acknowledged"),
        *in_transaction("b", 2, "aborted"),
        *in_transaction("c", 4, "unknown"),
        polled(0, runs[0]),
        polled(6, runs[2]),
        *grouped("m1", 0, runs[0], commit=2),
        *grouped("m2", 6, runs[2], commit=8),
        log,
        msgspec.structs.replace(log, broker=1),
        Finished(),
    ]


def grouped(member: str, start: int, run: Run, *, commit: int) -> History:
    """Return the entries of a member of group ``g`` that receives the partition, reads one run and commits."""
    return [
        Assigned(consumer=member, group="g", topic="t", partition=0),
        msgspec.structs.replace(polled(start, run, consumer=member), group="g"),
        Committed(consumer=member, group="g", topic="t", partition=0, offset=commit),
    ]


def kinds(history: History) -> set[str]:
    return {violation.kind for violation in check(history).violations}


def test_a_good_history_has_no_violations() -> None:
    report = check(good())
    assert report.violations == ()
    assert report.counts["records sent"] == 8 and report.counts["records read"] == 7
    assert report.counts["batches acknowledged"] == 1 and report.counts["faults"] == 1


def replaced(found: Callable[[Entry], bool], entry: Entry) -> History:
    """Return the good history with every entry equal to ``found`` replaced by ``entry``."""
    history = good()
    assert any(map(found, history))
    return [entry if found(old) else old for old in history]


def logs(*runs: Run) -> History:
    """Return the good history without reads, with these runs in the final log of both replicas."""
    history = [entry for entry in good() if not isinstance(entry, (Polled, Positioned, FinalLog))]
    return [*history, final(0, *runs), final(1, *runs)]


A, B = Run(0, "p", 0, 2), Run(2, "p", 2, 2)
BAD: dict[str, tuple[str, History]] = {
    "an acknowledged write is gone": ("lost", logs(Run(0, "p", 2, 2))),
    "one record of an acknowledged batch is gone": ("lost", logs(Run(0, "p", 0, 1), Run(1, "p", 2, 2))),
    "a topic that was written to has no log": ("lost", [e for e in logs(A) if not isinstance(e, FinalLog)]),
    "a batch is in the log twice": ("duplicate", logs(A, B, Run(4, "p", 0, 2))),
    "batches of one producer are in another order": ("reordered", logs(A, Run(2, "p", 4, 2), Run(4, "p", 2, 2))),
    "a record that was never sent is in the log": ("unknown", logs(A, Run(2, "q", 0, 1))),
    "a record that was never sent was read": ("unknown", [*logs(A, B), polled(0, Run(0, "q", 7, 1))]),
    "a refused record is in the log": ("unknown", logs(A, Run(2, "p", 6, 2))),
    "a record of another partition is in the log": ("unknown", [sent(9, partition=1), *logs(A, Run(2, "p", 9, 2))]),
    "an acknowledged offset has another record at the end": ("changed", logs(Run(0, "p", 2, 2), Run(2, "p", 0, 2))),
    "a record that was read is missing at the end": ("uncommitted", [*good(), polled(4, Run(4, "p", 4, 2))]),
    "a record that was read has changed at the end": ("changed", [*good(), polled(0, Run(0, "p", 2, 2), consumer="d")]),
    "two consumers saw different records": (
        "changed",
        [*[e for e in good() if not isinstance(e, FinalLog)], polled(0, Run(0, "p", 4, 2), consumer="d")],
    ),
    "an aborted record was read": (
        "aborted",
        replaced(
            lambda e: isinstance(e, OperationEnded) and e.first == 2,
            OperationEnded(producer="p", first=2, outcome="aborted"),
        ),
    ),
    "a consumer went backwards": ("repeated", [*good(), polled(0, A)]),
    "a consumer skipped an offset": ("skipped", [*good(), polled(5, Run(5, "p", 5, 1))]),
    "a consumer did not begin at the first offset": ("skipped", [*good(), polled(2, B, consumer="d")]),
    "a poll has a hole": ("skipped", [*good(), polled(0, Run(0, "p", 0, 1), Run(2, "p", 2, 2), consumer="d")]),
    "a poll returns less than its position advances": ("skipped", [*good(), polled(0, A, end=4, consumer="d")]),
    "a replica has other bytes": (
        "replicas",
        replaced(
            lambda e: isinstance(e, FinalLog) and e.broker == 1,
            msgspec.structs.replace(
                final(1, A, B), batches=(ObservedBatch(0, 2, 0, "p0"), ObservedBatch(2, 2, 0, "x"))
            ),
        ),
    ),
    "a replica has other batches": (
        "replicas",
        replaced(
            lambda e: isinstance(e, FinalLog) and e.broker == 1,
            msgspec.structs.replace(final(1, A, B), batches=(ObservedBatch(0, 2, 0, "p0"),)),
        ),
    ),
    "a replica ends elsewhere": (
        "replicas",
        replaced(lambda e: isinstance(e, FinalLog) and e.broker == 1, final(1, A)),
    ),
    "a consumer met what no fault allows": (
        "consumer",
        [*good(), ConsumerFailed(consumer="c", error="offset 2 is out of range", forbidden=True)],
    ),
    "the cluster did not heal": ("not healed", [*good(), NotHealed(text="t-0 has an ISR of 1")]),
    "the history was cut short": ("unfinished", good()[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_every_kind_of_fault_is_found(name: str) -> None:
    kind, history = BAD[name]
    found = kinds(history)
    assert kind in found, f"{kind} expected, found {found}"


def changed_transaction(old: str, outcome: Outcome) -> History:
    """Return the good history of transactions, in which those with the outcome ``old`` have another one."""
    history = transactions()
    for at, entry in enumerate(history):
        if isinstance(entry, OperationEnded) and entry.outcome == old:
            history[at] = msgspec.structs.replace(entry, outcome=outcome)
    return history


BAD_TRANSACTIONS: dict[str, tuple[str, History]] = {
    "a committed transaction is aborted in the log": ("lost", changed_transaction("aborted", "acknowledged")),
    "an aborted transaction is committed in the log": ("aborted", changed_transaction("acknowledged", "aborted")),
    "a record of an aborted transaction was read": ("aborted", [*transactions(), polled(3, Run(3, "p", 2, 2))]),
    "a transaction is committed in part": ("torn", [*transactions(), *in_transaction("c", 8, "unknown", count=1)]),
    "a consumer skipped a committed transaction": (
        "skipped",
        [
            entry
            for entry in transactions()
            if not (isinstance(entry, Polled) and entry.consumer == "c" and entry.start == 0)
        ],
    ),
    "a group skipped records": (
        "skipped",
        [entry for entry in transactions() if not (isinstance(entry, Polled) and entry.consumer == "m1")],
    ),
    "a member began before a committed offset": (
        "repeated",
        [*transactions(), *grouped("m3", 6, Run(6, "p", 4, 2), commit=8)],
    ),
    "a member skipped records": ("skipped", [*transactions(), *grouped("m3", 12, Run(12, "p", 4, 2), commit=14)]),
}


def test_a_good_history_of_transactions_has_no_violations() -> None:
    report = check(transactions())
    assert report.violations == ()
    assert report.counts["transactions"] == 3 and report.counts["offsets committed"] == 2


@pytest.mark.parametrize("name", BAD_TRANSACTIONS)
def test_every_fault_of_transactions_and_groups_is_found(name: str) -> None:
    kind, history = BAD_TRANSACTIONS[name]
    found = kinds(history)
    assert kind in found, f"{kind} expected, found {found}"


def test_a_member_may_read_again_what_the_group_has_not_committed() -> None:
    last = grouped("m3", 6, Run(6, "p", 4, 2), commit=8)
    history = [entry for entry in transactions() if not (isinstance(entry, Committed) and entry.offset == 8)]
    assert kinds([*history, *last]) == set()


def test_loose_topics_may_lose_but_show_nothing_uncommitted() -> None:
    loose: Entry = TopicUsed(topic="t", rules="loose", acks=1)
    history: History = [loose, *logs(Run(0, "p", 2, 2), Run(2, "p", 2, 2))[1:]]
    report = check(history)
    assert report.violations == () and report.counts["records lost where acks allow it"] == 2
    assert kinds([*history, polled(0, Run(0, "p", 4, 2))]) == {"changed"}


def test_records_of_a_recreated_topic_do_not_count_as_lost() -> None:
    remade: Entry = TopicUsed(topic="t", rules="remade", acks=-1)
    counts = check([remade, *logs(Run(0, "p", 2, 2))[1:]]).counts
    assert counts["records deleted with their topic"] == 2 and "records lost where acks allow it" not in counts


def test_a_history_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryWriter(path, seed=7, brokers=3) as writer:
        for entry in good():
            writer.write(entry)
    began, *entries = read_history(path)
    assert [msgspec.structs.replace(entry, at=0.0) for entry in entries] == good()
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    assert check([began, *entries]).violations == ()
    with path.open("ab") as file:
        file.write(b'{"what":"fau')
    assert len(list(read_history(path))) == len(good()) + 1, "a truncated line must not be an entry"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"what":"began","version":3,"seed":1,"brokers":3}\n', "format version 3"),
        ('{"what":"finished"}\n', "beginning of a history"),
        ("PAR1\n", "line 1"),
    ],
)
def test_a_file_that_is_not_a_history_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        list(read_history(path))


def test_records_are_recognized_by_their_content() -> None:
    assert record_name(record_value("p-1", 12, padding=30)) == ("p-1", 12)
    assert record_name(b"something else")[1] == record_name(None)[1] == -1
    records = [(0, "p", 0), (1, "p", 1), (2, "q", 0), (4, "q", 1), (5, "q", 3)]
    assert runs_of(records) == (Run(0, "p", 0, 2), Run(2, "q", 0, 1), Run(4, "q", 1, 1), Run(5, "q", 3, 1))
    assert runs_of([]) == ()
