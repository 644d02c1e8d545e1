"""Verifies files of torch.save: zip archives since torch 1.6, and the stream of pickles and storages before.

A zip archive has a CRC for each member, so any change is detected. The older format has no checksum: its pickles are
followed as data and must name exactly the storages that fill the file to its last byte, so a truncated file is
detected, and a flipped bit inside a tensor is not. The still older tar format (torch before 0.2) is not accepted.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from gpulaunch.launcher.checkpoint import archive, pickles
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.pickles import PickledObject
from gpulaunch.launcher.checkpoint.source import Entry

# The first pickle of the old format: the number 0x1950a86a20f9469cfc6c (torch/serialization.py, MAGIC_NUMBER).
_OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_OLD_STORAGES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4", "Untyped"), 1),
    "ComplexDouble": 16,
}
_SUMMARY_CAP_BYTES = 64 << 20


def check(files: Files, entry: Entry, *, any_archive: bool = False) -> None:
    """Verify a file of torch.save; with `any_archive` also other zip files and plain pickles. Raises Damaged."""
    with files.opened(entry) as file:
        try:
            _check(file, entry.size_bytes, any_archive=any_archive, known=files.knows(entry, "torch"))
        except Damaged as why:
            raise Damaged(f"{files.label(entry.path)}: {why}") from None
    files.learn(entry, "torch")


def _check(file: BinaryIO, size_bytes: int, *, any_archive: bool, known: bool) -> None:
    head = file.read(len(_OLD_MAGIC))
    if not head:
        raise Damaged("it is empty")
    if head[:4] == archive.LOCAL_MAGIC:
        found = archive.members(file, 0, size_bytes)
        if not any_archive and not any(_is_pickle(member) for member in found):
            raise Damaged("it is a zip file that torch.save did not write: it has no data.pkl")
        if not known:
            archive.check_data(file, found)
    elif head == _OLD_MAGIC:
        if not known:
            _check_old(file, size_bytes)
    elif any_archive and head[:1] == b"\x80":
        if not known:
            _check_plain_pickle(file, size_bytes)
    else:
        raise Damaged(f"it is not a file of torch.save: it begins with {head[:4]!r}")


def summary(files: Files, entry: Entry) -> PickledObject:
    """Return the object in a torch.save zip as data: what its top-level dict says of steps and sizes.

    An empty one if unavailable: it supplements the names, and never decides whether the checkpoint is complete.
    """
    try:
        with files.opened(entry) as file:
            for member in archive.members(file, 0, entry.size_bytes):
                if _is_pickle(member):
                    value = pickles.read(archive.content(file, member, _SUMMARY_CAP_BYTES)).value
                    return value if isinstance(value, PickledObject) else PickledObject("")
    except Damaged:
        pass
    return PickledObject("")


_PROGRESS = ("step", "global_step", "steps", "iteration", "iter_num", "iter", "it")
"""The keys that programs use for their progress, which distinguish two files of one name. Not an epoch: there may be
several saves in one."""


def progress(files: Files, entry: Entry) -> str:
    """Return the progress of the program that wrote a torch.save file, from the top-level dict; "" if not there."""
    said = summary(files, entry)
    named = ((str(key).lower(), value) for key, value in said.pairs if isinstance(key, str))
    known = {key: value for key, value in named if key in _PROGRESS and integer(value) is not None}
    return next((f"{key} {known[key]}" for key in _PROGRESS if key in known), "")


def integer(value: Any) -> int | None:
    """Return a count from a summary; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def _is_pickle(member: archive.Member) -> bool:
    # TorchScript archives have constants.pkl as well.
    return member.name.count("/") == 1 and member.name.endswith("/data.pkl")


def _check_plain_pickle(file: BinaryIO, size_bytes: int) -> None:
    window = _Window(file, size_bytes)
    pickles.read(window)  # type: ignore[arg-type] # reads, as genops needs
    if window.tell() != size_bytes:
        raise Damaged(f"something follows its pickle at byte {window.tell()}")


def _check_old(file: BinaryIO, size_bytes: int) -> None:
    """Follow torch.serialization._legacy_save: number, version, system, object, keys; then each storage."""
    window = _Window(file, size_bytes)
    read = [pickles.read(window) for _ in range(5)]  # type: ignore[arg-type]
    widths = dict(_storage(identity) for identity in read[3].persistent)
    keys = read[4].value
    if not isinstance(keys, list) or set(keys) - set(widths):
        raise Damaged("it lists storages that its object does not have")
    at = window.tell()
    for key in keys:
        file.seek(at)
        count = int.from_bytes(file.read(8), "little", signed=True)
        at += 8 + count * widths[key]
        if count < 0 or at > size_bytes:
            raise Damaged(f"storage {key} ends at byte {at} of {size_bytes}")
    if at != size_bytes:
        raise Damaged(f"its storages end at byte {at}, and it has {size_bytes}")


def _storage(identity: Any) -> tuple[str, int]:
    """The key and the width of one element, from ('storage', class, key, device, count, ...)."""
    match identity:
        case ("storage", PickledObject(name=name), str(key), *_):
            width = _OLD_STORAGES.get(str(name).rpartition(".")[2].removesuffix("Storage"))
            if width is not None:
                return key, width
        case _:
            pass
    raise Damaged("it has a storage of an unknown kind")


class _Window:
    """A file that returns no more than it has, whatever length a pickle claims: `read(2**60)` must not reserve that."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._at = 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        self._file.seek(self._at)
        data = self._file.read(max(0, min(size, self._size_bytes - self._at)))
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        """A line of the text opcodes; these are short: names and numbers."""
        self._file.seek(self._at)
        data = self._file.read(max(0, min(4096, self._size_bytes - self._at)))
        line = data[: data.find(b"\n") + 1]
        self._at += len(line)
        return line
