"""The rule about Python's GIL, found by samples of the training thread that waits for another thread of its process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.analysis.finding import ESTIMATED, NOWHERE, Loss, Place, place_of
from gpulaunch.profiler.analysis.gpu_idle import gpu_idle_s
from gpulaunch.profiler.analysis.nested_lines import innermost_line
from gpulaunch.profiler.analysis.stats import standard_error
from gpulaunch.profiler.analysis.thresholds import LOST, SAMPLED_ERROR, SAMPLES_OF_A_LINE
from gpulaunch.profiler.analysis.window import RankWindow, Window

_ADVICE: Final = (
    "Another thread computes in Python and keeps the GIL, and the training thread waits for it. Do it in another "
    "process (multiprocessing), less often, or with code that releases the GIL (NumPy)."
)


def gil_contention(window: Window) -> Iterator[Loss]:
    """The training thread waits for Python's GIL, which another thread of its process holds while it computes."""
    for rank in window.over.ranks:
        for function, count in rank.gil_waits.items():
            if not SAMPLES_OF_A_LINE.value <= count <= rank.samples:
                continue
            share = count / rank.samples
            error = standard_error(count, rank.samples)
            seconds = share * rank.step_s - _other_waits_s(rank)
            idle_s = None if rank.gpu is None else gpu_idle_s(window, rank)
            if rank.gpu is not None:
                seconds = min(seconds, idle_s or 0.0)  # it may compute meanwhile
            if seconds < LOST.value * rank.step_s or error > SAMPLED_ERROR.value * share:
                continue
            line, ratio = _line(rank, function)
            call = rank.calls.get(str(line), "")
            yield Loss(
                rank=rank.rank,
                seconds_per_step=seconds,
                step_s=rank.step_s,
                confidence=ESTIMATED,
                evidence={
                    "step_seconds": rank.step_s,
                    "samples": rank.samples,
                    "samples_waiting_for_gil": count,
                    "standard_error_ratio": error / share,
                    "thread": function,
                    **({"line_ratio": ratio} if ratio else {}),
                    **({"call": call} if call else {}),
                    **({} if idle_s is None else {"gpu_idle_seconds_per_step": idle_s}),
                },
                advice=_ADVICE,
                place=line,
                subject="" if line.file else function,
            )


def _other_waits_s(rank: RankWindow) -> float:
    """Seconds per step in which a rank waits for another thread, or for its workers: without the GIL between them it
    would wait longer for what these prepare."""
    waits_s = rank.thread_waits / rank.samples * rank.step_s
    has_workers = rank.loader is not None and rank.loader.workers_configured > 0
    return waits_s + (rank.phase_s("data_wait") if has_workers else 0.0)


def _line(rank: RankWindow, function: str) -> tuple[Place, float]:
    """The line of a thread's function that has the most samples, or the innermost one below it that has nearly as many;
    and its share of the samples of the function. NOWHERE: no line of the program is on the thread's stack."""
    lines = {line: count for (name, line), count in rank.gil_lines.items() if name == function and line}
    total = rank.gil_lines.get((function, ""), 0)
    if not lines or not total:
        return NOWHERE, 0.0
    inner = innermost_line(lines, total)
    return place_of(inner), lines[inner] / total
