"""The numbers of a run: collected as attempts end, shown at the end, stored in summary.json. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulaunch.launcher.policy.goodput import duration
from gpulaunch.profiler.channel.layout import PHASES
from gpulaunch.profiler.channel.segment import SegmentSnapshot

_ALWAYS = ("data_wait", "forward", "backward", "optimizer", "other")
_LEAST = 0.005
"""The share of a rank's steps from which on another phase gets its own column."""
_MODEL = ("forward", "backward", "optimizer")
_TELLS = 0.05
"""The share of the steps from which on a phase is worth a sentence; smaller losses are no finding either."""
_JUDGED_STEPS = 30
"""Of the warm-up and the shortest window of the rules (`analysis.thresholds`)."""
_JUDGED_NS = 2_000_000_000
_SLOW_STEPS, _SLOW_NS = 14, 60_000_000_000
"""The same of slow steps, in a window of a minute."""
_HINTS = {
    "comm": "ranks wait for each other or for the network",
    "validation": "validate less often, or on a part of the data",
    "other": "code between the steps; gpulaunch flame shows it",
    "sync": "waits for values from the GPU",
    "h2d": "copies to the GPU",
}
_QUIET_S = 10.0
"""If no rank has passed a step edge for this long, and for two steps, the previous rate no longer applies."""
_MIB = 1 << 20


@dataclass
class RankTotals:
    """One rank's sums over the attempts of a run."""

    seen: bool = False
    """Whether a probe was active in at least one attempt: otherwise nothing is known about steps."""
    steps: int = 0
    samples: int = 0
    untimed_steps: int = 0
    """Of them, those that a killed rank had made without having published their times."""
    step_ns: int = 0
    phase_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    transfer_ns: int = 0
    """Of the data wait: handing over batches that workers had ready."""
    batches: int = 0
    max_rss_bytes: int = 0
    has_workers: bool | None = None
    """Whether it had dataloader workers, which `max_rss_bytes` does not include; None: unknown."""
    gpu_peak_bytes: int = 0

    def add(self, segment: SegmentSnapshot | None, max_rss_bytes: int) -> None:
        """Add one attempt."""
        self.max_rss_bytes = max(self.max_rss_bytes, max_rss_bytes)
        if segment is None:
            return
        self.seen = self.seen or segment.armed
        if segment.armed:
            self.has_workers = bool(self.has_workers or segment.loader.workers_configured)
        self.steps += segment.steps_made
        self.untimed_steps += segment.steps_made - segment.steps
        self.samples += segment.samples
        self.step_ns += segment.step_ns_total
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, segment.gpu.peak_allocated_bytes)
        observed = segment.steps - segment.unobserved_steps
        self.transfer_ns += segment.loader.transfer_ns_total * segment.steps // observed if observed > 0 else 0
        self.batches += segment.loader.batches
        for phase in PHASES:
            self.phase_ns[phase] += segment.phase_ns.get(phase, 0)


def samples_per_second(totals: Iterable[RankTotals]) -> float:
    """The sum over ranks of samples per second of stepping; 0 if no batch size was observed."""
    return sum(1e9 * one.samples / one.step_ns for one in totals if one.step_ns)


def progress(segments: Mapping[int, SegmentSnapshot], elapsed_s: float, now_s: float) -> str:
    """One line while the job runs, or "" when no rank has stepped; `now_s` is monotonic."""
    stepping: list[RankTotals] = []
    steps: list[int] = []
    for segment in segments.values():
        if segment.steps_made:
            one = RankTotals()
            one.add(segment, 0)
            stepping.append(one)
            steps.append(segment.checkpoint.resumed_step + segment.steps_made)
    if not stepping:
        return ""
    low, high = min(steps), max(steps)
    step = f"step {high}" if low == high else f"steps {low} to {high}"
    step_ns = sum(one.step_ns for one in stepping) or 1
    wait = sum(one.phase_ns["data_wait"] for one in stepping) / step_ns
    rate = samples_per_second(stepping)
    rates = f", {rate:,.0f} samples/s" if rate else ""
    quiet_s = now_s - max(segment.last_edge_ns for segment in segments.values()) / 1e9
    if quiet_s > max(_QUIET_S, 2e-9 * step_ns / sum(one.steps for one in stepping)):
        return f"{duration(elapsed_s)}: {step}; no rank has made progress for {duration(quiet_s)}"
    return f"{duration(elapsed_s)}: {step}{rates}, data wait {wait:.0%} of the step"


def as_json(totals: Mapping[int, RankTotals], **more: Any) -> dict[str, Any]:
    """The content of summary.json; unknown values are null."""
    ranks = {str(rank): _of_rank(one) for rank, one in sorted(totals.items())}
    return {"version": 1, **more, "samples_per_second": samples_per_second(totals.values()) or None, "ranks": ranks}


def _of_rank(one: RankTotals) -> dict[str, Any]:
    told = {
        "steps": one.steps,
        "timed_steps": one.steps - one.untimed_steps,
        "samples": one.samples or None,
        "step_seconds": one.step_ns / 1e9,
        "phase_seconds": {phase: ns / 1e9 for phase, ns in one.phase_ns.items()},
        "gpu_peak_allocated_bytes": one.gpu_peak_bytes,
    }
    return {**(told if one.seen else dict.fromkeys(told)), "max_rss_bytes": one.max_rss_bytes or None}


def as_text(
    totals: Mapping[int, RankTotals],
    *,
    elapsed_s: float,
    restarts: int,
    run_dir: str,
    stopped_by: str,
    profiled: bool = True,
) -> list[str]:
    """The lines shown at the end of a run.

    `stopped_by`: the signal that ended it, or ""; `profiled`: False if step profiling was disabled.
    """
    lines: list[str] = []
    stepping = {rank: one for rank, one in sorted(totals.items()) if one.steps}
    if stepping:
        steps = max(one.steps for one in stepping.values())
        rate = samples_per_second(stepping.values())
        attempts = f" in {restarts + 1} attempts" if restarts else ""
        rates = f"{rate:,.0f} samples/s while stepping; " if rate else ""
        lines.append(f"{steps} steps{attempts}; {rates}{duration(elapsed_s)} in all")
        lines += _table(stepping)
    else:
        none = "no steps were observed" if profiled else "steps were not observed (--no-profile)"
        lines.append(f"{none}; {duration(elapsed_s)} in all")
    peak = max((one.max_rss_bytes for one in totals.values()), default=0)
    gpu = max((one.gpu_peak_bytes for one in totals.values()), default=0)
    facts = [f"stopped by {stopped_by}"] if stopped_by else []
    if peak:
        workers = ", workers not" if any(one.has_workers is not False for one in totals.values()) else ""
        facts.append(f"peak host memory of a rank {peak / _MIB:,.0f} MiB (shared pages included{workers})")
    if gpu:
        facts.append(f"on its GPU {gpu / _MIB:,.0f} MiB")
    facts += [f"{restarts} restart{'' if restarts == 1 else 's'}", f"files in {run_dir}"]
    lines.append("; ".join(facts))
    return lines


def why_nothing_was_found(totals: Iterable[RankTotals]) -> str:
    """The sentence for a run without findings: where its steps went; "" if no steps were timed."""
    stepping = [one for one in totals if one.step_ns]
    if not stepping:
        return ""
    steps, longest_ns = max(one.steps for one in stepping), max(one.step_ns for one in stepping)
    if longest_ns < _JUDGED_NS or steps < (_JUDGED_STEPS if longest_ns < _SLOW_NS else _SLOW_STEPS):
        return f"no findings: {steps} steps in {longest_ns / 1e9:.3g} s are too few to judge"
    step_ns = sum(one.step_ns for one in stepping)
    shares = {phase: sum(one.phase_ns[phase] for one in stepping) / step_ns for phase in PHASES}
    outside = max((phase for phase in PHASES if phase not in _MODEL), key=shares.__getitem__)
    if shares[outside] < _TELLS:
        return (
            f"no findings: {sum(shares[phase] for phase in _MODEL):.0%} of the steps is forward, backward and optimizer"
        )
    hint = _HINTS.get(outside, "")
    batches, transfer_ns = sum(one.batches for one in stepping), sum(one.transfer_ns for one in stepping)
    transferred = min(transfer_ns / step_ns, shares[outside])
    if outside == "data_wait" and batches and 2 * transferred >= shares[outside]:
        each_ms = transfer_ns / batches / 1e6
        hint = f"of which {transferred:.0%} is the transfer of batches, {each_ms:.2g} ms each: use fewer, larger ones"
    return f"no findings: {outside.replace('_', ' ')} is {shares[outside]:.0%} of the steps{', ' * bool(hint)}{hint}"


def _table(stepping: Mapping[int, RankTotals]) -> list[str]:
    """Where the step time went, one row per rank; ranks in the middle of a long list are left out."""
    phases = [
        phase for phase in PHASES if phase in _ALWAYS or any(_share(one, phase) >= _LEAST for one in stepping.values())
    ]
    rows = [f"{'rank':>6}{'step':>11}" + "".join(f"{phase.replace('_', ' '):>11}" for phase in phases)]
    ranks = list(stepping)
    shown = ranks if len(ranks) <= 16 else [*ranks[:8], *ranks[-8:]]
    for rank in shown:
        one = stepping[rank]
        shares = "".join(f"{_share(one, phase):>11.1%}" for phase in phases)
        rows.append(f"{rank:>6}{one.step_ns / (one.steps - one.untimed_steps or 1) / 1e6:>8.2f} ms{shares}")
        if len(shown) < len(ranks) and rank == ranks[7]:
            rows.append(f"{'...':>6}")
    return rows


def _share(one: RankTotals, phase: str) -> float:
    return one.phase_ns[phase] / (one.step_ns or 1)
