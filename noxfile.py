"""The fast stage of the tests on every supported Python.

``nox`` runs it on each Python that the machine has, ``nox -s fast-3.12`` on one. Each session installs the package with
its test dependencies into an environment of its own, so it needs a package index. ``tests/run`` is the whole check.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@nox.session(python=PYTHONS)
def fast(session: nox.Session) -> None:
    """Run the tests without real processes; arguments after ``--`` go to pytest."""
    session.install("pip>=24", "setuptools>=77")  # as spark-submit.sh does: tests build wheels with them
    session.install(".[spark,test]")
    session.run(
        *("python", "-m", "pytest", "-q", "-n", "2", "--no-loadscope-reorder"),
        *("-m", "not integration and not alone and not extended and not long", *session.posargs),
        # The working tree comes before the installed copy, also in the processes that tests start.
        env={"PYTHONPATH": str(session.invoked_from)},
    )
