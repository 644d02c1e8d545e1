from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.launcher.logs import lines
from gpulaunch.launcher.logs.lines import LONGEST_BYTES, PROGRESS_BYTES, LineSplitter, Tail, last_state

noisy = st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"bc", b"\xff\x00", b"x" * 300])).map(b"".join)


@given(noisy, st.lists(st.integers(0, 200)))
@example(b"ab\r\ncd", [3])
@example(b"12345678\n", [])
def test_bytes_stay_as_they_are_and_blocks_are_whole_lines(data: bytes, cuts: list[int]) -> None:
    splitter = LineSplitter()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    blocks = [splitter.feed(data[start:end]) for start, end in itertools.pairwise(edges)]

    rest = data[data.rfind(b"\n") + 1 :]
    assert splitter.state == rest.rstrip(b"\r").rpartition(b"\r")[2]
    assert splitter.progress == (b"\r" in rest)
    assert b"".join(blocks) + splitter.finish() == data
    assert all(block == b"" or block.endswith(b"\n") for block in blocks)
    assert (splitter.state, splitter.finish()) == (b"", b"")


def test_what_a_terminal_shows_of_a_progress_bar_is_its_last_state() -> None:
    assert last_state(b"\r 10%|#   |\r100%|####|") == b"100%|####|"
    assert last_state(b"\r100%|####|\r          \repoch 1") == b"epoch 1"
    assert last_state(b"one\r\r") == b"one", "of a line that was ended by \\r\\n"


def test_a_progress_bar_that_never_ends_takes_no_memory_and_loses_nothing() -> None:
    splitter = LineSplitter()
    given = b""
    for step in range(30_000):
        splitter.feed(b"\rstep %d" % step)
        given += splitter.excess()
        assert len(splitter.held) <= PROGRESS_BYTES

    assert splitter.state == b"step 29999"
    assert given + splitter.finish() == b"".join(b"\rstep %d" % step for step in range(30_000))
    assert given.endswith(b"\r"), "whole states"


def test_a_line_of_many_megabytes_is_one_line_and_one_without_an_end_is_given_out() -> None:
    splitter = LineSplitter()
    piece = b"y" * (1 << 20)
    for _ in range(10):
        assert (splitter.feed(piece), splitter.excess()) == (b"", b"")
    assert splitter.feed(b"\n") == piece * 10 + b"\n"

    given = 0
    for _ in range(40):
        splitter.feed(piece)
        given += len(splitter.excess())
    assert given + len(splitter.held) == 40 << 20
    assert len(splitter.held) <= LONGEST_BYTES


@given(st.lists(st.lists(st.binary(max_size=3).filter(lambda line: b"\n" not in line), max_size=30)))
def test_the_tail_is_the_last_twenty_lines(blocks: list[list[bytes]]) -> None:
    tail = Tail()
    for block in blocks:
        if block:
            tail.feed(b"".join(line + b"\n" for line in block))

    known = [line for block in blocks for line in block]
    assert [lines.plain(last_state(line)) for line in known[-20:]] == tail.read(20, b"")


def test_a_tail_is_bounded_plain_text() -> None:
    tail = Tail()
    tail.feed(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \xff\n" + b"z" * 5000 + b"\n")

    assert tail.read(20, b"not yet ended") == [
        r"red \x1b]0;title\x07 \xff",
        "z" * 2048 + "...",
        "not yet ended",
    ]
    assert tail.read(1, b"") == ["z" * 2048 + "..."]
    assert tail.read(0, b"x") == []
