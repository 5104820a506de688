"""Checks that optional packages are installed, and the errors that are raised if they are not.

``pip install sparklog`` installs what clients and the command line need; ``pip install sparklog[spark]`` adds Spark.
This module does not import Spark.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NoReturn

from sparklog.errors import ConfigError

#: The top-level modules that are installed with Spark.
_OF_SPARK = {"pyspark", "py4j"}


def spark_missing(what: str) -> ConfigError:
    """Return the error that says that ``what`` needs Spark and that Spark is not installed."""
    return ConfigError(f"{what} needs Spark, which is not installed: run pip install 'sparklog[spark]'")


def is_spark(missing: ModuleNotFoundError) -> bool:
    """Return whether the missing module is a part of Spark."""
    return (missing.name or "").partition(".")[0] in _OF_SPARK


def require_spark(what: str) -> None:
    """Check that Spark is installed, without importing it.

    Raises:
        ConfigError: Spark is not installed, so ``what`` cannot be done.
    """
    if find_spec("pyspark") is None:
        raise spark_missing(what)


def require_cryptography(what: str) -> None:
    """Check that the package ``cryptography`` is installed, without importing it.

    Raises:
        ConfigError: the package is not installed. ``what`` names the feature that needs it.
    """
    if find_spec("cryptography") is None:
        raise ConfigError(f"{what} needs the package cryptography: run pip install 'sparklog[certs]'")


def require_jwt(what: str) -> None:
    """Check that the packages ``PyJWT`` and ``cryptography`` are installed, without importing them.

    Raises:
        ConfigError: a package is not installed, so ``what`` cannot be done.
    """
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise ConfigError(f"{what} needs the package PyJWT: run pip install 'sparklog[oauth]'")


def without_spark(name: str) -> type:
    """Return a class that takes the place of sparklog's public class ``name`` if Spark is not installed.

    A program can import this class and use it in annotations. A call of the class raises ConfigError.
    """

    def refuse(_cls: type, *_: object, **__: object) -> NoReturn:
        raise spark_missing(f"sparklog.{name}")

    doc = f"{spark_missing(f'sparklog.{name}')}."
    return type(name, (), {"__new__": refuse, "__module__": "sparklog", "__doc__": doc})
