"""The rule about stragglers: ranks that others wait for, and why they are late.

A step ends on all ranks at the same time, so a rank whose own work takes longer waits less at synchronization points.
Backward contains both: DistributedDataParallel reduces gradients in it. If the exposed part of that is known (on the
CPU; it is then in comm, and backward is the rank's own work), a slower backward is part of the loss.

Two clocks are compared: the program's and, if some steps are timed there, the GPU's. A program on CUDA runs ahead of
its GPU and synchronizes with the other ranks where it waits for it, so a slow GPU shows only on the GPU's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from gpulaunch.profiler.analysis.dispatch_rules import dispatch_of, fetches
from gpulaunch.profiler.analysis.facts import number, section, text
from gpulaunch.profiler.analysis.finding import DERIVED, Loss, place_of
from gpulaunch.profiler.analysis.loader_model import LoaderModel
from gpulaunch.profiler.analysis.machine_rules import throttled_share
from gpulaunch.profiler.analysis.stats import median_high, median_low
from gpulaunch.profiler.analysis.thresholds import (
    IN_TURNS,
    LOST,
    SAMPLES_OF_ONE_RANK,
    SLOW_WINDOW_STEPS,
    STRAGGLES_S,
    SUPPLY_DIFFERS,
    THROTTLED,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window

_CAUSES: Final = {
    "data_wait": "input",
    "h2d": "copies",
    "forward": "compute",
    "optimizer": "compute",
    "backward": "compute",
    "gc": "garbage collection",
    "other": "other",
}
_ADVICE: Final = {
    "input": "Check its DataLoader and its storage.",
    "copies": "Check its PCIe link and the NUMA node it runs on.",
    "compute": "Give all ranks the same amount of computation (sequence lengths, padding).",
    "throttle": "Its GPU is throttled: check the cooling and the power supply.",
    "CPU contention": "It waits for a core: check which other processes run on its cores.",
    "garbage collection": "Call gc.freeze() after setup, or collect at the same steps on all ranks.",
    "other": "Check what only this rank does between steps (logging, saving, printing).",
}

_ONLY_IT: Final = "Only it was sampled in this line: give each rank its own part of that, or do it every N steps."
_SHARDED_UPDATE: Final = "ZeroRedundancyOptimizer"
"""Each rank updates whole parameters, and one may have a large one."""
_IF_ALIKE: Final = " If they are the same, its GPU is slower: compare clocks and temperatures, or replace it."


@dataclass(frozen=True, kw_only=True)
class _Clock:
    """The clock whose times are compared."""

    name: str
    own: tuple[str, ...]
    """Phases of a rank's own work."""
    waiting: tuple[str, ...]
    """Phases in which it also waits for other ranks."""
    phase_s: Callable[[RankWindow, str], float]

    def own_s(self, rank: RankWindow) -> float:
        return sum(self.phase_s(rank, phase) for phase in self.own)

    def waiting_s(self, rank: RankWindow) -> float:
        return sum(self.phase_s(rank, phase) for phase in self.waiting)


def _gpu_phase_s(rank: RankWindow, phase: str) -> float:
    timed = rank.gpu_time
    if timed is None or not timed.steps:
        return 0.0
    spent_ns = {
        "forward": timed.forward_ns_total,
        "backward": timed.backward_ns_total,
        "optimizer": timed.optimizer_ns_total,
    }
    return spent_ns[phase] / 1e9 / timed.steps


PROGRAM: Final = _Clock(
    name="",
    own=("data_wait", "h2d", "forward", "optimizer", "gc", "other"),
    # Saving and compiling have their own rules; validation differs between ranks for other reasons.
    waiting=("backward", "comm", "sync"),
    phase_s=RankWindow.phase_s,
)
"""The clock of the program."""
_GPU: Final = _Clock(name="gpu_", own=("forward", "optimizer"), waiting=("backward",), phase_s=_gpu_phase_s)


def straggler(window: Window) -> Iterator[Loss]:
    """A rank that the other ranks wait for at every step, and why it is late."""
    if not are_alike(window):
        return
    late = list(_late(window, PROGRAM))
    if not late and all(rank.gpu_time and rank.gpu_time.steps >= SLOW_WINDOW_STEPS.value for rank in window.ranks):
        late = list(_late(window, _GPU))
    yield from late


def are_alike(window: Window) -> bool:
    """Whether there are several ranks, which train the same model with a batch each."""
    return len(window.ranks) > 1 and not _work_in_turns(window) and not _train_different(window)


def _work_in_turns(window: Window) -> bool:
    """Whether the ranks have parts of one model, and each waits until the one before is ready: what one does longer,
    another one does shorter. Ranks with a batch each work at the same time."""
    if any(rank.gpu is not None or section(rank.facts, "ddp") or section(rank.facts, "fsdp") for rank in window.ranks):
        return False  # what a program waits for is not what its GPU does
    at_work_s = sum(rank.step_s - rank.phase_s("comm") - rank.phase_s("sync") for rank in window.ranks)
    return at_work_s <= IN_TURNS.value * max(rank.step_s for rank in window.ranks)


def _train_different(window: Window) -> bool:
    """Whether the ranks have parts of a model that are not of a size, or models of their own."""
    if any(section(rank.facts, "ddp") or section(rank.facts, "fsdp") for rank in window.ranks):
        return False
    elements = [number(section(rank.facts, "gradients"), "elements") for rank in window.ranks]
    known = [each for each in elements if each]
    if len(known) < len(elements):
        return len(known) > 0  # one that has none does not train
    return max(known) > (1.0 + LOST.value) * min(known)


def _late(window: Window, clock: _Clock) -> Iterator[Loss]:
    """Yield the ranks that are late by one of the clocks."""
    ranks = window.ranks
    # With two ranks the lower median is the faster one, which is the reference.
    usual_wait_s = median_high(map(clock.waiting_s, ranks))
    for rank in ranks:
        excess_s = above_usual(window, rank, clock.own_s)
        least_s = max(STRAGGLES_S.value, LOST.value * rank.step_s)
        likewise_s = 0.0
        if excess_s < least_s and clock is PROGRAM:
            likewise_s = _slower_likewise_s(window, rank)
        if excess_s + likewise_s < least_s:
            continue
        # If its own work takes longer, it waits less at synchronization points: the others wait for it.
        if usual_wait_s - clock.waiting_s(rank) < 0.5 * excess_s:
            continue
        by_phase = {phase: _phase_above_usual(window, rank, clock, phase) for phase in clock.own}
        longest = max(by_phase, key=by_phase.__getitem__)
        if longest == "data_wait" and (
            _all_wait_for_data(window, by_phase["data_wait"])
            or _is_supplied_alike(window, rank)
            or not any(fetches(each) for each in ranks if each is not rank)  # its batches are those of all
        ):
            continue
        if longest == "optimizer" and text(section(rank.facts, "precision"), "optimizer") == _SHARDED_UPDATE:
            continue
        if dispatch_of(window, rank) is not None:
            continue  # `one_rank_fetches` reports it
        slower_s = likewise_s
        if not likewise_s and clock is PROGRAM and _knows_exposed(window):
            slower_s = _phase_above_usual(window, rank, clock, "backward")
        if likewise_s or slower_s >= LOST.value * rank.step_s:  # less is within the error of logging one of a hundred
            by_phase["backward"] = slower_s
            excess_s += slower_s
        has_more_to_compute = bool(likewise_s) or _is_slower_in_both(rank, by_phase, excess_s)
        queued_s = above_usual(window, rank, _queued_s)
        cause = _cause(window, rank, by_phase, crowded=queued_s >= 0.5 * excess_s)
        if cause == "compute" and has_more_to_compute:  # all share it, if it is shared alike
            excess_s = _above_mean(window, rank, lambda each: clock.own_s(each) + clock.phase_s(each, "backward"))
            if rank.gpu is None and excess_s < least_s:
                continue  # one of two cores may be slower by a tenth for a minute
        line = _line_of_its_own(window, rank, excess_s) if cause == "compute" else ""
        advice = (
            _ONLY_IT if line else f"{_ADVICE[cause]}{_IF_ALIKE if cause == 'compute' and rank.gpu is not None else ''}"
        )
        yield Loss(
            rank=rank.rank,
            seconds_per_step=excess_s,
            step_s=rank.step_s,
            confidence=DERIVED,
            evidence={
                "step_seconds": rank.step_s,
                "cause": cause,
                **{f"{clock.name}{phase}_excess_seconds_per_step": seconds for phase, seconds in by_phase.items()},
                "runqueue_excess_seconds_per_step": queued_s,
                **_reduced(window, rank),
            },
            advice=f"Rank {rank.rank} is late at every step, and the other ranks wait for it; cause: {cause}. {advice}",
            subject=f"rank {rank.rank}",
            place=place_of(line),
        )


def _line_of_its_own(window: Window, rank: RankWindow, excess_s: float) -> str:
    """The line that only this rank was sampled in, and that takes most of its excess; empty: there is none. With a GPU
    it may be where this rank waits for that."""
    others = [each for each in window.over.ranks if each.rank != rank.rank]
    if rank.gpu is not None or any(each.samples < SAMPLES_OF_ONE_RANK.value for each in others):
        return ""
    lines = next((each.around_model for each in window.over.ranks if each.rank == rank.rank), {})
    line, count = line_of_one(lines, [each.around_model for each in others])
    if count < SAMPLES_OF_ONE_RANK.value:
        return ""
    return line if count / sum(lines.values()) * between_s(rank) >= 0.5 * excess_s else ""


def line_of_one(own: Mapping[str, int], others: Iterable[Mapping[str, int]]) -> tuple[str, int]:
    """Return the line, of those in which no other rank was sampled, that a rank was sampled in most, and how often; an
    empty one: there is none.

    Args:
        own: its samples, by line.
        others: those of the other ranks.
    """
    elsewhere = set[str]().union(*others)
    line = max((each for each in own if each not in elsewhere), key=own.__getitem__, default="")
    return line, own.get(line, 0)


def between_s(rank: RankWindow) -> float:
    """Of a step, what a rank does between its steps, and its forward pass: without a dataloader they are one phase."""
    return rank.phase_s("forward") + rank.phase_s("other")


def _all_wait_for_data(window: Window, excess_s: float) -> bool:
    """Whether the others also wait for their batches: then the slowest rank varies, and data loading is the cause."""
    return median_low(rank.phase_s("data_wait") for rank in window.ranks) >= excess_s


def _is_supplied_alike(window: Window, rank: RankWindow) -> bool:
    """Whether the others' workers are as slow: ranks in lockstep take turns in waiting, and the loader is the cause.

    While one waits for its batch, the workers of the others, which wait for it in backward, catch up.
    """
    models = {each.rank: LoaderModel.of(each, window) for each in window.ranks}
    fed_s = {number: model.fed_s for number, model in models.items() if model is not None and model.workers}
    own = models[rank.rank]
    if own is None or own.kind not in ("prep", "fetch", "contention") or len(fed_s) < len(window.ranks):
        return False
    return fed_s[rank.rank] < (1.0 + SUPPLY_DIFFERS.value) * median_low(fed_s.values())


def _cause(window: Window, rank: RankWindow, by_phase: Mapping[str, float], *, crowded: bool) -> str:
    """Return the source of the largest part, and what makes it slow if that is known.

    `crowded`: threads of the rank's own process waited for a core for most of it.
    """
    cause = _CAUSES[max(by_phase, key=by_phase.__getitem__)]
    if cause == "input":  # prepared by workers, which wait for a core themselves, or by the rank
        crowded = rank.stall.kind == "contention" or (crowded and rank.stall.kind == "no_workers")
    if crowded and cause in ("input", "compute", "other"):
        return "CPU contention"
    if cause == "compute" and above_usual(window, rank, lambda each: throttled_share(window, each)) >= THROTTLED.value:
        return "throttle"
    return cause


def _queued_s(rank: RankWindow) -> float:
    return (rank.trainer_runqueue_s or 0.0) / rank.steps


def _exposed_s(rank: RankWindow) -> float:
    return (rank.pauses.ddp_comm_ns - rank.pauses.ddp_overlap_ns) / 1e9


def _knows_exposed(window: Window) -> bool:
    """Whether comm holds the wait of backward, on all ranks. DDP logs it on the CPU; on CUDA it times the GPU."""
    return all(rank.pauses.ddp_comm_ns and not rank.facts.get("device") for rank in window.ranks)


def _slower_likewise_s(window: Window, rank: RankWindow) -> float:
    """What backward takes longer than usual, as far as the same is true of forward, and the others wait for that: what
    DDP has logged of a few steps is no proof by itself."""
    forward_s, backward_s = (_phase_above_usual(window, rank, PROGRAM, each) for each in ("forward", "backward"))
    usual_forward_s = rank.phase_s("forward") - forward_s
    if not _knows_exposed(window) or not usual_forward_s:
        return 0.0
    slower_s = min(backward_s, forward_s / usual_forward_s * (rank.phase_s("backward") - backward_s))
    waited_s = median_high(each.phase_s("comm") for each in window.ranks) - rank.phase_s("comm")
    return slower_s if 0.0 < slower_s <= 2.0 * waited_s else 0.0


def _is_slower_in_both(rank: RankWindow, by_phase: Mapping[str, float], excess_s: float) -> bool:
    """Whether a rank's forward is much slower besides its backward, or most of its excess is in both, by similar
    shares."""
    forward_s, backward_s = by_phase["forward"], by_phase.get("backward", 0.0)
    if backward_s and forward_s >= LOST.value * rank.step_s:
        return True
    if not backward_s or forward_s + backward_s < 0.5 * excess_s:
        return False
    shares = [
        excess / max(rank.phase_s(phase) - excess, 1e-9)
        for phase, excess in (("forward", forward_s), ("backward", backward_s))
    ]
    return shares[0] >= 0.5 * shares[1]


def _reduced(window: Window, rank: RankWindow) -> dict[str, float | str]:
    """Return DDP's log of its communication, if all ranks have one: one step of a hundred, so no proof."""
    if not all(each.pauses.ddp_comm_ns for each in window.ranks):
        return {}
    return {
        "exposed_comm_seconds_per_step": _exposed_s(rank),
        "usual_exposed_comm_seconds_per_step": median_high(map(_exposed_s, window.ranks)),
        "overlapped_comm_seconds_per_step": rank.pauses.ddp_overlap_ns / 1e9,
    }


def _phase_above_usual(window: Window, rank: RankWindow, clock: _Clock, phase: str) -> float:
    return above_usual(window, rank, lambda each: clock.phase_s(each, phase))


def above_usual(window: Window, rank: RankWindow, quantity: Callable[[RankWindow], float]) -> float:
    """How much more a rank has of something than the median one; of two ranks, than the other one, or nothing."""
    return quantity(rank) - median_low(map(quantity, window.ranks))


def _above_mean(window: Window, rank: RankWindow, quantity: Callable[[RankWindow], float]) -> float:
    return quantity(rank) - fmean(map(quantity, window.ranks))
