"""Builds the views of a node's ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from gpulaunch.exporters.store.series import Key
from gpulaunch.exporters.view.curves import Curves, Growth, ratio, total
from gpulaunch.exporters.view.rank_model import (
    CollectiveView,
    CopyView,
    CostView,
    Curve,
    LoaderView,
    MemoryView,
    PauseView,
    RankView,
    SyncView,
)
from gpulaunch.exporters.view.source import NodeSource, part
from gpulaunch.exporters.view.values import Values, by_label, whole
from gpulaunch.profiler.channel.layout import PHASES

_ROLES = ("trainer", "workers")
_STATES = ("allocated", "reserved")
_QUEUE = ("ready", "outstanding", "reorder_blocked", "pin_backlog")

_MOST_DIGITS: Final = 9


def ranks_of(source: NodeSource, curves: Curves, *, with_curves: set[int] | None) -> list[RankView]:
    """Return the ranks of a node, in order.

    Args:
        source: the node.
        curves: its rows.
        with_curves: the ranks that get curves; None: all of them.
    """
    told = part(source.document, "ranks")
    counters, gauges = by_label(source.counters), by_label(source.gauges)
    before, now = (by_label(moment.counters) for moment in source.recent) if source.recent else ({}, {})
    seconds = source.recent[1].at_s - source.recent[0].at_s if source.recent else 0.0
    numbers = {int(label) for label in told if _names_a_rank(label)}
    numbers |= {int(key[1]) for key in source.counters if key[0] == "gpulaunch_steps_total" and _names_a_rank(key[1])}
    views: list[RankView] = []
    for rank in sorted(numbers):
        label = str(rank)
        view = _rank(
            rank,
            source.node,
            part(told, label),
            Values(counters.get(label, {}), label),
            Values(gauges.get(label, {}), label),
            _Recent(Values(before.get(label, {}), label), Values(now.get(label, {}), label), seconds),
            curves if with_curves is None or rank in with_curves else Curves.none(),
        )
        views.append(view)
    return views


def with_summary(ranks: list[RankView], summary: Mapping[str, Any], *, profiled: bool) -> list[RankView]:
    """Return the ranks updated from summary.json: it is written last, and has the steps since the last sample.

    Args:
        ranks: from the telemetry.
        summary: the agent's summary.
        profiled: False where no steps were seen: an older gpulaunch wrote 0 for them.
    """
    told = {view.rank: view for view in _ranks_of_summary(summary, profiled=profiled)}
    if not ranks:
        return list(told.values())
    return [_newer(view, told[view.rank]) if view.rank in told else view for view in ranks]


def _newer(view: RankView, told: RankView) -> RankView:
    names = {**view.most_bytes, **told.most_bytes}
    most = {name: max(one.most_bytes.get(name, 0) for one in (view, told)) for name in names}
    view = replace(view, most_bytes=most)
    if told.steps is None or told.steps <= (view.steps or 0):
        return view
    return replace(
        view,
        steps=told.steps,
        timed_steps=told.timed_steps,
        samples=told.samples,
        step_seconds=told.step_seconds,
        phase_seconds=told.phase_seconds or view.phase_seconds,
    )


def _ranks_of_summary(summary: Mapping[str, Any], *, profiled: bool) -> list[RankView]:
    views: list[RankView] = []
    for label, told in part(summary, "ranks").items():
        if not _names_a_rank(label) or not isinstance(told, dict):
            continue
        one = cast("Mapping[str, Any]", told)
        phases = {phase: _number(part(one, "phase_seconds").get(phase)) for phase in PHASES}
        most = {"trainer": one.get("max_rss_bytes"), "allocated": one.get("gpu_peak_allocated_bytes")}
        most_bytes = {name: round(_number(value)) for name, value in most.items() if _number(value)}
        seen = profiled and one.get("steps") is not None
        views.append(
            RankView(
                rank=int(label),
                steps=round(_number(one.get("steps"))) if seen else None,
                samples=(round(_number(one.get("samples"))) or None) if seen else None,
                step_seconds=_number(one.get("step_seconds")) if seen else None,
                timed_steps=whole(one.get("timed_steps")) if seen else None,
                phase_seconds=phases if any(phases.values()) else {},
                memory=MemoryView(rss_bytes={name: most_bytes[name] for name in _ROLES if name in most_bytes}),
                most_bytes=most_bytes,
            )
        )
    return sorted(views, key=lambda view: view.rank)


class _Recent:
    """The recent growth of a rank's counters."""

    def __init__(self, before: Values, now: Values, seconds: float) -> None:
        self.seconds = seconds
        self._before = before
        self._now = now

    def grown(self, name: str, *labels: str) -> float | None:
        """Return the growth; None if unknown. A counter that is new started at 0."""
        now = self._now.get(name, *labels)
        if now is None or not self._before or self.seconds <= 0:
            return None
        was = self._before.get(name, *labels, default=0.0)
        return now - was if now >= was else now

    def per_second(self, name: str, *labels: str) -> float | None:
        grown = self.grown(name, *labels)
        return None if grown is None else grown / self.seconds


def _rank(
    rank: int, node: int, told: Mapping[str, Any], counters: Values, gauges: Values, recent: _Recent, curves: Curves
) -> RankView:
    label = str(rank)
    memory = _memory(counters, gauges)
    view = RankView(
        rank=rank,
        node=node,
        local_rank=whole(told.get("local_rank")),
        pid=whole(told.get("pid")),
        armed=told.get("armed") is True,
        cpu_seconds=_cpu(counters),
        cores_now=_cores(recent),
        memory=memory,
        rss_bytes=_levels(curves, "host_memory_bytes", {role: (label, role, "rss") for role in _ROLES}),
        most_bytes=_most(memory, curves, label),
        metrics={**counters.of_rank(), **gauges.of_rank()},
    )
    if not view.armed and not counters.count("steps_total"):
        return view  # the zeros that its page was initialized with
    steps = recent.grown("steps_total")
    step_seconds = recent.grown("step_duration_seconds_sum")
    phases = {phase: recent.grown("phase_seconds_total", phase) or 0.0 for phase in PHASES}
    in_phases = sum(phases.values())
    step_growth, time_growth = (
        curves.growth_from_0(f"gpulaunch_{name}", label) for name in ("steps_total", "step_duration_seconds_sum")
    )
    return replace(
        view,
        step_source=_word(told.get("step_source")),
        steps=counters.count("steps_total"),
        microsteps=counters.count("microsteps_total"),
        skipped_steps=counters.count("skipped_steps_total"),
        samples=counters.count("samples_total") or None,
        step_seconds=counters.get("step_duration_seconds_sum", default=0.0),
        last_step_s=_number(told.get("last_step_s")) or None,
        steps_per_second_now=None if steps is None else steps / recent.seconds,
        step_seconds_now=step_seconds / steps if steps and step_seconds is not None else None,
        phase_seconds=_phases(counters),
        phase_ratios_now={phase: value / in_phases for phase, value in phases.items()} if in_phases > 0 else {},
        gpu_phase_seconds=counters.one("phase_gpu_seconds_total"),
        loader=_loader(told, counters, gauges),
        copies=_copies(counters),
        syncs=_syncs(counters),
        pauses=_pauses(counters),
        collectives=_collectives(counters, gauges),
        cost=_cost(told, counters, gauges),
        steps_per_second=() if step_growth is None else step_growth.per_second(),
        step_mean_seconds=ratio(time_growth, step_growth),
        phase_ratios=phase_curves([phase_growths(curves, label)]),
        gpu_bytes=_levels(curves, "gpu_memory_bytes", {state: (label, state) for state in _STATES}),
        loader_ready=curves.level("gpulaunch_dataloader_ready_batches", label),
        copy_bytes_per_second=_copy_rates(curves, label),
    )


def phase_growths(curves: Curves, label: str) -> dict[str, Growth | None]:
    """Return the growth of a rank's phases."""
    return {phase: curves.growth_from_0("gpulaunch_phase_seconds_total", label, phase) for phase in PHASES}


def phase_curves(growths: Sequence[Mapping[str, Growth | None]]) -> dict[str, Curve]:
    """Return the share of each phase that occurred in the time of all steps, of one or several ranks."""
    phases = {phase: total([of_rank[phase] for of_rank in growths]) for phase in PHASES} if growths else {}
    whole = total(list(phases.values()))
    return {
        phase: curve
        for phase, growth in phases.items()
        if growth is not None and any(growth.amounts) and (curve := ratio(growth, whole))
    }


def _phases(counters: Values) -> dict[str, float]:
    told = counters.one("phase_seconds_total")
    return {phase: told[phase] for phase in PHASES if phase in told}


def _cpu(counters: Values) -> dict[str, float]:
    by_role: dict[str, float] = {}
    for labels, seconds in counters.by("process_cpu_seconds_total"):
        by_role[labels[0]] = by_role.get(labels[0], 0.0) + seconds
    return by_role


def _cores(recent: _Recent) -> dict[str, float]:
    cores: dict[str, float] = {}
    for role in _ROLES:
        rates = [recent.per_second("process_cpu_seconds_total", role, mode) for mode in ("user", "system")]
        if any(rate is not None for rate in rates):
            cores[role] = sum(rate or 0.0 for rate in rates)
    return cores


def _loader(told: Mapping[str, Any], counters: Values, gauges: Values) -> LoaderView | None:
    batches = counters.whole("dataloader_batches_total")
    if batches is None:
        return None
    # If the queue is no longer read, its last values do not describe the present, nor split the total wait. In runs of
    # earlier versions it may also have been "shed".
    reads_queue = "loader_queue" not in (*_words(told.get("shed")), *_words(told.get("unavailable")))
    queue = {name: gauges.whole(f"dataloader_{name}_batches") if reads_queue else None for name in _QUEUE}
    return LoaderView(
        batches=batches,
        eval_batches=counters.count("dataloader_eval_batches_total"),
        batch_bytes=counters.count("dataloader_batch_bytes_total"),
        wait_seconds=counters.get("dataloader_wait_seconds_sum", default=0.0),
        transfer_seconds=counters.get("dataloader_transfer_seconds_total", default=0.0) if reads_queue else None,
        reorder_blocked_seconds=(
            counters.get("dataloader_reorder_blocked_seconds_total", default=0.0) if reads_queue else None
        ),
        ready=queue["ready"],
        outstanding=queue["outstanding"],
        reorder_blocked=queue["reorder_blocked"],
        pin_backlog=queue["pin_backlog"],
        workers_configured=gauges.whole("dataloader_workers", "configured"),
        workers_alive=gauges.whole("dataloader_workers", "alive"),
        worker_seconds=counters.one("dataloader_worker_seconds_total"),
        storage_bytes=counters.whole("dataloader_worker_read_bytes_total", "storage"),
        cached_bytes=counters.whole("dataloader_worker_read_bytes_total", "cache"),
    )


def _copies(counters: Values) -> tuple[CopyView, ...]:
    return tuple(
        CopyView(
            direction=labels[0],
            host_memory=labels[1],
            count=round(count),
            size_bytes=counters.count("copy_bytes_total", *labels),
            blocked_seconds=counters.get("copy_blocked_seconds_total", *labels, default=0.0),
            gpu_seconds=counters.get("copy_gpu_seconds_total", *labels, default=0.0),
        )
        for labels, count in counters.by("copies_total")
    )


def _syncs(counters: Values) -> tuple[SyncView, ...]:
    return tuple(
        SyncView(
            kind=labels[0],
            calls=round(calls),
            blocked_seconds=counters.get("sync_blocked_seconds_total", *labels, default=0.0),
        )
        for labels, calls in counters.by("sync_calls_total")
    )


def _memory(counters: Values, gauges: Values) -> MemoryView:
    sizes: dict[str, dict[str, int]] = {"rss": {}, "pss": {}}
    for labels, size in gauges.by("host_memory_bytes"):
        if len(labels) == 2 and labels[1] in sizes:
            sizes[labels[1]][labels[0]] = round(size)
    return MemoryView(
        rss_bytes=sizes["rss"],
        pss_bytes=sizes["pss"],
        shm_inflight_bytes=gauges.whole("shm_inflight_bytes"),
        gpu_bytes={state: round(size) for state, size in gauges.one("gpu_memory_bytes").items()},
        pinned_bytes=gauges.whole("pinned_memory_bytes"),
        alloc_retries=counters.whole("gpu_alloc_retries_total"),
        ooms=counters.whole("gpu_ooms_total"),
    )


def _pauses(counters: Values) -> PauseView | None:
    collections = counters.whole("gc_collections_total")
    if collections is None:
        return None
    return PauseView(
        gc_collections=collections,
        gc_seconds=counters.get("gc_seconds_total", default=0.0),
        compiles=counters.count("compiles_total"),
        compile_seconds=counters.get("compile_seconds_total", default=0.0),
        comm_calls=counters.count("comm_calls_total"),
        comm_blocked_seconds=counters.get("comm_blocked_seconds_total", default=0.0),
    )


def _collectives(counters: Values, gauges: Values) -> CollectiveView | None:
    calls = {kind: round(count) for kind, count in counters.one("collective_calls_total").items()}
    enqueued = counters.whole("collectives_enqueued_total")
    if not calls and enqueued is None:
        return None
    return CollectiveView(
        calls=calls,
        enqueued=enqueued,
        completed=counters.whole("collectives_completed_total"),
        sequence=gauges.whole("collective_sequence"),
    )


def _cost(told: Mapping[str, Any], counters: Values, gauges: Values) -> CostView | None:
    probe_seconds = counters.get("profiler_overhead_seconds_total", "trainer")
    if probe_seconds is None:
        return None
    return CostView(
        probe_seconds=probe_seconds,
        budget_ratio=gauges.get("probe_budget_ratio"),
        unobserved_steps=counters.count("unobserved_steps_total"),
        parts_unavailable=_words(told.get("unavailable")),
        fault=_word(told.get("fault")) or "",
    )


def _levels(curves: Curves, name: str, series: Mapping[str, Key]) -> dict[str, Curve]:
    levels = {what: curves.level(f"gpulaunch_{name}", *labels) for what, labels in series.items()}
    return {what: curve for what, curve in levels.items() if curve}


def _most(memory: MemoryView, curves: Curves, label: str) -> dict[str, int]:
    """Return the peaks of the run: torch's allocator reports them per attempt, so take the highest."""
    most: dict[str, list[float | None]] = {
        role: [memory.rss_bytes.get(role), curves.highest("gpulaunch_host_memory_bytes", label, role, "rss")]
        for role in _ROLES
    }
    for state in _STATES:
        names = (state, f"peak_{state}")
        most[state] = [memory.gpu_bytes.get(name) for name in names]
        most[state] += [curves.highest("gpulaunch_gpu_memory_bytes", label, name) for name in names]
    known = {name: [value for value in values if value is not None] for name, values in most.items()}
    return {name: round(max(values)) for name, values in known.items() if values}


def _copy_rates(curves: Curves, label: str) -> dict[str, Curve]:
    rates: dict[str, Curve] = {}
    for direction in ("h2d", "d2h", "d2d"):
        moved = total(
            [
                curves.growth_from_0("gpulaunch_copy_bytes_total", label, direction, host_memory)
                for host_memory in ("pageable", "pinned", "")
            ]
        )
        if moved is not None:
            rates[direction] = moved.per_second()
    return rates


def _number(value: object) -> float:
    """Return a number from a file; 0 for anything else."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if known else 0.0  # type: ignore[arg-type]


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _words(value: object) -> tuple[str, ...]:
    return (
        tuple(each for each in cast("list[object]", value) if isinstance(each, str)) if isinstance(value, list) else ()
    )


def _names_a_rank(label: str) -> bool:
    """Whether it is a valid rank number; a file may contain anything."""
    return label.isdecimal() and len(label) <= _MOST_DIGITS
