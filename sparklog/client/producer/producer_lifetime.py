"""The end of a producer: by ``close``, at the program's end, or because no code refers to it.

These parts refer to each other and not to the producer. So Python collects a producer that no code uses. Then its I/O
thread sends the accepted records, and ends.
"""

from __future__ import annotations

import atexit

from sparklog.client.errors import ProducerClosed
from sparklog.client.producer.open_writes import OpenWrites
from sparklog.client.producer.sender import Sender
from sparklog.client.producer.transaction_api import ProducerTransactions

_EXIT_FLUSH_S = 5.0


class ProducerLifetime:
    """The end of one producer. The interpreter's exit handlers refer to it until the I/O thread has ended."""

    def __init__(self, sender: Sender, writes: OpenWrites) -> None:
        self.closed = False
        self.transactions: ProducerTransactions | None = None
        self._sender = sender
        self._writes = writes
        # A producer that was not closed still sends its records when the program ends.
        atexit.register(self.close_at_exit)
        sender.thread.on_end = self.unregister_exit

    def close(self, timeout_s: float | None) -> None:
        """Abort an open transaction, flush, and end the I/O thread. Raises as ``Producer.close``."""
        if self.closed:
            return
        self.closed = True
        try:
            self.finish(timeout_s)
        finally:
            self.stop()

    def finish(self, timeout_s: float | None) -> None:
        """Abort an open transaction and flush."""
        if self.transactions is not None:
            self.transactions.close()
        self._writes.flush(self._sender.buffer, timeout_s)

    def stop(self) -> None:
        self.unregister_exit()
        self._sender.thread.stop(ProducerClosed("the producer was closed before the record was acknowledged"))

    def close_at_exit(self) -> None:
        """Close the producer. Python prints the error if records could not be sent."""
        self.close(_EXIT_FLUSH_S)

    def unregister_exit(self) -> None:
        atexit.unregister(self.close_at_exit)

    def retire(self) -> None:
        """Let the I/O thread send its records and end.

        Python calls it when it collects the producer, in any thread and at any point of its code. So it takes no lock
        and waits for nothing.
        """
        if not self.closed:
            self._sender.thread.retire()
