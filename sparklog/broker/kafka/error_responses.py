"""The responses of Kafka's APIs to a request that has failed as a whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sparklog.kafka.wire import ApiKey
from sparklog.kafka.wire.fields import RESPONSES, fields_of


def error_response(api_key: int, version: int, code: int, detail: str) -> Any | None:
    """Return the response of an API with an error code, and with the error's text if the response has a field for it.

    Return None if the response has no error code for the whole request in this version.
    """
    codes, texts = _fields(api_key, version)
    if not codes:
        return None
    declared = RESPONSES[ApiKey(api_key)].declared
    return declared(error_code=code, **({"error_message": detail} if texts else {}))


@lru_cache(maxsize=1000)
def _fields(api_key: int, version: int) -> tuple[bool, bool]:
    """Return whether the response has a top-level error code, and whether it has a field for an error's text."""
    versions = {field.name: field.versions for field in fields_of(RESPONSES[ApiKey(api_key)].declared)}
    code, text = (name in versions and version in versions[name] for name in ("error_code", "error_message"))
    return code, text
