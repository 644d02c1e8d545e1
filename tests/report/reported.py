"""Runs to be reported. Not a test module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kept_run import GC, SYNC, state
from runs_on_disk import begin, end, keep

from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import AttemptView, CauseView, FindingView, RunView, Status
from gpulaunch.exporters.view.rank_model import SiteView

KINDS = ("h2d", "d2h", "built_on_cpu", "item", "loader", "collective", "save", "gc")


def a_run(run_dir: Path, seconds: int = 100) -> RunView:
    """Two ranks with a GPU, two findings, as the directory has them."""
    begin(run_dir)
    keep(run_dir, [state(second, gpu=True, findings=(SYNC, GC)) for second in range(1, seconds)])
    end(run_dir, seconds)
    return load_run(run_dir)


def with_everything(view: RunView) -> RunView:
    """The same with whatever a report can have: failures, copies by line, a loader, a price."""
    began_s = view.began_s or 0.0
    cause = CauseView(
        kind="gpu_oom",
        headline="rank 1: out of GPU memory at train.py:12",
        rank=1,
        why="it ended first, 1.2 s before the others",
        advice="Make the batch smaller.",
        report="attempts/0/failure.json",
    )
    return replace(
        view,
        attempts=(
            AttemptView(number=0, status=Status.FAILED, began_s=began_s, ended_s=began_s + 30, cause=cause),
            AttemptView(number=1, status=Status.FINISHED, began_s=began_s + 35, ended_s=view.ended_s),
        ),
        restarts={"gpu_oom": 1},
        resumed_step=40,
        sites=tuple(
            SiteView(
                kind=kind,
                text=f"train.py:{10 + number} step",
                ranks=(0, 1),
                count=100,
                size_bytes=1 << 20,
                blocked_seconds=2.5 - 0.1 * number,
                gpu_seconds=0.5,
                pinned=50,
                non_blocking=0,
            )
            for number, kind in enumerate(KINDS)
        ),
        notes=("something is damaged",),
    )


def of_many_ranks(view: RunView, count: int) -> RunView:
    """The same with more ranks, all with their curves."""
    return replace(
        view,
        world_size=count,
        ranks=tuple(
            replace(
                view.ranks[number % len(view.ranks)],
                rank=number,
                step_seconds=view.ranks[0].step_seconds * (1 + number / 1000),
            )
            for number in range(count)
        ),
    )


def with_text(value: Any, by: Callable[[str], str], name: str = "") -> Any:
    """The same with every text replaced that comes from a program, its user or its files."""
    if isinstance(value, str):
        return by(value)
    if isinstance(value, Enum) or value is None or isinstance(value, (bool, int, float)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: with_text(getattr(value, each.name), by, each.name) for each in fields(value)}
        )
    if isinstance(value, Mapping):
        # Names of phases and of kinds of memory are ours; names in events and evidence are not.
        ours = name not in ("fields", "evidence", "restarts", "throttle_seconds")
        return {(key if ours else by(key)): with_text(each, by, name) for key, each in value.items()}
    return tuple(with_text(each, by, name) for each in value)


def a_finding(number: int) -> FindingView:
    return FindingView(
        rule=f"rule-{number}",
        file="train.py",
        line=number,
        subject="",
        ranks=tuple(range(number % 20)),
        seconds_per_step=0.001 * number,
        seconds_per_hour=10.0 * number,
        lost_seconds=1.0,
        confidence=0.7,
        evidence={"share": 0.5},
        advice="Change it.",
        active=False,
        first_seen_s=1.0,
        last_seen_s=2.0,
    )
