"""The rows of the table, one module for each kind of work, in the order in which they are printed."""

from __future__ import annotations

from bench.measure import Row
from bench.rows import produce

ROWS: tuple[Row, ...] = (*produce.ROWS,)
