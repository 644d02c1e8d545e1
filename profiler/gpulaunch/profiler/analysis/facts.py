"""Parses a rank's facts about its environment without trusting them: a fact of an unexpected type is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from gpulaunch.profiler.analysis.finding import NOWHERE, Place, place_of
from gpulaunch.profiler.analysis.thresholds import LOOP_NS
from gpulaunch.profiler.analysis.window import RankWindow, Window

_LARGEST: Final = 1e18


def section(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a name; empty if there is none."""
    value = facts.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def number(facts: Mapping[str, Any], name: str) -> float | None:
    """Return the number under a name; None if there is none."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:  # nor NaN
        return None
    return float(value)


def text(facts: Mapping[str, Any], name: str) -> str:
    """Return the string under a name; empty if there is none."""
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def world_size(rank: RankWindow, window: Window) -> float:
    """Return how many ranks train together with one."""
    return number(section(rank.facts, "ddp"), "world_size") or len(window.over.ranks)


def slowness(window: Window) -> float:
    """Return how many times as long small operations take on this host as on those where they were measured."""
    loop_ns = None if window.host is None else window.host.loop_ns
    return max(0.5, min(5.0, loop_ns / LOOP_NS.value)) if loop_ns else 1.0


def steps_by_closure(rank: RankWindow) -> bool:
    """Return whether an optimizer makes several passes in a step, each of which depends on the one before: LBFGS."""
    return text(section(rank.facts, "precision"), "optimizer") == "LBFGS"


def loader_of(rank: RankWindow) -> Mapping[str, Any]:
    """Return what is known of the construction of the loader that this rank trains from.

    A program may have several. Preferred is one with the same number of workers as the running one, then one that is
    not for evaluation.
    """
    said = rank.facts.get("loaders")
    listed = cast("list[object]", said) if isinstance(said, list) else []
    known = [cast("Mapping[str, Any]", each) for each in listed if isinstance(each, Mapping)]
    running = None if rank.loader is None else rank.loader.workers_configured

    def rank_of(loader: Mapping[str, Any]) -> tuple[bool, bool]:
        return number(loader, "num_workers") == running, text(loader, "split") != "eval"

    return max(known, key=rank_of, default={})


def loader_place(rank: RankWindow) -> Place:
    """Return the line that constructs that loader."""
    site = text(loader_of(rank), "site")
    return place_of(site) if site else NOWHERE
