"""The rules for the end of a broker process: why and how it ends, and with which exit code.

``process`` applies the rules.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum

from sparklog.broker.context import BrokerContext
from sparklog.broker.lifecycle.process_config import EXIT_RESTART
from sparklog.errors import BrokerError, ErrorCode

_log = logging.getLogger(__name__)

EXIT_OK = 0
#: Also the exit code of a broker that ends because another broker is registered with its id.
EXIT_CANNOT_START = 69
EXIT_STOP_TIMED_OUT = 71
EXIT_LOG_FAILED = 74


class StopMode(Enum):
    """A way in which the process ends."""

    #: The controller moves leaderships first.
    CONTROLLED = "controlled"
    #: The whole cluster stops, so no leadership moves and the ISRs stay as they are.
    FINISH = "finish"
    AT_ONCE = "at once"


class Ending:
    """A record of whether, how and why one broker process ends, and of its exit code.

    A part of ``BrokerProcess``. Not thread-safe: use it only on the broker's event loop.
    """

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        #: How the process ends; None while it serves.
        self.mode: StopMode | None = None
        #: Whether the supervisor starts the broker again afterwards.
        self.restarts = False
        #: The first error of the log directory.
        self.log_error: Exception | None = None
        #: Set when the process has to end.
        self.begun = asyncio.Event()
        self._id_is_taken = False

    @property
    def is_controlled(self) -> bool:
        return self.mode is StopMode.CONTROLLED

    @property
    def exit_code(self) -> int:
        if self.log_error is not None:
            return EXIT_LOG_FAILED
        if self._id_is_taken:
            return EXIT_CANNOT_START
        return EXIT_RESTART if self.restarts else EXIT_OK

    def begin(self, mode: StopMode) -> None:
        """End the process in this mode, unless it is already ending in a quicker mode.

        FINISH replaces CONTROLLED: if the whole cluster stops, there is no new leader to wait for. A stop that begins
        during a restart cancels the restart.
        """
        overtakes = mode is StopMode.AT_ONCE or (mode is StopMode.FINISH and self.mode is StopMode.CONTROLLED)
        if self.mode is None or overtakes:
            self.mode = mode
        self.restarts = False
        self.begun.set()
        self._context.roles_changed()

    def on_signal(self) -> None:
        """Begin a controlled shutdown at the first signal, and end the process at once at a further signal.

        A signal during a restart counts as the first one: it turns the restart into a stop.
        """
        stopping = self.mode is not None and not self.restarts
        self.begin(StopMode.AT_ONCE if stopping else StopMode.CONTROLLED)

    def on_id_taken(self, error: Exception) -> None:
        """End the process at once, because another broker is registered with this id.

        If there is a supervisor, it tries to start this broker again.
        """
        _log.critical("broker %d ends: %s", self._context.broker_id, error)
        self._context.state = "failed"
        self._id_is_taken = True
        self.begin(StopMode.AT_ONCE)

    def restart(self, *, supervised: bool) -> None:
        """Begin a controlled shutdown after which the supervisor starts the broker again.

        Raises:
            BrokerError: INVALID_REQUEST if there is no supervisor to start the broker again, BROKER_STOPPING if this
                broker or the cluster is stopping.
        """
        context = self._context
        if self.restarts:
            return  # a restart was already requested
        if self.mode is not None or context.quiesced:
            raise BrokerError(ErrorCode.BROKER_STOPPING, f"broker {context.broker_id} is stopping")
        if not supervised:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"broker {context.broker_id} has no supervisor that could restart it"
            )
        self.begin(StopMode.CONTROLLED)
        self.restarts = True
