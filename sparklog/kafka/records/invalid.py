"""The error for invalid record batches of Kafka's clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparklog.errors import BrokerError, ErrorCode

#: The maximum number of records that one error names.
MOST_RECORD_ERRORS = 20


class RecordError(NamedTuple):
    """The error of one record: its position in the batch, from 0, and what is wrong with it.

    A Produce response of version 8 or later lists such errors in ``record_errors``.
    """

    batch_index: int
    message: str


class InvalidRecords(BrokerError):
    """The error for a produced batch that is refused as a whole.

    ``code`` is the error code that the Produce response has for the partition. If single records are invalid,
    ``record_errors`` names them, at most ``MOST_RECORD_ERRORS``. The broker then refuses the valid records of the batch
    too.
    """

    def __init__(self, code: ErrorCode, detail: str, record_errors: Sequence[RecordError] = ()) -> None:
        super().__init__(code, detail)
        self.record_errors = tuple(record_errors)
        self.args = (code, detail, self.record_errors)
