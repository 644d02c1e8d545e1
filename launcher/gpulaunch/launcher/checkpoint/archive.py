"""Checks a zip archive as torch.save writes it, record by record: end, central directory, local headers, CRCs.

Not `zipfile`: it searches for the end of an archive, tolerates inconsistencies and takes the last entry of a name. Of
all single-bit flips in a file of torch.save, some 380 that torch.load refuses pass it (tried 2026-11), and a hostile
size makes it take gigabytes. Here everything must be where the format says; and an archive may be a window of a larger
file, as in the shards of torch.distributed.checkpoint. Read in chunks; for any input, only Damaged is raised.

PKWARE's APPNOTE.TXT 6.3.10: sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (ends).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gpulaunch.launcher.checkpoint.damaged import Damaged

LOCAL_MAGIC = b"PK\x03\x04"
END_MAGIC = b"PK\x05\x06"
_CENTRAL_MAGIC = b"PK\x01\x02"
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR_MAGIC = b"PK\x06\x07"

_LOCAL = struct.Struct("<4s2xHH8x8xHH")  # flags, method, length of the name, length of the extra field
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHH8xL")
_END = struct.Struct("<4sHHHHLLH")
_END64 = struct.Struct("<4sQ4xLLQQQQ")
_LOCATOR = struct.Struct("<4sLQL")

END_BYTES = _END.size
_CENTRAL_CAP_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_STORED, _DEFLATED = 0, 8


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of the archive; `start` is the offset of its data in the file that holds the archive."""

    name: str
    method: int
    crc: int
    stored_bytes: int
    size_bytes: int
    start: int


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """The content of the end records; `at` is where the central directory must have ended."""

    at: int
    count: int
    size_bytes: int
    offset: int


def members(file: BinaryIO, start: int, length: int) -> list[Member]:
    """Read the structure of the archive that fills `length` bytes from `start`. Raises Damaged."""
    ending = _ending(file, start, length)
    if ending.offset + ending.size_bytes != ending.at:
        raise Damaged(
            f"its central directory should end at byte {ending.offset + ending.size_bytes}, and the end record is at "
            f"{ending.at}"
        )
    if ending.size_bytes > _CENTRAL_CAP_BYTES:
        raise Damaged(f"its central directory has {ending.size_bytes} bytes")
    central = _read(file, start + ending.offset, ending.size_bytes, "its central directory")
    found: list[Member] = []
    taken_to = 0
    for member in sorted(_entries(central), key=lambda one: one.start):
        data_at = _data_start(file, start, member)
        # Header and data of a member must lie between those of its neighbours, and before the central directory.
        if member.start < taken_to or data_at + member.stored_bytes > ending.offset:
            raise Damaged(f"member {member.name} ({member.stored_bytes} bytes) does not fit at its position")
        taken_to = data_at + member.stored_bytes
        found.append(
            Member(
                name=member.name,
                method=member.method,
                crc=member.crc,
                stored_bytes=member.stored_bytes,
                size_bytes=member.size_bytes,
                start=start + data_at,
            )
        )
    if len(found) != ending.count:
        raise Damaged(f"its central directory has {len(found)} of {ending.count} entries")
    if len({member.name for member in found}) != len(found):
        raise Damaged("two of its members have the same name")
    return found


def check_data(file: BinaryIO, found: list[Member]) -> None:
    """Compare every member's bytes with its CRC. Raises Damaged.

    With torch.serialization.set_crc32_options(False) every CRC is zero: there is nothing to compare with.
    """
    if all(member.crc == 0 for member in found):
        return
    for member in found:
        crc = size_bytes = 0
        for chunk in _data(file, member):
            crc = zlib.crc32(chunk, crc)
            size_bytes += len(chunk)
        if size_bytes != member.size_bytes:
            raise Damaged(f"member {member.name} has {size_bytes} of {member.size_bytes} bytes")
        if crc != member.crc:
            raise Damaged(f"member {member.name} has CRC {crc:08x}, and {member.crc:08x} was written")


def content(file: BinaryIO, member: Member, cap_bytes: int) -> bytes:
    """Return a small member's data. Raises Damaged."""
    if member.size_bytes > cap_bytes:
        raise Damaged(f"member {member.name} has {member.size_bytes} bytes")
    return b"".join(_data(file, member))


def _data(file: BinaryIO, member: Member) -> Iterator[bytes]:
    """Yield the member's data in chunks, never more than its size and one chunk."""
    file.seek(member.start)
    left = member.stored_bytes
    inflate = zlib.decompressobj(-15) if member.method == _DEFLATED else None
    given = 0
    while left:
        chunk = file.read(min(_CHUNK_BYTES, left))
        if not chunk:
            raise Damaged(f"member {member.name} ends {left} bytes early")
        left -= len(chunk)
        while chunk:
            data = chunk
            chunk = b""
            if inflate is not None:
                try:
                    data = inflate.decompress(data, _CHUNK_BYTES)
                except zlib.error:
                    raise Damaged(f"member {member.name} cannot be decompressed") from None
                chunk = inflate.unconsumed_tail
            given += len(data)
            yield data
            if given > member.size_bytes:
                return


def _ending(file: BinaryIO, start: int, length: int) -> _Ending:
    if length < END_BYTES:
        raise Damaged(f"it has only {length} bytes")
    at = length - END_BYTES
    record = _read(file, start + at, END_BYTES, "its end record")
    magic, disk, first_disk, count_here, count, size_bytes, offset, comment = _END.unpack(record)
    if magic != END_MAGIC or comment:
        raise Damaged("it has no end record: it is cut off, or something follows it")
    if disk or first_disk or count_here != count:
        raise Damaged("its end record is invalid")
    if at < _LOCATOR.size:
        return _Ending(at=at, count=count, size_bytes=size_bytes, offset=offset)
    magic, disk, at64, disks = _LOCATOR.unpack(_read(file, start + at - _LOCATOR.size, _LOCATOR.size, "its end record"))
    if magic != _LOCATOR_MAGIC:
        return _Ending(at=at, count=count, size_bytes=size_bytes, offset=offset)
    if disk or disks > 1 or at64 + _END64.size + _LOCATOR.size > at:
        raise Damaged("its zip64 locator is invalid")
    magic, room, disk, first_disk, count_here, count64, size64, offset64 = _END64.unpack(
        _read(file, start + at64, _END64.size, "its zip64 end record")
    )
    if magic != _END64_MAGIC or disk or first_disk or count_here != count64 or at64 + 12 + room != at - _LOCATOR.size:
        raise Damaged("its zip64 end record is invalid")
    told = ((count, count64, 0xFFFF), (size_bytes, size64, 0xFFFFFFFF), (offset, offset64, 0xFFFFFFFF))
    if any(small not in (large, full) for small, large, full in told):
        raise Damaged("its two end records differ")
    return _Ending(at=at64, count=count64, size_bytes=size64, offset=offset64)


def _entries(central: bytes) -> Iterator[Member]:
    """The entries of the central directory; `start` is still the local header, relative to the archive."""
    at = 0
    while at < len(central):
        if at + _CENTRAL.size > len(central):
            raise Damaged("its central directory is cut off")
        (magic, flags, method, crc, stored_bytes, size_bytes, name_bytes, extra_bytes, comment_bytes, header_at) = (
            _CENTRAL.unpack_from(central, at)
        )
        at += _CENTRAL.size
        if magic != _CENTRAL_MAGIC or at + name_bytes + extra_bytes + comment_bytes > len(central):
            raise Damaged("its central directory is invalid")
        name = central[at : at + name_bytes].decode("utf-8", "replace")
        extra = central[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        wide = _wide(extra, name, [value == 0xFFFFFFFF for value in (size_bytes, stored_bytes, header_at)])
        size_bytes, stored_bytes, header_at = (
            small if large is None else large
            for small, large in zip((size_bytes, stored_bytes, header_at), wide, strict=True)
        )
        if flags & 1 or method not in (_STORED, _DEFLATED) or (method == _STORED and stored_bytes != size_bytes):
            raise Damaged(f"member {name} is stored in a way that torch.save does not use")
        yield Member(
            name=name, method=method, crc=crc, stored_bytes=stored_bytes, size_bytes=size_bytes, start=header_at
        )


def _wide(extra: bytes, name: str, wanted: list[bool]) -> list[int | None]:
    """The 64-bit values of the zip64 extra field (id 1): only those whose 32-bit field is all ones, in this order."""
    if not any(wanted):
        return [None, None, None]
    at = 0
    while at + 4 <= len(extra):
        kind, size_bytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            field = extra[at : at + size_bytes]
            if len(field) < 8 * sum(wanted):
                break
            values = iter(struct.unpack_from(f"<{sum(wanted)}Q", field))
            return [next(values) if want else None for want in wanted]
        at += size_bytes
    raise Damaged(f"member {name} lacks its 64-bit sizes")


def _data_start(file: BinaryIO, start: int, member: Member) -> int:
    """Read the local header, which must match the central one; return where the data begins, relative to `start`."""
    header = _read(file, start + member.start, _LOCAL.size, f"the header of member {member.name}")
    magic, flags, method, name_bytes, extra_bytes = _LOCAL.unpack(header)
    name = _read(file, start + member.start + _LOCAL.size, name_bytes, f"the header of member {member.name}")
    if magic != LOCAL_MAGIC or flags & 1 or method != member.method or name.decode("utf-8", "replace") != member.name:
        raise Damaged(f"the header of member {member.name} is invalid")
    return member.start + _LOCAL.size + int(name_bytes) + int(extra_bytes)


def _read(file: BinaryIO, at: int, size_bytes: int, what: str) -> bytes:
    try:
        file.seek(at)
        data = file.read(size_bytes)
    except (OverflowError, ValueError):  # an offset larger than any file can be
        raise Damaged(f"{what} is outside of the file") from None
    if len(data) != size_bytes:
        raise Damaged(f"{what} is cut off")
    return data
