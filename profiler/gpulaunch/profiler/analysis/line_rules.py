"""Rules about lines of the program, found by samples of the training thread's stack.

A share of few samples is a guess, so a line is reported when the standard error of its share is small enough, and the
share without that is large enough: a line that holds half of the steps after a quarter of a minute, one that holds a
fifteenth after some minutes. Lines that follow each other are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from gpulaunch.profiler.analysis.facts import number, section, slowness, text, world_size
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED, NOWHERE, Loss, Place, place_of
from gpulaunch.profiler.analysis.gpu_idle import bounded
from gpulaunch.profiler.analysis.line_advice import CONVERTS, COPIES, IN_PLACE_OF_CALLS, advice_on
from gpulaunch.profiler.analysis.memory_rules import host_room
from gpulaunch.profiler.analysis.one_rank_lines import lines_of_one_rank
from gpulaunch.profiler.analysis.stats import standard_error
from gpulaunch.profiler.analysis.thresholds import (
    ADAM_SAVES,
    ADAPTER_SAVES,
    ATTENTION_SAVES,
    CACHED_ATTENTION_SAVES,
    CELL_SAVES,
    CONVERTED,
    COPIED,
    EVERY_STEP,
    FILLED_GIB_S,
    GRAPH_NODES,
    LOGGED,
    LOOP_SHARE,
    LOST,
    LOST_MEASURED,
    MAPPED_ATTENTION_SAVES,
    MAPPED_MIB,
    NAN_CHECK_NS,
    NAN_CHECK_SHARE,
    NAN_CHECK_US,
    NODE_OVERHEAD_US,
    NODE_US,
    SAME_PASSES_SAVE,
    SAMPLED_ERROR,
    SAMPLES_OF_A_LINE,
    SCORES_IN_CACHE_MIB,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record.line_calls import (
    ADAM,
    ADAPTER,
    ANOMALY,
    ATTENTION,
    CELL,
    COMPRESSES,
    DRAWS_ORDER,
    FOR_ALL_RANKS,
    GRAPH_MATRIX,
    ONE_HOT,
    ONE_HOT_PRODUCT,
    PAIRS,
    PAIRS_OF_ALL_RANKS,
    PARAMETRIZED,
    PYTHON,
    RECOMPUTED,
    SAME_IN_LOOP,
    SAME_PASSES,
    SINGULAR,
)

_BEFORE_BACKWARD: Final = ("forward", "h2d", "sync")
"""The phases of the clock in which samples are before backward, see `tally.Tally`; with or without a dataloader."""
_OF_DDP: Final = "._sync_buffers"
"""The end of the name of a function that an argument of DDP's constructor switches off."""
_MEETS: Final = (
    *(_OF_DDP, ".full_tensor", ".all_gather_object", ".gather_object", ".broadcast_object_list"),
    *(".scatter_object_list", ".gather_for_metrics"),
)
"""The end of the name of a function in which ranks wait for each other: the last one to come waits least."""
_WITH_BACKWARD: Final = frozenset(
    (
        *(ADAPTER, ATTENTION, CELL, GRAPH_MATRIX, ONE_HOT_PRODUCT, PAIRS, PAIRS_OF_ALL_RANKS, PARAMETRIZED),
        *(SAME_IN_LOOP, SAME_PASSES, SINGULAR),
    )
)
"""Calls that have as large a part of backward as they have of forward."""
_SAVES: Final = {
    ADAM: ADAM_SAVES.value,
    ADAPTER: ADAPTER_SAVES.value,
    CELL: CELL_SAVES.value,
    SAME_PASSES: SAME_PASSES_SAVE.value,
}
"""The share of calls that is saved, where it is not all; of attention see `_attention_saves`."""


def logging_stall(window: Window) -> Iterator[Loss]:
    """Stack samples repeatedly show the training thread in logging, called from one line."""
    for rank in window.over.ranks:
        for found in _sampled(rank, rank.logged, "samples_in_logging"):
            if found.seconds_per_step >= LOGGED.value * rank.step_s:
                yield replace(
                    found, advice="Log every N steps, or write in another thread (logging.handlers.QueueHandler)."
                )


def hot_line(window: Window) -> Iterator[Loss]:
    """One line of the program, outside of the model's compute, holds a part of every step."""
    told = list(_in_steps(window))
    yield from told
    for found in lines_of_one_rank(window.over):
        if not any((found.rank, found.place) == (each.rank, each.place) for each in told):
            yield found


def _in_steps(window: Window) -> Iterator[Loss]:
    """The lines of which there are samples enough."""
    for rank in window.over.ranks:
        for found in _sampled(rank, _with_copies(rank, _with_logs(rank)), "samples_in_line"):
            call = rank.calls.get(str(found.place), "")
            meets = call.endswith(_MEETS)
            if meets:
                count, samples = _least(window.over, str(found.place))
                if not _is_sure(count, samples, rank.step_s, rank.step_s):
                    continue
                found = replace(found, seconds_per_step=count / samples * rank.step_s)
            if call.endswith(_OF_DDP) and (made := place_of(text(section(rank.facts, "ddp"), "site"))) != NOWHERE:
                found = replace(found, place=made)
            if call == DRAWS_ORDER and not _is_asked_anew(rank):
                continue
            found = replace(found, seconds_per_step=_saved_s(call, found.seconds_per_step, rank, window))
            in_library = "." in call and call != CONVERTS
            if (not _is_known(call) or _waits(call)) and rank.gpu is not None:
                continue  # a line that computes with tensors may be waiting for its GPU
            # The program may need what it computes itself; and where ranks wait for each other, they also wait for the
            # last one, which may be another one each time.
            measured = in_library and not meets
            least = LOST_MEASURED if measured else CONVERTED if call in (CONVERTS, ONE_HOT, ONE_HOT_PRODUCT) else LOST
            if found.seconds_per_step < least.value * rank.step_s:
                continue
            if call == COMPRESSES and number(section(rank.facts, "ddp"), "world_size") != len(window.over.ranks):
                continue  # there may be a network between some
            if call == RECOMPUTED and not _recomputes_in_vain(found, rank, window):
                continue
            seconds, confidence, idle_s = bounded(window, rank, found.seconds_per_step)
            if call == PYTHON and rank.gpu is not None and idle_s is None:
                continue  # the GPU may compute meanwhile
            if rank.gpu is None:
                seconds, confidence = found.seconds_per_step, DERIVED if in_library else ESTIMATED
            elif seconds < LOST_MEASURED.value * rank.step_s:
                continue
            idle = {} if idle_s is None else {"gpu_idle_seconds_per_step": idle_s}
            yield replace(
                found,
                seconds_per_step=seconds,
                confidence=confidence,
                evidence={**found.evidence, **idle, **({"call": call} if call else {})},
                advice=advice_on(call),
            )


def small_operations_loop(window: Window) -> Iterator[Loss]:
    """A loop inside the step computes element by element, and the graph has very many nodes that are all short."""
    slow = slowness(window)
    torch_us = slow * NODE_OVERHEAD_US.value
    for rank in window.over.ranks:
        graph = section(rank.facts, "graph")
        nodes = _graph_nodes(rank)
        forward_s, backward_s = rank.phase_s("forward"), rank.phase_s("backward")
        if nodes < GRAPH_NODES.value or not forward_s or not backward_s:
            continue
        node_us = 1e6 * _running(rank) * backward_s / nodes
        if node_us > slow * NODE_US.value:
            continue
        if sum(rank.backward.values()) < SAMPLES_OF_A_LINE.value:
            continue  # the loop may be the one that makes the steps
        before_s = sum(rank.phase_s(phase) for phase in _BEFORE_BACKWARD)
        for found in _sampled(rank, rank.looping, "samples_in_loop", rank.before_backward, before_s):
            count, samples = (float(found.evidence[each]) for each in ("samples_in_loop", "samples"))
            if count / samples + standard_error(round(count), round(samples)) < LOOP_SHARE.value:
                continue
            loop_s = found.seconds_per_step
            back_s = min(1.0, loop_s / forward_s) * backward_s
            overhead = torch_us / max(torch_us, node_us)  # the rest is computed in any case
            seconds, _, idle_s = bounded(window, rank, overhead * (loop_s + back_s))
            if seconds < LOST.value * rank.step_s:
                continue
            at_least = "at least " if graph.get("at_least") is True else ""
            yield replace(
                found,
                seconds_per_step=seconds,
                confidence=ESTIMATED,
                evidence={
                    **found.evidence,
                    "lines": _lines(rank, found),
                    "loop_seconds_per_step": loop_s,
                    "loop_backward_seconds_per_step": back_s,
                    "graph_nodes_per_step": nodes,
                    "seconds_per_graph_node": node_us / 1e6,
                    **({} if idle_s is None else {"gpu_idle_seconds_per_step": idle_s}),
                },
                advice="Compute the whole batch with one operation (broadcasting, indexing with a tensor, a masked "
                "reduction, torch.vmap): this loop computes element by element. With its part of backward it is "
                f"{min(1.0, (loop_s + back_s) / rank.step_s):.0%} of the step, and the graph has {at_least}{nodes:.0f} "
                f"nodes of {node_us:.0f} us each. Such small operations are mostly torch's own work; on a GPU "
                "each is a kernel launch.",
            )


def _with_logs(rank: RankWindow) -> dict[str, int]:
    """The samples of lines outside of the model's compute, with those in which a line logs what it has computed, as
    `self.log("auroc", self.auroc.compute())`, if that is the smaller part of it and no loss by itself."""
    least = LOGGED.value * rank.samples
    logged = {line: count for line, count in rank.logged.items() if count < least}
    return {line: count + min(count, logged.get(line, 0)) for line, count in rank.calling.items()}


def _with_copies(rank: RankWindow, lines: dict[str, int]) -> dict[str, int]:
    """The samples of lines, where those of a function after a step that copies the weights, to average them, are
    together at the first line of the copies: alone each may be too few. On a GPU what averages may wait for it."""
    if rank.gpu is not None:
        return lines
    copies = [line for line in lines if re.fullmatch(COPIES, rank.calls.get(line, ""))]
    for function in {rank.after_step[line] for line in copies if line in rank.after_step}:
        within = [line for line in lines if rank.after_step.get(line) == function]
        copying = [line for line in within if line in copies]
        total = sum(lines[line] for line in within)
        copied = sum(lines[line] for line in copying)
        if copied >= COPIED.value * total and total >= LOST.value * rank.samples:
            at = min(copying, key=lambda each: place_of(each).line or 0)  # with more samples it is the same one
            lines = {line: count for line, count in lines.items() if line not in within} | {at: total}
    return lines


def _graph_nodes(rank: RankWindow) -> float:
    """The nodes of the autograd graphs of a step; 0: not known."""
    return (number(section(rank.facts, "graph"), "nodes") or 0.0) * max(1, rank.microsteps) / max(1, rank.steps)


def _saved_s(call: str, line_s: float, rank: RankWindow, window: Window) -> float:
    """What the advice on a call saves of each step, of the time of its line and of what backward has of it."""
    if call == ANOMALY:
        return line_s + _nan_checks_s(rank, window)
    saved = _attention_saves(rank) if call == ATTENTION else _SAVES.get(call, 1.0)
    if call in (FOR_ALL_RANKS, PAIRS_OF_ALL_RANKS):
        saved *= 1 - 1 / world_size(rank, window)
    if call in _WITH_BACKWARD:
        line_s = rank.with_backward_s(line_s)
    return saved * line_s


def _attention_saves(rank: RankWindow) -> float:
    """The share of attention in steps that is saved without a matrix of scores, which on a CPU depends on its size."""
    scores_mib = (number(section(rank.facts, "graph"), "scores_bytes") or 0.0) / 2**20
    if rank.gpu is not None or not scores_mib:  # the graph may be too large to be read
        return ATTENTION_SAVES.value
    if scores_mib < SCORES_IN_CACHE_MIB.value:
        return CACHED_ATTENTION_SAVES.value if number(rank.facts, "torch_threads") == 1 else 0.0
    return (ATTENTION_SAVES if scores_mib < MAPPED_MIB.value else MAPPED_ATTENTION_SAVES).value


def _nan_checks_s(rank: RankWindow, window: Window) -> float:
    """What torch's anomaly mode at least adds to a backward pass: no stack shows it, as it is C++."""
    nodes = _graph_nodes(rank)
    elements = number(section(rank.facts, "gradients"), "elements") or 0.0
    checks_s = nodes * NAN_CHECK_US.value / 1e6 + 2 * elements * NAN_CHECK_NS.value / 1e9
    return min(slowness(window) * checks_s, NAN_CHECK_SHARE.value * rank.phase_s("backward"))


def _is_asked_anew(rank: RankWindow) -> bool:
    """Whether a rank begins an epoch with about every batch."""
    loader = rank.loader
    return loader is not None and loader.epochs >= EVERY_STEP.value * (loader.batches - loader.eval_batches) > 0


def _recomputes_in_vain(found: Loss, rank: RankWindow, window: Window) -> bool:
    """Whether there is room for all that the ranks of the node, if they are as this one, compute again, and that surely
    is a loss, by two standard errors: they do it on purpose."""
    error_s = float(found.evidence["standard_error_ratio"]) * found.seconds_per_step
    if found.seconds_per_step - 2.0 * error_s < LOST.value * rank.step_s:
        return False
    threads = number(rank.facts, "torch_threads")
    room_bytes = host_room(window.host)
    if not threads or room_bytes is None:
        return False
    return room_bytes >= FILLED_GIB_S.value * 2**30 * found.seconds_per_step * threads * len(window.ranks)


def _least(window: Window, place: str) -> tuple[int, int]:
    """Samples in a line, and all samples, of the rank of the node that has the smallest share of them in it."""
    counts = [(each.calling.get(place, 0), each.samples) for each in window.ranks if each.samples]
    return min(counts, key=lambda each: each[0] / each[1], default=(0, 1))


def _lines(rank: RankWindow, found: Loss) -> str:
    """The first and the last line of a loop, or of several that begin on lines that follow each other."""
    first, _, last = str(found.evidence.get("lines") or f"{found.place.line}-{found.place.line}").partition("-")
    ends = (rank.loop_ends.get(f"{found.place.file}:{line}", line) for line in range(int(first), int(last) + 1))
    return f"{first}-{max(ends)}"


def _running(rank: RankWindow) -> float:
    """The share of the time that a rank's threads have a core, of that in which they want one: other programs make all
    that it computes longer. 1 where the kernel does not count it."""
    wanted_s = rank.trainer_cpu_s + (rank.trainer_runqueue_s or 0.0)
    return rank.trainer_cpu_s / wanted_s if rank.trainer_cpu_s > 0 else 1.0


def _sampled(
    rank: RankWindow,
    lines: Mapping[str, int],
    counted_as: str,
    samples: int | None = None,
    seconds: float | None = None,
) -> Iterator[Loss]:
    """Return what lines take, of the samples that are not too few.

    Args:
        rank: the rank.
        lines: their samples.
        counted_as: what the evidence calls these.
        samples: of which they are a part; None: all of the step.
        seconds: how long that part of a step takes.
    """
    samples = rank.samples if samples is None else samples
    seconds = rank.step_s if seconds is None else seconds
    for place, count, together in _together(lines, rank.calls):
        if count > samples:
            continue
        share = count / samples
        if _is_sure(count, samples, seconds, rank.step_s):
            yield Loss(
                rank=rank.rank,
                seconds_per_step=share * seconds,
                step_s=rank.step_s,
                confidence=DERIVED,
                evidence={
                    "step_seconds": rank.step_s,
                    "samples": samples,
                    counted_as: count,
                    "standard_error_ratio": standard_error(count, samples) / share,
                    **({"lines": together} if together else {}),
                },
                advice="",
                place=place,
            )


def _is_sure(count: int, samples: int, seconds: float, step_s: float) -> bool:
    """Whether some of the samples of a part of the step, which takes so many seconds, are a loss, and are enough."""
    share, error = count / samples, standard_error(count, samples)
    return (share - error) * seconds >= LOST_MEASURED.value * step_s and error <= SAMPLED_ERROR.value * share


def _together(lines: Mapping[str, int], calls: Mapping[str, str]) -> Iterator[tuple[Place, int, str]]:
    """Take lines that follow each other as one, such as `cursor.executemany(...)` and `connection.commit()`, if they
    are of a kind.

    Returns:
        Of each group the first line that has at least half as many samples as any other of it, the samples of all,
        and `first-last` if it has several lines.
    """
    sampled: list[tuple[str, int, int, str]] = []
    for site, count in lines.items():
        place = place_of(site)
        if count >= SAMPLES_OF_A_LINE.value and place.file is not None and place.line is not None:
            sampled.append((place.file, place.line, count, _kind(calls.get(site, ""))))
    groups: list[tuple[str, list[tuple[int, int]]]] = []
    last = "", 0, ""
    for file, line, count, kind in sorted(sampled):
        if last != (file, line - 1, kind):
            groups.append((file, []))
        groups[-1][1].append((line, count))
        last = file, line, kind
    for file, group in groups:
        most = max(count for _, count in group)
        first = next(line for line, count in group if 2 * count >= most)
        together = f"{group[0][0]}-{group[-1][0]}" if len(group) > 1 else ""
        yield Place(file=file, line=first), sum(count for _, count in group), together


def _kind(call: str) -> str:
    """What lines have in common that are told together: what is to be done about them, or whether it is known what
    they call."""
    return call if call in IN_PLACE_OF_CALLS and call != PYTHON else "known" if _is_known(call) else ""


def _is_known(call: str) -> bool:
    """Whether what a line calls is known not to compute with tensors: a function of a library, or any Python code."""
    return "." in call or call == PYTHON


def _waits(call: str) -> bool:
    """Whether what is known may wait for the GPU all the same: it copies to it, or computes there."""
    return call == CONVERTS or call.startswith("torchmetrics.")
