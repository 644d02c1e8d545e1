"""The words of a verb, and answers: one line for what is wrong, and nothing that a terminal would obey."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.cli import doctor
from gpulaunch.launcher.cli import main as entry
from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, count, time_s, wants_help
from gpulaunch.launcher.job.options import UsageError


@pytest.mark.parametrize(
    ("text", "value_s"),
    [("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("1d", 86400.0), ("250ms", 0.25), ("0.5", 0.5), ("0", 0.0)],
)
def test_times(text: str, value_s: float) -> None:
    assert time_s(text) == value_s


@pytest.mark.parametrize("text", ["", "s", "ms", "-1s", "-1ms", "nan", "inf", "1e99", "2 minutes", "1s1s", "1sms"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 250ms, 30s"):
        time_s(text)


@given(st.text(max_size=8))
def test_any_text_is_a_time_or_told_to_be_none(text: str) -> None:
    with contextlib.suppress(argparse.ArgumentTypeError):
        assert 0 <= time_s(text) < 1e9


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "\u0663", "x"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number from 1"):
        count(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lenght", "3"], "verb: unknown argument --lenght; did you mean --length?"),
        (["--lenght=3"], "verb: unknown argument --lenght=3; did you mean --length?"),
        (["--length"], "verb: argument --length: expected one argument"),
        (["--length", "0"], "verb: argument --length: expected a number from 1, got '0'"),
        (["more"], "verb: unknown argument more"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], told: str) -> None:
    parser = VerbParser("verb")
    parser.add_argument("--length", type=count)

    with pytest.raises(UsageError) as error:
        parser.read(words)
    assert str(error.value) == told


def test_who_wants_help() -> None:
    assert [wants_help(words) for words in (["help"], ["x", "-h"], ["--help"], ["x", "help"], [])] == [
        *(True, True, True),
        *(False, False),
    ]


def test_an_answer_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    answer("a\x1b]0;owned\x07\tb\n\udcff\u202e\n")

    assert capsys.readouterr().out == "a\\x1b]0;owned\\x07\tb\n\\udcff\\u202e\n"


def test_an_answer_that_the_terminal_has_no_letters_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    answer("gew\u00f6hnlich\n")

    assert terminal.buffer.getvalue() == b"gew?hnlich\n"  # type: ignore[attr-defined]


def test_a_complaint_is_one_line_whatever_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def complain(argv: object) -> int:
        raise UsageError("no run in a\nb\x1b[2J\udcff")

    monkeypatch.setattr(doctor, "run", complain)

    assert entry.main(["doctor"]) == 2
    assert capsys.readouterr().err == "gpulaunch: error: no run in a b\\x1b[2J\\udcff\n"


@pytest.mark.parametrize(
    "verb", ["chaos", "compare", "doctor", "export", "flame", "init", "report", "runs", "top", "trace"]
)
def test_every_verb_tells_its_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([verb, "--help"]) == 0

    said = capsys.readouterr().out
    assert said.startswith(f"usage: gpulaunch {verb} ")
    assert "xit code" in said, "what a script needs to know"
    assert max(map(len, said.splitlines())) <= 120
