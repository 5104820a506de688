"""Tests of the torture command: it judges its run, judges a stored history again, and reports the result by its exit
code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sparklog.errors import ClusterError
from sparklog.testing.history import (
    Committed,
    FinalLog,
    Finished,
    HistoryWriter,
    OperationEnded,
    Polled,
    RecordedFault,
    Sent,
    TopicUsed,
    read_history,
)
from sparklog.testing.namespaces import NamespaceNetwork
from sparklog.testing.torture import main


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_broken_promises_are_found_also_when_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command injects one fault, with all its steps."""
    history = tmp_path / "history.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", "sparklog.testing.torture", "--minutes", "0.001", "--seed", "7", "--history", history],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"seed 7, history in {history}" in run.stdout
    faults = [entry.text for entry in read_history(history) if isinstance(entry, RecordedFault)]
    assert faults and all(text in run.stdout for text in faults)
    assert main(["--check", str(history)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == run.stdout.splitlines()[-1]

    # One replica has other bytes than the others. Each judgment of the history reports it.
    entries = list(read_history(history))
    last = next(entry for entry in reversed(entries) if isinstance(entry, FinalLog) and entry.batches)
    other = msgspec.structs.replace(last.batches[0], digest="other")
    entries[entries.index(last)] = msgspec.structs.replace(last, batches=(other, *last.batches[1:]))
    with HistoryWriter(tmp_path / "changed.jsonl", seed=7, brokers=3) as writer:
        for entry in entries[1:]:
            writer.write(entry)
    assert main(["--check", str(tmp_path / "changed.jsonl")]) == 1
    assert "replicas" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_a_secure_cluster_keeps_its_promises(tmp_path: Path) -> None:
    """Clients log in over TLS, and brokers and controllers have certificates. Network cuts need namespaces."""
    try:
        NamespaceNetwork().close()
    except ClusterError as reason:
        pytest.skip(str(reason))
    options = ["--secure", "--minutes", "0.3", "--seed", "7", "--history", str(tmp_path / "history.jsonl")]
    run = subprocess.run(
        [sys.executable, "-m", "sparklog.testing.torture", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    faults = [entry for entry in read_history(tmp_path / "history.jsonl") if isinstance(entry, RecordedFault)]
    assert len(faults) > 2


@pytest.mark.integration
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_kafka_clients_lose_nothing_under_faults(tmp_path: Path) -> None:
    """Clients of Kafka and of sparklog write and read the same topics, also in transactions and in groups."""
    options = ["--kafka", "--minutes", "0.5", "--seed", "7", "--history", str(tmp_path / "history.jsonl")]
    run = subprocess.run(
        [sys.executable, "-m", "sparklog.testing.torture", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    entries = list(read_history(tmp_path / "history.jsonl"))
    assert len([entry for entry in entries if isinstance(entry, RecordedFault)]) > 2
    sent = {entry.first for entry in entries if isinstance(entry, Sent) and entry.producer == "kafka-writer-all"}
    assert len(sent) > 1_000
    assert any(isinstance(entry, Polled) and entry.consumer == "kafka-reader" for entry in entries)
    outcomes = {
        entry.outcome for entry in entries if isinstance(entry, OperationEnded) and "transactions" in entry.producer
    }
    assert outcomes >= {"acknowledged", "aborted"}
    committed = {entry.group for entry in entries if isinstance(entry, Committed)}
    assert committed == {"kafka-group-eager", "kafka-group-cooperative", "kafka-group-consumer"}
    assert any(isinstance(entry, FinalLog) and entry.hidden for entry in entries)


def test_an_incomplete_history_is_neither_good_nor_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").write_text("PAR1\n")
    assert main(["--check", str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().out
    with HistoryWriter(tmp_path / "empty", seed=1, brokers=3) as writer:
        writer.write(TopicUsed(topic="t", rules="strict", acks=-1))
    assert main(["--check", str(tmp_path / "empty")]) == 1, "a history without its end cannot prove a loss"
    with HistoryWriter(tmp_path / "ended", seed=1, brokers=3) as writer:
        writer.write(Finished())
    assert main(["--check", str(tmp_path / "ended")]) == 0
