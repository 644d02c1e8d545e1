"""The difference of two snapshots: counters are subtracted, field by field; gauges keep the later value."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpulaunch.profiler.analysis.stall import Stall, verdict
from gpulaunch.profiler.analysis.thresholds import SAMPLES_OF_A_LINE
from gpulaunch.profiler.analysis.window import GpuWindow, MemoryPoint, RankWindow, Snapshot, Window
from gpulaunch.profiler.channel.declare import difference
from gpulaunch.profiler.channel.layout import COPIES, SYNCS
from gpulaunch.profiler.record import (
    CopyTotals,
    HostState,
    LoaderState,
    LoaderWorkers,
    RankProcesses,
    Role,
    Site,
    TrainingState,
)
from gpulaunch.profiler.record.line_calls import PYTHON

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


K = TypeVar("K")
R = TypeVar("R", bound="DataclassInstance")

_IN_OBSERVED_STEPS: Final = frozenset((*SYNCS, *(direction for direction, _ in COPIES), "built_on_cpu"))
"""Kinds of lines that are only counted in these; saves, collections and the like always are."""
_NO_COPIES: Final = CopyTotals(count=0, size_bytes=0, blocked_ns=0, gpu_ns=0)


def between(
    before: Snapshot,
    after: Snapshot,
    *,
    least_steps: int = 1,
    memory: Mapping[int, tuple[MemoryPoint, ...]] | None = None,
) -> Window:
    """Return the window between two snapshots of one attempt.

    Args:
        before: the earlier one.
        after: the later one.
        least_steps: ranks that have made fewer are left out.
        memory: the trend of each rank's memory.
    """
    old, new = before.state, after.state
    old_training = {training.rank: training for training in old.training}
    old_processes = {processes.rank: processes for processes in old.processes}
    new_processes = {processes.rank: processes for processes in new.processes}
    trends = memory or {}
    ranks = [
        _rank(
            (before, after),
            (old_training[training.rank], training),
            (old_processes.get(training.rank), new_processes.get(training.rank)),
            trends.get(training.rank, ()),
        )
        for training in new.training
        if training.rank in old_training and training.steps - old_training[training.rank].steps >= max(1, least_steps)
    ]
    throttled = {device.uuid: device.throttle_seconds for device in old.devices}
    waited = {} if old.host is None else old.host.pressure_s
    return Window(
        seconds=(new.taken_monotonic_ns - old.taken_monotonic_ns) / 1e9,
        ranks=tuple(ranks),
        gpus=tuple(
            GpuWindow(state=device, throttle_s=_grown(throttled.get(device.uuid, {}), device.throttle_seconds))
            for device in new.devices
        ),
        host=new.host,
        pressure_s=_grown(waited, new.host.pressure_s) if new.host is not None and waited else {},
        cores=_cores(new.host),
    )


def _cores(host: HostState | None) -> float | None:
    known = [] if host is None else [cores for cores in (host.cores, host.cpu_quota_cores) if cores]
    return min(known, default=None)


def _rank(
    snapshots: tuple[Snapshot, Snapshot],
    training: tuple[TrainingState, TrainingState],
    processes: tuple[RankProcesses | None, RankProcesses | None],
    memory: tuple[MemoryPoint, ...],
) -> RankWindow:
    before, after = snapshots
    old, new = training
    rank, now = new.rank, processes[1]
    trainer_cpu_s, _, trainer_runqueue_s = _cpu(*processes, Role.TRAINER)
    workers_cpu_s, workers_system_s, _ = _cpu(*processes, Role.WORKERS)
    steps, unobserved = new.steps - old.steps, new.unobserved_steps - old.unobserved_steps
    times = steps / (steps - unobserved) if 0 < unobserved < steps else 1.0
    holding_gil = {line for whose, line in after.holding_gil if whose == rank}
    scores_line, scores_share = _scores(rank, after)
    window = RankWindow(
        rank=rank,
        steps=steps,
        microsteps=new.microsteps - old.microsteps,
        step_ns=new.step_ns_total - old.step_ns_total,
        phase_ns=_grown(old.phase_ns, new.phase_ns),
        loader=_loader(old, new),
        workers=_workers(_workers_of(rank, before), _workers_of(rank, after)),
        workers_alive=0 if now is None else now.workers_alive,
        worker_cores=frozenset() if now is None else now.worker_cores,
        stall=Stall(kind="none", share=0.0, parts_ns={}),
        copies={
            key: _of_all_steps(difference(copies, was), times)
            for key, copies in new.copies.items()
            if (was := old.copies.get(key, _NO_COPIES)).count < copies.count
        },
        sites=tuple(
            _of_all_steps(site, times) if site.kind in _IN_OBSERVED_STEPS else site
            for site in _sites(old.sites, new.sites)
        ),
        validation_share=new.phase_ns.get("validation", 0) / new.step_ns_total if new.step_ns_total else 0.0,
        saves=(new.checkpoint.saves if new.checkpoint else 0) - (old.checkpoint.saves if old.checkpoint else 0),
        compiled=new.pauses.compiles > 0,
        pauses=difference(new.pauses, old.pauses),
        gpu=None if new.gpu is None else difference(new.gpu, old.gpu),
        gpu_time=None if new.gpu_time is None else difference(new.gpu_time, old.gpu_time),
        trainer_cpu_s=trainer_cpu_s,
        workers_cpu_s=workers_cpu_s,
        workers_system_s=workers_system_s,
        trainer_runqueue_s=trainer_runqueue_s,
        main_thread_s=_main_thread_s(*processes),
        shm_inflight_bytes=None if now is None else now.shm_inflight_bytes,
        facts=new.facts,
        samples=after.samples.get(rank, 0) - before.samples.get(rank, 0),
        logged=_grown(_lines_of(rank, before.logged), _lines_of(rank, after.logged)),
        calling=_calling(rank, before, after, holding_gil),
        after_step=_lines_of(rank, after.after_step),
        before_backward=after.before_backward.get(rank, 0),
        looping=_lines_of(rank, after.looping),
        loop_ends=_lines_of(rank, after.loop_ends),
        indexing=after.indexing.get(rank, 0) - before.indexing.get(rank, 0),
        saving_share=_saving_share(rank, after),
        chained=after.chained,
        gil_waits=_grown(_functions_of(rank, before), _functions_of(rank, after)),
        gil_lines={(function, line): n for (whose, function, line), n in after.gil_waits.items() if whose == rank},
        thread_waits=after.thread_waits.get(rank, 0) - before.thread_waits.get(rank, 0),
        backward=_lines_of(rank, after.backward),
        around_model=_grown(_lines_of(rank, before.around_model), _lines_of(rank, after.around_model)),
        scores_line=scores_line,
        scores_share=scores_share,
        fetches=after.fetches.get(rank, 0),
        locked=after.locked.get(rank, 0),
        fetching=_lines_of(rank, after.fetching),
        calls=_lines_of(rank, after.calls) | dict.fromkeys(holding_gil, PYTHON),
        memory=memory,
        cpu_nodes=after.cpu_nodes.get(rank, frozenset()),
    )
    return window if window.loader is None else replace(window, stall=_stall(window, window.loader))


def _loader(old: TrainingState, new: TrainingState) -> LoaderState | None:
    """None also where its queue is not read: the segment then reports no prefetching, which may be wrong."""
    if new.loader is None or "loader_queue" in new.hooks_unavailable:
        return None
    return difference(new.loader, old.loader)


def _stall(rank: RankWindow, loader: LoaderState) -> Stall:
    done = rank.workers
    return verdict(
        step_ns=rank.step_ns,
        data_wait_ns=rank.phase_ns.get("data_wait", 0),
        loader_wait_ns=loader.wait_ns_total,
        transfer_ns=loader.transfer_ns_total,
        reorder_ns=loader.blocked_ns_total,
        workers=loader.workers_configured,
        cpu_ns=done.cpu_ns if done else 0,
        runqueue_ns=done.runqueue_ns if done else 0,
        blocked_ns=done.blocked_ns if done else 0,
    )


def _of_all_steps(counted: R, times: float) -> R:
    """Return what was counted in the observed steps, for all steps: so many times as much, as for their phases."""
    if times == 1.0:
        return counted
    numbers = {each.name: getattr(counted, each.name) for each in fields(counted)}
    return replace(counted, **{name: round(times * n) for name, n in numbers.items() if isinstance(n, int)})


def _minus(old: R | None, new: R, as_it_is: frozenset[str] = frozenset()) -> R:
    """Subtract a record's counts from those of a later one; other fields keep the later value."""
    if old is None:
        return new
    counts = {field.name: getattr(new, field.name) for field in fields(new) if field.name not in as_it_is}
    return replace(new, **{name: value - getattr(old, name) for name, value in counts.items()})


def _grown(old: Mapping[K, float], new: Mapping[K, Any]) -> dict[K, Any]:
    """Return the growth of each value; one that is less than before was reset, and counts whole."""
    return {key: value - old.get(key, 0) if value >= old.get(key, 0) else value for key, value in new.items()}


def _lines_of(rank: int, lines: Mapping[tuple[int, str], K]) -> dict[str, K]:
    return {line: known for (whose, line), known in lines.items() if whose == rank}


def _functions_of(rank: int, snapshot: Snapshot) -> dict[str, int]:
    """Samples that wait for the GIL by the function of its holder."""
    return {name: count for (whose, name, line), count in snapshot.gil_waits.items() if whose == rank and not line}


def _calling(rank: int, before: Snapshot, after: Snapshot, holding_gil: Set[str]) -> dict[str, int]:
    """Samples by the line that they count for: an innermost one that always holds the GIL, or one further out."""
    calling = _grown(_lines_of(rank, before.calling), _lines_of(rank, after.calling))
    if not holding_gil:
        return calling
    for (whose, line, instead), samples in after.innermost.items():
        count = samples - before.innermost.get((whose, line, instead), 0)
        if whose == rank and line in holding_gil and count > 0:
            calling[line] = calling.get(line, 0) + count
            if instead in calling:
                calling[instead] = max(0, calling[instead] - count)
    return calling


def _cpu(old: RankProcesses | None, new: RankProcesses | None, role: Role) -> tuple[float, float, float | None]:
    """Seconds on a core, those of them in the kernel, and seconds of waiting for a core if that is counted."""
    if old is None or new is None or role not in old.usage or role not in new.usage:
        return 0.0, 0.0, None
    was, now = old.usage[role], new.usage[role]
    system_s = now.cpu_system_s - was.cpu_system_s
    used_s = now.cpu_user_s - was.cpu_user_s + system_s
    waited_s: float | None = None
    if role in old.runqueue_s and role in new.runqueue_s:
        waited_s = max(0.0, new.runqueue_s[role] - old.runqueue_s[role])
    return max(0.0, used_s), max(0.0, system_s), waited_s


def _main_thread_s(old: RankProcesses | None, new: RankProcesses | None) -> float | None:
    """How long the first thread of a rank's process ran, or was ready to; None if it is another process."""
    if old is None or new is None or old.main_thread_s is None or new.main_thread_s is None:
        return None
    wanted_s = new.main_thread_s - old.main_thread_s
    return wanted_s if wanted_s >= 0 else None


def _workers_of(rank: int, snapshot: Snapshot) -> LoaderWorkers | None:
    return next((workers for workers in snapshot.state.workers if workers.rank == rank), None)


def _workers(old: LoaderWorkers | None, new: LoaderWorkers | None) -> LoaderWorkers | None:
    return None if new is None else _minus(old, new, frozenset({"rank", "alive", "knows_runqueue"}))


def _sites(old: tuple[Site, ...], new: tuple[Site, ...]) -> tuple[Site, ...]:
    """What each line did; a row whose count has fallen belongs to a new segment, and counts whole."""
    was = {(site.kind, site.text): site for site in old}
    found: list[Site] = []
    for site in new:
        before = was.get((site.kind, site.text))
        if before is not None and before.count > site.count:
            before = None
        if before is None or before.count < site.count:
            found.append(_minus(before, site, frozenset({"kind", "text"})))
    return tuple(site for site in found if site.count)


def _scores(rank: int, after: Snapshot) -> tuple[str, float]:
    """See `RankWindow.scores_line` and `scores_share`."""
    losses, scored = _lines_of(rank, after.losses), _lines_of(rank, after.around_model)
    line = max(losses, key=lambda each: losses[each] + scored.get(each, 0), default="")
    of_line, of_loss = scored.get(line, 0), losses.get(line, 0)
    count, samples = of_line + of_loss, after.samples.get(rank, 0)
    # A head takes about as long as its loss: with far fewer samples the line calls what computes the scores.
    is_head = 2 * of_line >= of_loss and SAMPLES_OF_A_LINE.value <= count <= samples
    return line, count / samples if is_head else 0.0


def _saving_share(rank: int, after: Snapshot) -> float:
    saving, samples = after.saving.get(rank, 0), after.samples.get(rank, 0)
    return saving / samples if SAMPLES_OF_A_LINE.value <= saving <= samples else 0.0
