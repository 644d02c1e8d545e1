"""What a rank prints, made fit for a terminal."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure.redact import inert


def test_control_characters_are_shown_and_not_obeyed() -> None:
    text = "a\tb\n\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eevil \udcff \u00e9 \U0001f600"

    assert inert(text) == "a\tb\n\\x1b[2J\\x1b]0;title\\x07\\r\\x9b31m\\u202eevil \\udcff \u00e9 \U0001f600"


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_inert_text_can_always_be_written(text: str) -> None:
    shown = inert(text)

    assert shown.encode("utf-8").decode("utf-8") == shown
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in shown if char not in "\t\n")
    assert not any(
        unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI") for char in shown
    )
