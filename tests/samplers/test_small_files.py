"""Small files beside the pages: whole or not at all, for their owner only, and nothing is waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.files import read_file, regular, replacing, write_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.json"


def test_what_is_written_is_read(path: Path) -> None:
    write_file(path, ["a", "\u00e9\n", "\ud800"])  # names of files may hold what is no text

    assert read_file(path) == "a\u00e9\n?".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_reader_finds_the_old_file_until_the_new_one_is_whole(path: Path) -> None:
    write_file(path, ["old"])
    seen: list[bytes] = []

    def pieces() -> Iterator[str]:
        for piece in ("n", "e", "w"):
            seen.append(read_file(path))
            yield piece

    write_file(path, pieces())

    assert (seen, read_file(path)) == ([b"old"] * 3, b"new")


def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    """A disk that is full is not to stay full of drafts."""
    write_file(path, ["old"])

    def pieces() -> Iterator[str]:
        yield "x" * 100_000
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        write_file(path, pieces())

    assert read_file(path) == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_a_draft_that_a_killed_writer_left_is_no_hindrance(path: Path) -> None:
    path.with_name("small.json.tmp").write_text("half of a longer tex")
    write_file(path, ["whole"])

    assert read_file(path) == b"whole"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "hard link", "link to what has no end"])
def test_what_is_no_file_is_neither_read_nor_written_to(path: Path, kind: str) -> None:
    """What lies in the way is replaced if it can be, and led to nobody."""
    draft = path.with_name("small.json.tmp")
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("somebody's")
    for place in (path, draft):
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "directory":
            place.mkdir()
        elif kind == "hard link":
            place.hardlink_to(elsewhere)
        else:
            place.symlink_to("/dev/zero" if kind == "link to what has no end" else elsewhere)
    if kind not in ("link", "hard link"):  # a link to a file is one, to be read
        with pytest.raises(OSError, match=r"Is a directory|not a regular file"):
            read_file(path)
    if kind == "directory":
        with pytest.raises(IsADirectoryError):
            write_file(path, ["mine"])
    else:
        write_file(path, ["mine"])
        assert read_file(path) == b"mine"
        assert sorted(os.listdir(path.parent)) == ["elsewhere", path.name]

    assert elsewhere.read_text() == "somebody's"


def test_others_may_read_it_where_that_is_asked_for_whatever_the_umask(path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_file(path, [b"\xff"], mode=0o644)
    finally:
        os.umask(before)

    assert read_file(path) == b"\xff"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_two_writers_with_drafts_of_their_own_leave_the_file_of_the_one_or_the_other(path: Path) -> None:
    with replacing(path, suffix=".1.part") as one:
        one.write(b"half of ")
        with replacing(path, suffix=".2.part") as other:
            other.write(b"two")
        assert read_file(path) == b"two"
        one.write(b"one")

    assert read_file(path) == b"half of one"
    assert os.listdir(path.parent) == [path.name]


def test_what_has_no_end_is_not_read_to_it(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(1 << 40)

    with pytest.raises(OSError, match="File too large"):
        read_file(path, most_bytes=1000)
    with open(path, "rb", opener=regular) as file:
        assert file.read(10) == bytes(10)
