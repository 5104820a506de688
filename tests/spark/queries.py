"""Streaming queries that end without a call of ``stop``."""

from __future__ import annotations

import time
from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

_PATIENCE_S = 180


def drained(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query and wait for its end.

    Spark gives a query's Python process ten seconds to start, and no setting changes that. If a busy machine needs
    longer, the query is started again from its checkpoint.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        query = start()
        try:
            assert query.awaitTermination(_PATIENCE_S), query.lastProgress
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error) or time.monotonic() > deadline:
                raise
        else:
            return query
