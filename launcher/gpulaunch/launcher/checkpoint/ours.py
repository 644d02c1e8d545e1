"""Our own checkpoints: `step-<number>/` with a manifest of every file, its size and its SHA-256."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpulaunch.launcher.checkpoint import manifest
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import CHUNK_BYTES, Files, in_parallel
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, Manifest
from gpulaunch.launcher.checkpoint.source import Source, join

_NAME = re.compile(r"step-\d{12}")
_CAP_BYTES = 256 << 20


def matches(name: str, names: Iterable[str]) -> bool:
    """Whether a directory is one of ours: by its manifest, or, if that is lost, by a name that only ours have."""
    return MANIFEST in names or _NAME.fullmatch(name) is not None


def age(source: Source, directory: str) -> int:
    """A number that grows with generation, then with step: the newer, the greater.

    After `--resume` of an older checkpoint, the higher steps next to it are an abandoned branch. One without a readable
    manifest counts as the newest, so that its rejection is reported instead of being silent.
    """
    try:
        with source.open(join(directory, MANIFEST)) as file:
            said = manifest.parse(file.read(_CAP_BYTES))
    except (OSError, Damaged):
        return 1 << 128
    return said.generation << 64 | said.step


def check(files: Files, directory: str) -> Manifest:
    """Verify every file that the manifest names, like `manifest.verify`, on any storage. Raises Damaged."""
    import hashlib

    said = manifest.parse(files.content(join(directory, MANIFEST), _CAP_BYTES))

    def check_one(one: manifest.ManifestFile) -> None:
        entry = files.entry(join(directory, one.name))
        manifest.check_size(one, entry.size_bytes)
        fact = f"sha256 {one.sha256}"
        if files.knows(entry, fact):
            return
        digest = hashlib.sha256()
        with files.opened(entry) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        manifest.check_digest(one, digest.hexdigest())
        files.learn(entry, fact)

    in_parallel(check_one, said.files)
    return said
