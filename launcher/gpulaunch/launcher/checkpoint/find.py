"""Finds the newest complete checkpoint under given directories, by reading files only: never torch, never unpickle.

Which is the newest: within one series (one directory and one family of formats, or all that a user's pattern matches
except the step) the higher step; between series the later time. A checkpoint counts as saved no earlier than those of
lower steps in its series, so copying files does not reorder them. Bare weights (safetensors, a `pytorch_model.bin`)
come last: a model that was exported at the end has no optimizer state to resume with.

Candidates are verified from the newest on, until enough are complete. Rejected ones are reported with the reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from gpulaunch.launcher.checkpoint.damaged import Damaged, OutOfTimeError

if TYPE_CHECKING:
    from gpulaunch.launcher.checkpoint.memory import Memory
    from gpulaunch.launcher.checkpoint.scan import Candidate


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: str
    """Absolute path or URL, of a file or a directory."""
    format: str
    """gpulaunch, dcp, torch, safetensors, trainer, accelerate, lightning, deepspeed, megatron, or pattern."""
    step: int | None
    saved_s: float
    """Wall clock; 0.0 if the storage does not report it."""
    size_bytes: int
    key: str
    """Its path relative to the searched directory ("." for the directory itself), the same on every node."""
    identity: str = ""
    """With `identify`: what else must be the same on every node for it to be the same checkpoint."""
    generation: int = 0
    """Of gpulaunch's own: which run of the program has saved it; see `checkpoint.store`."""
    verified: bool = True
    """False: its structure is whole, names, sizes and manifest; there was no time to read all of its content."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A rejected candidate, and why: one phrase."""

    path: str
    format: str
    """Empty for an unreadable directory."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """The result of a search."""

    found: tuple[Checkpoint, ...] = ()
    """Complete ones, newest first."""
    skipped: tuple[Skipped, ...] = ()
    """Incomplete ones newer than the last one found; directories that could not be read, or in which nothing matches
    the pattern, if it matches nothing at all."""
    error: str = ""
    """Why a location could not be searched at all, one line; empty when all could."""


def find(
    where: Sequence[str],
    *,
    pattern: str | None = None,
    limit: int = 1,
    memory: str | None = None,
    since_s: float | None = None,
    content_s: float = math.inf,
    identify: bool = False,
    damaged: Mapping[str, float] | None = None,
) -> Search:
    """Search directories or URLs for the `limit` newest complete checkpoints. Never raises.

    `pattern`: a glob relative to each directory, with one optional `{step}`; only its matches are candidates.
    `memory`: a JSON file of earlier full verifications, so that an unchanged file is not read again.
    `since_s`: only what was saved at this wall-clock time or later; nothing, if the storage does not report times.
    `content_s`: for how long to read file contents; after that, only the structure counts. 0: from the beginning.
    `identify`: give for each the identity that distinguishes it from others of its name.
    `damaged`: paths known to be damaged, and the save time of what lay there: skipped silently.
    """
    until_s = monotonic() + content_s if content_s > 0 else -math.inf
    from gpulaunch.launcher.checkpoint import names, source
    from gpulaunch.launcher.checkpoint.memory import Memory
    from gpulaunch.launcher.checkpoint.scan import scan

    trouble = names.check_pattern(pattern) if pattern is not None else None
    if trouble:
        return Search(error=trouble)
    wanted = names.Pattern(pattern) if pattern is not None else None
    candidates: dict[str, Candidate] = {}
    skipped: list[Skipped] = []
    unfit: list[Skipped] = []
    any_fits = False
    errors: list[str] = []
    for root in where:
        try:
            place = source.open_source(root)
        except source.SourceError as err:
            errors.append(str(err))
            continue
        looked = scan(place, wanted)
        any_fits = any_fits or bool(looked.candidates)
        if looked.unfit:
            why = f"nothing in it matches the pattern {pattern!r}: {looked.unfit[0]} does not"
            unfit.append(Skipped(path=place.root, format="", why=why))
        for candidate in looked.candidates:
            if since_s is not None and candidate.saved_s < since_s:
                continue
            candidates.setdefault(candidate.source.where(candidate.entry.path), candidate)
        skipped += [Skipped(path=path, format="", why=why) for path, why in looked.unread]
    if not any_fits:
        skipped += unfit
    remembered = Memory(memory)
    found: list[Checkpoint] = []
    for candidate in newest_first(candidates.values()):
        if len(found) >= limit:
            break
        try:
            one = _verified(candidate, remembered, until_s, identify=identify)
            if (damaged or {}).get(one.path) != one.saved_s:
                found.append(one)
        except Damaged as why:
            path = candidate.source.where(candidate.entry.path)
            skipped.append(Skipped(path=path, format=candidate.family, why=str(why)))
    remembered.save()
    return Search(found=tuple(found), skipped=tuple(skipped), error="; ".join(errors))


def examine(
    path: str,
    *,
    memory: str | None = None,
    content_s: float = math.inf,
    identify: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Checkpoint:
    """Verify one named checkpoint, a file or a directory, as `find` does. Raises Damaged, also if it does not exist.

    `share`: (which, of how many) share of its files to read, see `Files`.

    A directory in which `latest` or Megatron's tracker names a checkpoint is verified as that one. Any other directory
    that is no checkpoint itself means the newest complete one in it.
    """
    from gpulaunch.launcher.checkpoint import formats, names, scan, source
    from gpulaunch.launcher.checkpoint.files import reason
    from gpulaunch.launcher.checkpoint.memory import Memory

    above, _, name = (path if source.is_remote(path) else os.path.abspath(path)).rstrip("/").rpartition("/")
    try:
        place = source.open_source(above or "/")
        entry = place.entry(name)
        if entry is None:
            raise Damaged("there is no such file or directory")
        beside = (
            frozenset(one.name for one in place.listing("", scan.MAX_ENTRIES)) if entry.is_dir else frozenset[str]()
        )
        family, saved_s = scan.family_of(place, entry, beside)
        verified_as = entry
        if family is None and entry.is_dir:
            family, verified_as = formats.of_container(place, entry)
        holds_others = (
            family is None
            and entry.is_dir
            and not any(names.format_of_file(one.name) for one in place.listing(name, scan.MAX_ENTRIES))
        )
    except source.SourceError as err:
        raise Damaged(str(err)) from None
    except OSError as err:
        raise Damaged(f"cannot be read: {reason(err)}") from None
    if holds_others:
        inside = find([place.where(name)], memory=memory, content_s=content_s, identify=identify)
        if inside.found:
            return inside.found[0]
        if inside.skipped:
            raise Damaged(
                f"it contains nothing complete: {os.path.basename(inside.skipped[0].path)}: {inside.skipped[0].why}"
            )
    remembered = Memory(memory)
    candidate = scan.Candidate(
        source=place, entry=verified_as, family=family or formats.ANY, number=None, series="", saved_s=saved_s
    )
    until_s = monotonic() + content_s if content_s > 0 else -math.inf
    verified = _verified(candidate, remembered, until_s, identify=identify, share=share)
    remembered.save()
    return replace(verified, path=place.where(name), key=name)


def newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates as the module's docstring describes."""
    series: dict[tuple[str, str], list[Candidate]] = {}
    for one in candidates:
        alone = one.entry.path if one.number is None else ""
        series.setdefault((one.source.root, f"{one.series}:{alone}"), []).append(one)
    ordered: list[tuple[bool, float, int, str, Candidate]] = []
    for group in series.values():
        counted_s = 0.0
        for one in sorted(group, key=lambda member: (member.number or 0, member.saved_s)):
            counted_s = max(counted_s, one.saved_s)
            whole = one.family != "safetensors"
            ordered.append((whole, counted_s, -1 if one.number is None else one.number, one.entry.path, one))
    return [entry[-1] for entry in sorted(ordered, key=lambda entry: entry[:-1], reverse=True)]


def _step_of(candidate: Candidate) -> int | None:
    """The number in its name, unless it is an epoch."""
    return None if candidate.series.endswith(":epoch") else candidate.number


def _verified(
    candidate: Candidate, memory: Memory, until_s: float, *, identify: bool, share: tuple[int, int] = (0, 1)
) -> Checkpoint:
    """Verify it, after `until_s` (monotonic; -inf: at once) only its structure. Raises Damaged."""
    from gpulaunch.launcher.checkpoint import formats
    from gpulaunch.launcher.checkpoint.files import Files

    if until_s < monotonic():
        until_s = -math.inf
    files = Files(candidate.source, memory, candidate.entry.path, until_s=until_s, share=share)
    try:
        verdict = formats.verify(files, candidate.entry, candidate.family)
        step = _step_of(candidate) if verdict.step is None else verdict.step
        identity = formats.identity(files, candidate.entry, candidate.family, step) if identify else ""
    except OutOfTimeError:
        return _verified(candidate, memory, -math.inf, identify=identify)
    return Checkpoint(
        path=candidate.source.where(candidate.entry.path),
        format=candidate.family,
        step=step,
        saved_s=candidate.saved_s if verdict.saved_s is None else verdict.saved_s,
        size_bytes=sum(entry.size_bytes for entry in files.seen.values()),
        key=candidate.entry.path or ".",
        identity=identity,
        verified=files.all_read,
        generation=verdict.generation,
    )
