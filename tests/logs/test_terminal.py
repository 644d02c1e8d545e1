from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.logs.terminal import inert, plain, ranks_label, wants_color


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"plain\ttext\n", b"plain\ttext\n"),
        (b"\x1b]0;owned\x07\n", b"\\x1b]0;owned\\x07\n"),
        (b"\x1b[2J\x1b[H\n", b"\\x1b[2J\\x1b[H\n"),
        (b"a\x08b\x7f\x00\n", b"a\\x08b\\x7f\\x00\n"),
        ("caf\u00e9 \u2588\n".encode(), "caf\u00e9 \u2588\n".encode()),
        (b"\xff\xfe\x80\n", b"\\xff\\xfe\\x80\n"),
        ("\u009b2J\n".encode(), b"\\x9b2J\n"),
        (b"\x1b[31mred\nnext\n", b"\x1b[31mred\x1b[0m\nnext\n"),
        (b"\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\n"),
        (b"\x1b[31mred\x1b[m\n", b"\x1b[31mred\x1b[m\n"),
        (b"\x1b[0;31mred\n", b"\x1b[0;31mred\x1b[0m\n"),
        (b"\x1b[38;5;0mblack\n", b"\x1b[38;5;0mblack\x1b[0m\n"),
        (b"\x1b[38:5:1mred\n", b"\x1b[38:5:1mred\x1b[0m\n"),
        (b"cut \x1b[3\n", b"cut \\x1b[3\n"),
    ],
)
def test_only_colours_and_tabs_reach_a_terminal(said: bytes, shown: bytes) -> None:
    assert inert(said) == shown


@given(st.lists(st.sampled_from([b"\x1b[31m", b"\x1b", b"[", b"m", b"0", b"\n", b"\xc2\x9b", b"\xff", b"x", b"\x07"])))
def test_nothing_gets_through(parts: list[bytes]) -> None:
    shown = inert(b"".join(parts))

    text = re.sub(r"\x1b\[[0-9;:]*m", "", shown.decode())
    assert not [char for char in text if (ord(char) < 32 and char not in "\t\n") or 127 <= ord(char) < 160]
    for line in shown.split(b"\n"):
        colors = re.findall(rb"\x1b\[([0-9;:]*)m", line)
        assert not colors or not colors[-1].strip(b"0;")
    assert shown.count(b"\n") == b"".join(parts).count(b"\n")


@given(st.binary().filter(lambda line: b"\n" not in line))
def test_reports_get_plain_text(line: bytes) -> None:
    assert all(char == "\t" or char.isprintable() or ord(char) >= 160 for char in plain(line))


def test_ranks_are_named_as_a_reader_says_them() -> None:
    assert ranks_label([0]) == "0"
    assert ranks_label(range(8)) == "0-7"
    assert ranks_label([6, 2, 0, 1, 3]) == "0-3,6"
    assert ranks_label([1, 2, 4, 5, 9]) == "1-2,4-5,9"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_label_names_each_rank_once(ranks: set[int]) -> None:
    named: list[int] = []
    for run in ranks_label(ranks).split(","):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert sorted(ranks) == named


def test_colours_are_for_terminals_whose_user_wants_them() -> None:
    assert wants_color({"TERM": "xterm"}, is_tty=True)
    assert wants_color({"TERM": "xterm", "NO_COLOR": ""}, is_tty=True)
    assert not wants_color({"TERM": "xterm", "NO_COLOR": "1"}, is_tty=True)
    assert not wants_color({"TERM": "dumb"}, is_tty=True)
    assert not wants_color({"TERM": "xterm"}, is_tty=False)
