"""Whether scrapers have lost anything: what each of them must have seen in the pages that it got, one after another.

- Whole: every page ends as a page does, and has the steps of every rank.
- Monotone: no counter is lower, or gone, in the page that a scraper got after another.
- Complete: of all refreshes between the first and the last that it saw, a scraper has seen each. (One that asks ten
  times as often as there are refreshes misses none, unless its answers are old or do not come.)
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

__all__ = ["counters", "judge", "pages_in", "steps", "value"]

REFRESHES = "gpulaunch_sidecar_refreshes_total"
STEPS = "gpulaunch_steps_total{"


def pages_in(directory: Path) -> dict[int, bytes]:
    """The pages that `_scrapers.py` has kept, unpacked, by their numbers."""
    return {
        int(path.name.removeprefix("page-")): gzip.decompress(path.read_bytes()) for path in directory.glob("page-*")
    }


def counters(page: bytes) -> dict[str, float]:
    """Everything in a page that must never fall, by its name and labels."""
    found: dict[str, float] = {}
    for line in page.decode().splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum")) and not line.startswith("#"):
            found[series] = float(value)
    return found


def steps(page: Mapping[str, float]) -> dict[int, float]:
    """The steps that a page tells, by rank."""
    return {int(name.split('"')[1]): value for name, value in page.items() if name.startswith(STEPS)}


def value(page: bytes, name: str) -> float:
    """Of a metric without labels."""
    (found,) = [line.rpartition(" ")[2] for line in page.decode().splitlines() if line.startswith(f"{name} ")]
    return float(found)


def judge(pages: Mapping[int, bytes], sequences: Sequence[Iterable[int]], *, ranks: int) -> dict[str, object]:
    """What was lost, by the three rules."""
    seen = {number: counters(page) for number, page in pages.items()}
    cut = [
        number
        for number, page in pages.items()
        if not page.endswith(b"# EOF\n") or set(steps(seen[number])) != set(range(ranks))
    ]
    after = {pair for sequence in sequences for pair in pairwise(sequence)}
    fallen = {
        series
        for one, next_one in after
        for series, value in seen[one].items()
        if not seen[next_one].get(series, float("-inf")) >= value
    }
    refreshes = [sorted({round(seen[number][REFRESHES]) for number in sequence}) for sequence in sequences]
    gone = [last - first + 1 - len(of) for of in refreshes if of for first, last in [(of[0], of[-1])]]
    return {
        "pages": len(pages),
        "counters": max((len(of) for of in seen.values()), default=0),
        "refreshes": max((len(of) for of in refreshes), default=0),
        "pages_cut_short": len(cut),
        "counters_fallen": sorted(fallen),
        "refreshes_not_seen": sum(gone),
        "scrapers_that_missed_one": sum(1 for each in gone if each) + sum(1 for of in refreshes if not of),
    }
