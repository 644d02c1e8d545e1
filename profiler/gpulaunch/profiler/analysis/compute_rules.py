"""Rules about what is computed in vain: padding, gradients without an optimizer, rows of embeddings, what several
backward passes go through, and searches for unused parameters.

The rank reads what they need now and then: see `probe.padding`, `probe.gradients`, `probe.repeats` and `probe.ddp`.
What they cost follows from the time of the phases. With a GPU these tell only when its kernels were started, so there
it is the GPU's busy time, of which two thirds are taken for backward: it has two matrix products for each one of
forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gpulaunch.profiler.analysis.facts import number, section, slowness, text
from gpulaunch.profiler.analysis.finding import ESTIMATED, Loss, place_of
from gpulaunch.profiler.analysis.gpu_idle import gpu_idle_s
from gpulaunch.profiler.analysis.thresholds import ALL_TARGETS, LOST, PADDED, SEARCH_ALL_REDUCE_S, SEARCH_PARAMETER_S
from gpulaunch.profiler.analysis.window import RankWindow, Window

_OF_BACKWARD: Final = 2 / 3


def padded_batches(window: Window) -> Iterator[Loss]:
    """Batches are padded to a width that none of their samples needs."""
    for rank in window.ranks:
        padding = section(rank.facts, "padding")
        unneeded, width = number(padding, "unneeded") or 0.0, number(padding, "width") or 0.0
        model_s = _model_s(window, rank)
        if model_s is None or not PADDED.value <= unneeded <= 1.0 or rank.compiled:
            continue
        if 0.0 < (number(section(rank.facts, "graph"), "tokens") or 0.0) < width:
            continue  # the program cuts the batch before the model has it
        yield from _lost(
            rank,
            unneeded * model_s,
            {
                "model_seconds_per_step": model_s,
                "tokens_per_sample": width,
                "unneeded_columns_ratio": unneeded,
                "padded_ratio": number(padding, "padded") or 0.0,
            },
            f"Pad each batch to its longest sample, not to {width:.0f} tokens (padding=True instead of "
            '"max_length", or DataCollatorWithPadding over samples that are not padded): no sample of a batch needs '
            f"{unneeded:.0%} of the columns. Batches of similar lengths (group_by_length) save more.",
        )


def gradients_unused(window: Window) -> Iterator[Loss]:
    """Backward goes through parameters that nothing updates."""
    for rank in window.ranks:
        gradients = section(rank.facts, "gradients")
        share, unused = number(gradients, "unused_share") or 0.0, number(gradients, "unused_elements") or 0.0
        elements, resting = number(gradients, "elements") or 0.0, number(gradients, "resting_elements") or 0.0
        backward_s = _backward_s(window, rank)
        if backward_s is None or not unused or not 0.0 <= share <= 1.0:
            continue
        # With a GPU, its phase is not the time that the optimizer takes there.
        optimizer_s = 0.0 if rank.gpu is not None else rank.phase_s("optimizer")
        optimizer_s *= resting / max(1.0, elements - unused + resting)
        yield from _lost(
            rank,
            share * backward_s + optimizer_s,
            {
                "backward_seconds_per_step": backward_s,
                "optimizer_seconds_per_step": optimizer_s,
                "parameters_in_graph": elements,
                "parameters_not_updated": unused,
            },
            f"Parameters with {unused:,.0f} elements get gradients, but no optimizer has them (or only with lr=0), and "
            "they do not change: a teacher, or a frozen part of the model. Call it under torch.no_grad(), or set "
            "requires_grad_(False) for it. If it is to be trained, add its parameters to the optimizer.",
        )


def gradients_cleared(window: Window) -> Iterator[Loss]:
    """Backward goes through a model whose gradients are cleared before its optimizer steps."""
    for rank in window.ranks:
        gradients = section(rank.facts, "gradients")
        share, backward_s = number(gradients, "cleared_share") or 0.0, _backward_s(window, rank)
        if backward_s is None or not 0.0 < share <= 1.0:
            continue
        yield from _lost(
            rank,
            share * backward_s,
            {"backward_seconds_per_step": backward_s, "cleared_ratio": share},
            f"{share:.0%} of backward computes gradients that are cleared before their optimizer steps: this pass goes "
            "on through another model, as a discriminator's through the generator. Give it that model's output "
            "detached: fake.detach().",
            text(gradients, "cleared_at"),
        )


def backward_repeated(window: Window) -> Iterator[Loss]:
    """Several backward passes of a step go through the same graph, which is kept for them."""
    for rank in window.ranks:
        share = number(section(rank.facts, "graph"), "repeated") or 0.0
        backward_s, passes = _backward_s(window, rank), rank.microsteps / max(1, rank.steps)
        if backward_s is None or not 0.0 < share <= 1.0:
            continue
        yield from _lost(
            rank,
            share * backward_s,
            {
                "backward_seconds_per_step": backward_s,
                "backward_passes_per_step": passes,
                "repeated_nodes_ratio": share,
            },
            f"{share:.0%} of backward goes again through what a pass before it has gone through (retain_graph=True, "
            f"{passes:.0f} passes per step). Unless you need the gradients of each loss by themselves, add the losses "
            "up and call backward once. If it is the state of a recurrent network that leads to earlier windows: "
            "hidden = hidden.detach().",
            rank.backward_line,
        )


def targets_ignored(window: Window) -> Iterator[Loss]:
    """The head of a model computes scores of rows that the loss of the program ignores."""
    for rank in window.ranks:
        gradients, targets = section(rank.facts, "gradients"), section(rank.facts, "targets")
        share, head_rows = number(gradients, "head_share") or 0.0, number(gradients, "head_rows") or 0.0
        used, rows = number(gradients, "loss_rows") or 0.0, number(targets, "rows") or 0.0
        model_s = _model_s(window, rank)
        if model_s is None or not rank.scores_line or not 0.0 < share <= 1.0 or not 0.0 < used <= head_rows:
            continue
        is_given_all = ALL_TARGETS.value * rows <= used <= rows
        if is_given_all and gradients.get("loss_ignores") is True:
            used *= 1.0 - (number(targets, "ignored") or 0.0)
        ignored = 1.0 - used / head_rows
        head_s = share * model_s
        if rank.gpu is None and (sampled_s := rank.scores_share * rank.step_s):
            head_s = min(head_s, rank.with_backward_s(sampled_s))
        yield from _lost(
            rank,
            ignored * head_s,
            {
                "model_seconds_per_step": model_s,
                "rows_of_scores": head_rows,
                "rows_used": used,
                "head_seconds_per_step": head_s,
            },
            f"The model computes scores for {head_rows:.0f} rows, of which its loss uses {used:.0f} (the others are "
            "ignored, as with the target -100, or left out): choose the rows before the head, hidden[targets != -100], "
            "and give the loss only those.",
            rank.scores_line,
        )


def embedding_gradient_dense(window: Window) -> Iterator[Loss]:
    """The optimizer updates all rows of an embedding of which a batch uses few."""
    for rank in window.ranks:
        gradients = section(rank.facts, "gradients")
        elements, untouched = number(gradients, "elements") or 0.0, number(gradients, "untouched_elements") or 0.0
        if rank.gpu is not None or not 0.0 < untouched <= elements:
            continue  # how long a GPU takes for an optimizer is not known
        share = untouched / elements
        yield from _lost(
            rank,
            share * rank.phase_s("optimizer"),
            {
                "optimizer_seconds_per_step": rank.phase_s("optimizer"),
                "parameters_in_graph": elements,
                "parameters_not_looked_up": untouched,
            },
            f"{share:.0%} of all parameters are rows of embeddings that a batch does not look up; their gradient is "
            "zero, and the optimizer updates them all the same. Use nn.Embedding(..., sparse=True), with "
            "torch.optim.SparseAdam, Adagrad or SGD for them. Then compare the loss curves.",
        )


def unused_parameters_searched(window: Window) -> Iterator[Loss]:
    """DDP searches for parameters that are not used in a step, and there are none."""
    for rank in window.ranks:
        ddp = section(rank.facts, "ddp")
        parameters = number(ddp, "num_parameter_tensors") or 0.0
        if ddp.get("searched_in_vain") is not True or rank.gpu is not None:
            continue
        all_reduce_s = SEARCH_ALL_REDUCE_S.value if number(ddp, "world_size") != 1 else 0.0
        yield from _lost(
            rank,
            slowness(window) * (all_reduce_s + SEARCH_PARAMETER_S.value * parameters),
            {"parameters": parameters},
            "Remove find_unused_parameters=True: all ranks have used all parameters in every step so far. If the model "
            "may leave some out later, keep it; without it, DDP raises an error then.",
            text(ddp, "site"),
        )


def _model_s(window: Window, rank: RankWindow) -> float | None:
    """Seconds of a step in forward and backward; None if they are not known."""
    if rank.gpu is None:
        return rank.phase_s("forward") + rank.phase_s("backward") or None
    idle_s = gpu_idle_s(window, rank)
    return None if idle_s is None else rank.step_s - idle_s


def _backward_s(window: Window, rank: RankWindow) -> float | None:
    if rank.gpu is None:
        return rank.phase_s("backward") or None
    model_s = _model_s(window, rank)
    return None if model_s is None else _OF_BACKWARD * model_s


def _lost(rank: RankWindow, seconds: float, evidence: Mapping[str, float], advice: str, at: str = "") -> Iterator[Loss]:
    if seconds >= LOST.value * rank.step_s:
        yield Loss(
            rank=rank.rank,
            seconds_per_step=seconds,
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence={"step_seconds": rank.step_s, **evidence},
            advice=advice,
            place=place_of(at),
        )
