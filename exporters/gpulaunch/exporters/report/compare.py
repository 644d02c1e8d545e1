"""Compares two runs: what changed, and which changes are distinguishable from noise. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast

from gpulaunch.exporters.report.crowding import Crowding, crowding_of
from gpulaunch.exporters.report.formatting import seconds
from gpulaunch.exporters.report.noise import FEWEST_BLOCKS, SURE, Judgement, judge
from gpulaunch.exporters.report.resample import SEVERAL, length_between, steady, with_whole_steps
from gpulaunch.exporters.view.model import FindingView, RunView
from gpulaunch.exporters.view.rank_model import Curve
from gpulaunch.profiler.channel.layout import PHASES

Told = Literal["changed", "noise", "short", "crowded", "single"]
"""`changed`: by more than chance. `noise`: not distinguishable from noise. `short`: too little data to compare.
`crowded`: other processes used the cores. `single`: one value per run, whose noise is unknown."""

_STEP: Final = "step time"
_SURE_OF_MANY: Final = 0.05
_LEAST_SHARE: Final = 0.01
"""Phases with a smaller share of the step in both runs are left out."""
_VOLATILE: Final = frozenset(
    (
        *("gpulaunch_pid", "run_id", "job_dir", "log_dir", "options.job-dir", "options.log-dir", "call_dir", "command"),
        *("origins", "cards", "cpu_sets", "version", "program.call_dir", "name", "options.name"),
    )
)
"""Fields of job.json that differ in every run, or are repeated elsewhere in it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity in both runs."""

    name: str
    unit: str
    """`s`, `B`, `1/s`, `1`."""
    a: float | None
    b: float | None
    more_is_better: bool | None
    told: Told
    judgement: Judgement | None = None

    @property
    def ratio(self) -> float | None:
        """The change relative to the first run."""
        if self.judgement is not None and self.judgement.ratio is not None:
            return self.judgement.ratio
        return self.b / self.a - 1 if self.a and self.b is not None else None

    @property
    def better(self) -> bool | None:
        """Whether the second run is better in this; None: undecided, or neither."""
        if self.told != "changed" or self.more_is_better is None or self.judgement is None:
            return None
        return (self.judgement.shift or 0.0) > 0 if self.more_is_better else (self.judgement.shift or 0.0) < 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences, and the quantities compared."""

    a: RunView
    b: RunView
    changes: tuple[Change, ...]
    """The step time first."""
    came: tuple[FindingView, ...]
    went: tuple[FindingView, ...]
    stayed: tuple[tuple[FindingView, FindingView], ...]
    settings: tuple[tuple[str, Any, Any], ...]
    versions: tuple[tuple[str, Any, Any], ...]
    versions_known: bool
    notes: tuple[str, ...]

    @property
    def step(self) -> Change | None:
        """The change of the step time, the one that matters."""
        return next((change for change in self.changes if change.name == _STEP), None)


def compare(
    a: RunView,
    b: RunView,
    *,
    jobs: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Comparison:
    """Compare two runs.

    Args:
        a: the first, the baseline.
        b: the second.
        jobs: their job.json.
    """
    crowding = crowding_of(a), crowding_of(b)
    crowded = any(each is not None and each.crowded for each in crowding)
    length_s = length_between(a, b)
    series = _series(a, b, length_s)
    changes = [_judged(name, unit, better, one, other) for name, unit, better, one, other in series]
    changes = _sure(changes, crowded=crowded)
    came, went, stayed = _findings(_found_in(a), _found_in(b))
    versions = tuple(job.get("versions") for job in jobs)
    known = all(isinstance(each, Mapping) for each in versions)
    return Comparison(
        a=a,
        b=b,
        changes=(*changes, *_single(a, b, curved=bool(series))),
        came=came,
        went=went,
        stayed=stayed,
        settings=_different(settings_of(jobs[0]), settings_of(jobs[1])),
        versions=_different(*({str(key): value for key, value in (each or {}).items()} for each in versions))
        if known
        else (),
        versions_known=known,
        notes=(*_notes(a, b, crowding), *_too_few(a, b, series, length_s)),
    )


# -- series

_Series: TypeAlias = tuple[str, str, bool, list[float], list[float]]
"""A quantity over time: name, unit, whether more is better, and its values in both."""


def _series(a: RunView, b: RunView, length_s: float) -> list[_Series]:
    a, b = with_whole_steps(a), with_whole_steps(b)
    curves: list[tuple[str, str, bool, Curve, Curve]] = [
        (_STEP, "s", False, a.step_mean_seconds, b.step_mean_seconds),
        ("steps a second", "1/s", True, a.steps_per_second, b.steps_per_second),
    ]
    if any(value for view in (a, b) for value in view.samples_per_second):
        curves.append(("samples a second", "1/s", True, a.samples_per_second, b.samples_per_second))
    curves += [
        (f"{phase.replace('_', ' ')} in a step", "s", False, _phase(a, phase), _phase(b, phase))
        for phase in PHASES
        if any(_share(view, phase) >= _LEAST_SHARE for view in (a, b))
    ]
    found: list[_Series] = []
    for name, unit, better, one, other in curves:
        values_a, values_b = (steady(*each, length_s, by_steps=unit == "s") for each in ((one, a), (other, b)))
        if values_a and values_b:
            found.append((name, unit, better, values_a, values_b))
    return found


def _phase(view: RunView, phase: str) -> Curve:
    """Return seconds per step: 0 for a phase that the run never had, None for an unknown share."""
    shares = view.phase_ratios.get(phase)
    if shares is None:
        return tuple(None if step is None else 0.0 for step in view.step_mean_seconds)
    return tuple(
        None if step is None or share is None else share * step
        for share, step in zip(shares, view.step_mean_seconds, strict=True)
    )


def _share(view: RunView, phase: str) -> float:
    known = [share for share in view.phase_ratios.get(phase, ()) if share is not None]
    return sum(known) / len(known) if known else 0.0


def _judged(name: str, unit: str, better: bool, a: list[float], b: list[float]) -> Change:
    judgement = judge(a, b)
    return Change(
        name=name,
        unit=unit,
        a=judgement.a,
        b=judgement.b,
        more_is_better=better,
        told="short" if judgement.shift is None else "noise",
        judgement=judgement,
    )


def _sure(changes: Sequence[Change], *, crowded: bool) -> list[Change]:
    """Decide which of them changed. The step time has its own threshold; the others share one by Holm's correction:
    of twenty quantities, one is always extreme."""
    told: dict[str, Told] = {}
    others = [change for change in changes if change.name != _STEP and _p(change) is not None]
    others.sort(key=lambda change: _p(change) or 0.0)
    passed = True
    for index, change in enumerate(others):
        passed = passed and (_p(change) or 0.0) <= _SURE_OF_MANY / (len(others) - index)
        told[change.name] = "changed" if passed else "noise"
    judged: list[Change] = []
    for change in changes:
        judgement, p = change.judgement, _p(change)
        says = change.told
        if judgement is not None and judgement.apart:
            says = "changed"
        elif p is not None:
            says = told.get(change.name, "changed" if p <= SURE else "noise")
        if says == "changed" and judgement is not None and not judgement.large:
            says = "noise"
        if says in ("changed", "short") and crowded:
            says = "crowded"
        judged.append(replace(change, told=says))
    return judged


def _p(change: Change) -> float | None:
    return None if change.judgement is None else change.judgement.p


# -- one value per run


def _single(a: RunView, b: RunView, *, curved: bool) -> list[Change]:
    def most(view: RunView, values: Callable[[Any], float | None]) -> float | None:
        known = [value for rank in view.ranks if (value := values(rank)) is not None]
        return max(known, default=None)

    means: tuple[tuple[str, str, bool, Callable[[RunView], float | None]], ...] = (
        (_STEP, "s", False, lambda view: view.step_seconds_now),
        ("samples a second", "1/s", True, lambda view: view.samples_per_second_now),
    )
    quantities: tuple[tuple[str, str, bool | None, Callable[[RunView], float | None]], ...] = (
        *(() if curved else means),
        ("steps", "1", None, lambda view: view.steps),
        ("ranks", "1", None, lambda view: view.world_size),
        ("time of the whole run", "s", False, lambda view: view.elapsed_seconds),
        ("goodput", "%", True, lambda view: None if view.goodput_at_most else view.goodput_ratio),
        ("startup", "s", False, lambda view: _spent(view, "startup")),
        ("checkpoint stall", "s", False, lambda view: _spent(view, "checkpoint_stall")),
        ("restarts", "1", False, lambda view: float(sum(view.restarts.values()))),
        (
            "trainer memory, most of a rank",
            "B",
            False,
            lambda view: most(view, lambda rank: rank.most_bytes.get("trainer")),
        ),
        (
            "worker memory, most of a rank",
            "B",
            False,
            lambda view: most(view, lambda rank: rank.most_bytes.get("workers")),
        ),
        (
            "GPU memory, peak of a rank",
            "B",
            False,
            lambda view: most(view, lambda rank: rank.most_bytes.get("allocated")),
        ),
        ("CPU time of the trainers in a step", "s", False, _cpu_in_step),
    )
    changes = [
        Change(name=name, unit=unit, a=of(a), b=of(b), more_is_better=better, told="single")
        for name, unit, better, of in quantities
    ]
    return [change for change in changes if change.a is not None or change.b is not None]


def _spent(view: RunView, bucket: str) -> float | None:
    """Return a bucket's seconds; None if no step was seen: start-up then ends when ranks run, so is not comparable."""
    return None if view.goodput_ratio is None else view.goodput_seconds.get(bucket)


def _cpu_in_step(view: RunView) -> float | None:
    """Return CPU time per step of all ranks, whatever else uses the cores; includes that before the first step."""
    steps = sum(rank.steps or 0 for rank in view.ranks)
    known = [rank.cpu_seconds["trainer"] for rank in view.ranks if "trainer" in rank.cpu_seconds]
    return sum(known) / steps if steps and known else None


# -- findings and settings


def _found_in(view: RunView) -> tuple[FindingView, ...]:
    """Return the findings of the run itself, without those of earlier runs in the same directory."""
    return tuple(found for found in view.findings if not found.earlier)


def _findings(
    a: Sequence[FindingView], b: Sequence[FindingView]
) -> tuple[tuple[FindingView, ...], tuple[FindingView, ...], tuple[tuple[FindingView, FindingView], ...]]:
    """Return which findings came, went and stayed. Edits move lines, and a program may be in another directory: the
    same rule, subject and file is the same finding if its line is gone."""
    ours, theirs = _once(a), _once(b)
    stayed: list[tuple[FindingView, FindingView]] = []
    keys: tuple[Callable[[FindingView], object], ...] = (
        lambda found: (found.rule, found.file, found.line, found.subject),
        lambda found: (found.rule, (found.file or "").rpartition("/")[2], found.line, found.subject),
        lambda found: (found.rule, (found.file or "").rpartition("/")[2], found.subject),
    )
    for key in keys:
        for one in list(ours):
            other = next((each for each in theirs if key(each) == key(one)), None)
            if other is not None:
                stayed.append((one, other))
                ours.remove(one)
                theirs.remove(other)
    return tuple(theirs), tuple(ours), tuple(stayed)


def _once(findings: Sequence[FindingView]) -> list[FindingView]:
    """Merge findings seen on several nodes: keep the most expensive."""
    best: dict[object, FindingView] = {}
    for found in findings:
        key = (found.rule, found.file, found.line, found.subject)
        if key not in best or found.seconds_per_hour > best[key].seconds_per_hour:
            best[key] = found
    return list(best.values())


def settings_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested settings of job.json, flattened: `options.max-restarts`, `program.args`."""
    flat: dict[str, Any] = {}
    for name, value in job.items():
        if isinstance(value, Mapping) and name in ("options", "env", "program", "redirects", "tee"):
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        elif name != "versions":
            flat[name] = value
    return {name: _joined(value) for name, value in flat.items() if name not in _VOLATILE}


def _joined(value: Any) -> Any:
    """Join the arguments of a command line into one line."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in cast("list[object]", value)):
        return " ".join(cast("list[str]", value))
    return value


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """Return the settings that differ; one with two names is listed once."""
    rows = [(name, a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    resolved = {_bare(name) for name, _, _ in rows if not name.startswith("options.")}
    return tuple(row for row in rows if not (row[0].startswith("options.") and _bare(row[0]) in resolved))


def _bare(name: str) -> str:
    bare = name.removeprefix("options.").replace("-", "_")
    return {"nproc_per_node": "nproc", "program": "program.target"}.get(bare, bare.removesuffix("_s"))


def _notes(a: RunView, b: RunView, crowding: tuple[Crowding | None, Crowding | None]) -> list[str]:
    notes: list[str] = []
    for name, view, crowd in zip("AB", (a, b), crowding, strict=True):
        if not view.step_mean_seconds:
            notes.append(f"{name} has no curve of its steps: nothing can be said of its noise")
        if crowd is not None and crowd.crowded:
            notes.append(
                f"others had the cores in {name}: somebody waited for one {crowd.pressure_ratio:.0%} of the time, and "
                f"the job itself used {crowd.cores_used:.1f} of {crowd.cores_allowed:g}; times are theirs, too"
            )
    if a.world_size != b.world_size and a.world_size and b.world_size:
        notes.append(f"A has {a.world_size} ranks and B {b.world_size}: a step is not the same work in both")
    if any(change is None for change in crowding):
        notes.append("it is unknown whether other processes used the cores of both runs")
    return notes


def _too_few(a: RunView, b: RunView, series: Sequence[_Series], length_s: float) -> list[str]:
    """Return notes on runs that are too short for the comparison."""
    numbers = [len(values) for values in series[0][3:]] if series else []
    return [
        f"steps are compared in stretches of {seconds(length_s)}, as long as {SEVERAL} steps and as an interval of "
        f"either run at least: {name} has {number} of them, and {FEWEST_BLOCKS} are needed"
        for name, view, number in zip("AB", (a, b), numbers, strict=False)
        if number < FEWEST_BLOCKS and length_s > view.interval_seconds
    ]
