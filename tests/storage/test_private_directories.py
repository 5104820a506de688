"""Tests that a log directory is private to the user of its broker: no other user reads records or holds a lock."""

from __future__ import annotations

import grp
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparklog.broker.lifecycle.logging_setup import bounded_file
from sparklog.errors import ConfigError
from sparklog.storage.directory_meta import BROKER_LOCK, SUPERVISOR_LOCK, claim_directory
from sparklog.storage.disk import RealDisk
from tests.storage.batches import SMALL, TP, commit_and_seal, create_log, fill, open_directory

#: The user without privileges if it exists. Any other user than root would do.
_OTHER_USER = 65534


@pytest.fixture
def log_dir() -> Iterator[Path]:
    """Create a log directory whose parents are open to every user. pytest's own directories are not."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    yield parent / "log"
    shutil.rmtree(parent)


@pytest.fixture(autouse=True, params=[0o022, 0])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def write_everything(log_dir: Path) -> None:
    """Write a claimed log directory with sealed, active and copied segments, a checkpoint and a clean shutdown."""
    claim = claim_directory([log_dir], cluster_id="cluster")
    directory = open_directory(log_dir)
    directory.load()
    log = directory.get(TP) or create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log)
    directory.checkpoint()
    directory.write_clean_marker()
    directory.close()
    assert claim is not None
    claim.release()


def open_to_others(log_dir: Path) -> list[str]:
    """Return the files that other users have rights on, including the directory itself."""
    return [
        f"{stat.filemode(path.lstat().st_mode)} {path.relative_to(log_dir)}"
        for path in (log_dir, *log_dir.rglob("*"))
        if path.lstat().st_mode & 0o077
    ]


def other_user_opens(path: Path) -> bool:
    """Return whether another user can open the file for reading, which is enough to lock it."""
    command = ["sh", "-c", 'exec 9<"$1"', "sh", str(path)]
    done = subprocess.run(
        command, check=False, user=_OTHER_USER, group=_OTHER_USER, extra_groups=[], stderr=subprocess.DEVNULL
    )
    return done.returncode == 0


def test_every_file_is_private_to_its_owner(log_dir: Path) -> None:
    write_everything(log_dir)
    assert open_to_others(log_dir) == []
    assert any(path.suffix == ".arrow" for path in log_dir.rglob("*"))


def test_a_directory_of_an_earlier_release_is_made_private_at_start(log_dir: Path) -> None:
    write_everything(log_dir)
    for path in (log_dir, *log_dir.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    claim = claim_directory([log_dir], cluster_id="cluster")
    assert stat.S_IMODE(log_dir.stat().st_mode) == 0o700, "a supervisor closes it before it starts the broker"
    assert claim is not None
    claim.release()
    log_dir.chmod(0o755)
    open_directory(log_dir).close()
    assert open_to_others(log_dir) == []


def test_a_link_in_the_directory_does_not_change_its_target(log_dir: Path) -> None:
    write_everything(log_dir)
    elsewhere = log_dir.parent / "elsewhere"
    elsewhere.write_bytes(b"")
    elsewhere.chmod(0o644)
    (log_dir / "link").symlink_to(elsewhere)
    (log_dir / BROKER_LOCK).chmod(0o644)
    open_directory(log_dir).close()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644


def test_a_copy_of_a_segment_is_private_to_its_owner(log_dir: Path) -> None:
    log_dir.mkdir()
    (log_dir / "source").write_bytes(b"records")
    RealDisk().copy(log_dir / "source", log_dir / "target", 3)
    assert stat.S_IMODE((log_dir / "target").stat().st_mode) == 0o600
    RealDisk().copy(log_dir / "source", log_dir / "target", 7, start=3)
    assert (log_dir / "target").read_bytes() == b"records"


def test_a_brokers_log_file_is_private_to_its_owner(log_dir: Path) -> None:
    log_dir.mkdir()
    (log_dir / "older.log").write_bytes(b"")
    for name in ("broker.log", "older.log"):
        bounded_file(str(log_dir / name)).close()
        assert stat.S_IMODE((log_dir / name).stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_can_read_no_record_and_hold_no_lock(log_dir: Path) -> None:
    write_everything(log_dir)
    readable = log_dir.parent / "readable"
    readable.write_bytes(b"")
    readable.chmod(0o644)
    assert other_user_opens(readable), "the other user must reach the log directory"
    names = [BROKER_LOCK, SUPERVISOR_LOCK, f"{TP}/00000000000000000000.arrow"]
    assert [name for name in names if other_user_opens(log_dir / name)] == []
    for path in (log_dir, *log_dir.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert [name for name in names if other_user_opens(log_dir / name)] == names
    open_directory(log_dir).close()
    assert [name for name in names if other_user_opens(log_dir / name)] == []


# --- log.dir.group ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> grp.struct_group:
    """Return a group that this process may give to its files, other than its own if possible."""
    chosen = [found for found in grp.getgrall() if found.gr_gid not in {os.getgid(), _OTHER_USER}]
    if os.geteuid() != 0:
        chosen = [found for found in chosen if found.gr_gid in os.getgroups()]
    return chosen[0] if chosen else grp.getgrgid(os.getgid())


def shared(log_dir: Path, group: grp.struct_group) -> None:
    """Open and write a log directory as a broker with ``log.dir.group``, and close it."""
    before = os.umask(0o027)
    claim = claim_directory([log_dir], cluster_id="cluster", for_group=True)
    directory = open_directory(log_dir, settings={"log.dir.group": group.gr_name})
    directory.load()
    log = directory.get(TP) or create_log(directory, segment_bytes=SMALL)
    fill(log, 10)
    commit_and_seal(log)
    directory.checkpoint()
    directory.close()
    os.umask(before)
    assert claim is not None
    claim.release()


def not_shared(log_dir: Path, group: grp.struct_group) -> list[str]:
    """Return the names of files and directories that have other rights than reading by the group."""
    return [
        path.name
        for path in (log_dir, *log_dir.rglob("*"))
        if (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) != (group.gr_gid, 0o2750 if path.is_dir() else 0o640)
    ]


@pytest.mark.parametrize("exists", [False, True])
def test_a_group_reads_a_log_directory_and_holds_no_lock(
    log_dir: Path, group: grp.struct_group, *, exists: bool
) -> None:
    if exists:
        write_everything(log_dir)
        bounded_file(str(log_dir / "broker.log")).close()
    shared(log_dir, group)
    closed = [BROKER_LOCK, SUPERVISOR_LOCK, *(["broker.log"] if exists else [])]
    assert sorted(not_shared(log_dir, group)) == sorted(closed)
    for name in closed:
        assert stat.S_IMODE((log_dir / name).stat().st_mode) == 0o600
    changed_ns = log_dir.stat().st_ctime_ns
    claim = claim_directory([log_dir], cluster_id="cluster", for_group=True)
    assert claim is not None and log_dir.stat().st_ctime_ns == changed_ns, "a supervisor changes nothing"
    claim.release()


def test_without_the_setting_the_group_loses_its_access(log_dir: Path, group: grp.struct_group) -> None:
    shared(log_dir, group)
    open_directory(log_dir).close()
    assert stat.S_IMODE(log_dir.stat().st_mode) & 0o077 == 0


def test_an_unknown_group_is_refused(log_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-group"):
        open_directory(log_dir, settings={"log.dir.group": "no-such-group"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_member_of_the_group_reads_records_and_others_do_not(log_dir: Path, group: grp.struct_group) -> None:
    shared(log_dir, group)
    segment = next(log_dir.rglob("*.arrow"))

    def reads(path: Path, *groups: int) -> bool:
        command = ["cat", str(path)]
        return not subprocess.run(
            command, check=False, user=_OTHER_USER, group=_OTHER_USER, extra_groups=groups, capture_output=True
        ).returncode

    assert reads(segment, group.gr_gid) and not reads(segment)
    assert not reads(log_dir / BROKER_LOCK, group.gr_gid)
    writes = ["sh", "-c", f"echo x >> {segment} || rm {segment}"]
    assert subprocess.run(
        writes, check=False, user=_OTHER_USER, group=group.gr_gid, extra_groups=[], capture_output=True
    ).returncode
