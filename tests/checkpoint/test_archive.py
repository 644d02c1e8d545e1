"""The zip archives of torch.save: whole ones pass, and whatever happened to the others is found and said."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.checkpoint import archive
from gpulaunch.launcher.checkpoint.damaged import Damaged

pytestmark = pytest.mark.torch


def check(data: bytes, start: int = 0, length: int | None = None) -> list[archive.Member]:
    file = io.BytesIO(data)
    found = archive.members(file, start, len(data) - start if length is None else length)
    archive.check_data(file, found)
    return found


def zipped(*, method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def whole(samples: Path) -> bytes:
    return (samples / "new.pt").read_bytes()


def test_what_torch_wrote_is_whole(whole: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(whole)) as known:
        expected = {info.filename: (info.file_size, info.CRC) for info in known.infolist()}

    found = check(whole)

    assert {member.name: (member.size_bytes, member.crc) for member in found} == expected
    assert all(zlib.crc32(whole[one.start : one.start + one.size_bytes]) == one.crc for one in found)


def test_an_archive_inside_a_larger_file_is_read_in_its_place(whole: bytes) -> None:
    found = check(b"before" + whole + b"after", 6, len(whole))

    assert [member.start - 6 for member in found] == [member.start for member in check(whole)]
    with pytest.raises(Damaged):
        check(b"before" + whole + b"after", 5, len(whole))


def test_compressed_members_are_read_too() -> None:
    data = zipped(method=zipfile.ZIP_DEFLATED, a=b"x" * 3_000_000, b=b"")

    assert [member.size_bytes for member in check(data)] == [3_000_000, 0]
    with pytest.raises(Damaged, match="member a"):
        check(data[:100] + bytes([data[100] ^ 1]) + data[101:])


def test_an_archive_without_checksums_is_whole_by_its_structure(samples: Path) -> None:
    """torch.serialization.set_crc32_options(False), which torch.load reads."""
    data = (samples / "nocrc.pt").read_bytes()

    assert all(member.crc == 0 for member in check(data))
    with pytest.raises(Damaged):
        check(data[:-1])


@given(st.data())
def test_every_truncation_is_found(whole: bytes, data: st.DataObject) -> None:
    left = data.draw(st.integers(0, len(whole) - 1))

    with pytest.raises(Damaged):
        check(whole[:left])


@given(st.data())
def test_every_flipped_bit_of_a_member_is_found(whole: bytes, data: st.DataObject) -> None:
    member = data.draw(st.sampled_from([one for one in check(whole) if one.size_bytes]))
    at = member.start + data.draw(st.integers(0, member.size_bytes - 1))
    broken = bytearray(whole)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(Damaged, match=f"member {member.name} has CRC"):
        check(bytes(broken))


@given(st.data())
def test_a_lost_block_is_found(whole: bytes, data: st.DataObject) -> None:
    """What a crash leaves of a file whose size was written before its data: zeros."""
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(first + 1, len(whole)))
    broken = whole[:first] + bytes(last - first) + whole[last:]

    try:
        check(broken)
    except Damaged:
        return
    # Only padding, which no reader looks at, may have been lost.
    with zipfile.ZipFile(io.BytesIO(broken)) as known:
        assert known.testzip() is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_raise_anything_but_damaged(before: bytes, after: bytes) -> None:
    end = b"PK\x05\x06" + after[:18].ljust(18, b"\0")
    for data in (before, before + after, before + end, b"PK\x03\x04" + before + b"PK\x06\x07" + after + end):
        with pytest.raises(Damaged):
            check(data + b"!")
        try:
            check(data)
        except Damaged:
            continue


@settings(max_examples=300)
@given(st.data())
def test_no_change_to_an_archive_raises_anything_but_damaged(whole: bytes, data: st.DataObject) -> None:
    # Near the end lie the records whose fields are offsets and sizes.
    at = data.draw(st.integers(1, 600))
    change = data.draw(st.binary(min_size=1, max_size=8))
    broken = bytearray(whole)
    broken[len(whole) - at : len(whole) - at + len(change)] = change

    why = ""
    try:
        check(bytes(broken))
    except Damaged as err:
        why = str(err)
    assert why.isprintable()


def test_a_size_that_no_file_can_have_is_damage_and_reserves_no_memory(whole: bytes) -> None:
    huge = b"\xff" * 7 + b"\x7f"
    at = whole.rindex(b"PK\x06\x06")
    for field in (40, 48):
        broken = whole[: at + field] + huge + whole[at + field + 8 :]
        with pytest.raises(Damaged):
            check(broken)


def test_two_members_of_one_name_are_refused() -> None:
    with pytest.raises(Damaged, match="same name"):
        check(zipped(aa=b"1", ab=b"2").replace(b"ab", b"aa"))
