"""The control segment: what the agent asks reaches every rank that maps it, and a bad segment asks for nothing."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel.control import CONTROL_BYTES, ControlError, ControlReader, ControlWriter, create

MAGIC = int.from_bytes(b"gpulctrl", "little")

RANK = """
import sys, time
from gpulaunch.profiler.channel.control import ControlReader

control = ControlReader(sys.argv[1])
print("reading", flush=True)
until = time.monotonic() + 60
while not control.preempted and time.monotonic() < until:
    time.sleep(0.001)
print(control.signum, control.deadline_ns, control.save_requests)
"""


@pytest.fixture
def path(tmp_path) -> str:
    made = str(tmp_path / "control.bin")
    create(made)
    return made


def heard(reader: ControlReader) -> tuple[bool, int, int, int]:
    return reader.preempted, reader.signum, reader.deadline_ns, reader.save_requests


def test_a_new_page_asks_for_nothing_and_is_the_owners(path):
    status = os.stat(path)

    assert heard(ControlReader(path)) == (False, 0, 0, 0)
    assert (status.st_mode & 0o777, status.st_size) == (0o600, CONTROL_BYTES)
    assert status.st_blocks * 512 >= CONTROL_BYTES, "not reserved: a full tmpfs would kill the rank with SIGBUS"
    assert os.listdir(os.path.dirname(path)) == ["control.bin"]


def test_what_the_agent_asks_is_heard(path):
    reader, writer = ControlReader(path), ControlWriter(path)
    writer.request_save()
    asked_to_save = heard(reader)
    writer.request_save()
    writer.preempt(15, 10**15)
    asked_to_end = heard(reader)
    writer.close()

    assert asked_to_save == (False, 0, 0, 1)
    assert asked_to_end == heard(reader) == (True, 15, 10**15, 2)


def test_saves_are_forgotten_and_can_be_asked_for_again(path):
    reader, writer = ControlReader(path), ControlWriter(path)
    writer.request_save()

    writer.forget_saves()
    assert heard(reader) == (False, 0, 0, 0)
    writer.request_save()
    assert heard(reader) == (False, 0, 0, 1)


def test_who_is_to_make_place_is_told_until_another_attempt_begins(path):
    reader, writer = ControlReader(path), ControlWriter(path)

    told = [reader.leaves]
    for leaves in (True, False):
        writer.leave(leaves)
        told.append(reader.leaves)

    assert told == [False, True, False]


def test_another_process_hears_it(path):
    rank = subprocess.Popen([sys.executable, "-c", RANK, path], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    rank.stdout.readline()
    writer = ControlWriter(path)
    writer.request_save()
    writer.preempt(10, 42)
    said, _ = rank.communicate(timeout=60)

    assert said == "10 42 1\n"


def test_a_page_made_anew_is_another_page(path):
    """An old attempt's rank goes on reading the segment that it has; what the new one is asked is not for it."""
    old = ControlReader(path)
    create(path)
    ControlWriter(path).preempt(15, 1)

    assert heard(old) == (False, 0, 0, 0)
    assert ControlReader(path).preempted


DAMAGED = [
    (b"", "0 bytes, a control segment has 4096"),
    (b"\xff" * CONTROL_BYTES, "not a gpulaunch control segment"),
    (struct.pack("@3Q", MAGIC, 2, 1) + bytes(CONTROL_BYTES - 24), "control segment version 2"),
    (struct.pack("@3Q", MAGIC, 1, 1), "24 bytes, a control segment has 4096"),
]


@pytest.mark.parametrize(("content", "why"), DAMAGED)
def test_a_damaged_page_asks_for_nothing_and_tells_the_agent_why(tmp_path, content, why):
    path = tmp_path / "control.bin"
    path.write_bytes(content)

    assert heard(ControlReader(str(path))) == (False, 0, 0, 0)
    with pytest.raises(ControlError, match=why):
        ControlWriter(str(path))


def test_a_page_that_is_not_there_asks_for_nothing(tmp_path):
    assert heard(ControlReader(str(tmp_path / "none"))) == (False, 0, 0, 0)
    assert heard(ControlReader(str(tmp_path))) == (False, 0, 0, 0)
    assert heard(ControlReader("with a \0 in it")) == (False, 0, 0, 0)
    with pytest.raises(FileNotFoundError):
        create(str(tmp_path / "none" / "control.bin"))


def test_a_closed_reader_asks_for_nothing(path):
    writer, reader = ControlWriter(path), ControlReader(path)
    writer.preempt(15, 1)
    reader.close()
    writer.close()

    assert heard(reader) == (False, 0, 0, 0)


@given(content=st.binary(max_size=64) | st.binary(max_size=64).map(lambda start: start.ljust(CONTROL_BYTES, b"\0")))
def test_no_file_upsets_a_rank(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("control") / "control.bin"
    path.write_bytes(content)

    assert heard(ControlReader(str(path))) == (False, 0, 0, 0)
