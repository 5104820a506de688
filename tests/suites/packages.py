"""Packages of registries with the test suites of other projects, in a cache outside the project.

No file of these packages becomes a part of the project. The cache is ``$XDG_CACHE_HOME/sparklog/suites``
(``~/.cache/sparklog/suites``), with a folder for each package and version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparklog.errors import ClusterError

_STEP_TIMEOUT_S = 1800


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder ``name`` of the cache. If it is missing, ``make`` fills it; a failed attempt leaves nothing.

    Raises:
        ClusterError: a step of ``make`` failed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparklog" / "suites"
    folder, new = cache / name, cache / f"{name}.new"
    if not folder.exists():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        make(new)
        new.rename(folder)
    return folder


def step(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    """Run one command of a download or a build in ``folder``; return its output.

    Raises:
        ClusterError: the program is missing or failed; the message has its last output.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_STEP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
