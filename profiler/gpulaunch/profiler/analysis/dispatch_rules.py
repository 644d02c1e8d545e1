"""The rule about batches that one rank fetches for all, as Accelerate does with an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpulaunch.profiler.analysis.facts import loader_place, number, section
from gpulaunch.profiler.analysis.finding import DERIVED, Loss
from gpulaunch.profiler.analysis.thresholds import LOST
from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record import Site


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """What a step takes longer because one rank fetches the batches of all and sends them."""

    wait_s: float
    """That rank's data wait."""
    send_s: float
    """Its time in the calls that send."""
    lost_s: float


def dispatch_of(window: Window, rank: RankWindow) -> Dispatch | None:
    """Return what it costs that only this rank fetches; None: others do, or it costs little.

    The others do not only compute something else: DDP has all of them, and in every step they call a collective at the
    same line as this rank. FSDP calls its own at lines of the program.
    """
    others = [each for each in window.ranks if each is not rank and each.steps]
    if not others or not fetches(rank) or any(map(fetches, others)) or not _is_data_parallel(rank, len(window.ranks)):
        return None
    lines = _lines_every_step(rank).intersection(*map(_lines_every_step, others))
    if not lines:
        return None
    sent_ns = sum(site.blocked_ns for site in _collectives(rank) if site.text in lines)
    wait_s, send_s = rank.phase_s("data_wait"), rank.per_step_s(sent_ns)
    lost_s = wait_s * (1.0 - 1.0 / len(window.ranks)) + send_s
    return None if lost_s < LOST.value * rank.step_s else Dispatch(wait_s=wait_s, send_s=send_s, lost_s=lost_s)


def one_rank_fetches(window: Window) -> Iterator[Loss]:
    """One rank fetches the batches of all ranks and sends them."""
    for rank in window.ranks:
        if (cost := dispatch_of(window, rank)) is None:
            continue
        yield Loss(
            rank=rank.rank,
            seconds_per_step=cost.lost_s,
            step_s=rank.step_s,
            confidence=DERIVED,
            evidence={
                "step_seconds": rank.step_s,
                "data_wait_seconds_per_step": cost.wait_s,
                "sending_seconds_per_step": cost.send_s,
            },
            advice=f"Only rank {rank.rank} fetches batches, those of all ranks, and sends them: let the dataset of "
            "each rank yield only its own part. Accelerate does this to an IterableDataset: do not give its DataLoader "
            "to accelerator.prepare() then. If only one rank can read them, num_workers=1 fetches them ahead.",
            place=loader_place(rank),
            subject=f"rank {rank.rank}",
        )


def fetches(rank: RankWindow) -> bool:
    """Whether it trains with batches of a DataLoader of its own."""
    return rank.loader is not None and rank.loader.batches > rank.loader.eval_batches


def _is_data_parallel(rank: RankWindow, ranks: int) -> bool:
    """Whether so many ranks have a batch each: some that share a layer need the same one."""
    ddp = section(rank.facts, "ddp")
    return number(ddp, "modules") is not None and (number(ddp, "world_size") or 0.0) >= ranks


def _lines_every_step(rank: RankWindow) -> set[str]:
    """The lines at which a rank calls a collective in every step."""
    return {site.text for site in _collectives(rank) if site.count >= max(1, rank.steps)}


def _collectives(rank: RankWindow) -> Iterator[Site]:
    return (site for site in rank.sites if site.kind.endswith("collective") and site.text)
