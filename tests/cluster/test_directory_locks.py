"""Tests of the claims of log directories, with real files and real ports and without brokers."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.cluster import directory_locks
from sparklog.cluster.directory_locks import claim_slot, survey_host
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.slots import FoundSlot, Slot
from sparklog.errors import ClusterError, StorageError
from sparklog.storage.directory_meta import DirectoryMeta, read_meta, write_meta
from sparklog.storage.disk import RealDisk
from tests.cluster.support import spec


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def claim_all(found: list[FoundSlot], generation: GenerationSpec) -> list[Slot]:
    """Claim one directory after the other, as the tasks of a host would, and release all claims."""
    ids = itertools.count()

    async def next_id() -> int:
        return next(ids)

    async def run() -> list[Slot]:
        held = []
        try:
            for one in found:
                held.append(await claim_slot(one, generation, next_broker_id=next_id))  # noqa: PERF401
            return [slot for slot, _ in held]
        finally:
            for _, claim in held:
                claim.release()

    return asyncio.run(run())


def test_new_directories_take_the_first_free_ports_and_keep_them(tmp_path: Path, taken_port: int) -> None:
    generation = spec(tmp_path, port=taken_port)
    slots = claim_all([FoundSlot(str(tmp_path / f"slot-{k}")) for k in range(2)], generation)
    assert [slot.broker_id for slot in slots] == [0, 1]
    assert taken_port < slots[0].port < slots[1].port
    survey = asyncio.run(survey_host(generation, task=0, host="here"))
    assert [(found.broker_id, found.port, found.live) for found in survey.slots] == [
        (0, slots[0].port, False),
        (1, slots[1].port, False),
    ]
    assert claim_all(list(survey.slots), spec(tmp_path, port=1)) == slots


def test_a_stored_port_in_use_is_named_in_the_error(tmp_path: Path, taken_port: int) -> None:
    path = tmp_path / "slot-0"
    path.mkdir()
    write_meta(RealDisk(), path, DirectoryMeta(cluster_id="test-cluster", broker_id=5, port=taken_port))
    found = asyncio.run(survey_host(spec(tmp_path), task=0, host="here")).slots
    with pytest.raises(ClusterError, match=rf"port {taken_port} of broker 5 is used .*meta\.json"):
        claim_all(list(found), spec(tmp_path))


def test_a_directory_of_another_cluster_is_left_to_the_survey(tmp_path: Path) -> None:
    path = tmp_path / "slot-0"
    path.mkdir()
    write_meta(RealDisk(), path, DirectoryMeta(cluster_id="someone else's", broker_id=0, port=9092))
    survey = asyncio.run(survey_host(spec(tmp_path), task=0, host="here"))
    assert "someone else's" in survey.problem
    assert str(path) in survey.problem
    assert survey.slots == ()
    assert str(path) not in survey.vacancies


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        claim_all([FoundSlot(str(tmp_path / "file" / "slot-0"))], spec(tmp_path))


def test_a_directory_that_stays_supervised_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_locks, "LOCK_TIMEOUT_S", 0.2)
    found = FoundSlot(str(tmp_path / "slot-0"))
    with pytest.raises(ClusterError, match="supervised by another process"):
        claim_all([found, found], spec(tmp_path))
    meta = read_meta(RealDisk(), tmp_path / "slot-0", cluster_id="test-cluster")
    assert meta is not None
    assert meta.broker_id == 0
