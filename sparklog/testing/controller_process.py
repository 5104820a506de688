"""A controller in a process of its own, to be paused and killed: ``python -m sparklog.testing.controller_process``.

Arguments: ZooKeeper's address, the cluster's id, the settings as JSON. Stands for election until SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import sys

import msgspec

from sparklog.cluster.controller_loop import ControllerLoop
from sparklog.cluster.stop_request import StopRequest


def main(zookeeper: str, cluster_id: str, settings: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = StopRequest()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    controller = ControllerLoop(zookeeper, cluster_id, settings=msgspec.json.decode(settings, type=dict[str, str]))
    controller.start()
    while not stop.wait(0.5):
        if controller.status.state == "failed":
            logging.getLogger(__name__).critical("the controller failed: %s", controller.status.detail)
            return 1
    controller.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
