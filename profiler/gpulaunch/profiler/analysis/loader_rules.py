"""Rules about the dataloader: why training waits for data, and what would shorten the wait.

`analysis.stall` classifies the stall; the model in `loader_model` estimates the loss and whether the fix would work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpulaunch.profiler.analysis.dispatch_rules import dispatch_of
from gpulaunch.profiler.analysis.facts import loader_of, loader_place, number, text
from gpulaunch.profiler.analysis.fetch_lines import at_slow_line, converts_lists, dropped_share, slow_line
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED, MEASURED, Loss
from gpulaunch.profiler.analysis.loader_model import LoaderModel, workers_needed
from gpulaunch.profiler.analysis.thresholds import (
    COMPUTES,
    EPOCHS,
    HANDOVER,
    HOLDS_FETCHES,
    LOST,
    LOST_MEASURED,
    PAGE_FAULT_US,
    SAMPLES_OF_A_LINE,
    STORAGE,
    SURPLUS,
    WORKER_PAYS_S,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record import LoaderState, LoaderWorkers


def too_few_workers(window: Window) -> Iterator[Loss]:
    """Training waits for fetches that more workers would do in parallel."""
    for rank, supply in _stalled(window, "no_workers", "prep", "fetch"):
        if is_unread(rank, supply):
            continue
        if not supply.workers and loader_of(rank).get("holds"):
            continue  # forked workers would share it, such as a connection
        if supply.workers and _reads_storage(rank.workers):
            continue  # `slow_storage` reports it
        if supply.workers and _locked_share(rank) >= HOLDS_FETCHES.value:
            continue  # `locked_workers` reports it
        if (plan := workers_needed(supply, window)) is None or _is_transform(supply, plan[1]):
            continue
        workers, step_s = plan
        if supply.kind == "prep" and _exceeds_mask(window, workers * len(window.ranks)):
            continue  # `pinned_workers` reports it
        now = f"now {supply.workers}" if supply.workers else "now 0: the training thread fetches every batch itself"
        line, evidence = (None, {}) if supply.workers else slow_line((rank,))
        cheaper = ""
        if line:
            line_ratio = float(evidence["line_ratio"])
            what = evidence.get("call") or "what it does"
            cheaper = f" {line_ratio:.0%} of a fetch is {what} at {line}: is it needed for each sample?"
            line_s = line_ratio * rank.phase_s("data_wait")
            if line_s > supply.step_s - step_s:  # workers take cores from training
                cheaper += f" Without it a step would take {1e3 * line_s:.3g} ms less, with workers "
                cheaper += f"{1e3 * (supply.step_s - step_s):.3g} ms."
                step_s = supply.step_s - line_s
        loss = supply_loss(
            rank,
            supply,
            step_s,
            advice=f"Set num_workers={workers} ({now}) and persistent_workers=True, so that batches are ready when "
            f"training needs them.{cheaper}",
            workers_advised=workers,
            **_curve(rank, supply, workers),
        )
        yield replace(loss, evidence={**loss.evidence, **evidence})


def _curve(rank: RankWindow, supply: LoaderModel, advised: int) -> dict[str, float]:
    """The predicted step for other numbers of workers, up to twice the advised one, and what each of them takes."""
    numbers = sorted({*(1 << power for power in range(7)), advised})
    curve = {
        f"step_seconds_with_{number}_workers": supply.step_with(number)
        for number in numbers
        if supply.workers < number <= 2 * advised
    }
    used_bytes = rank.memory[-1].workers_bytes if rank.memory else None
    if used_bytes and rank.workers_alive:
        curve["memory_bytes_per_worker"] = used_bytes / rank.workers_alive
    return curve


def slow_storage(window: Window) -> Iterator[Loss]:
    """Workers are blocked on reads that are not in the page cache."""
    for rank, supply in _stalled(window, "fetch"):
        step_s = supply.step_from_memory()
        if rank.workers is not None and _reads_storage(rank.workers) and _lost(supply, step_s):
            yield supply_loss(
                rank,
                supply,
                step_s,
                advice="Workers wait for storage. Move the data to a local disk or into memory, or read fewer and "
                "larger files sequentially. More workers hide the wait only if the storage can serve them in parallel.",
                storage_bytes_per_step=rank.workers.storage_bytes / rank.steps,
                cached_bytes_per_step=rank.workers.cached_bytes / rank.steps,
            )


def slow_transform(window: Window) -> Iterator[Loss]:
    """Computing batches is the bottleneck, and there is no core for more workers: the transform must become cheaper."""
    for rank, supply in _stalled(window, "no_workers", "prep", "contention"):
        if supply.others_use_cores or not _lost(supply, supply.own_s):
            continue
        plan = workers_needed(supply, window)
        if plan is not None and not _is_transform(supply, plan[1]):
            continue
        if supply.kind == "contention" and _are_pinned(window):
            continue  # `pinned_workers` reports it
        if not supply.workers:
            yield from _own_transform(rank, supply, window)
        elif rank.workers is not None:
            collate_share = rank.workers.collate_ns / rank.workers.wall_ns
            what = "collate_fn" if collate_share > 0.5 else "the dataset's transforms"
            cores = "No core is free for more workers."
            if plan is not None:
                saved_ms = 1e3 * (supply.step_s - plan[1])
                cores = f"There are cores for {plan[0]} workers, which alone would save {saved_ms:.3g} ms."
            loss = supply_loss(
                rank,
                supply,
                supply.own_s - supply.freed_s,
                advice=f"Make {what} cheaper: preprocess once and store the result, process whole batches at a time, "
                f"or use the GPU. {cores}",
                collate_ratio=collate_share,
            )
            yield at_slow_line(loss, window.over.ranks)


def _is_transform(supply: LoaderModel, step_s: float) -> bool:
    """Whether workers that compute would still keep training waiting with as many of them as find a core."""
    return supply.kind == "prep" and step_s - supply.own_s >= LOST.value * supply.step_s


def _own_transform(rank: RankWindow, supply: LoaderModel, window: Window) -> Iterator[Loss]:
    """The training thread prepares the batches itself. A bound: even a cheaper transform would not be overlapped."""
    if is_unread(rank, supply) or supply.fetch_s < WORKER_PAYS_S.value:
        return
    if (computes_share := _computes_share(rank, supply)) >= COMPUTES.value:
        has_core = not supply.is_crowded and supply.workers_fitting(len(window.ranks)) >= 1
        why = "handing them over from a worker takes nearly as long" if has_core else "no core is free for a worker"
        loss = supply_loss(
            rank,
            supply,
            supply.own_s,
            confidence=ESTIMATED,
            advice="Make the dataset's transforms and collate_fn cheaper: preprocess once and store the result, or "
            f"use the GPU. The training thread fetches every batch itself (num_workers=0), and {why}.",
            computing_ratio=computes_share,
        )
        yield at_slow_line(loss, window.ranks)


def head_of_line(window: Window) -> Iterator[Loss]:
    """Finished batches wait for an earlier one that takes long."""
    for rank, supply in _stalled(window, "head_of_line"):
        if rank.loader is None or loader_of(rank).get("in_order") is False:
            continue
        blocked_s = rank.per_step_s(rank.loader.blocked_ns_total)
        step_s = max(supply.step_s - blocked_s, supply.step_with(supply.workers))
        if _lost(supply, step_s):
            yield supply_loss(
                rank,
                supply,
                step_s,
                advice="Set in_order=False if the order of batches does not matter, or use samples that take about "
                "equally long: finished batches wait for an earlier one that takes much longer.",
                blocked_seconds_per_step=blocked_s,
            )


def too_many_workers(window: Window) -> Iterator[Loss]:
    """Workers contend with each other, or cost more in communication than they save."""
    for rank, supply in _stalled(window, "transfer"):
        if rank.loader is None or supply.others_use_cores:
            continue
        handed_s = rank.per_step_s(rank.loader.transfer_ns_total) + supply.sending_s
        step_s = supply.own_s + supply.batches * supply.fetch_s
        if handed_s >= HANDOVER.value * supply.step_s and _lost(supply, step_s):
            yield supply_loss(
                rank,
                supply,
                step_s,
                advice="Set num_workers=0, or collate each batch into a few large tensors: transferring a batch from "
                "a worker takes longer than preparing it.",
                handover_seconds_per_step=handed_s,
                workers_advised=0,
            )
    workers_of_node = sum(rank.loader.workers_configured for rank in window.ranks if rank.loader is not None)
    for rank, supply in _stalled(window, "contention"):
        if not supply.cores or workers_of_node <= SURPLUS.value * supply.cores or supply.others_use_cores:
            continue
        if _are_pinned(window):
            continue
        workers = max(1, int(supply.cores) // len(window.ranks) - 1)
        step_s = supply.step_with(workers, fetch_s=supply.fetch_s * (1.0 - supply.runqueue_share))
        yield supply_loss(
            rank,
            supply,
            min(step_s, supply.step_s),
            advice=f"Set num_workers={workers}: {workers_of_node} workers on this node share {supply.cores:g} cores. "
            "The excess workers use memory and wait for a core.",
            workers_advised=workers,
            workers_of_node=workers_of_node,
            cores=supply.cores,
            workers_memory_bytes=float(rank.memory[-1].workers_bytes or 0) if rank.memory else 0.0,
        )


def locked_workers(window: Window) -> Iterator[Loss]:
    """The workers wait for each other at a lock: more of them would wait longer."""
    for rank, supply in _stalled(window, "fetch"):
        locked_share = _locked_share(rank)
        step_s = (
            supply.step_with(supply.workers, fetch_s=supply.fetch_s * (1.0 - locked_share)) if supply.workers else 0.0
        )
        if supply.workers and locked_share >= HOLDS_FETCHES.value and _lost(supply, step_s):
            loss = supply_loss(
                rank,
                supply,
                step_s,
                confidence=ESTIMATED,
                advice="Do less while holding the lock, or give each worker a file or connection of its own, opened in "
                "worker_init_fn. More workers would wait for the same lock.",
                locked_ratio=locked_share,
            )
            yield at_slow_line(loss, window.ranks)


def _locked_share(rank: RankWindow) -> float:
    """The share of the sampled fetches of a rank's workers that wait for a lock; 0 if there are few samples."""
    return rank.locked / rank.fetches if rank.locked >= SAMPLES_OF_A_LINE.value and rank.fetches else 0.0


def pinned_workers(window: Window) -> Iterator[Loss]:
    """The workers may only run on a few cores, and wait there for each other while other cores are free."""
    for rank, supply in _stalled(window, "contention", "prep"):
        if supply.kind == "contention":
            is_bound, step_s = _are_pinned(window), supply.step_on_all_cores()
        else:
            workers, step_s = workers_needed(supply, window) or (0, supply.step_s)
            is_bound = _exceeds_mask(window, workers * len(window.ranks))
        if is_bound and supply.cores is not None and _lost(supply, step_s):
            cores = _worker_cores(window)
            yield supply_loss(
                rank,
                supply,
                step_s,
                advice=f"Let the workers run on all cores: they may use only {cores} of {supply.cores:g}. Look for "
                "sched_setaffinity, taskset, OMP_PROC_BIND, GOMP_CPU_AFFINITY or KMP_AFFINITY; os.sched_setaffinity(0, "
                "range(os.cpu_count())) in worker_init_fn undoes it.",
                worker_cores=float(cores),
                cores=supply.cores,
            )


def _worker_cores(window: Window) -> int:
    """How many cores the workers of this node may run on, all together; 0: not known."""
    return len(frozenset[int]().union(*(rank.worker_cores for rank in window.ranks)))


def _are_pinned(window: Window) -> bool:
    """Whether the workers of this node are more than the cores that they may run on, while there are others."""
    return _exceeds_mask(window, sum(rank.workers_alive for rank in window.ranks))


def _exceeds_mask(window: Window, workers: int) -> bool:
    """Whether so many workers on this node would be."""
    return 0 < _worker_cores(window) < min(workers, window.cores or 0)


def restarted_workers(window: Window) -> Iterator[Loss]:
    """Every epoch starts its workers anew, and waits for them."""
    for rank in window.over.ranks:
        loader, done = rank.loader, rank.workers
        if loader is None or not loader.workers_configured or loader.epochs < EPOCHS.value:
            continue
        settings = loader_of(rank)
        made_anew = settings.get("made_anew") is True
        if settings.get("persistent_workers") is not False and not made_anew:
            continue
        if settings.get("changes") is True:
            continue  # workers that persist would have the data of the first epoch
        # Persistent workers begin an epoch with a fetch, too.
        fetch_s = done.wall_ns / 1e9 / done.batches if done is not None and done.batches else 0.0
        first_s = loader.first_wait_ns_total / 1e9 / loader.epochs
        copied_s = _copying_pages_s(rank, loader)
        lost_s = (loader.epochs * (first_s - fetch_s) + loader.restarts * copied_s) / rank.steps
        if lost_s >= LOST_MEASURED.value * rank.step_s:
            yield Loss(
                rank=rank.rank,
                seconds_per_step=lost_s,
                step_s=rank.step_s,
                confidence=MEASURED,
                evidence={
                    "step_seconds": rank.step_s,
                    "epochs": float(loader.epochs),
                    "first_batch_wait_seconds": first_s,
                    "fetch_seconds_per_batch": fetch_s,
                    "page_copies_seconds": copied_s,
                    "workers": float(loader.workers_configured),
                    "start_method": text(settings, "start_method"),
                },
                advice=(
                    "Keep the DataLoader, with persistent_workers=True: each epoch constructs a new one, which "
                    if made_anew
                    else "Set persistent_workers=True: every epoch stops its workers and "
                )
                + f"starts them anew, which takes {first_s + copied_s:.2g} s with the wait for its first batch"
                + (", and with the copies of memory pages that they share." if copied_s >= 0.1 * first_s else "."),
                place=loader_place(rank),
            )


def _copying_pages_s(rank: RankWindow, loader: LoaderState) -> float:
    """How much longer a step after the start of workers is: what the training thread writes to is copied, page by page,
    because a fork shares it."""
    others = loader.batches - loader.restarts
    if not loader.restarts or others <= 0:
        return 0.0
    shared_s = loader.shared_ns_total / 1e9
    longer_s = shared_s / loader.restarts - (rank.steps * rank.step_s - loader.wait_ns_total / 1e9 - shared_s) / others
    return max(0.0, min(longer_s, PAGE_FAULT_US.value / 1e6 * loader.shared_faults / loader.restarts))


def _stalled(window: Window, *kinds: str) -> Iterator[tuple[RankWindow, LoaderModel]]:
    for rank in window.ranks:
        if (supply := LoaderModel.of(rank, window)) is None or supply.kind not in kinds:
            continue
        if converts_lists(rank) or dropped_share(rank, window)[0]:
            continue  # `fetch_rules` reports it
        if dispatch_of(window, rank) is None:  # else `one_rank_fetches` reports it
            yield rank, supply


def is_unread(rank: RankWindow, supply: LoaderModel) -> bool:
    """Whether the loader has workers whose queue cannot be read."""
    return not supply.workers and bool(number(loader_of(rank), "num_workers"))


def _computes_share(rank: RankWindow, supply: LoaderModel) -> float:
    """A lower bound of the share of its wait that a rank without workers was on a core, or ready for one.

    The most that threads can have used in the rest of the step, all of the time, is subtracted: of its first thread,
    which usually fetches, and of all threads that compute.
    """
    if not supply.wait_s:
        return 0.0
    wanted_s = [0.0]
    if rank.main_thread_s is not None:
        wanted_s.append(rank.main_thread_s / rank.steps - supply.own_s)
    if threads := number(rank.facts, "torch_threads") or supply.cores:
        all_s = rank.trainer_cpu_s + (rank.trainer_runqueue_s or 0.0)
        wanted_s.append(all_s / rank.steps - max(1.0, threads) * supply.own_s)
    return min(1.0, max(wanted_s) / supply.wait_s)


def _reads_storage(workers: LoaderWorkers | None) -> bool:
    if workers is None or not workers.storage_bytes:
        return False
    return workers.storage_bytes >= STORAGE.value * (workers.storage_bytes + workers.cached_bytes)


def _lost(supply: LoaderModel, step_s: float) -> bool:
    return supply.step_s - step_s >= LOST.value * supply.step_s


def supply_loss(
    rank: RankWindow, supply: LoaderModel, step_s: float, *, advice: str, confidence: float = DERIVED, **evidence: float
) -> Loss:
    """A loss of a rank at its loader, if a step could take `step_s` seconds instead; with the figures of the supply."""
    return Loss(
        rank=rank.rank,
        seconds_per_step=supply.step_s - step_s,
        step_s=supply.step_s,
        confidence=confidence,
        evidence={**supply.evidence(), **evidence},
        advice=advice,
        place=loader_place(rank),
    )
