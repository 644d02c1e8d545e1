"""Shows what trials of a job have given: as lines while they run, as a table and a patch at the end, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from gpulaunch.exporters.files.tuned import VERSION, gain_text
from gpulaunch.launcher.tune.candidates import why_no_workers
from gpulaunch.launcher.tune.change import Change, line_of
from gpulaunch.launcher.tune.measure import Gain
from gpulaunch.launcher.tune.patch import IfGiven, diff_of_source, patched_all, read_source
from gpulaunch.launcher.tune.search import Measured, Tried
from gpulaunch.launcher.tune.session import Tuned

_MOST_FOUND: Final = 3
_NO_GAIN: Final = "no gain"
_POSITIONS: Final = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
"""Of DataLoader; what follows is given by keyword only."""
_WITHOUT_WORKERS: Final = {
    **{name: IfGiven(None) for name in ("prefetch_factor", "multiprocessing_context")},
    "persistent_workers": IfGiven(False),
    "timeout": IfGiven(0),
}
"""Of DataLoader, which raises with other values if it has no workers; the probe sets the same in a trial."""
_OF_TORCH: Final[Mapping[str, str]] = {
    "num_threads": "torch.set_num_threads({value}), or OMP_NUM_THREADS={value} in the environment",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = {value}",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({value!r})",
}


def as_line(tuned: Tuned, change: Change, measured: Measured) -> str:
    """What to say of a trial that has just ended: a line, and after the first trial what was found in it."""
    if tuned.trials == 1:
        found = "".join(f"\n    found: {_found(each)}" for each in tuned.seen.findings[:_MOST_FOUND])
        return f"  as it is, for its findings: {1e3 * tuned.base_s:.1f} ms a step{found}"
    name = f"{change.name} ({change.where})" if change.keys else "as it is"
    if measured.step_s is None:
        return f"  {name}: {measured.refused or measured.died}"
    base = tuned.search.base
    gain = f", {_signed(median(base) / measured.step_s - 1.0)}" if change.keys and base else ""
    return f"  {name}: {1e3 * measured.step_s:.1f} ms a step{gain}"


def _found(finding: Mapping[str, Any]) -> str:
    place = f" {finding['file']}:{finding['line']}" if finding["file"] else ""
    return f"{finding['rule']}{place}: {1e3 * finding['seconds_per_step']:.3g} ms of every step"


def as_table(tuned: Tuned) -> list[str]:
    """The changes that were tried, what was predicted, and what they gain."""
    rows = [("change", "where", "predicted", "measured", "trials")]
    best = tuned.search.best()
    tried = [each for each in tuned.search.tried if each.trials]
    rows += [_row(tuned, each) for each in sorted(tried, key=lambda each: -_gained(tuned, each))]
    if tuned.search.combined is not None and tuned.search.combined.trials:
        rows.append(_row(tuned, tuned.search.combined))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if tuned.left and tried:
        lines.append(f"no time for: {'; '.join(each.name for each in tuned.left)} (allow more with --budget)")
    if not tried and tuned.left:
        lines = [f"no time for any trial: {'; '.join(each.name for each in tuned.left)} (allow more with --budget)"]
    elif not tried:
        lines = ["nothing was tried: no setting that this could change takes a part of the steps"]
    elif best is None:
        lines.append("nothing that was tried makes this job surely faster")
    lines += why_no_workers(tuned.seen)
    return lines


def as_json(tuned: Tuned, *, command: Iterable[str], patch: str) -> dict[str, Any]:
    """All of it."""
    best = tuned.search.best()
    combined = tuned.search.combined
    return {
        "version": VERSION,
        "command": list(command),
        "step_seconds": tuned.base_s,
        "base_step_seconds": tuned.search.base,
        "measured_steps": {"first": tuned.steps.first, "count": tuned.steps.count},
        "ranks": tuned.seen.ranks,
        "trials": tuned.trials,
        "seconds": tuned.spent_s,
        "tried": [_tried_json(tuned, each) for each in tuned.search.tried if each.trials],
        "together": _tried_json(tuned, combined) if combined is not None and combined.trials else None,
        "best": None if best is None else best.change.as_json(),
        "not_tried": [each.as_json() for each in tuned.left],
        "patch": patch,
    }


def patch_of(change: Change) -> tuple[str, list[str]]:
    """Return a change as a patch of the files in the current directory or elsewhere, and a line for each part of it
    that is not in the patch."""
    diffs, hints = [], []
    by_file: dict[str, list[tuple[int, str, Mapping[str, Any], Sequence[str]]]] = {}
    for site, settings in change.loaders.items():
        path, _, line = line_of(site).rpartition(":")
        if os.path.isabs(path) and not os.path.relpath(path).startswith(".."):
            path = os.path.relpath(path)  # the program has changed its directory
        arguments = settings if settings.get("num_workers") != 0 else {**_WITHOUT_WORKERS, **settings}
        by_file.setdefault(path, []).append((int(line), "DataLoader", arguments, _POSITIONS))
    for path, edits in by_file.items():
        before = read_source(path)
        after = patched_all(before, edits) if before else None
        if after is not None and before:
            diffs.append(diff_of_source(before, after, path))
            continue
        made = "for the DataLoader that it makes"
        hints += [f"{path}:{line}: {made}: {_arguments(settings)}" for line, _, settings, _ in edits]
    if change.ddp:
        hints.append(f"DistributedDataParallel(..., {_arguments(change.ddp)})")
    hints += [_OF_TORCH[name].format(value=value) for name, value in change.torch.items()]
    if change.gc_freeze:
        hints.append("gc.collect(); gc.freeze() before the training loop")
    return "".join(diffs), hints


def _arguments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items() if not isinstance(value, IfGiven))


def _tried_json(tuned: Tuned, tried: Tried) -> Mapping[str, Any]:
    gain = tuned.search.gain(tried)
    return {
        "change": tried.change.as_json(),
        "name": tried.change.name,
        "where": tried.change.where,
        "rule": tried.change.because,
        "predicted_ratio": _predicted(tuned, tried.change),
        "step_seconds": tried.step_s,
        "gain_ratio": None if gain is None else {"median": gain.median, "low": gain.low, "high": gain.high},
        "verdict": "failed" if gain is None else gain.verdict,
        "failed": tuned.search.refused(tried),
    }


def _row(tuned: Tuned, tried: Tried) -> tuple[str, str, str, str, str]:
    gain, predicted = tuned.search.gain(tried), _predicted(tuned, tried.change)
    return (
        tried.change.name,
        tried.change.where,
        "" if predicted is None else _signed(predicted),
        tuned.search.refused(tried) if gain is None else _as_text(gain),
        str(len(tried.trials)),
    )


def _as_text(gain: Gain) -> str:
    if gain.verdict == "none":
        return f"{_NO_GAIN} ({_signed(gain.median)})"
    return gain_text(gain.median, gain.low, gain.high) + ("" if gain.verdict == "gain" else ", not sure")


def _gained(tuned: Tuned, tried: Tried) -> float:
    gain = tuned.search.gain(tried)
    return -1.0 if gain is None else gain.median


def _predicted(tuned: Tuned, change: Change) -> float | None:
    """By how much more steps a second there would be, by a finding."""
    saved_s = change.predicted_s
    if saved_s is None or saved_s >= tuned.base_s:
        return None
    return tuned.base_s / (tuned.base_s - saved_s) - 1.0


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+.0f} %"
