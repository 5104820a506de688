"""Tests of the display of text from other users."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sparklog.escaping import escaped, escaped_json, escaped_lines, shown_bytes


def test_unprintable_characters_are_escaped() -> None:
    assert escaped("reports, Zürich 日本") == "reports, Zürich 日本"
    assert escaped("\x1b]0;owned\x07\x9b31m") == r"\x1b]0;owned\x07\x9b31m"
    assert escaped("a\r\nb\tc\x7f\u2028") == r"a\r\nb\tc\x7f\u2028"
    assert escaped("\u202egnp.exe\U000e0041\ud800") == r"\u202egnp.exe\U000e0041\ud800"
    assert escaped_lines("a\n\x1bb") == "a\n\\x1bb"
    assert shown_bytes(b"a\tb\xff\x1b\n") == rb"a\tb\xff\x1b\n".replace(rb"\t", b"\t")


@given(st.text())
def test_escaped_text_prints_and_can_be_encoded(text: str) -> None:
    assert escaped(text).isprintable()
    escaped(text).encode()
    assert all(line.isprintable() for line in escaped_lines(text).split("\n"))


@given(st.text(alphabet=st.characters(codec="utf-8")), st.sampled_from([None, 2]))
def test_escaped_json_prints_and_means_the_same(text: str, indent: int | None) -> None:
    shown = escaped_json(json.dumps([{text: text}], ensure_ascii=False, indent=indent))
    assert shown.replace("\n", "").isprintable()
    assert json.loads(shown) == [{text: text}]
