"""Small files beside the pages: whole or not at all, for their owner only, and nothing is waited for."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.files import read_file, regular, write_file


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


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "link to what has no end"])
def test_what_is_no_file_is_neither_read_nor_written_to(path: Path, kind: str) -> None:
    draft = path.with_name("small.json.tmp")
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("somebody's")
    for place in (path, draft):
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "directory":
            place.mkdir()
        else:
            place.symlink_to("/dev/zero" if kind == "link to what has no end" else elsewhere)
    with pytest.raises(OSError):  # noqa: PT011 - which one is the kernel's business
        write_file(path, ["mine"])
    if kind != "link":  # a link to a file is one, to be read
        with pytest.raises(OSError, match=r"Is a directory|not a regular file"):
            read_file(path)

    assert elsewhere.read_text() == "somebody's"


def test_what_has_no_end_is_not_read_to_it(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(1 << 40)

    with pytest.raises(OSError, match="File too large"):
        read_file(path, most_bytes=1000)
    with open(path, "rb", opener=regular) as file:
        assert file.read(10) == bytes(10)
