"""Rules about communication between ranks that a program asks for more often than it needs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpulaunch.profiler.analysis.facts import number, section, steps_by_closure, text
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED, Loss, place_of
from gpulaunch.profiler.analysis.thresholds import (
    BUSY,
    FSDP_GATHERS,
    FSDP_PARAMETERS,
    FSDP_SMALL_KIB,
    FSDP_UNIT_KIB,
    LOST,
    LOST_MEASURED,
    REDUCTIONS,
    SECOND_LINE,
    SMALL_COLLECTIVES,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window

_GATHERS: Final = 2.2
"""All-gathers of parameters per reduction of FSDP that always reduces: 1, or up to 2 if it frees them after forward."""


def small_collectives(window: Window) -> Iterator[Loss]:
    """Several collectives of a few numbers in every step: each takes as long as it takes to reach the other ranks."""
    redundant = _redundant_lines(window)
    waits = {rank.rank: _small(rank, redundant.get(rank.rank, "")) for rank in window.ranks}
    waited = [seconds for seconds, _, _ in waits.values() if seconds]
    for rank in window.ranks:
        seconds, calls, site = waits[rank.rank]
        if calls < SMALL_COLLECTIVES.value or steps_by_closure(rank):
            continue
        yield from _measured(
            rank,
            min(waited, default=0.0),
            {"following_seconds_per_step": seconds, "calls_per_step": calls},
            "Combine those that do not need each other's results: put the numbers into one tensor and reduce it once "
            "per step; for a log, every N steps. Each call waits for all ranks, however little it transfers.",
            site,
        )


def _small(rank: RankWindow, redundant: str) -> tuple[float, float, str]:
    """Seconds per step in a rank's small collectives, calls per step, and the line with most of the seconds.

    Without the first one of each step: in that a rank waits for those that are late, and would elsewhere. And without
    those of a loop in which each needs the result of the last one, and those of a line that is redundant as a whole.
    """
    small = [
        site
        for site in rank.sites
        if site.kind == "small_collective"
        and site.text
        and str(place_of(site.text)) not in rank.chained
        and not _is_at(site.text, redundant)
    ]
    longest = max(small, key=lambda site: site.gpu_ns, default=None)
    return (
        rank.per_step_s(sum(site.gpu_ns for site in small)),
        sum(site.count for site in small) / max(1, rank.steps),
        "" if longest is None else longest.text,
    )


def redundant_all_reduce(window: Window) -> Iterator[Loss]:
    """The program reduces what is the same on all ranks already."""
    lines = _redundant_lines(window)
    waits = {rank.rank: _blocked_s(rank, lines[rank.rank]) for rank in window.ranks if rank.rank in lines}
    lost_s = min(waits.values(), default=0.0)  # the others also wait for that rank
    for rank in window.ranks if lines else ():
        size_bytes = number(section(rank.facts, "reduced"), "bytes") or 0.0
        yield from _measured(
            rank,
            lost_s,
            {"blocked_seconds_per_step": waits[rank.rank], "bytes_per_step": size_bytes},
            f"Remove this all_reduce of {size_bytes / 1e6:,.1f} MB in a step: what it reduces is the same on all ranks "
            "already. DistributedDataParallel has averaged the gradients when backward returns; without it, give each "
            "rank samples of its own.",
            lines[rank.rank],
        )


def _redundant_lines(window: Window) -> Mapping[int, str]:
    """Of each rank the line that reduces most, if what it reduces is the same on all; empty: it is not, or there are no
    others, and it may be that one has what they get."""
    told = {rank.rank: section(rank.facts, "reduced") for rank in window.ranks}
    if len(told) < 2 or any(reduced.get("same") is not True for reduced in told.values()):
        return {}
    return {rank: text(reduced, "line") for rank, reduced in told.items()}


def _blocked_s(rank: RankWindow, line: str) -> float:
    """Seconds per step in the collectives of a line."""
    sites = (site for site in rank.sites if site.kind.endswith("collective") and _is_at(site.text, line))
    return rank.per_step_s(sum(site.blocked_ns for site in sites))


def _is_at(site: str, line: str) -> bool:
    """Whether a site is at a line; of a long text, it has only the end."""
    return site != "" and line.endswith(site)


def reduced_in_accumulation(window: Window) -> Iterator[Loss]:
    """The gradients are reduced in each of several backward passes before the optimizer steps."""
    for rank in window.over.ranks:
        yield from _reduced_by_fsdp(rank)
        ddp = section(rank.facts, "ddp")
        told = number(ddp, "reductions_per_step") or 0.0
        reductions = min(told, rank.microsteps / max(1, rank.steps))
        if number(ddp, "modules") != 1 or reductions < REDUCTIONS.value:
            continue  # of several modules, each may have a backward pass of its own
        if steps_by_closure(rank) or section(rank.facts, "graph").get("accumulates") is False:
            continue  # each pass has a use of its own: the first of SAM says where the second one begins
        if _backward_lines(rank) > 1:
            continue  # so may these: that of an adversary's samples begins where the gradients of the first one lead
        if number(ddp, "world_size") == 1:
            continue  # there is no other rank to send gradients to
        overlap_s = 0.0
        if rank.gpu is None:
            exposed_s = max(0.0, rank.phase_s("comm") - rank.per_step_s(rank.pauses.comm_blocked_ns_total))
            if _is_full(window.over):  # communication takes its time from the backward that it overlaps with
                overlap_s = min(reductions * rank.pauses.ddp_overlap_ns / 1e9, rank.phase_s("backward"))
        else:  # its phases are those of the program, which runs ahead of the GPU
            exposed_s = reductions * max(0, rank.pauses.ddp_comm_ns - rank.pauses.ddp_overlap_ns) / 1e9
        lost_s = (exposed_s + overlap_s) * (1.0 - 1.0 / reductions)
        yield from _measured(
            rank,
            lost_s,
            {
                "reductions_per_step": reductions,
                "exposed_seconds_per_step": exposed_s,
                "overlap_seconds_per_step": overlap_s,
            },
            "Use model.no_sync() around the forward and backward passes of all but the last micro-batch: "
            f"the gradients are reduced {reductions:.0f} times per step, and needed once.",
            rank.backward_line,
        )


def _backward_lines(rank: RankWindow) -> int:
    """How many lines of the program have a part in the samples of backward passes that is more than a chance."""
    most = max(rank.backward.values(), default=0)
    return sum(count >= SECOND_LINE.value * most for count in rank.backward.values())


def _reduced_by_fsdp(rank: RankWindow) -> Iterator[Loss]:
    """FSDP gathers parameters once or twice per backward pass, and once or twice per reduction if it always reduces."""
    fsdp = section(rank.facts, "fsdp")
    reductions, gathers = number(fsdp, "reductions_per_step") or 0.0, number(fsdp, "gathers_per_reduction") or 0.0
    if reductions <= REDUCTIONS.value or gathers > _GATHERS:
        return  # two may be of two modules, each with a backward pass
    reduction_s = number(fsdp, "seconds_per_reduction") or 0.0
    lost_s = min(rank.phase_s("comm"), (reductions - 1.0) * reduction_s)
    yield from _measured(
        rank,
        lost_s,
        {
            "reductions_per_step": reductions,
            "seconds_per_reduction": reduction_s,
            "gathers_per_reduction": gathers,
        },
        "Call model.set_requires_gradient_sync(False) before the forward passes of all but the last "
        f"micro-batch: the gradients are reduced {reductions:.0f} times per step, and needed once. Until then each "
        "rank keeps those of all parameters.",
        rank.backward_line,
    )


def fsdp_small_units(window: Window) -> Iterator[Loss]:
    """FSDP gathers very few parameters at a time: each gather takes as long as it takes to reach the other ranks."""
    for rank in window.ranks:
        fsdp = section(rank.facts, "fsdp")
        gathers, size_bytes = number(fsdp, "gathers_per_step") or 0.0, number(fsdp, "bytes_per_gather") or 0.0
        parameters = number(fsdp, "parameters_per_unit") or 0.0
        if gathers < FSDP_GATHERS.value or not 0.0 < parameters <= FSDP_PARAMETERS.value:
            continue
        if not 0.0 < size_bytes <= 1024 * FSDP_SMALL_KIB.value:
            continue
        # The rank that waits least for the others.
        least_s = min(number(section(each.facts, "fsdp"), "following_seconds_per_step") or 0.0 for each in window.ranks)
        lost_s = min(rank.phase_s("comm"), least_s) * (1.0 - size_bytes / (1024 * FSDP_UNIT_KIB.value))
        if lost_s >= LOST.value * rank.step_s:
            yield Loss(
                rank=rank.rank,
                seconds_per_step=lost_s,
                step_s=rank.step_s,
                confidence=ESTIMATED,
                evidence={
                    "step_seconds": rank.step_s,
                    "gathers_per_step": gathers,
                    "bytes_per_gather": size_bytes,
                    "parameters_per_unit": parameters,
                    "following_seconds_per_step": least_s,
                },
                advice=f"Shard larger units: FSDP gathers {gathers:.0f} times per step, each time only "
                f"{size_bytes / 1024:.0f} KiB. Call fully_shard() for each block of the model and for the model, not "
                "for its single layers (FSDP1: an auto_wrap_policy of blocks). Each gather waits for all ranks, "
                "however little it transfers.",
            )


def _measured(rank: RankWindow, lost_s: float, evidence: Mapping[str, float], advice: str, line: str) -> Iterator[Loss]:
    """Report measured time at a line, if it is long enough."""
    if lost_s >= LOST_MEASURED.value * rank.step_s:
        yield Loss(
            rank=rank.rank,
            seconds_per_step=lost_s,
            step_s=rank.step_s,
            confidence=DERIVED,
            evidence={"step_seconds": rank.step_s, **evidence},
            advice=advice,
            place=place_of(line),
        )


def _is_full(window: Window) -> bool:
    """Whether the ranks use the cores of their node."""
    used_s = sum(rank.trainer_cpu_s + rank.workers_cpu_s for rank in window.ranks)
    return window.cores is not None and used_s >= BUSY.value * window.cores * window.seconds > 0
