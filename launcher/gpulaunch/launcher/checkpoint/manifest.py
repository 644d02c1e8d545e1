"""The manifest of our own checkpoints: every file of the directory with its size and SHA-256.

`gpulaunch.checkpoint` writes it last, so a directory that has one was written completely; `verify` checks that it is
unchanged. Standard library only: the program that saves and the search that reads both use it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from gpulaunch.launcher.checkpoint.damaged import Damaged

MANIFEST = "gpulaunch-manifest.json"
VERSION = 1
_READ_CAP_BYTES = 256 << 20  # a manifest of a million files


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """One file of the checkpoint; `name` is relative to its directory, with `/` between parts."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was saved: by which job (run, attempt, generation, world size), when (wall clock), and every other file."""

    run: str = ""
    """$GPULAUNCH_RUN_ID of the job; empty in those of earlier versions."""
    step: int
    attempt: int
    generation: int
    world_size: int
    saved_s: float
    files: tuple[ManifestFile, ...]


def read(directory: str) -> Manifest:
    """Read the manifest of a checkpoint. Raises Damaged if there is no valid one."""
    try:
        with open(os.path.join(directory, MANIFEST), "rb") as file:
            data = file.read(_READ_CAP_BYTES + 1)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except OSError as err:
        raise Damaged(f"{MANIFEST} cannot be read: {os.strerror(err.errno or 0)}") from None
    return parse(data)


def parse(data: bytes) -> Manifest:
    """Parse the bytes of a manifest. Raises Damaged."""
    if len(data) > _READ_CAP_BYTES:
        raise Damaged(f"{MANIFEST} is larger than {_READ_CAP_BYTES >> 20} MiB")
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged(f"{MANIFEST} is not JSON") from None
    try:
        version = document["version"]
        manifest = Manifest(
            run=str(document.get("run", ""))[:200],
            step=_integer(document["step"]),
            attempt=_integer(document["attempt"]),
            generation=_integer(document["generation"]),
            world_size=_integer(document["world_size"]),
            saved_s=_time(document["saved_s"]),
            files=tuple(_file(entry) for entry in document["files"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as err:
        raise Damaged(f"{MANIFEST} is invalid: {type(err).__name__}: {err}"[:200]) from None
    if version != VERSION:
        raise Damaged(f"{MANIFEST} has version {version!r}, and this gpulaunch reads {VERSION}"[:200])
    return manifest


def write(directory: str, manifest: Manifest) -> None:
    """Write the manifest, and sync it and the directory's entries to disk before returning. Raises OSError."""
    document = {"version": VERSION, **asdict(manifest)}
    descriptor = os.open(os.path.join(directory, MANIFEST), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(document, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def digest(path: str) -> str:
    """SHA-256 of a file in hex, read in chunks. Raises OSError."""
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(directory: str) -> None:
    """Read every file that the manifest names. Raises Damaged for the first that differs."""
    from gpulaunch.launcher.checkpoint.files import in_parallel

    def check(entry: ManifestFile) -> None:
        path = os.path.join(directory, entry.name)
        try:
            size_bytes = os.stat(path).st_size
            check_size(entry, size_bytes)
            check_digest(entry, digest(path))
        except FileNotFoundError:
            raise Damaged(f"{entry.name} is missing") from None
        except OSError as err:
            raise Damaged(f"{entry.name} cannot be read: {os.strerror(err.errno or 0)}") from None

    in_parallel(check, read(directory).files)


def check_size(entry: ManifestFile, size_bytes: int) -> None:
    """Compare with what the manifest says. Raises Damaged."""
    if size_bytes != entry.size_bytes:
        raise Damaged(f"{entry.name} has {size_bytes} of {entry.size_bytes} bytes")


def check_digest(entry: ManifestFile, sha256: str) -> None:
    """Compare with what the manifest says. Raises Damaged."""
    if sha256 != entry.sha256:
        raise Damaged(
            f"{entry.name} has changed since it was written (SHA-256 {sha256[:12]}.., written {entry.sha256[:12]}..)"
        )


def _file(entry: Any) -> ManifestFile:
    name, sha256 = entry["name"], entry["sha256"]
    if not isinstance(name, str) or not isinstance(sha256, str):
        raise TypeError("name and sha256 of a file must be strings")
    # A manifest names files in its directory: never a path that leads out.
    if name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise ValueError(f"file name {name!r}")
    return ManifestFile(name=name, size_bytes=_integer(entry["size_bytes"]), sha256=sha256)


def _time(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e15:  # also rejects nan and inf
        raise TypeError(f"{value!r} is not a time")
    return float(value)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value
