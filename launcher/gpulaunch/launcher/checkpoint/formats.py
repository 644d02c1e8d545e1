"""The families of formats: the names that identify each, and the function that verifies it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpulaunch.launcher.checkpoint import (
    dcp,
    deepspeed,
    huggingface,
    lightning,
    manifest,
    megatron,
    names,
    ours,
    parts,
    tensors,
    torchfile,
)
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files
from gpulaunch.launcher.checkpoint.source import Entry, Source, join

ANY = "pattern"
"""Matched by a user's pattern but of no known family: everything in it that can be verified must be whole."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a complete checkpoint says of itself; None if it does not."""

    step: int | None
    saved_s: float | None = None
    generation: int = 0


def of_directory(name: str, inside: Collection[str], above: Collection[str]) -> str | None:
    """Identify a directory by its name, the names in it and those next to it; None: it may contain checkpoints.

    Order: the library that writes more of a checkpoint comes before the one whose format it uses.
    """
    if ours.matches(name, inside):
        return "gpulaunch"
    if megatron.matches(name, inside, above):
        return "megatron"
    if lightning.matches(name, inside):
        return "lightning"
    if huggingface.is_trainer(name, inside):
        return "trainer"
    if huggingface.is_accelerate(inside):
        return "accelerate"
    if deepspeed.matches(inside):
        return "deepspeed"
    return "dcp" if dcp.matches(inside) else None


def holds_index(inside: Collection[str]) -> bool:
    """Whether a model is stored here as an index and its shards; checkpoints may be here as well."""
    return any(name.endswith(tensors.INDEX_SUFFIXES) for name in inside)


def of_container(source: Source, entry: Entry) -> tuple[str | None, Entry]:
    """For a directory of no family: the checkpoint that DeepSpeed's or Megatron's tracker in it names.

    (None, the directory itself) if there is no tracker. Raises OSError, and Damaged if the tracker names nothing.
    """
    for tracker, family in ((deepspeed.LATEST, "deepspeed"), (megatron.TRACKER, "megatron")):
        path = join(entry.path, tracker)
        found = source.entry(path)
        if found is None or found.is_dir:
            continue
        with source.open(path) as file:
            named = file.read(4096).decode("utf-8", "replace").strip()
        if family == "megatron":
            named = megatron.directory_of(named)
        target = source.entry(join(entry.path, named)) if named and "/" not in named and "\0" not in named else None
        if target is None or not target.is_dir:
            raise Damaged(f"{tracker} names {named[:80]!r}, which does not exist")
        return family, target
    return None, entry


def verify(files: Files, entry: Entry, family: str) -> Verdict:
    """Verify a checkpoint of this family. Raises Damaged if it is not complete."""
    path = entry.path
    match family:
        case "gpulaunch":
            said = ours.check(files, path)
            return Verdict(step=said.step, saved_s=said.saved_s, generation=said.generation)
        case "megatron":
            return Verdict(step=megatron.check(files, path))
        case "lightning":
            check = lightning.check_directory(files, path) if entry.is_dir else lightning.check_file(files, entry)
            return Verdict(step=check)
        case "trainer":
            return Verdict(step=huggingface.check_trainer(files, path))
        case "deepspeed":
            return Verdict(step=deepspeed.check(files, path))
        case "accelerate":
            huggingface.check_accelerate(files, path)
        case "dcp":
            dcp.check(files, path)
        case "safetensors" if entry.is_dir:
            tensors.check_directory(files, path)
        case "safetensors":
            tensors.check_weights(files, entry)
        case "torch":
            torchfile.check(files, entry)
        case _ if entry.is_dir:
            if not parts.check_all(files, path):
                raise Damaged("it contains nothing that can be verified")
        case _:
            torchfile.check(files, entry, any_archive=True)
    return Verdict(step=names.step_of(entry.name))


_SAMPLE_BYTES = 1 << 16


def identity(files: Files, entry: Entry, family: str, step: int | None) -> str:
    """Identity of a checkpoint among those of its name, on any node: text without `|` and `:`.

    Ours: its manifest, which has every file's SHA-256. Else the step, by its name or its content: if each node keeps
    its part on its own disk, the files differ. Without a step: the sizes, and the beginning and the end of each file
    (torch.save's archives have every CRC at the end). Call it after `verify`. Raises Damaged.
    """
    from hashlib import sha256

    if family == "gpulaunch":
        said = files.content(join(entry.path, manifest.MANIFEST), _SAMPLE_BYTES << 12)
        return f"step {step} manifest {sha256(said).hexdigest()[:12]}"
    if step is not None:
        return f"step {step}"
    if not entry.is_dir and (progress := torchfile.progress(files, entry)):
        return progress
    digest = sha256()
    for path, one in sorted(files.seen.items()):
        digest.update(f"{files.label(path)} {one.size_bytes} ".encode("utf-8", "surrogateescape"))
        with files.opened(one) as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, one.size_bytes - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{sum(one.size_bytes for one in files.seen.values())} bytes {digest.hexdigest()[:12]}"
