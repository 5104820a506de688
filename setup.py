"""What setup.cfg cannot say: which modules a compiled install compiles.

``SPARKLOG_COMPILE`` is how the C compiler optimises (``./spark-submit.sh --setup compiled`` says O2). Without it
nothing is compiled, and only time depends on it: mypyc makes C of the typed Python that is here anyway.

These are the modules that every request goes through. Not those whose classes msgspec decodes, of whose annotations
compiled modules keep but the outermost type, nor those with a view (``memoryview``) as a class's field, nor what users
call: a compiled function takes an ``int`` and nothing else that counts. No class in them has an attribute ``_thread``:
mypyc puts an underscore before each name, and ``__thread`` is a keyword of C compilers.
"""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import setup

COMPILED = {
    "broker": "context",
    "broker/replication": "fetcher log_maintenance partition partition_effects partitions replica_hosting",
    "broker/requests": "dispatch fetch fetch_read open_fetch produce",
    "broker/transactions": "coordinator_registry hosted_coordinators",
    "client/cluster": "loop_cluster metadata",
    "client/producer": "caller_io delivery direct_send inflight_requests loop_handoff partition_queues partitioning "
    "producer_metadata producer_thread record_buffer record_chunk sender spin_policy",
    "kafka/records": "decode_few encode_few",
    "net": "async_client server server_connection server_limits",
    "protocol": "connection frames",
    "record": "checksum codec header small_batch_encoder small_batch_validator validate",
    "replica": "fetch_session leader purgatory replica",
    "storage": "append_fast_path append_plan batch_cache disk log log_durability log_files log_offsets log_tail "
    "open_files segment segment_chain transactions",
}

#: What the check of the sources asks is not asked again, perhaps with another Python and other releases of packages.
_UNASKED = (
    "--ignore-missing-imports",
    "--allow-any-generics",
    "--no-warn-unused-ignores",
    "--no-warn-unreachable",
    "--no-warn-return-any",
)


def modules() -> list[str]:
    """Paths of the modules that are compiled, relative to this file."""
    return [f"sparklog/{package}/{name}.py" for package, names in COMPILED.items() for name in names.split()]


def _compiled(level: str) -> None:
    from mypyc.build import mypycify

    Path("build").mkdir(exist_ok=True)
    scratch = os.path.relpath(tempfile.mkdtemp(dir="build"))  # setuptools wants no absolute path
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    made = mypycify(
        [*_UNASKED, *modules()],
        opt_level=level.removeprefix("O"),
        debug_level="0",
        multi_file=True,
        target_dir=scratch,
        group_name="sparklog",
    )
    setup(ext_modules=made)


if __name__ == "__main__":
    level = os.environ.get("SPARKLOG_COMPILE")
    if level and "bdist_wheel" in sys.argv:  # and not where pip only asks for the package's name
        _compiled(level)
    else:
        setup()
