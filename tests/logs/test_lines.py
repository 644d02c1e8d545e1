from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulaunch.launcher.logs import lines
from gpulaunch.launcher.logs.lines import CONTINUES, PIECE_BYTES, LineSplitter, Tail


def reference(data: bytes, piece_bytes: int) -> tuple[list[bytes], bytes]:
    """The rules of lines.py, one byte at a time: finished lines, and the unfinished one."""
    done: list[bytes] = []
    state, returned = b"", False
    for byte in data:
        if byte == 0x0A:
            done.append(state)
            state, returned = b"", False
        elif byte == 0x0D:
            returned = True
        else:
            if returned:
                state, returned = b"", False
            if len(state) == piece_bytes:
                done.append(state + CONTINUES)
                state = b""
            state += bytes([byte])
    return done, state


noisy = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"a", b"bc", b"\xff\x00", b"12345678", b"0123456789abcdef"])
).map(b"".join)


@given(noisy, st.lists(st.integers(0, 200)))
@example(b"ab\r\ncd", [3])
@example(b"12345678\n", [])
@example(b"123456789\r\r\nx", [9, 10, 11])
def test_lines_do_not_depend_on_how_the_stream_was_cut(data: bytes, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "PIECE_BYTES", 8)
        splitter = LineSplitter()
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        blocks = [splitter.feed(data[start:end]) for start, end in itertools.pairwise(edges)]

    done, state = reference(data, 8)
    assert b"".join(line + b"\n" for line in done) == b"".join(blocks)
    assert splitter.state == state
    assert all(block == b"" or block.endswith(b"\n") for block in blocks)
    assert splitter.finish() == (state + b"\n" if state else b"")
    assert splitter.state == b""


def test_a_progress_bar_ends_in_its_last_state() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"\r 10%|#   |") == b""
    assert splitter.progress
    assert splitter.feed(b"\r 50%|##  |") == b""
    assert splitter.state == b" 50%|##  |"
    assert splitter.feed(b"\r100%|####|\nnext\n") == b"100%|####|\nnext\n"
    assert not splitter.progress


def test_a_cleared_bar_leaves_nothing_behind() -> None:
    assert LineSplitter().feed(b"\r100%|####|\r          \repoch 1\n") == b"epoch 1\n"


def test_crlf_is_a_newline_even_when_cut_between() -> None:
    splitter = LineSplitter()

    assert splitter.feed(b"one\r") == b""
    assert splitter.feed(b"\ntwo\r\r\n") == b"one\ntwo\n"
    assert not splitter.progress


def test_a_progress_bar_that_never_ends_takes_no_memory() -> None:
    splitter = LineSplitter()
    for step in range(100_000):
        splitter.feed(b"\rstep %d" % step)

    assert splitter._held == b"step 99999"


def test_a_long_line_comes_whole_and_a_huge_one_in_marked_pieces() -> None:
    splitter = LineSplitter()
    long = b"x" * 300
    assert splitter.feed(long + b"\n") == long + b"\n"
    assert splitter.feed(b"y" * PIECE_BYTES + b"\n") == b"y" * PIECE_BYTES + b"\n"

    huge = bytes(range(97, 123)) * 400_000
    pieces: list[bytes] = []
    for at in range(0, len(huge), 1 << 20):
        pieces += splitter.feed(huge[at : at + (1 << 20)]).splitlines()
        assert len(splitter._held) <= PIECE_BYTES
    pieces += splitter.feed(b"\n").splitlines()

    assert all(piece.endswith(CONTINUES) for piece in pieces[:-1])
    assert huge == b"".join(piece.removesuffix(CONTINUES) for piece in pieces)


@given(st.lists(st.lists(st.binary(max_size=3).filter(lambda line: b"\n" not in line), max_size=30)))
def test_the_tail_is_the_last_twenty_lines(blocks: list[list[bytes]]) -> None:
    tail = Tail()
    for block in blocks:
        if block:
            tail.feed(b"".join(line + b"\n" for line in block))

    known = [line for block in blocks for line in block]
    assert [lines.plain(line) for line in known[-20:]] == tail.read(20, b"")


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
