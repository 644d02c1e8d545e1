"""Directories of torch.distributed.checkpoint: `.metadata` and the `__r_i.distcp` files it names.

`.metadata` is a pickle of torch.distributed.checkpoint.metadata.Metadata; it is read as data. Its `storage_data` gives
the file, offset and length of every item. Items are small archives of torch.save one after
another, so each has its own CRCs. If a save without collectives left `__r.metadata` for every rank, all are read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

from gpulaunch.launcher.checkpoint import archive, pickles
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files, in_parallel
from gpulaunch.launcher.checkpoint.pickles import PickledObject
from gpulaunch.launcher.checkpoint.source import Entry

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_METADATA_CAP_BYTES = 1 << 30

_ARCHIVE, _OTHER, _ZEROS = "archive", "other", "zeros"

Item = tuple[int, int, bool]
"""Offset, length, and whether the item is stored as it was saved (not compressed by an extension)."""


def matches(names: Iterable[str]) -> bool:
    """Whether a directory with these names is such a checkpoint, finished or not."""
    return any(name == METADATA or name.endswith(".distcp") or _RANK_METADATA.fullmatch(name) for name in names)


def check(files: Files, directory: str) -> None:
    """Verify every shard. Raises Damaged."""
    names = files.listing(directory)
    ranks = sorted(int(found[1]) for name in names if (found := _RANK_METADATA.fullmatch(name)))
    if METADATA in names:
        descriptions = [names[METADATA]]
    elif not ranks:
        raise Damaged("it has no .metadata: the save was not finished")
    elif ranks != list(range(len(ranks))):
        raise Damaged(f"__{next(n for n, rank in enumerate(ranks) if n != rank)}.metadata is missing")
    else:
        descriptions = [names[f"__{rank}.metadata"] for rank in ranks]
    shards = [
        # The listing has all that is needed: this saves one request per shard to remote storage.
        (names[name] if name in names else files.entry(files.inside(directory, name, said_by=said.name)), items)
        for said in descriptions
        for name, items in sorted(_shards(files, said).items())
    ]
    kinds = [kind for found in in_parallel(lambda shard: _check_shard(files, *shard), shards) for kind in found]
    # With torch.save every item is an archive, with another serialization none is. An item that is none among archives
    # was lost, and so were zeros: a crash leaves these in blocks that had not reached the disk.
    mixed = any(kind == _ARCHIVE for kind, _ in kinds)
    for kind, where in kinds:
        if kind == _ZEROS or (kind == _OTHER and mixed):
            raise Damaged(f"{where} is {'all zeros' if kind == _ZEROS else 'not an archive, unlike the others'}")


def _shards(files: Files, description: Entry) -> dict[str, list[Item]]:
    """The items of each file, according to the pickle."""
    label = files.label(description.path)
    data = files.content(description.path, _METADATA_CAP_BYTES)
    try:
        metadata = pickles.read(data).value
    except Damaged as why:
        raise Damaged(f"{label}: {why}") from None
    stored = metadata.get("storage_data") if isinstance(metadata, PickledObject) else None
    if not isinstance(stored, PickledObject) or not (pairs := stored.pairs):
        raise Damaged(f"{label} names no shards")
    shards: dict[str, list[Item]] = {}
    for _, info in pairs:
        if not isinstance(info, PickledObject):
            raise Damaged(f"{label} has a shard that makes no sense")
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not _is_count(offset) or not _is_count(length):
            raise Damaged(f"{label} has a shard that makes no sense")
        shards.setdefault(name, []).append((offset, length, not info.get("transform_descriptors")))
    return shards


def _check_shard(files: Files, entry: Entry, items: list[Item]) -> list[tuple[str, str]]:
    """Verify one file; return the kind of each of its items, and where. Raises Damaged."""
    label = files.label(entry.path)
    needed = max(offset + length for offset, length, _ in items)
    if entry.size_bytes < needed:
        raise Damaged(f"{label} has {entry.size_bytes} of {needed} bytes")
    items = sorted(set(items))
    fact = f"dcp {zlib.crc32(repr(items).encode()):08x}"  # the same file is read again under another .metadata
    known = files.knows(entry, fact)
    kinds: list[tuple[str, str]] = []
    with files.opened(entry) as file:
        for offset, length, plain in items:
            if not plain or length < archive.END_BYTES:
                continue
            where = f"{label}: the item at byte {offset}"
            kinds.append((_kind(file, offset, length), where))
            if kinds[-1][0] == _ARCHIVE and not known:
                try:
                    archive.check_data(file, archive.members(file, offset, length))
                except Damaged as why:
                    raise Damaged(f"{where}: {why}") from None
    files.learn(entry, fact)
    return kinds


def _kind(file: BinaryIO, offset: int, length: int) -> str:
    """Whether an archive was written there: by its beginning or its end, so that damage to one does not hide it."""
    file.seek(offset)
    head = file.read(archive.END_BYTES)
    file.seek(offset + length - archive.END_BYTES)
    end = file.read(archive.END_BYTES)
    if head.startswith(archive.LOCAL_MAGIC) or end.startswith(archive.END_MAGIC):
        return _ARCHIVE
    return _OTHER if any(head) or any(end) else _ZEROS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
