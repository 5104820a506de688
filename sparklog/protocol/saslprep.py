"""The normalization of user names and passwords, so that equal texts have equal bytes.

This module is pure. Source: RFC 4013 (SASLprep), a profile of RFC 3454 (stringprep), which uses Unicode 3.2.
"""

from __future__ import annotations

import stringprep
from unicodedata import ucd_3_2_0

from sparklog.errors import ConfigError

_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def saslprep(text: str, *, stored: bool = False) -> str:
    """Return the normalized form of a user name or password.

    With ``stored``, refuse characters that Unicode 3.2 does not define, because later Unicode versions may normalize
    them differently.

    Raises:
        ConfigError: the text is empty or has characters that are not allowed. The error does not quote the text.
    """
    if text.isascii() and text.isprintable() and text:
        return text
    mapped = "".join(" " if stringprep.in_table_c12(one) else one for one in text if not stringprep.in_table_b1(one))
    prepared = ucd_3_2_0.normalize("NFKC", mapped)
    if not prepared:
        raise ConfigError("a user name or password is empty")
    if any(prohibited(one) for one in prepared for prohibited in _PROHIBITED):
        raise ConfigError("a user name or password has a character that is not allowed, such as a control character")
    if stored and any(stringprep.in_table_a1(one) for one in prepared):
        raise ConfigError("a user name or password has a character that Unicode 3.2 does not have")
    if any(map(stringprep.in_table_d1, prepared)) and not _is_right_to_left(prepared):
        raise ConfigError("a user name or password mixes writing directions")
    return prepared


def _is_right_to_left(text: str) -> bool:
    """Return whether a text begins and ends with a right-to-left character and has no left-to-right characters.

    Source: RFC 3454, section 6.
    """
    ends = stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])
    return ends and not any(map(stringprep.in_table_d2, text))
