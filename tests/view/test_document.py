"""A view as JSON and back, with whatever users have put into names; and text made harmless."""

from __future__ import annotations

import json
import math
import unicodedata
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_run import GC, SYNC, state
from runs_on_disk import NOW_S, whole

from gpulaunch.exporters.view.as_json import from_json, to_json
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import VERSION, RunView
from gpulaunch.exporters.view.text import inert

LIVE = view_of_state(state(10.0, findings=(SYNC, GC), gpu=True), earlier=state(5.0))


def test_every_field_is_in_the_document_and_comes_back(tmp_path: Path) -> None:
    for view in (LIVE, load_run(whole(tmp_path / "run", gpu=True, findings=(SYNC,)), now_s=NOW_S)):
        document = json.loads(json.dumps(to_json(view), allow_nan=False))

        assert document.pop("version") == VERSION
        assert list(document) == [field.name for field in fields(RunView)]
        again = from_json({"version": VERSION, **document})
        assert to_json(again) == {"version": VERSION, **document}
        assert again.ranks[0].phase_ratios_now.keys() == view.ranks[0].phase_ratios_now.keys()
        assert again.status is view.status


@given(st.text(st.characters()), st.text(st.characters(categories=["Cs", "Cc", "Cf"])))
def test_any_text_is_carried_and_no_text_breaks_the_document(name: str, odd: str) -> None:
    found = replace(LIVE.findings[0], file=odd, evidence={odd: name})
    view = replace(LIVE, name=name, command=(odd, name), notes=(odd,), findings=(found,))

    text = json.dumps(to_json(view), allow_nan=False)

    text.encode("utf-8")
    assert from_json(json.loads(text)).name == name.encode("utf-8", "replace").decode("utf-8")


def test_numbers_are_finite_and_short() -> None:
    view = replace(
        LIVE, steps_per_second=(math.nan, math.inf, 1 / 3, None), step_seconds_now=math.nan, made_s=1790000000.123456
    )
    document = to_json(view)

    assert document["steps_per_second"] == [None, None, 0.333333, None]
    assert document["step_seconds_now"] is None
    assert document["made_s"] == 1790000000.123


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "version None"),
        ({"version": 2}, "version 2, this gpulaunch knows 1"),
        ({"version": 1}, "damaged view"),
        ({**to_json(LIVE), "ranks": 3}, "damaged view"),
        ({**to_json(LIVE), "status": "asleep"}, "asleep"),
        ({**to_json(LIVE), "ranks": [{"rank": "zero"}]}, "no int"),
    ],
)
def test_what_is_no_view_is_refused_in_one_line(document: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        from_json(document)

    assert "\n" not in str(refused.value)


def test_fields_of_a_later_gpulaunch_are_passed_over() -> None:
    assert from_json({**to_json(LIVE), "mood": "good"}).name == "demo"


# -- text


def test_what_a_terminal_would_obey_is_shown_instead() -> None:
    assert inert("\x1b[31mred\x1b[0m\x07") == r"\x1b[31mred\x1b[0m\x07"
    assert inert("a\u202eb\u2066c\u200bd\u2028e\x9bf\ud800") == r"a\u202eb\u2066c\u200bd\u2028e\x9bf\ud800"
    assert inert("two\nlines\tand a tab") == r"two\nlines\tand a tab"


def test_plain_text_of_any_script_stays() -> None:
    for text in ("train.py:88 main", "Gr\u00fc\u00dfe", "\u8bad\u7ec3", "\U0001f600", "50 % <b>"):
        assert inert(text) == text


@given(st.text(st.characters()))
def test_nothing_is_left_that_does_anything(text: str) -> None:
    shown = inert(text)

    shown.encode("utf-8")
    bad = [char for char in shown if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")]
    assert bad == []
    assert not any(
        unicodedata.bidirectional(char) in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
        for char in shown
    )
