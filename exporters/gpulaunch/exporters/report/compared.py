"""Renders a comparison as text for people, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from gpulaunch.exporters.report.compare import Change, Comparison
from gpulaunch.exporters.report.formatting import amount, percent, seconds, signed_percent, size
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import FindingView, RunView
from gpulaunch.exporters.view.text import inert

_SAYS: Final = {
    "noise": "not to be told from noise",
    "short": "too little to compare",
    "crowded": "others had the cores",
    "single": "one figure a run",
}
_MOST: Final = 30
_LONGEST: Final = 60


def verdict(comparison: Comparison) -> str:
    """Return the main result in a sentence."""
    step = comparison.step
    unseen = " and ".join(name for name, view in (("A", comparison.a), ("B", comparison.b)) if view.steps is None)
    if unseen:
        return f"The steps of the two runs cannot be compared: none was seen in {unseen} (--no-profile?)."
    uncurved = "The steps of the two runs cannot be compared: there is no curve of them in both"
    if step is None or step.a is None or step.b is None:
        return f"{uncurved} (telemetry.sqlite)."
    figures = f"{seconds(step.a)} in A, {seconds(step.b)} in B"
    if step.told == "single":
        return f"{uncurved}. On the average one took {figures}."
    parts = _parts(comparison)
    if step.told == "short":
        return (
            f"Too little to compare ({figures}): the runs are too short for how slowly they wander; "
            f"let them run longer.{f' What can be told: {parts}.' if parts else ''}"
        )
    if step.told == "crowded":
        return f"Steps took {figures}, but others had the cores: that says nothing about the program."
    if step.told == "noise":
        return f"No difference in the length of a step that could be told from noise ({figures}{_range(step)})."
    longer = "longer" if (step.judgement is not None and (step.judgement.shift or 0.0) > 0) else "shorter"
    said = f"Steps are {percent(abs(step.ratio or 0.0))} {longer} in B: {figures}{_range(step)}."
    return said + (f" Most of it: {parts}." if parts else "")


def _parts(comparison: Comparison) -> str:
    """Return the part of a step that changed most."""
    shifts = [
        (change.judgement.shift, change.name)
        for change in comparison.changes
        if change.told == "changed"
        and change.name.endswith(" in a step")
        and change.judgement is not None
        and change.judgement.shift is not None
    ]
    if not shifts:
        return ""
    shift, name = max(shifts, key=lambda each: abs(each[0]))
    return f"{name}, {'+' if shift > 0 else ''}{seconds(shift)}"


def as_text(comparison: Comparison) -> str:
    """Return lines for a terminal; control characters in untrusted text are escaped."""
    a, b = comparison.a, comparison.b
    lines = [_side("A", a), _side("B", b), "", verdict(comparison), ""]
    rows = [("", "A", "B", "change", "")]
    rows += [
        (change.name, _value(change.a, change.unit), _value(change.b, change.unit), _change(change), _says(change))
        for change in comparison.changes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines += [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    lines += [
        *_findings("findings that came", comparison.came),
        *_findings("findings that went", comparison.went),
        *_stayed(comparison),
        *_settings("settings that differ", comparison.settings),
    ]
    if comparison.versions_known:
        lines += _settings("versions that differ", comparison.versions) or ["", "versions: the same"]
    else:
        lines += ["", "versions: not on record in both (job.json)"]
    if comparison.notes:
        lines += ["", *(f"note: {note}" for note in comparison.notes)]
    lines += [
        "",
        "Two runs differ by chance, too, and only more runs tell by how much: repeat what matters.",
    ]
    return "\n".join(inert(line) for line in lines)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return plain values that `json.dumps(..., allow_nan=False)` takes."""
    return {
        "version": 1,
        "a": _of_side(comparison.a),
        "b": _of_side(comparison.b),
        "verdict": verdict(comparison),
        "changes": [_of_change(change) for change in comparison.changes],
        "findings": {
            "came": [_of_finding(found) for found in comparison.came],
            "went": [_of_finding(found) for found in comparison.went],
            "stayed": [{"a": _of_finding(one), "b": _of_finding(other)} for one, other in comparison.stayed],
        },
        "settings": [{"name": name, "a": one, "b": other} for name, one, other in comparison.settings],
        "versions": [{"name": name, "a": one, "b": other} for name, one, other in comparison.versions]
        if comparison.versions_known
        else None,
        "notes": list(comparison.notes),
    }


def _side(name: str, view: RunView) -> str:
    return f"{name}: {view.run_dir}: {view.status.value}, {count(view.steps)} steps, ranks: {count(view.world_size)}"


def _value(value: float | None, unit: str) -> str:
    return {"s": seconds, "B": size, "1": count, "%": percent}.get(unit, amount)(value)


def _change(change: Change) -> str:
    if change.unit == "%":
        known = change.a is not None and change.b is not None
        return f"{100 * ((change.b or 0.0) - (change.a or 0.0)):+.1f} points" if known else UNKNOWN
    return "" if change.a == change.b else signed_percent(change.ratio)


def _says(change: Change) -> str:
    if change.told != "changed":
        return "" if change.told == "single" and change.a == change.b else _SAYS[change.told]
    how = {True: "better", False: "worse", None: "changed"}[change.better]
    return f"{how}{_range(change)}"


def _range(change: Change) -> str:
    own = change.judgement
    if own is None or own.low is None or own.high is None or not own.a:
        return ""
    return f"; {signed_percent(own.low / abs(own.a))} to {signed_percent(own.high / abs(own.a))} within the runs' noise"


def _findings(title: str, findings: Sequence[FindingView]) -> list[str]:
    if not findings:
        return []
    lines = [f"  {_named(found)}: {_cost(found)}" for found in findings[:_MOST]]
    return ["", f"{title}:", *lines, *_more(findings)]


def _stayed(comparison: Comparison) -> list[str]:
    if not comparison.stayed:
        return []
    lines = [f"  {_named(other)}: {_cost(one)} -> {_cost(other)}" for one, other in comparison.stayed[:_MOST]]
    return ["", "findings in both:", *lines, *_more(comparison.stayed)]


def _settings(title: str, rows: Sequence[tuple[str, Any, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [f"  {name}: {_short(one)} -> {_short(other)}" for name, one, other in rows[:_MOST]]
    return ["", f"{title}:", *lines, *_more(rows)]


def _more(rows: Sequence[object]) -> list[str]:
    return [f"  and {len(rows) - _MOST} more (--json has them)"] if len(rows) > _MOST else []


def _named(found: FindingView) -> str:
    return f"{found.rule} {found.location}".rstrip() + (f" ({found.subject})" if found.subject else "")


def _cost(found: FindingView) -> str:
    return f"{seconds(found.seconds_per_step)} of every step" if found.seconds_per_step else "no time"


def _short(value: object) -> str:
    if value is None:
        return "none"
    parts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    text = " ".join(parts)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _of_side(view: RunView) -> dict[str, Any]:
    return {
        "run": view.run_dir,
        "name": view.name,
        "run_id": view.run_id,
        "status": view.status.value,
        "steps": view.steps,
        "ranks": view.world_size,
    }


def _of_change(change: Change) -> dict[str, Any]:
    own = change.judgement
    return {
        "name": change.name,
        "unit": change.unit,
        "a": _finite(change.a),
        "b": _finite(change.b),
        "change_ratio": _finite(change.ratio),
        "told": change.told,
        "better": change.better,
        "shift": None if own is None else _finite(own.shift),
        "low": None if own is None else _finite(own.low),
        "high": None if own is None else _finite(own.high),
        "p": None if own is None else _finite(own.p),
        "blocks": None if own is None else [own.blocks_a, own.blocks_b],
    }


def _of_finding(found: FindingView) -> dict[str, Any]:
    return {
        "rule": found.rule,
        "file": found.file,
        "line": found.line,
        "subject": found.subject,
        "seconds_per_step": _finite(found.seconds_per_step),
        "seconds_per_hour": _finite(found.seconds_per_hour),
    }


def _finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
