"""A separate controller process for tests of faults: ``python -m sparklog.testing.controller_process``.

Arguments: the address of ZooKeeper, the cluster id, the settings as JSON, and the secret file if there is one. The
process is the active or a standby controller until SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import msgspec

from sparklog.broker.lifecycle.logging_setup import LineFormatter
from sparklog.broker.lifecycle.secret_file import read_secret_file
from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.stop_request import StopRequest


def main(zookeeper: str, cluster_id: str, settings: str, secret_file: str = "") -> int:
    output = logging.StreamHandler()
    output.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[output], level=logging.INFO)
    stop = StopRequest()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    chosen = msgspec.json.decode(settings, type=dict[str, str])
    keys = read_secret_file(Path(secret_file)) if secret_file else None
    controller = ControllerLoop(zookeeper, cluster_id, settings=chosen, keys=keys)
    controller.start()
    while not stop.wait(0.5):
        if controller.status.state == "failed":
            logging.getLogger(__name__).critical("the controller failed: %s", controller.status.detail)
            return 1
    controller.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
