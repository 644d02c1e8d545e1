"""Files that are read while others write them, cut them short or put something else in their place."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulaunch.profiler.channel.mapping import OpenFile, make

BYTES = 4096
MAGIC = 0x1234


class ThingError(ValueError):
    """It is not the thing."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "words.bin")
    make(made, BYTES, (MAGIC, 1))
    return made


def held(path: str) -> OpenFile:
    return OpenFile(path, size_bytes=BYTES, magic=MAGIC, version=1, what="thing", error=ThingError)


def test_what_is_written_is_read(path: str) -> None:
    reader = held(path)
    with open(path, "r+b") as file:
        file.seek(64)
        file.write(b"news")

    assert reader.piece(64, 4) == b"news"
    reader.check()
    reader.close()


def test_a_piece_that_is_not_there_any_more_is_an_error(path: str) -> None:
    reader = held(path)
    os.truncate(path, 100)

    assert reader.piece(0, 100) == struct.pack("@2Q", MAGIC, 1) + bytes(84)
    with pytest.raises(ThingError, match="this thing has been cut short"):
        reader.piece(96, 8)
    with pytest.raises(ThingError, match="100 bytes, a thing has 4096"):
        reader.check()
    reader.close()


def test_what_was_written_over_is_noticed(path: str) -> None:
    reader = held(path)
    Path(path).write_bytes(b"\xff" * BYTES)

    with pytest.raises(ThingError, match="not a gpulaunch thing"):
        reader.check()
    reader.close()


def test_a_file_that_is_replaced_stays_what_it_was(path: str) -> None:
    reader = held(path)
    before = reader.replaced()
    make(path, BYTES, (MAGIC, 2))
    after = reader.replaced()
    os.unlink(path)

    assert (before, after, reader.replaced()) == (False, True, True)
    reader.check()
    reader.close()


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "endless"])
def test_nobody_waits_for_what_is_no_file(path: str, kind: str) -> None:
    os.unlink(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    else:
        os.symlink(path if kind == "loop" else "/dev/zero", path)

    with pytest.raises((ThingError, OSError)):
        held(path)


def test_a_closed_one_may_be_closed_again(path: str) -> None:
    reader = held(path)
    reader.close()
    reader.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.piece(0, 8)


WRITER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
print("ready", flush=True)
while True:
    for value in (0, 0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF, 0xFEDCBA9876543210):
        for index in range(2, 512):
            words[index] = value
"""
WHOLE = {0, 0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF, 0xFEDCBA9876543210}


def test_no_word_is_ever_read_in_part(path: str) -> None:
    """A process writes words by single stores, of numbers that differ in every byte, while they are read."""
    reader = held(path)
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen: set[int] = set()
        reads = changes = 0
        until_s = time.monotonic() + 60
        while reads < 20_000 or changes < 100:  # on a busy machine the two may take turns for a while
            assert time.monotonic() < until_s, f"{changes} changes in {reads} reads"
            reads += 1
            one, page = reader.piece(8 * 300, 8), reader.piece(0, BYTES)
            seen |= {*struct.unpack("@512Q", page)[2:], *struct.unpack("@Q", one)}
            changes += page[8 * 300 : 8 * 301] != one
        writer.kill()
    reader.close()

    assert seen == WHOLE
