"""The assignment of a log directory to one broker: the lock of its supervisor, the broker id and the port.

A new directory gets an id from ZooKeeper and the first free port. Both are written to its ``meta.json`` before the
broker starts, and never change, so that clients find the broker again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sparklog.cluster import runtime_directory
from sparklog.cluster.control import ControlConnection
from sparklog.cluster.generation import GenerationSpec
from sparklog.cluster.process import is_alive, port_taken
from sparklog.cluster.slots import FoundSlot, HostSurvey, Slot, candidates
from sparklog.errors import ClusterError, StorageError
from sparklog.storage.directory_meta import META_FILE, Claim, DirectoryMeta, claim_directory, read_meta
from sparklog.storage.disk import RealDisk

log = logging.getLogger(__name__)

#: The maximum wait for the lock. The tasks of the previous generation end, or are killed by Spark, well within this
#: time.
LOCK_TIMEOUT_S = 20.0
#: The number of ports that are tried for a new directory.
_PORTS_TRIED = 1000


async def survey_host(spec: GenerationSpec, *, task: int, host: str) -> HostSurvey:
    """Return a survey of this host's log directories. Its ``problem`` describes a directory that cannot be used."""
    found, empty, problem = [], [], ""
    existing, possible = candidates(spec)
    for path in existing:
        try:
            meta = read_meta(RealDisk(), path, cluster_id=spec.cluster_id)
        except StorageError as error:
            problem = problem or str(error)
            continue
        if meta is None:
            empty.append(str(path))
        else:
            found.append(FoundSlot(str(path), meta.broker_id, meta.port, await is_live(path)))
    return HostSurvey(task, host, tuple(found), (*empty, *(str(path) for path in possible)), problem)


async def is_live(log_dir: Path) -> bool:
    """Return whether a broker process uses this directory or is starting with it."""
    connection = await ControlConnection.open(runtime_directory.control_socket(log_dir))
    if connection is not None:
        await connection.close()
        return True
    noted = runtime_directory.noted_process(log_dir)
    return noted is not None and is_alive(noted)


async def claim_slot(
    found: FoundSlot, spec: GenerationSpec, *, next_broker_id: Callable[[], Awaitable[int]]
) -> tuple[Slot, Claim]:
    """Lock a log directory, so that only this process supervises its broker. Assign a new directory to a new broker.

    Raises:
        ClusterError: another process keeps the directory's lock for longer than an ending generation would, another
            process uses its port, or no port is free.
        StorageError: the directory cannot be used for a broker's data.
    """
    claim = await _claim(Path(found.path), spec)
    try:
        meta = claim.meta or await _make_broker(claim, spec, next_broker_id=next_broker_id)
        if meta is claim.meta and not found.live and port_taken(spec.bind_host, meta.port):
            raise ClusterError(
                f"port {meta.port} of broker {meta.broker_id} is used by another process: stop it, or set"
                f" another port in {claim.path / META_FILE} (clients that use this broker's port then lose it)"
            )
    except BaseException:
        claim.release()
        raise
    return Slot(claim.path, meta.broker_id, meta.port), claim


async def _claim(path: Path, spec: GenerationSpec) -> Claim:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    for_group = bool(spec.settings.get("log.dir.group"))
    while (claim := claim_directory([path], cluster_id=spec.cluster_id, for_group=for_group)) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"{path} has been supervised by another process for over {LOCK_TIMEOUT_S:g} s")
        await asyncio.sleep(0.1)
    return claim


async def _make_broker(
    claim: Claim, spec: GenerationSpec, *, next_broker_id: Callable[[], Awaitable[int]]
) -> DirectoryMeta:
    broker_id = await next_broker_id()
    with runtime_directory.host_lock():
        runtime_directory.forget_vanished()
        meta = DirectoryMeta(cluster_id=spec.cluster_id, broker_id=broker_id, port=_free_port(spec))
        claim.write_meta(meta)
    log.info("assigned %s to broker %d, port %d", claim.path, broker_id, meta.port)
    return meta


def _free_port(spec: GenerationSpec) -> int:
    """Return a free port. The caller holds the host's lock, so ports of other new directories are already recorded."""
    existing, _ = candidates(spec)
    metas = [read_meta(RealDisk(), path, cluster_id=spec.cluster_id) for path in existing]
    kept = {meta.port for meta in metas if meta is not None}
    for port in range(spec.port, min(spec.port + _PORTS_TRIED, 65_536)):
        if port not in kept and not port_taken(spec.bind_host, port):
            return port
    raise ClusterError(f"no free port from {spec.port} to {spec.port + _PORTS_TRIED - 1}")
