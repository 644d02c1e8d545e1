"""Rules about pauses of the training thread. Each kind of pause has a phase, so its duration is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpulaunch.profiler.analysis.facts import number, section, text
from gpulaunch.profiler.analysis.finding import DERIVED, MEASURED, NOWHERE, Loss, Place, place_of
from gpulaunch.profiler.analysis.thresholds import LOST_MEASURED, SAVES, SPARE, VALIDATED, VALIDATES
from gpulaunch.profiler.analysis.window import RankWindow, Window

_SAVE_LESS: Final = (
    "Save less often, or asynchronously: training is blocked during a save. Use "
    "torch.distributed.checkpoint.async_save, or gpulaunch.checkpoint, which writes in the background."
)
_SAVE_COPIES: Final = (
    "torch.save writes all of the memory of a tensor, and most of what it writes here is in none: tensors are parts of "
    "larger ones (vectors[:4000]). Save copies of them (tensor.clone()), or make the model of copies."
)


def checkpoint_stall(window: Window) -> Iterator[Loss]:
    """Training is blocked while its state is saved."""
    for rank in window.over.ranks:
        saving = [site for site in rank.sites if site.kind == "save"]
        saves = max(rank.saves, sum(site.count for site in saving))
        longest = max(saving, key=lambda site: site.blocked_ns, default=None)
        if saves >= SAVES.value:
            beside_s = rank.saving_share * rank.step_s
            beside = {"seconds_beside_saves_per_step": beside_s} if beside_s else {}
            advice, part, views = _SAVE_LESS, 1.0, {}
            saved = section(rank.facts, "saved")
            written, spare = (number(saved, name) or 0.0 for name in ("bytes", "spare_bytes"))
            is_of_all = len(saving) == 1 and text(saved, "site").endswith(saving[0].text)
            if is_of_all and spare >= SPARE.value * written > 0:
                advice, part, views = _SAVE_COPIES, spare / written, {"bytes": written, "spare_bytes": spare}
            yield from _timed(
                rank,
                "checkpoint",
                {
                    "saves": saves,
                    "seconds_per_save": rank.phase_ns.get("checkpoint", 0) / 1e9 / saves,
                    **beside,
                    **views,
                },
                advice,
                NOWHERE if longest is None else place_of(longest.text),
                part=part,
                beside_s=beside_s,
            )


def frequent_validation(window: Window) -> Iterator[Loss]:
    """Batches without gradients take a large part of the time."""
    for rank in window.over.ranks:
        # A rare one may fill the long window.
        spent_s = min(rank.phase_s("validation"), rank.validation_share * rank.step_s)
        if spent_s and spent_s >= VALIDATES.value * rank.step_s:
            training_s = max(rank.step_s - spent_s, 0.01 * rank.step_s)
            enough_s = training_s * VALIDATED.value / (1.0 - VALIDATED.value)
            yield Loss(
                rank=rank.rank,
                seconds_per_step=spent_s - enough_s,
                step_s=rank.step_s,
                confidence=MEASURED,
                evidence={"step_seconds": rank.step_s, "validation_seconds_per_step": spent_s},
                advice=f"{spent_s / rank.step_s:.0%} of the time is validation: {VALIDATED.value:.0%} if it is "
                f"{spent_s / enough_s:.0f} times less often, or on as much less of the data; larger batches help, too.",
            )


def gc_pauses(window: Window) -> Iterator[Loss]:
    """Python's garbage collector takes a large part of the steps."""
    for rank in window.over.ranks:
        if collections := rank.pauses.gc_collections:
            asking = [site for site in rank.sites if site.kind == "gc"]
            longest = max(asking, key=lambda site: site.blocked_ns, default=None)
            is_most = longest is not None and 2 * longest.blocked_ns >= rank.phase_ns.get("gc", 0)
            yield from _timed(
                rank,
                "gc",
                {
                    "collections_per_step": collections / rank.steps,
                    "seconds_per_collection": rank.pauses.gc_ns_total / 1e9 / collections,
                },
                "Call gc.collect() and gc.freeze() once after setup, and do not collect in the training loop; or call "
                "gc.disable() and collect every few hundred steps.",
                place_of(longest.text) if longest is not None and is_most else NOWHERE,
            )


def recompiles(window: Window) -> Iterator[Loss]:
    """torch.compile recompiles repeatedly, long after the first steps."""
    for rank in window.ranks:
        if compiles := rank.pauses.compiles:
            yield from _timed(
                rank,
                "compile",
                {
                    "compiles_per_step": compiles / rank.steps,
                    "seconds_per_compile": rank.pauses.compile_ns_total / 1e9 / compiles,
                },
                "Keep shapes and Python values constant across steps (padding, drop_last=True), or compile with "
                "dynamic=True. TORCH_LOGS=recompiles prints what changed.",
            )


def _timed(
    rank: RankWindow,
    phase: str,
    evidence: Mapping[str, float | str],
    advice: str,
    place: Place = NOWHERE,
    *,
    part: float = 1.0,
    beside_s: float = 0.0,
) -> Iterator[Loss]:
    """Report a phase that is long enough, of which this part is lost; `beside_s`: of each step, lost with it."""
    lost_s = rank.phase_s(phase)
    if lost_s and lost_s >= LOST_MEASURED.value * rank.step_s:
        yield Loss(
            rank=rank.rank,
            seconds_per_step=part * lost_s + beside_s,
            step_s=rank.step_s,
            confidence=DERIVED if beside_s > lost_s or part < 1 else MEASURED,
            evidence={"step_seconds": rank.step_s, **evidence},
            advice=advice,
            place=place,
        )
