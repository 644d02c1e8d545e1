"""Verifies directories made of several files of known kinds: every file must be whole."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpulaunch.launcher.checkpoint import dcp, deepspeed, tensors, torchfile
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.names import is_unfinished
from gpulaunch.launcher.checkpoint.source import join

_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.(safetensors|bin)")


def check_all(files: Files, directory: str, *, depth: int = 2) -> int:
    """Verify everything in a directory that can be verified; return how many things that were. Raises Damaged."""
    checked = 0
    entries = files.listing(directory)
    for name, entry in entries.items():
        path = join(directory, name)
        shard = _SHARD.fullmatch(name)
        if is_unfinished(name):
            continue
        if entry.is_dir:
            checked += _check_directory(files, path, depth - 1) if depth else 0
        elif name.endswith(tensors.INDEX_SUFFIXES):
            tensors.check_index(files, path)
            checked += 1
        elif shard:
            index = f"{shard[1]}.{shard[2]}.index.json"
            if index not in entries:
                raise Damaged(f"{files.label(join(directory, index))} is missing")
        elif name.endswith(".safetensors"):
            tensors.check(files, entry)
            checked += 1
        elif name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl")):
            torchfile.check(files, entry, any_archive=name.endswith(".pkl"))
            checked += 1
    return checked


def _check_directory(files: Files, directory: str, depth: int) -> int:
    names = files.listing(directory)
    if dcp.matches(names):
        dcp.check(files, directory)
        return 1
    if deepspeed.matches(names):
        deepspeed.check_tag(files, directory)
        return 1
    return check_all(files, directory, depth=depth)


def check_row(files: Files, directory: str, names: Iterable[str], pattern: str) -> None:
    """Verify that numbered files have no gap: `pattern` has one group. Raises Damaged."""
    numbers = sorted(int(found[1]) for name in names if (found := re.fullmatch(pattern, name)))
    for expected, number in enumerate(numbers):
        if number != expected:
            missing = re.sub(r"\(.*\)", str(expected), pattern).replace("\\", "")
            raise Damaged(f"{files.label(join(directory, missing))} is missing")
