"""Lines that one rank alone runs, such as pictures that only rank 0 writes, where the other ranks wait for it.

That the others wait is measured, and so is how long it is late, and its main thread works; the samples only have to say
in which line. So fewer of them are enough than where they are all that is known of a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpulaunch.profiler.analysis.finding import DERIVED, Loss, place_of
from gpulaunch.profiler.analysis.line_advice import advice_on
from gpulaunch.profiler.analysis.stats import median_high, median_low
from gpulaunch.profiler.analysis.straggler_rules import PROGRAM, above_usual, are_alike, between_s, line_of_one
from gpulaunch.profiler.analysis.thresholds import LOST_MEASURED, SAMPLES_OF_ONE_RANK, STRAGGLES_S
from gpulaunch.profiler.analysis.window import RankWindow, Window

ONLY_ONE: Final = "Only rank {rank} does it, and the other ranks wait for it."


def lines_of_one_rank(window: Window) -> Iterator[Loss]:
    """Yield the line outside of the model's compute in which one rank alone was sampled, if that is why it is late.

    It takes what it was sampled for, at least what the others are measured to wait: they may be slower by themselves.

    Args:
        window: whose samples and times are judged, the longest one that there is.
    """
    if not are_alike(window):
        return
    for rank in window.ranks:
        if rank.gpu is not None:
            continue  # the line may be where this rank waits for its GPU, and the others do so elsewhere
        others = [each for each in window.ranks if each is not rank]
        line, count = line_of_one(rank.calling, [each.calling for each in others])
        if not SAMPLES_OF_ONE_RANK.value <= count <= rank.samples:
            continue
        line_s = count / rank.samples * rank.step_s
        late_s = above_usual(window, rank, between_s)
        waited_s = median_high(map(PROGRAM.waiting_s, window.ranks)) - PROGRAM.waiting_s(rank)
        if max(line_s, late_s) < LOST_MEASURED.value * rank.step_s or late_s < STRAGGLES_S.value:
            continue
        if min(late_s, waited_s, _works_longer_s(rank, others)) < 0.5 * line_s or line_s < 0.5 * late_s:
            continue  # something else is why, or this is the one that waits
        call = rank.calls.get(line, "")
        yield Loss(
            rank=rank.rank,
            seconds_per_step=max(line_s, min(late_s, waited_s)),
            step_s=rank.step_s,
            confidence=DERIVED,
            evidence={
                "step_seconds": rank.step_s,
                "samples": rank.samples,
                "samples_in_line": count,
                "late_seconds_per_step": late_s,
                **({"call": call} if call else {}),
            },
            advice=f"{advice_on(call)} {ONLY_ONE.format(rank=rank.rank)}",
            place=place_of(line),
        )


def _works_longer_s(rank: RankWindow, others: Sequence[RankWindow]) -> float:
    """How much longer than theirs the main thread of a rank runs in a step; 0 where it is not known."""
    run_s = [each.per_step_s(1e9 * each.main_thread_s) for each in (rank, *others) if each.main_thread_s is not None]
    return run_s[0] - median_low(run_s[1:]) if len(run_s) == 1 + len(others) else 0.0
