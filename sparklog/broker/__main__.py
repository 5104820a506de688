"""The entry point of a broker process: ``python -m sparklog.broker --config file.json``.

Exit codes: 0 stopped on request; 64 wrong configuration; 69 failed start; 70 stalled event loop; 71 stop took too long;
74 failed log directory; 75 restart requested. The last line of the log gives the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import sys
from pathlib import Path

from sparklog.broker.lifecycle.logging_setup import configure_logging
from sparklog.broker.lifecycle.process import BrokerProcess
from sparklog.broker.lifecycle.process_config import ProcessConfig, load_process_config
from sparklog.broker.security.audit_log import AUDIT_FILE, open_audit_log
from sparklog.errors import ConfigError
from sparklog.net.loop import new_event_loop
from sparklog.protocol.proof import KeyRing
from sparklog.storage.group_access import group_id
from sparklog.storage.open_files import raise_descriptor_limit

EXIT_CONFIG = 64

#: The thresholds of Python's garbage collector: the number of new objects before a collection of the youngest
#: generation, then the number of such collections before one of the next older generation, and so on. Few collections
#: suffice: a closed connection and its buffer are freed without a collection, and other reference cycles are small. A
#: change of thousands of leaders creates a hundred thousand objects that stay in use. With Python's default thresholds
#: the collector would visit all these objects once or twice meanwhile, and would block the event loop for 0.1 s.
_COLLECTOR = (5_000, 10, 20)


#: The umask of a broker whose log directory a group may read. An inherited umask could deny the group new files.
_GROUP_MASK = 0o027


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sparklog.broker", description="One sparklog broker.")
    parser.add_argument(
        "--config", type=Path, required=True, help="JSON file, see sparklog.broker.lifecycle.process_config"
    )
    path = parser.parse_args().config
    try:
        config = load_process_config(path)
        config.listeners()
        keys = config.keys()
        if group := config.broker_settings().log_dir_group:
            group_id(group)
            os.umask(_GROUP_MASK)
        configure_logging(config.log_file)
        open_audit_log((Path(config.log_file).parent if config.log_file else Path(config.log_dir)) / AUDIT_FILE)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    raise_descriptor_limit()
    gc.set_threshold(*_COLLECTOR)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_run(config, keys))
    finally:
        # uvloop refuses this while the TLS session of a connection is ending. The process exits next.
        with contextlib.suppress(OSError):
            loop.close()
        logging.shutdown()


async def _run(config: ProcessConfig, keys: KeyRing) -> int:
    return await BrokerProcess(config, keys).run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # sys.exit would wait for threads, and one may hang in an fsync of a broken disk. All required data is already
    # durable.
    os._exit(code)
