"""Finds candidates for checkpoints below a root: by names alone, and bounded in number.

A directory that some family recognises is one candidate, and nothing in it is another. Hidden directories, names of
unfinished files, links to directories, and the `attempts` of a job directory are skipped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpulaunch.launcher.checkpoint import formats, names, ours
from gpulaunch.launcher.checkpoint.files import reason
from gpulaunch.launcher.checkpoint.source import Entry, Source

MAX_DEPTH = 4
"""Depth of the search below the root: lightning_logs/version_0/checkpoints/last.ckpt needs three."""
MAX_ENTRIES = 100_000


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A possible checkpoint, before anything in it was read."""

    source: Source
    entry: Entry
    family: str
    number: int | None
    """The step or, without one, the epoch in its name: its order within its series."""
    series: str
    """Candidates of one series belong to one run, and count the same thing."""
    saved_s: float


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The result for one root: candidates, and (path, why) of what could not be read."""

    candidates: list[Candidate]
    unread: list[tuple[str, str]]
    unfit: list[str]
    """Paths below the root that do not match the pattern, but may be checkpoints by their names."""


def scan(source: Source, pattern: names.Pattern | None = None) -> Scan:
    """Scan a root, breadth first. Never raises for storage errors."""
    found = Scan(candidates=[], unread=[], unfit=[])
    waiting = deque([(Entry(path="", is_dir=True, size_bytes=0, changed_s=0.0, mark=""), 0, frozenset[str]())])
    left = MAX_ENTRIES
    while waiting and left > 0:
        directory, depth, above = waiting.popleft()
        try:
            inside = source.listing(directory.path, left)
        except FileNotFoundError:
            continue  # a root that does not exist yet, or a directory removed meanwhile
        except OSError as err:
            found.unread.append((source.where(directory.path), f"cannot be read: {reason(err)}"))
            continue
        left -= len(inside)
        if pattern is None:
            down = _look(source, directory, inside, above, found.candidates)
        else:
            down = _match(source, inside, pattern, found)
        if depth < (MAX_DEPTH if pattern is None else pattern.depth):
            beside = frozenset(entry.name for entry in inside)
            waiting.extend((entry, depth + 1, beside) for entry in down)
    if left <= 0:
        found.unread.append((source.root, f"contains more than {MAX_ENTRIES} entries: the rest was not searched"))
    return found


def family_of(source: Source, entry: Entry, above: frozenset[str]) -> tuple[str | None, float]:
    """The family that recognises a file or directory, and when its newest part was written."""
    if not entry.is_dir:
        return names.format_of_file(entry.name), entry.changed_s
    inside = source.listing(entry.path, MAX_ENTRIES)
    return formats.of_directory(_name(source, entry), {one.name for one in inside}, above), _newest(entry, inside)


def _look(
    source: Source, directory: Entry, inside: list[Entry], above: frozenset[str], candidates: list[Candidate]
) -> list[Entry]:
    """Add what a directory is or directly contains; return the directories to scan next."""
    present = {entry.name for entry in inside}
    family = formats.of_directory(_name(source, directory), present, above)
    if family is not None:
        candidates.append(_candidate(source, directory, family, _newest(directory, inside)))
        return []
    if formats.holds_index(present):
        candidates.append(_candidate(source, directory, "safetensors", _newest(directory, inside)))
    down: list[Entry] = []
    for entry in inside:
        if entry.is_dir:
            if not names.is_unfinished(entry.name) and (directory.path or entry.name != "attempts"):
                down.append(entry)
        elif file_family := names.format_of_file(entry.name):
            candidates.append(_candidate(source, entry, file_family, entry.changed_s))
    return down


def _match(source: Source, inside: list[Entry], pattern: names.Pattern, found: Scan) -> list[Entry]:
    """Add what matches the pattern; return the directories in which more may."""
    down: list[Entry] = []
    for entry in inside:
        if names.is_unfinished(entry.name):
            continue
        fits, step, series = pattern.match(entry.path)
        if fits:
            try:
                family, saved_s = family_of(source, entry, frozenset(one.name for one in inside))
            except OSError:
                family, saved_s = None, entry.changed_s  # verification will say why
            number = names.step_of(entry.name) if step is None else step
            found.candidates.append(
                Candidate(
                    source=source,
                    entry=entry,
                    family=family or formats.ANY,
                    number=number,
                    series=series if step is not None else entry.path.rpartition("/")[0],
                    saved_s=saved_s,
                )
            )
        elif entry.is_dir and pattern.may_match_below(entry.path):
            down.append(entry)
        elif names.format_of_file(entry.name) or names.step_of(entry.name) is not None:
            found.unfit.append(entry.path)
    return down


def _candidate(source: Source, entry: Entry, family: str, saved_s: float) -> Candidate:
    name = _name(source, entry)
    step, epoch = names.step_of(name), names.epoch_of(name)
    if family == "gpulaunch":
        step = ours.age(source, entry.path)
    return Candidate(
        source=source,
        entry=entry,
        family=family,
        number=epoch if step is None else step,
        series=f"{entry.path.rpartition('/')[0]}:{family}:{'epoch' if step is None else 'step'}",
        saved_s=saved_s,
    )


def _name(source: Source, entry: Entry) -> str:
    return entry.name or source.root.rpartition("/")[2]


def _newest(directory: Entry, inside: list[Entry]) -> float:
    return max((entry.changed_s for entry in inside), default=directory.changed_s)
